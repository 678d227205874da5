// Curves over steps: loss, throughput, memory. Point, tap or use the arrow keys to read a step's values.
"use strict";

class Curves {
  // lines: [{ name, points: [[step, value or null]…], colour (of the theme or plain), dots, write: value → text }]
  constructor(target, lines, { fromZero = false, label, write = short }) {
    Object.assign(this, { target, fromZero, label, write });
    this.lines = lines.filter((line) => line.points.some(([, value]) => value !== null));
    this.steps = [...new Set(this.lines.flatMap((line) => line.points.map(([step]) => step)))].sort((a, b) => a - b);
    this.readout = target.parentElement.querySelector(".readout");
    this.chosen = null;
    if (!this.steps.length) {
      target.replaceChildren(element("p", { class: "quiet" }, "nothing was written down"));
      return;
    }
    this.range();
    this.draw();
    redrawn(target, () => this.draw());
    this.read();
  }

  range() {
    const values = this.lines.flatMap((line) => line.points.map(([, value]) => value)).filter((value) => value !== null);
    const lowest = this.fromZero ? 0 : Math.min(...values);
    const highest = Math.max(...values);
    const spare = (highest - lowest) * 0.06 || Math.abs(highest) * 0.1 || 1;
    this.low = this.fromZero ? 0 : Math.max(lowest - spare, lowest >= 0 ? 0 : -Infinity);
    this.high = highest + spare;
    [this.first, this.last] = [this.steps[0], this.steps.at(-1)];
  }

  draw() {
    const [width, height, left, right, top, bottom] = [this.target.clientWidth, 220, 48, 12, 8, 26];
    const many = this.last > this.first;
    this.x = (step) => (many ? left + ((step - this.first) / (this.last - this.first)) * (width - left - right) : (left + width) / 2);
    this.y = (value) => top + ((this.high - value) / (this.high - this.low)) * (height - top - bottom);
    const picture = shape("svg", { width, height, role: "img", "aria-label": this.label, tabindex: 0, class: "curves" });
    for (const value of ticks(this.low, this.high, 5)) {
      picture.append(
        shape("line", { x1: left, x2: width - right, y1: this.y(value), y2: this.y(value), class: "grid" }),
        shape("text", { x: left - 6, y: this.y(value) + 4, "text-anchor": "end" }, this.write(value)),
      );
    }
    for (const step of ticks(this.first, this.last, width / 90).filter(Number.isInteger)) {
      picture.append(shape("text", { x: this.x(step), y: height - 8, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
    for (const line of this.lines) this.line(picture, line);
    this.cursor = shape("g", { class: "cursor" });
    picture.append(this.cursor);
    this.listen(picture);
    this.target.replaceChildren(picture);
    this.mark();
  }

  line(picture, { points, colour: stroke, dots }) {
    let path = "";
    let pen = "M";
    for (const [step, value] of points) {
      if (value === null) {
        pen = "M"; // a gap where the value was no number
        continue;
      }
      path += `${pen}${this.x(step).toFixed(1)} ${this.y(value).toFixed(1)}`;
      pen = "L";
    }
    picture.append(shape("path", { d: path, fill: "none", style: `stroke:${stroke}`, "stroke-width": 2, "stroke-linejoin": "round" }));
    const seen = points.filter(([, value]) => value !== null);
    if (!dots && seen.length > 1) return;
    for (const [step, value] of seen) {
      picture.append(shape("circle", { cx: this.x(step), cy: this.y(value), r: 3.5, style: `fill:${stroke}` }));
    }
  }

  listen(picture) {
    const nearest = (event) => {
      const at = event.clientX - picture.getBoundingClientRect().left;
      return this.steps.reduce((best, step) => (Math.abs(this.x(step) - at) < Math.abs(this.x(best) - at) ? step : best));
    };
    picture.addEventListener("pointermove", (event) => this.choose(nearest(event)));
    picture.addEventListener("pointerdown", (event) => this.choose(nearest(event)));
    picture.addEventListener("pointerleave", () => this.choose(null));
    picture.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const place = this.chosen === null ? (by > 0 ? -1 : this.steps.length) : this.steps.indexOf(this.chosen);
      this.choose(this.steps[Math.min(Math.max(place + by, 0), this.steps.length - 1)]);
    });
  }

  choose(step) {
    if (step === this.chosen) return;
    this.chosen = step;
    this.mark();
    this.read();
  }

  mark() {
    this.cursor.replaceChildren();
    if (this.chosen === null) return;
    const x = this.x(this.chosen);
    this.cursor.append(shape("line", { x1: x, x2: x, y1: 8, y2: 194 }));
    for (const line of this.lines) {
      const point = line.points.find(([step]) => step === this.chosen);
      if (point && point[1] !== null) this.cursor.append(shape("circle", { cx: x, cy: this.y(point[1]), r: 5, style: `fill:${line.colour}` }));
    }
  }

  // The values of the chosen step; the last ones when none is.
  read() {
    const step = this.chosen ?? this.last;
    const parts = this.lines.map((line) => {
      const seen = line.points.filter(([at, value]) => value !== null && (this.chosen === null || at === step));
      const mark = element("i", { style: `background:${line.colour}` });
      return seen.length ? [mark, `${line.name} ${(line.write ?? this.write)(seen.at(-1)[1])} `] : [mark, `${line.name} – `];
    });
    this.readout.replaceChildren(`step ${step.toLocaleString("en")}: `, ...parts.flat());
  }
}

function drawCurves() {
  const { loss, validation, speed, steps_a_point: many } = report.curves;
  const note = many > 1 ? `; a point is the mean of ${many} steps` : "";
  const losses = document.getElementById("plot-loss");
  if (losses) {
    const lines = [
      { name: "training", points: loss, colour: "var(--training)" },
      { name: "validation", points: validation, colour: "var(--validation)", dots: validation.length < 60 },
    ];
    new Curves(losses, lines, { label: `loss over ${loss.length} points${note}`, write: (value) => Number(value.toPrecision(4)).toString() });
    const line = { name: "samples a second", points: speed, colour: "var(--speed)" };
    new Curves(document.getElementById("plot-speed"), [line], { fromZero: true, label: `samples a second over steps${note}` });
  }
  if (report.memory) drawMemory(document.getElementById("memory-figures"), report.memory);
}

function drawMemory(target, { over_steps: curves, sizes }) {
  const most = Math.max(...Object.values(sizes).flat(), 1);
  for (const [name, values] of Object.entries(sizes)) {
    const rows = values.map((bytes, rank) => {
      const bar = element("div", { class: "bar" }, element("span", { class: "segment memory", style: `width:${(100 * bytes) / most}%` }));
      const label = element("span", { class: "rank" }, values.length > 1 ? `rank ${rank}` : "all");
      return element("div", { class: "share" }, label, bar, element("span", { class: "amount" }, size(bytes)));
    });
    target.append(element("h3", {}, name.replaceAll("_", " ")), ...rows);
  }
  for (const [name, points] of Object.entries(curves)) {
    const plot = element("div", { class: "plot" });
    target.append(element("figure", {}, element("figcaption", {}, name.replaceAll("_", " ")), plot, element("p", { class: "readout quiet" })));
    new Curves(plot, [{ name: "memory", points, colour: "var(--speed)" }], { fromZero: true, label: name, write: size });
  }
}
