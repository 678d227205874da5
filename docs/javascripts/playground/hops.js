// A collective hop by hop: what each rank holds, slice by slice, and who sends what to whom. The data is drawing/html.py's.
import { button, make, slider } from "./make.js";

const COLOURS = ["#56b4e9", "#e69f00", "#2bb58c", "#cc79a7", "#f0d442", "#0072b2", "#e8743b", "#8fd3b6"];

/** One rank's slices: for each, whose contributions are in it. */
export function card(rank, slices, more = {}) {
  const rows = slices.map((slice, index) => make("li", { class: slice.whole ? "whole" : "" },
    make("span", { class: "pg-slice-name" }, `C${index}`), ...parts(slice.of, more.ranks)));
  const words = slices.map((slice, index) => `slice ${index}: ${said(slice)}`).join("; ");
  return make("div", { class: "pg-card", role: "group", "aria-label": `rank ${rank}; ${words}` },
    make("p", { class: "pg-card-name" }, `rank ${rank}`), make("ul", { "aria-hidden": "true" }, ...rows));
}

export function said(slice) {
  if (slice.of.length === 0) return "nothing";
  return `${slice.whole ? "whole, " : ""}from rank ${slice.of.join(" and ")}`;
}

export function parts(of, ranks) {
  return Array.from({ length: ranks }, (_, rank) => {
    const times = of.filter((one) => one === rank).length;
    const on = times > 0 ? `background:${COLOURS[rank % COLOURS.length]};color:#000` : "";
    return make("span", { class: `pg-part${times > 1 ? " twice" : ""}`, style: on }, times > 0 ? String(rank) : "·");
  });
}

/** A stepper through all hops; it stays at its hop when the program changes, if there is one. */
export function stepper(data, at, moved) {
  const cards = make("div", { class: "pg-cards" });
  const words = make("p", { class: "pg-hop", "aria-live": "polite" });
  const moves = make("ul", { class: "pg-moves" });
  const most = data.hops.length;
  let now = Math.min(at, most);
  const show = (hop) => {
    now = Math.max(0, Math.min(most, hop));
    moved(now);
    const holds = data.holds[now];
    cards.replaceChildren(...holds.map((slices, rank) => card(rank, slices.map((set, index) => (
      { of: data.sets[set], whole: data.complete[index].includes(set) })), { ranks: data.ranks })));
    words.textContent = now === 0 ? `At first (${most} hops follow)` : `After hop ${now} of ${most}`;
    moves.replaceChildren(...(now === 0 ? [] : data.hops[now - 1].words.map((line) => make("li", {}, line))));
    range.set(now);
    back.disabled = now === 0;
    next.disabled = now === most;
  };
  const back = button("‹ Back", () => show(now - 1), { "aria-label": "previous hop" });
  const next = button("Next ›", () => show(now + 1), { "aria-label": "next hop" });
  const range = slider({ words: "Hop", least: 0, most, value: now, change: show });
  show(now);
  return make("section", { class: "pg-hops", "aria-label": "hop by hop" },
    make("h3", {}, "Hop by hop"), make("div", { class: "pg-row" }, back, next, range), words, cards, moves,
    make("p", { class: "pg-quiet" }, "A card is what a rank holds: a line for each slice, a square for each rank whose part is in it. "
      + "A green slice is whole."));
}
