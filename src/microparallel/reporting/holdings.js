// What each rank held in a step, in bytes over time: measured, and beside it what the simulator says, on one scale.
"use strict";

class Holdings {
  constructor(section, measured) {
    Object.assign(this, { section, measured });
    this.target = section.querySelector("#held-rows");
    this.kinds = measured.held_kinds;
  }

  show(step) {
    this.step = step;
    this.section.hidden = !step.held;
    this.draw();
  }

  draw() {
    const { held, predicted, length } = this.step;
    if (!held) return;
    const expected = predicted?.held ?? null;
    const total = (row) => row.slice(1).reduce((sum, bytes) => sum + bytes, 0);
    const peak = (rows) => rows.reduce((best, row) => (total(row) > total(best) ? row : best));
    const most = Math.max(...[...held, ...(expected ?? [])].map((rows) => total(peak(rows))), 1);
    const narrow = this.target.clientWidth < 640;
    const columns = expected && !narrow ? 2 : 1;
    const width = Math.floor((this.target.clientWidth - (narrow ? 0 : 70) - (columns - 1) * 16) / columns);
    const strip = (rows, end, words) => {
      const best = peak(rows);
      const parts = this.kinds.map((kind, place) => [kind, best[place + 1]]).filter(([, bytes]) => bytes > 0);
      const shares = parts.map(([kind, bytes]) => `${kind} ${size(bytes)}`).join(", ");
      return this.strip(rows, best, { end, most, width, label: `${words}: at most ${size(total(best))} (${shares})` });
    };
    this.target.replaceChildren(
      ...held.map((rows, rank) => {
        const strips = [strip(rows, length, `measured, rank ${rank}`)];
        if (expected?.[rank]) strips.push(strip(expected[rank], predicted.length, `simulated, rank ${rank}`));
        return element("div", { class: "held" }, element("span", { class: "rank" }, `rank ${rank}`), element("div", { class: "strips" }, ...strips));
      }),
    );
    const there = this.kinds.filter((_, place) => held.some((rows) => rows.some((row) => row[place + 1] > 0)));
    const entries = there.map((kind) => element("li", {}, element("i", { style: `background:${colour(kind)}` }), kind));
    document.getElementById("held-legend").replaceChildren(...entries);
    const beside = expected ? (narrow ? "Above, what was measured; below, what the simulator says. " : "Left, what was measured; right, what the simulator says. ") : "";
    document.getElementById("held-note").textContent = `${beside}All strips have one scale; the highest is ${size(most)}.`;
  }

  // An area for each kind, one upon the other, and a dot at the peak with its number.
  strip(rows, best, { end, most, width, label }) {
    const [height, top] = [64, 16];
    const x = (moment) => (end > 0 ? Math.min(moment / end, 1) * width : 0);
    const y = (bytes) => height - (bytes / most) * (height - top);
    const picture = shape("svg", { width, height, role: "img", "aria-label": label, class: "holding" }, shape("title", {}, label));
    picture.append(shape("rect", { width, height, class: "ground" }));
    let below = rows.map(() => 0);
    this.kinds.forEach((kind, place) => {
      const above = rows.map((row, number) => below[number] + row[place + 1]);
      const line = (sizes) => rows.flatMap((row, number) => [row[0], rows[number + 1]?.[0] ?? end].map((moment) => `${x(moment).toFixed(1)},${y(sizes[number]).toFixed(1)}`));
      const points = [...line(above), ...line(below).reverse()].join(" ");
      if (above.some((bytes, number) => bytes > below[number])) picture.append(shape("polygon", { points, fill: colour(kind) }));
      below = above;
    });
    const bytes = best.slice(1).reduce((sum, part) => sum + part, 0);
    const left = x(best[0]) > width - 80;
    picture.append(
      shape("circle", { cx: Math.min(Math.max(x(best[0]), 3), width - 3), cy: y(bytes), r: 2.6 }),
      shape("text", { x: x(best[0]) + (left ? -7 : 7), y: y(bytes) - 4, "text-anchor": left ? "end" : "start" }, size(bytes)),
    );
    return picture;
  }
}
