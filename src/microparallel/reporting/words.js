// What a bar of the timeline is, in words.
"use strict";

function paragraph(name, ...content) {
  return element("p", name ? { class: name } : {}, ...content);
}

// The chosen bar, as paragraphs; of a computation, also the pieces during which its rank did not wait.
function describe(item, step, pieces) {
  if (item.expected) return describePrediction(item, step);
  return item.what === undefined ? describeBar(item, step, pieces) : describeWait(item, step);
}

function describePrediction(bar, step) {
  const found = step.bars.find((one) => isTheSame(one, bar));
  const measured = found ? `measured: from ${time(found.start, step.length)}, took ${time(found.end - found.start)}` : "nothing of that name was measured on this rank";
  const words = ` predicted ${bar.kind} on rank ${bar.rank}, from ${time(bar.start, step.length)}, takes ${time(bar.end - bar.start)}`;
  return [paragraph("", element("strong", {}, bar.name), words), paragraph("wait", measured)];
}

function describeBar(bar, step, pieces) {
  const kind = bar.name.startsWith(bar.kind) ? "" : `${bar.kind} `;
  const facts = [` ${kind}on rank ${bar.rank}, from ${time(bar.start, step.length)}, takes ${time(bar.end - bar.start)}`];
  if (bar.bytes) facts.push(size(bar.bytes));
  if (bar.place) facts.push(bar.place);
  const head = paragraph("", element("strong", {}, bar.name), facts.join(" · "));
  if (bar.begun !== null) return [head, ...describeMeeting(bar)];
  const working = pieces.reduce((sum, [start, end]) => sum + end - start, 0);
  if (working > 0.999 * (bar.end - bar.start)) return [head];
  return [head, paragraph("quiet", `it computed for ${time(working)} of that; the rest went into waiting and communication`)];
}

// When it could begin, and whether it cost this rank anything.
function describeMeeting(bar) {
  const found = [];
  const waited = bar.begun - bar.start;
  if (bar.kind === "receive") {
    found.push(paragraph("wait", waited > 0 ? `rank ${bar.last} sent it ${time(waited)} after rank ${bar.rank} had asked for it` : "it had been sent before it was asked for"));
  } else if (bar.kind === "collective" && bar.last !== null) {
    const own = bar.last === bar.rank;
    found.push(paragraph(own ? "quiet" : "wait", own ? "this rank came last: it began at once" : `it could begin ${time(waited)} later, when rank ${bar.last} came; then it took ${time(bar.end - bar.begun)}`));
  }
  const blocked = bar.waited === null ? 0 : bar.end - bar.waited;
  const free = bar.end - bar.start - blocked;
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
