// Drawings come from Python as markup. It is escaped there; here only what is on a list comes through, all the same.
import { make } from "./make.js";

const TAGS = new Set(("svg g rect text tspan title line path polygon polyline circle defs marker pattern div ul li i span p dl dt dd")
  .split(" "));
const ATTRIBUTES = new Set(("class style id role tabindex viewBox width height x y x1 x2 y1 y2 cx cy r rx ry d points transform "
  + "fill fill-opacity stroke stroke-width stroke-opacity stroke-dasharray opacity font-size font-family font-weight text-anchor "
  + "dominant-baseline marker-end orient refX refY markerWidth markerHeight patternUnits patternTransform paint-order xmlns").split(" "));

/** The elements of a drawing, without anything that could run, load or lead elsewhere. */
export function safe(markup) {
  const found = new DOMParser().parseFromString(`<body>${markup}</body>`, "text/html");
  const clean = (node) => {
    for (const child of [...node.children]) {
      if (!TAGS.has(child.localName)) { child.remove(); continue; }
      for (const { name, value } of [...child.attributes]) {
        const known = ATTRIBUTES.has(name) || /^(aria|data)-[a-z-]+$/.test(name);
        const leads = /url\(\s*['"]?\s*(?!#)|javascript:|expression\(/i.test(value) && !name.startsWith("aria") && !name.startsWith("data");
        if (!known || leads) child.removeAttribute(name);
      }
      clean(child);
    }
  };
  clean(found.body);
  return [...found.body.childNodes].map((node) => document.importNode(node, true));
}

/** A timeline whose cells say what they are and why they waited, by mouse, touch and keyboard (as drawing/schedule.js does). */
export function timeline(markup) {
  const details = make("div", { class: "pg-details", "aria-live": "polite" });
  const hint = "Point at a cell, or walk with the arrow keys: what it is, and why it waited.";
  const whole = make("div", { class: "pg-drawing" }, ...safe(markup));
  const chart = whole.querySelector(".scroll svg");
  const cells = chart === null ? [] : [...chart.querySelectorAll(".cell[data-row]")];
  if (cells.length === 0) return [whole];
  details.append(make("p", { class: "pg-quiet" }, hint));
  const rows = new Map();
  for (const cell of cells) rows.set(cell.dataset.row, [...(rows.get(cell.dataset.row) ?? []), cell]);
  let chosen = null;

  function choose(cell) {
    chosen?.classList.remove("chosen");
    chosen?.setAttribute("tabindex", "-1");
    chosen = cell;
    cell.classList.add("chosen");
    cell.setAttribute("tabindex", "0");
    const { op, kind, rank, lane, start, end, takes, wait, related, held } = cell.dataset;
    const holds = held ? `; the rank holds ${held} ${held === "1" ? "activation" : "activations"}` : "";
    details.replaceChildren(
      make("p", {}, make("strong", {}, op), ` ${kind} on rank ${rank}, from ${start} to ${end} (takes ${takes})${holds}`),
      wait ? make("p", { class: "pg-wait" }, wait)
        : make("p", { class: "pg-quiet" }, lane === "compute" ? "it began as soon as its rank was free" : ""),
    );
    const mine = new Set((related ?? "").split(" ").filter(Boolean));
    for (const other of cells) {
      other.classList.toggle("related", other === cell || (other.dataset.related ?? "").split(" ").some((number) => mine.has(number)));
    }
    chart.classList.toggle("choosing", mine.size > 0);
  }

  function neighbour(cell, key) {
    const names = [...rows.keys()];
    const row = rows.get(cell.dataset.row);
    if (key === "ArrowLeft" || key === "ArrowRight") return row[row.indexOf(cell) + (key === "ArrowRight" ? 1 : -1)];
    const next = rows.get(names[names.indexOf(cell.dataset.row) + (key === "ArrowDown" ? 1 : -1)]);
    const middle = (one) => { const box = one.getBBox(); return box.x + box.width / 2; };
    const distance = (one) => Math.abs(middle(one) - middle(cell));
    return next?.reduce((best, one) => (distance(one) < distance(best) ? one : best));
  }

  chart.addEventListener("pointerover", (event) => { const cell = event.target.closest(".cell"); if (cell) choose(cell); });
  chart.addEventListener("pointerleave", () => chart.classList.remove("choosing"));
  chart.addEventListener("click", (event) => event.target.closest(".cell")?.focus({ preventScroll: true }));
  chart.addEventListener("focusin", (event) => { const cell = event.target.closest(".cell"); if (cell) choose(cell); });
  chart.addEventListener("keydown", (event) => {
    const cell = event.target.closest(".cell");
    if (!event.key.startsWith("Arrow") || cell === null) return;
    event.preventDefault();
    const next = neighbour(cell, event.key);
    next?.focus();
    next?.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
  cells[0].setAttribute("tabindex", "0");
  return [whole, details];
}
