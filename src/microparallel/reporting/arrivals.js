// When each collective of the backward pass was handed over by each rank, could begin, and was back.
"use strict";

class Arrivals {
  constructor(section, measured) {
    Object.assign(this, { section, measured });
    this.target = section.querySelector(".plot");
    this.note = section.querySelector("#arrival-note");
  }

  show(step) {
    this.step = step;
    this.section.hidden = !step.arrivals.length;
    if (!step.arrivals.length) return;
    this.draw();
  }

  draw() {
    if (this.section.hidden) return;
    const { step } = this;
    const width = this.target.clientWidth;
    const narrow = width < 640;
    const [left, right, top, row] = [narrow ? 62 : 150, 10, 26, step.arrivals.length > 24 ? 18 : 30];
    const height = top + row * step.arrivals.length + 18;
    const [from, to] = this.range();
    this.x = (moment) => left + ((moment - from) / (to - from)) * (width - left - right);
    const picture = shape("svg", { width, height, role: "group", "aria-label": "when gradients arrived", class: "arrivals" });
    if (step.backward) {
      const [start, end] = step.backward;
      picture.append(
        shape("rect", { x: this.x(start), y: top - 4, width: this.x(end) - this.x(start), height: height - top, class: "backward-band" }),
        shape("text", { x: this.x(start) + 6, y: height - 7, class: "band-name" }, "backward"),
      );
    }
    const places = ticks(from, to, (width - left - right) / 90);
    for (const place of places) {
      const x = Math.min(this.x(place), width - 26);
      picture.append(shape("text", { x, y: 14, "text-anchor": "middle" }, tickText(place, places, step.length)));
      picture.append(shape("line", { x1: this.x(place), x2: this.x(place), y1: top - 4, y2: height - 4, class: "grid" }));
    }
    step.arrivals.forEach((arrival, number) => picture.append(this.row(arrival, number, top + row * number, row, narrow)));
    this.target.replaceChildren(picture);
    this.sayAll();
  }

  range() {
    const { arrivals, backward } = this.step;
    const moments = arrivals.flatMap(([, , , handed, met, back]) => [...handed.map(([, at]) => at), met, back]);
    const from = Math.min(...moments, ...(backward ?? []));
    const to = Math.max(...moments, ...(backward ?? []));
    return [from, to > from ? to : from + 1];
  }

  row(arrival, number, top, height, narrow) {
    const [, name, bytes, handed, met, back, last] = arrival;
    const first = Math.min(...handed.map(([, at]) => at));
    const middle = top + height / 2;
    const thick = height > 20 ? 12 : 8;
    const label = narrow ? size(bytes) : `${number + 1}. ${this.measured.names[name].split("(")[0]}, ${size(bytes)}`;
    const words = this.words(arrival, number);
    const group = shape("g", { class: "arrival", tabindex: 0, role: "img", "aria-label": words });
    group.append(
      shape("rect", { x: 0, y: top, width: this.target.clientWidth, height, class: "row-ground" }),
      shape("text", { x: 0, y: middle + 4 }, label),
      shape("rect", { x: this.x(first), y: middle - 2, width: Math.max(this.x(met) - this.x(first), 0.5), height: 4, rx: 2, class: "gathering" }),
      shape("rect", { x: this.x(met), y: middle - thick / 2, width: Math.max(this.x(back) - this.x(met), 1.5), height: thick, rx: 3, class: "travelling" }),
    );
    const room = handed.length <= 8 && height > 20;
    for (const [rank, at] of [...handed].sort((one, other) => one[1] - other[1])) {
      const mark = rank === last ? "handed last" : "handed";
      group.append(shape("circle", { cx: this.x(at), cy: middle, r: room ? 7 : 3, class: mark }));
      if (room) group.append(shape("text", { x: this.x(at), y: middle + 3.5, "text-anchor": "middle", class: `${mark} number` }, String(rank)));
    }
    for (const event of ["pointerenter", "focus", "click"]) group.addEventListener(event, () => (this.note.textContent = words));
    for (const event of ["pointerleave", "blur"]) group.addEventListener(event, () => this.sayAll());
    return group;
  }

  words([, name, bytes, handed, met, back, last], number) {
    const first = handed.reduce((one, other) => (other[1] < one[1] ? other : one));
    const gap = met - first[1];
    const late = handed.length > 1 && gap > 0 ? `rank ${last} came last, ${time(gap)} after rank ${first[0]}` : "all ranks came at once";
    return `${number + 1}. ${this.measured.names[name]}, ${size(bytes)}: ${late}; under way for ${time(back - met)}, back at ${time(back, this.step.length)}`;
  }

  sayAll() {
    const { arrivals, all_arrivals: all } = this.step;
    const last = new Map();
    for (const arrival of arrivals) last.set(arrival[6], (last.get(arrival[6]) ?? 0) + 1);
    const [rank, times] = [...last].reduce((one, other) => (other[1] > one[1] ? other : one));
    const gaps = arrivals.reduce((sum, [, , , handed, met]) => sum + met - Math.min(...handed.map(([, at]) => at)), 0) / arrivals.length;
    const shown = all > arrivals.length ? `The first ${arrivals.length} of ${all} collectives. ` : "";
    const several = `Rank ${rank} came last to ${times} of ${arrivals.length}; on average the last came ${time(gaps)} after the first.`;
    const who = arrivals[0][3].length > 1 ? (arrivals.length > 1 ? several : `Rank ${rank} came last, ${time(gaps)} after the first.`) : "";
    this.note.textContent = shown + who;
  }
}
