// Put the page together: figures of the whole run, and of the step that is chosen.
"use strict";

let timeline = null;

function startStep(measured) {
  const select = document.getElementById("step-choice");
  timeline = new Timeline(document.getElementById("lanes"), document.getElementById("details"), measured);
  const shares = new Shares(document.getElementById("share-rows"), measured);
  const arrivals = new Arrivals(document.getElementById("arrivals"), measured);
  const holdings = new Holdings(document.getElementById("held"), measured);
  const slowest = measured.steps.reduce((one, other) => (other.length > one.length ? other : one)).step;
  for (const { step, length } of measured.steps) {
    const word = step === measured.typical ? ", typical" : step === slowest ? ", the slowest" : "";
    select.append(element("option", { value: step }, `${step + measured.first_step + 1}: ${time(length)}${word}`));
  }
  if (measured.steps.length < measured.recorded_steps) {
    document.getElementById("step-note").textContent = `${measured.steps.length} of ${measured.recorded_steps} recorded steps are on this page`;
  }
  const show = () => {
    const step = unpacked(measured.steps[select.selectedIndex], measured);
    for (const figure of [shares, timeline, holdings, arrivals]) figure.show(step);
    document.getElementById("earlier").disabled = select.selectedIndex === 0;
    document.getElementById("later").disabled = select.selectedIndex === measured.steps.length - 1;
    showLegend(step);
  };
  const go = (by) => {
    select.selectedIndex += by;
    show();
  };
  select.addEventListener("change", show);
  document.getElementById("earlier").addEventListener("click", () => go(-1));
  document.getElementById("later").addEventListener("click", () => go(1));
  select.value = measured.typical;
  show();
  redrawn(shares.target, () => shares.draw());
  redrawn(timeline.canvas, () => timeline.arrange());
  redrawn(arrivals.target, () => arrivals.draw());
  redrawn(holdings.target, () => holdings.draw());
}

// What the colours of this step's bars mean, and nothing that is not there.
function showLegend(step) {
  const kinds = new Set(step.bars.map((bar) => bar.kind));
  const exposed = step.blocked.some((item) => item.what === 1);
  const shown = report.measured.kinds.filter((kind) => kinds.has(kind) || (kind === "collective" && exposed));
  const word = (kind) => (kind !== "collective" || !exposed ? kind : kinds.has(kind) ? "collective, exposed communication" : "exposed communication");
  const entries = shown.map((kind) => element("li", {}, element("i", { style: `background:${colour(kind)}` }), word(kind)));
  if (step.blocked.some((item) => item.what === 0)) entries.push(element("li", {}, element("i", { class: "swatch waiting" }), "waiting for another rank"));
  if (kinds.has("collective") || kinds.has("receive")) {
    entries.push(element("li", {}, element("i", { class: "swatch handed-over" }), "handed over or asked for; the others are not there yet"));
  }
  if (step.predicted) {
    const off = step.length / step.predicted.length - 1;
    const words = `predicted ${time(step.predicted.length)}, took ${time(step.length)}: ${percent(Math.abs(off))} ${off < 0 ? "less" : "more"}`;
    entries.push(element("li", {}, element("i", { class: "swatch dashes" }), words));
  }
  if (step.left_out) entries.push(element("li", {}, `${step.left_out.toLocaleString("en")} shortest bars are left out`));
  document.getElementById("legend").replaceChildren(...entries);
}

window.addEventListener("error", (event) => document.documentElement.setAttribute("data-error", event.message));
drawCurves();
if (report.measured) startStep(report.measured);
document.documentElement.setAttribute("data-drawn-ms", performance.now().toFixed(0));
requestAnimationFrame(() => requestAnimationFrame(() => document.documentElement.setAttribute("data-shown-ms", performance.now().toFixed(0))));
