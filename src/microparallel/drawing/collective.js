// A collective hop by hop: the data was computed beforehand, this only shows it.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const picture = document.querySelector(".circle");
const slider = document.querySelector("input[type=range]");
const [back, play, forward] = ["back", "play", "forward"].map((name) => document.getElementById(name));
const title = document.querySelector(".hop");
const moves = document.querySelector(".moves");

const SPEED = 1400; // milliseconds a hop while playing
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a900", "#7f7f7f"];
const colour = (rank) => (data.ranks <= COLOURS.length ? COLOURS[rank] : `hsl(${(rank * 360) / data.ranks} 60% 50%)`);

// Each slice is a row with a square for each rank's contribution; of many ranks, one square that fills up.
const matrix = data.ranks <= 16;
const side = matrix ? Math.max(5, Math.min(15, Math.floor(100 / Math.max(data.ranks, data.slices)))) : 8;
const named = matrix && side >= 12; // there is room for numbers: of the slices, and of the ranks in the squares
const gutter = named ? 26 : 8;
const columns = matrix ? data.ranks : Math.ceil(Math.sqrt(data.slices));
const lines = matrix ? data.slices : Math.ceil(data.slices / columns);
const foot = data.parts.flat(2).length ? 16 : 7;
const CARD = { width: Math.max(columns * side + gutter + 8, 64), height: lines * side + 22 + foot };
const size = Math.hypot(CARD.width, CARD.height);
const radius = data.ranks === 1 ? 0 : Math.max(size * 1.05, ((size + 22) * data.ranks) / (2 * Math.PI));
const middle = Math.max(radius + size / 2 + 8, 150);
picture.setAttribute("viewBox", `0 0 ${2 * middle} ${2 * middle}`);

let at = 0;
let timer = null;

function shape(tag, attributes, text) {
  const made = document.createElementNS(picture.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function place(rank) {
  const angle = (2 * Math.PI * rank) / data.ranks - Math.PI / 2;
  return { x: middle + radius * Math.cos(angle), y: middle + radius * Math.sin(angle) };
}

// Where a line from a card's middle towards a point leaves the card.
function edge(from, to) {
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const scale = Math.min((CARD.width / 2 + 4) / Math.abs(dx || 1e-9), (CARD.height / 2 + 4) / Math.abs(dy || 1e-9));
  return { x: from.x + dx * scale, y: from.y + dy * scale };
}

const number = (x, y, text, name) => shape("text", { x, y, class: `number ${name}` }, text);

function square(rank, slice, corner) {
  const now = data.sets[data.holds[at][rank][slice]];
  const before = data.sets[data.holds[Math.max(0, at - 1)][rank][slice]];
  const top = corner.y + 22 + (matrix ? slice : Math.floor(slice / columns)) * side;
  const made = [];
  const box = (column, attributes) =>
    made.push(shape("rect", { x: corner.x + gutter + column * side, y: top, width: side - 1, height: side - 1, ...attributes }));
  if (matrix) {
    for (let other = 0; other < data.ranks; other += 1) {
      const times = now.filter((one) => one === other).length;
      if (times === 0) box(other, { class: "empty" });
      else box(other, times === 1 ? { fill: colour(other) } : { class: "twice" });
      if (times && named) made.push(number(corner.x + gutter + (other + 0.5) * side - 0.5, top + side - 4, other, "on"));
    }
  } else {
    box(slice % columns, { class: "empty" });
    box(slice % columns, { fill: colour(slice), "fill-opacity": now.length / data.ranks });
  }
  if (named) made.push(number(corner.x + 16, top + side - 4, `C${slice}`, "slice"));
  const first = matrix ? 0 : slice % columns;
  const frame = { x: corner.x + gutter - 0.5 + first * side, y: top - 0.5, height: side, width: (matrix ? columns : 1) * side };
  if (data.complete[slice].includes(data.holds[at][rank][slice])) made.push(shape("rect", { ...frame, class: "whole" }));
  if (now !== before && matrix) {
    made.push(shape("circle", { cx: corner.x + 4, cy: top + side / 2, r: Math.min(2.5, side / 3), class: "fresh" }));
  }
  return made;
}

function card(rank) {
  const { x, y } = place(rank);
  const corner = { x: x - CARD.width / 2, y: y - CARD.height / 2 };
  const held = data.holds[at][rank];
  const full = held.every((set, slice) => data.complete[slice].includes(set));
  const group = shape("g", {});
  group.append(shape("rect", { ...corner, ...CARD, rx: 8, class: full ? "card full" : "card" }));
  group.append(shape("text", { x, y: corner.y + 15 }, `rank ${rank}${full ? " ✓" : ""}`));
  for (let slice = 0; slice < data.slices; slice += 1) group.append(...square(rank, slice, corner));
  const apart = data.parts[at][rank].map((other) => `P${other}`).join(" ");
  if (apart) group.append(shape("text", { x, y: corner.y + CARD.height - 5, style: "font-size: 9px" }, apart));
  return group;
}

// An arrow bends to its right, so that two ranks which swap show two arrows; one that passes ranks bends around them.
function arrow(message) {
  const [from, to] = [place(message.from), place(message.to)];
  const [dx, dy] = [to.x - from.x, to.y - from.y];
  const apart = Math.abs(message.from - message.to);
  const inwards = Math.min(apart, data.ranks - apart) > 1 ? 0.55 : 0;
  const bent = (one, aside) => ((from[one] + to[one]) / 2) * (1 - inwards) + middle * inwards + aside * 0.12;
  const bend = { x: bent("x", -dy), y: bent("y", dx) };
  const [start, end] = [edge(from, bend), edge(to, bend)];
  const path = `M${start.x},${start.y} Q${bend.x},${bend.y} ${end.x},${end.y}`;
  const angle = (Math.atan2(end.y - bend.y, end.x - bend.x) * 180) / Math.PI;
  const part = 0.42;
  const along = (one) => (1 - part) ** 2 * start[one] + 2 * part * (1 - part) * bend[one] + part ** 2 * end[one];
  const width = message.value.length * 7.5 + 10;
  const group = shape("g", {});
  group.append(
    shape("path", { d: path, class: "arrow", pathLength: 1 }),
    shape("path", { d: "M2,0 L-9,5 L-9,-5 z", class: "head", transform: `translate(${end.x} ${end.y}) rotate(${angle})` }),
    shape("rect", {
      x: along("x") - width / 2, y: along("y") - 9, width, height: 18, rx: 5, class: message.adds ? "chip adds" : "chip",
    }),
    shape("text", { x: along("x"), y: along("y") + 4, class: message.adds ? "adds-text" : "" }, message.value),
  );
  return group;
}

function show(hop) {
  at = Math.max(0, Math.min(data.hops.length, hop));
  const messages = at ? data.hops[at - 1].messages : [];
  const cards = Array.from({ length: data.ranks }, (_, rank) => card(rank));
  picture.replaceChildren(...cards, ...messages.map(arrow));
  slider.value = at;
  slider.setAttribute("aria-valuetext", at ? `hop ${at} of ${data.hops.length}` : "start");
  title.textContent = at ? `Hop ${at} of ${data.hops.length}` : "Start: what every rank brings along";
  const said = at ? data.hops[at - 1].words : [data.start];
  moves.replaceChildren(...said.map((words) => Object.assign(document.createElement("li"), { textContent: words })));
  back.disabled = at === 0;
  forward.disabled = at === data.hops.length;
  play.disabled = data.hops.length === 0;
}

function stop() {
  clearInterval(timer);
  timer = null;
  play.textContent = "▶ Play";
}

function step(by) {
  stop();
  show(at + by);
}

function start() {
  if (timer) return stop();
  if (at === data.hops.length) show(0);
  play.textContent = "⏸ Pause";
  timer = setInterval(() => {
    show(at + 1);
    if (at === data.hops.length) stop();
  }, SPEED);
}

back.addEventListener("click", () => step(-1));
forward.addEventListener("click", () => step(1));
play.addEventListener("click", start);
slider.addEventListener("input", () => step(Number(slider.value) - at));
document.addEventListener("keydown", (event) => {
  if (event.target === slider || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowRight") step(1);
  if (event.key === "ArrowLeft") step(-1);
});
slider.max = data.hops.length;
show(0);
