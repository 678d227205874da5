// The timeline: which piece of a step is in view, and what pointers and keys do to it.
"use strict";

class Timeline {
  constructor(canvas, details, measured) {
    Object.assign(this, { canvas, details, measured, chosen: null, view: { from: 0, to: 1 } });
    this.hint = [...details.childNodes];
    this.pointers = new Map();
    this.predicted = document.getElementById("predicted");
    this.predicted?.addEventListener("change", () => this.arrange());
    this.listen();
  }

  show(step) {
    this.step = step;
    this.chosen = null;
    this.view = { from: 0, to: step.length };
    this.details.replaceChildren(...this.hint);
    this.arrange();
  }

  // Begin anew: another step, or another width.
  arrange() {
    const predicted = Boolean(this.step.predicted && this.predicted?.checked);
    this.lanes = new PaintedLanes(this.step, this.measured.ranks, this.canvas.clientWidth, predicted);
    this.draw();
  }

  draw() {
    this.lanes.paint(this.canvas, this.view, this.chosen);
    const { from, to } = this.view;
    const whole = to - from >= this.step.length * 0.999;
    const arrows = this.lanes.tooMany ? "; zoom in to see messages as arrows" : "";
    const seen = whole ? `${time(this.step.length)} in all` : `${time(from, this.step.length)} to ${time(to, this.step.length)} of ${time(this.step.length)}`;
    document.getElementById("window").textContent = seen + arrows;
    document.getElementById("zoom-out").disabled = document.getElementById("fit").disabled = whole;
    document.getElementById("pan-left").disabled = from <= 0;
    document.getElementById("pan-right").disabled = to >= this.step.length * 0.9999;
  }

  // ── the piece in view ────────────────────────────────────────────────────────────────────────────────────────

  // Never beyond the step, and never closer than a hundredth of a microsecond.
  look(from, to) {
    const length = Math.min(Math.max(to - from, Math.min(0.01, this.step.length)), this.step.length);
    const middle = (from + to) / 2;
    const start = Math.min(Math.max(middle - length / 2, 0), this.step.length - length);
    this.view = { from: start, to: start + length };
    this.draw();
  }

  // Go there smoothly, unless the reader prefers stillness.
  glide(from, to) {
    cancelAnimationFrame(this.motion);
    if (calm.matches) {
      this.look(from, to);
      return;
    }
    const begun = performance.now();
    const start = { ...this.view };
    const move = (now) => {
      const part = Math.min(Math.max((now - begun) / 160, 0), 1);
      const eased = part * (2 - part);
      this.look(start.from + (from - start.from) * eased, start.to + (to - start.to) * eased);
      if (part < 1) this.motion = requestAnimationFrame(move);
    };
    this.motion = requestAnimationFrame(move);
  }

  zoomed(factor, centre = (this.view.from + this.view.to) / 2) {
    return [centre - (centre - this.view.from) * factor, centre + (this.view.to - centre) * factor];
  }

  panned(share) {
    const by = share * (this.view.to - this.view.from);
    return [this.view.from + by, this.view.to + by];
  }

  moment(x) {
    const { left, right } = this.lanes;
    return this.view.from + ((x - left) / (right - left)) * (this.view.to - this.view.from);
  }

  // ── what is chosen ───────────────────────────────────────────────────────────────────────────────────────────

  choose(item) {
    if (item === this.chosen) return;
    this.chosen = item;
    this.details.replaceChildren(...(item ? describe(item, this.step, this.lanes.uncovered.get(item)) : this.hint));
    this.draw();
  }

  // The bar at a place, or the nearest one a finger may have meant.
  at(x, y, reach) {
    if (x < this.lanes.left) return null;
    let best = null;
    let shortest = reach;
    const predicted = this.lanes.predicted ? this.step.predicted.bars.filter((bar) => bar.rank < this.lanes.ranks) : [];
    for (const items of [...this.lanes.items, predicted]) {
      for (const item of items) {
        const { top, height } = this.lanes.box(item);
        if (y < top - 1 || y > top + height + 1) continue;
        const away = Math.max(this.lanes.x(item.start) - x, x - this.lanes.x(item.end), 0);
        // What lies on top of another bar comes later in its lane, or is a wait.
        if (away < shortest || (away === shortest && (item.what !== undefined || best?.what === undefined))) {
          best = item;
          shortest = away;
        }
      }
    }
    return best;
  }

  walk(key) {
    const { items } = this.lanes;
    if (!this.chosen || this.chosen.expected) return items.find((lane) => lane.length)?.[0];
    const lane = this.lanes.laneOf(this.chosen);
    if (key === "ArrowLeft" || key === "ArrowRight") {
      return items[lane][items[lane].indexOf(this.chosen) + (key === "ArrowRight" ? 1 : -1)];
    }
    const by = key === "ArrowDown" ? 1 : -1;
    let next = lane + by;
    while (items[next] && !items[next].length) next += by;
    const middle = (item) => (item.start + item.end) / 2;
    const away = (item) => Math.abs(middle(item) - middle(this.chosen));
    return items[next]?.reduce((best, item) => (away(item) < away(best) ? item : best));
  }

  // Choose a bar, and bring it into view.
  visit(item) {
    const { from, to } = this.view;
    if (item.end < from || item.start > to) {
      const middle = (item.start + item.end) / 2;
      this.look(middle - (to - from) / 2, middle + (to - from) / 2);
    }
    this.choose(item);
  }

  // ── pointers and keys ────────────────────────────────────────────────────────────────────────────────────────

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointerdown", (event) => this.pressed(event));
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, (event) => this.released(event));
    canvas.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !this.pointers.size && this.choose(null));
    canvas.addEventListener("dblclick", (event) => this.glide(...this.zoomed(0.4, this.moment(event.offsetX))));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    const buttons = {
      "zoom-in": () => this.zoomed(0.5),
      "zoom-out": () => this.zoomed(2),
      "pan-left": () => this.panned(-0.4),
      "pan-right": () => this.panned(0.4),
      fit: () => [0, this.step.length],
    };
    for (const [name, view] of Object.entries(buttons)) {
      document.getElementById(name).addEventListener("click", () => this.glide(...view()));
    }
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  pressed(event) {
    const place = this.place(event);
    cancelAnimationFrame(this.motion);
    this.canvas.setPointerCapture?.(event.pointerId);
    this.pointers.set(event.pointerId, { ...place, first: place, onAxis: place.y < AXIS });
    this.dragged = false;
  }

  moved(event) {
    const place = this.place(event);
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) {
      this.choose(this.at(place.x, place.y, 3));
      return;
    }
    const before = { ...pointer };
    Object.assign(pointer, place);
    this.dragged ||= Math.abs(place.x - pointer.first.x) > 4;
    if (this.pointers.size === 2) this.pinch(event.pointerId, before);
    else if (this.dragged && pointer.onAxis) this.select(pointer);
    else if (this.dragged) {
      const by = this.moment(before.x) - this.moment(place.x);
      this.look(this.view.from + by, this.view.to + by);
    }
  }

  // Two fingers: the moments under them stay under them.
  pinch(id, before) {
    const [other] = [...this.pointers].filter(([one]) => one !== id).map(([, pointer]) => pointer);
    const now = this.pointers.get(id);
    const [mine, theirs] = [this.moment(before.x), this.moment(other.x)];
    const apart = now.x - other.x;
    if (Math.abs(apart) < 8) return;
    const scale = (mine - theirs) / apart;
    if (scale <= 0) return;
    const from = theirs - (other.x - this.lanes.left) * scale;
    this.look(from, from + (this.lanes.right - this.lanes.left) * scale);
  }

  select({ first, x }) {
    this.draw();
    const pen = this.canvas.getContext("2d");
    pen.globalAlpha = 0.2;
    pen.fillStyle = themed("accent");
    pen.fillRect(Math.min(first.x, x), 0, Math.abs(x - first.x), this.lanes.height);
    pen.globalAlpha = 1;
  }

  released(event) {
    const pointer = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!pointer || event.type === "pointercancel") return;
    if (!this.dragged) {
      this.choose(this.at(pointer.x, pointer.y, event.pointerType === "mouse" ? 3 : 14));
    } else if (pointer.onAxis && Math.abs(pointer.x - pointer.first.x) > 4) {
      const [from, to] = [pointer.first.x, pointer.x].sort((a, b) => a - b);
      this.glide(Math.max(this.moment(from), 0), this.moment(to));
    }
  }

  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const wanted = event.ctrlKey || event.metaKey || document.activeElement === this.canvas;
    if (!wanted && !sideways) return; // the page scrolls
    event.preventDefault();
    if (sideways) this.look(...this.panned(event.deltaX / (this.lanes.right - this.lanes.left)));
    else this.look(...this.zoomed(Math.exp(Math.min(Math.max(event.deltaY, -120), 120) * 0.004), this.moment(event.offsetX)));
  }

  key(event) {
    const views = {
      "+": () => this.zoomed(0.5, this.middle()),
      "=": () => this.zoomed(0.5, this.middle()),
      "-": () => this.zoomed(2, this.middle()),
      0: () => [0, this.step.length],
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key.startsWith("Arrow") && event.shiftKey) this.glide(...this.panned({ ArrowLeft: -0.3, ArrowRight: 0.3 }[event.key] ?? 0));
    else if (event.key.startsWith("Arrow")) {
      const next = this.walk(event.key);
      if (next) this.visit(next);
    } else if (event.key === "Escape") this.choose(null);
    else if (views[event.key]) this.glide(...views[event.key]());
    else return;
    event.preventDefault();
  }

  middle() {
    const { chosen, view } = this;
    return chosen ? Math.min(Math.max((chosen.start + chosen.end) / 2, view.from), view.to) : (view.from + view.to) / 2;
  }
}
