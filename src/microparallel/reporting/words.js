// What a bar of the timeline is, in words.
"use strict";

function paragraph(name, ...content) {
  return element("p", name ? { class: name } : {}, ...content);
}

// The chosen bar, as paragraphs; of a computation, also the pieces during which its rank did not wait.
function describe(item, step, pieces) {
  if (item.expected) return describePrediction(item, step);
  return item.what === undefined ? describeSpan(item, step, pieces) : describeWait(item, step);
}

function describePrediction(span, step) {
  const found = step.spans.find((one) => isTheSame(one, span));
  const measured = found ? `measured: from ${time(found.start, step.length)}, took ${time(found.end - found.start)}` : "nothing of that name was measured on this rank";
  const words = ` predicted ${span.kind} on rank ${span.rank}, from ${time(span.start, step.length)}, takes ${time(span.end - span.start)}`;
  return [paragraph("", element("strong", {}, span.name), words), paragraph("wait", measured)];
}

function describeSpan(span, step, pieces) {
  const kind = span.name.startsWith(span.kind) ? "" : `${span.kind} `;
  const facts = [` ${kind}on rank ${span.rank}, from ${time(span.start, step.length)}, takes ${time(span.end - span.start)}`];
  if (span.bytes) facts.push(size(span.bytes));
  if (span.place) facts.push(span.place);
  const head = paragraph("", element("strong", {}, span.name), facts.join(" · "));
  if (span.begun !== null) return [head, ...describeMeeting(span)];
  const working = pieces.reduce((sum, [start, end]) => sum + end - start, 0);
  if (working > 0.999 * (span.end - span.start)) return [head];
  return [head, paragraph("quiet", `it computed for ${time(working)} of that; the rest went into waiting and communication`)];
}

// When it could begin, and whether it cost this rank anything.
function describeMeeting(span) {
  const found = [];
  const waited = span.begun - span.start;
  if (span.kind === "receive") {
    found.push(paragraph("wait", waited > 0 ? `rank ${span.last} sent it ${time(waited)} after rank ${span.rank} had asked for it` : "it had been sent before it was asked for"));
  } else if (span.kind === "collective" && span.last !== null) {
    const own = span.last === span.rank;
    found.push(paragraph(own ? "quiet" : "wait", own ? "this rank came last: it began at once" : `it could begin ${time(waited)} later, when rank ${span.last} came; then it took ${time(span.end - span.begun)}`));
  }
  const blocked = span.waited === null ? 0 : span.end - span.waited;
  const free = span.end - span.start - blocked;
  if (blocked <= 0) found.push(paragraph("quiet", "hidden: the rank went on with its work all the while"));
  else if (free > 0.05 * blocked) found.push(paragraph("quiet", `the rank went on with its work for ${time(free)}; for the last ${time(blocked)} it had nothing else to do`));
  else found.push(paragraph("quiet", "the rank had nothing else to do meanwhile"));
  return found;
}

function describeWait(item, step) {
  const length = time(item.end - item.start);
  const about = item.cause ? paragraph("quiet", "in ", element("strong", {}, item.cause.name), item.cause.place ? ` · ${item.cause.place}` : "") : "";
  if (item.what === 1) {
    return [paragraph("", element("strong", {}, "exposed communication"), ` on rank ${item.rank}, from ${time(item.start, step.length)}, for ${length}: data was on its way, and there was nothing else to do`), about];
  }
  const why = item.cause
    ? `waiting: rank ${item.rank} had nothing to do until rank ${item.whom} ${item.cause.kind === "receive" ? "sent something" : "came"}`
    : `waiting: rank ${item.rank} is done with this step; rank ${item.whom} ends it`;
  return [paragraph("", element("strong", {}, "waiting"), ` on rank ${item.rank}, from ${time(item.start, step.length)}, for ${length}`), paragraph("wait", why), about];
}
