// Timelines of schedules: say what a cell is and why it waited, by mouse, by touch or by keyboard.
"use strict";

const charts = [...document.querySelectorAll(".scroll svg")];
const details = document.querySelector(".details");
const cellsOf = new Map(charts.map((chart) => [chart, [...chart.querySelectorAll(".cell")]]));
const rows = new Map();
for (const [place, chart] of charts.entries()) {
  for (const cell of cellsOf.get(chart)) {
    const row = `${place} ${cell.dataset.row}`;
    cell.dataset.row = row;
    rows.set(row, [...(rows.get(row) ?? []), cell]);
  }
}
let chosen = null;

function line(tag, text, name) {
  const part = document.createElement(tag);
  part.textContent = text;
  if (name) part.className = name;
  return part;
}

// Show a cell's words, and set it off from the others, with all cells of its micro-batch (or of its layer).
function choose(cell) {
  chosen?.classList.remove("chosen");
  chosen?.setAttribute("tabindex", "-1");
  chosen = cell;
  cell.classList.add("chosen");
  cell.setAttribute("tabindex", "0"); // the tab key comes back to where one was
  const { op, kind, rank, lane, start, end, takes, wait, related, held } = cell.dataset;
  const facts = line("p", "");
  facts.append(line("strong", op), ` ${kind} on rank ${rank}, from ${start} to ${end} (takes ${takes})`);
  if (held) facts.append(`; the rank holds ${held} ${held === "1" ? "activation" : "activations"}`);
  const prompt = lane === "compute" ? "it began as soon as its rank was free" : "";
  details.replaceChildren(facts, wait ? line("p", wait, "wait") : line("p", prompt, "quiet"));
  const mine = new Set((related ?? "").split(" ").filter(Boolean));
  for (const other of cellsOf.get(cell.ownerSVGElement)) {
    const shared = (other.dataset.related ?? "").split(" ").some((number) => mine.has(number));
    other.classList.toggle("related", other === cell || shared);
  }
  for (const chart of charts) chart.classList.toggle("choosing", mine.size > 0 && chart === cell.ownerSVGElement);
}

function neighbour(cell, key) {
  const names = [...rows.keys()];
  const row = rows.get(cell.dataset.row);
  if (key === "ArrowLeft" || key === "ArrowRight") {
    return row[row.indexOf(cell) + (key === "ArrowRight" ? 1 : -1)];
  }
  const next = rows.get(names[names.indexOf(cell.dataset.row) + (key === "ArrowDown" ? 1 : -1)]);
  const middle = (one) => {
    const box = one.querySelector("rect:not(.gap)").getBBox();
    return box.x + box.width / 2;
  };
  const distance = (one) => Math.abs(middle(one) - middle(cell));
  return next?.reduce((best, one) => (distance(one) < distance(best) ? one : best));
}

for (const chart of charts) {
  chart.addEventListener("pointerover", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) choose(cell);
  });
  chart.addEventListener("pointerleave", () => chart.classList.remove("choosing"));
  chart.addEventListener("click", (event) => event.target.closest(".cell")?.focus({ preventScroll: true }));
  chart.addEventListener("focusin", (event) => choose(event.target.closest(".cell")));
  chart.addEventListener("keydown", (event) => {
    if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
    const next = neighbour(event.target.closest(".cell"), event.key);
    next?.focus();
    next?.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  cellsOf.get(chart)[0]?.setAttribute("tabindex", "0");
}
