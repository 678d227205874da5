// Where each rank's time went: a bar for all that adds up to the step, a thin one for what ran behind computation.
"use strict";

const PARTS = [
  ["forward", "forward", "computing forward"],
  ["backward", "backward", "computing backward"],
  ["optimizer", "optimizer", "updating the weights"],
  ["communicating", "exposed communication", "data was on its way, and the rank had nothing else to do"],
  ["waiting", "waiting", "the rank had nothing to do until another one came"],
  ["other", "other", "between the bars: data, logging, Python"],
];
const HIDDEN = "hidden communication";

class Shares {
  constructor(target, measured) {
    Object.assign(this, { target, measured, all: false });
  }

  show(step) {
    this.step = step;
    this.draw();
  }

  draw() {
    const { measured, step } = this;
    const rows = this.all ? measured.mean_parts : step.parts;
    const column = (name) => measured.part_names.indexOf(name);
    const longest = Math.max(...rows.map((row) => row[column("step")]), 1e-9);
    const bars = rows.map((row, rank) => this.bar(row, rank, column, longest));
    this.target.replaceChildren(...this.choice(), ...bars, this.legend(), this.table(rows, column));
  }

  choice() {
    if (this.measured.recorded_steps < 2) return [];
    const button = (text, all) => {
      const made = element("button", { type: "button", "aria-pressed": this.all === all }, text);
      made.addEventListener("click", () => {
        this.all = all;
        this.draw();
        this.target.querySelector('[aria-pressed="true"]').focus({ preventScroll: true });
      });
      return made;
    };
    const mean = `Mean of ${this.measured.recorded_steps} recorded steps`;
    return [element("div", { class: "controls choice", role: "group", "aria-label": "which steps" }, button("This step", false), button(mean, true))];
  }

  bar(row, rank, column, longest) {
    const segments = PARTS.map(([key, name]) => {
      const share = row[column(key)] / longest;
      const text = `${name} ${time(row[column(key)])}, ${percent(share)}`;
      const made = element("span", { class: `segment ${key}`, style: `width:${100 * share}%`, title: text });
      if (share * (this.target.clientWidth - 70) > 40) made.append(element("b", {}, `${Math.round(100 * share)}\u00a0%`));
      return made;
    });
    const hidden = row[column("hidden")];
    const below = element("div", { class: "hidden-bar", title: `${HIDDEN} ${time(hidden)}` });
    below.append(element("span", { style: `width:${(100 * hidden) / longest}%` }));
    const label = PARTS.map(([key, name]) => `${name} ${percent(row[column(key)] / longest)}`).join(", ");
    const bar = element("div", { class: "bar", role: "img", "aria-label": `rank ${rank}: ${label}` }, ...segments);
    return element("div", { class: "share" }, element("span", { class: "rank" }, `rank ${rank}`), element("div", { class: "bars" }, bar, below));
  }

  legend() {
    const entries = PARTS.map(([key, name, meaning]) => element("li", { title: meaning }, element("i", { class: `swatch ${key}` }), `${name}: ${meaning}`));
    const hidden = element("li", {}, element("i", { class: "swatch hidden-swatch" }), `${HIDDEN}: it ran while the rank computed, and costs nothing here`);
    return element("details", { class: "meanings" }, element("summary", {}, "What the colours mean"), element("ul", { class: "legend" }, ...entries, hidden));
  }

  // A row for each rank; on a phone, a column for each, as long as they fit.
  table(rows, column) {
    const scale = Math.max(...rows.map((row) => row[column("step")]));
    const [by, unit] = scale >= 1e6 ? [1e6, "s"] : scale >= 1e3 ? [1e3, "ms"] : [1, "µs"];
    const columns = [...PARTS.map(([key, name]) => [key, name, key]), ["step", "step", ""], ["hidden", HIDDEN, "hidden-swatch"]];
    const head = (scope, name, swatch) => element("th", { scope }, ...(swatch ? [element("i", { class: `swatch ${swatch}` })] : []), name);
    const cell = (row, key) => element("td", {}, (row[column(key)] / by).toFixed(scale / by >= 100 ? 1 : 2));
    const narrow = this.target.clientWidth < 640 && rows.length <= 4;
    const lines = narrow
      ? [
          [element("td"), ...rows.map((_, rank) => head("col", `rank ${rank}`))],
          ...columns.map(([key, name, swatch]) => [head("row", name, swatch), ...rows.map((row) => cell(row, key))]),
        ]
      : [
          [head("col", "rank"), ...columns.map(([, name, swatch]) => head("col", name, swatch))],
          ...rows.map((row, rank) => [head("row", String(rank)), ...columns.map(([key]) => cell(row, key))]),
        ];
    const table = element("table", { class: narrow ? "numbers standing" : "numbers" }, ...lines.map((cells) => element("tr", {}, ...cells)));
    const box = element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "where the time went, in numbers" }, table);
    return element("div", {}, paragraph("quiet", `In ${unit}; all but hidden communication add up to the step.`), box);
  }
}
