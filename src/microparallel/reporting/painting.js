// How the bars of the timeline are painted.
"use strict";

class PaintedLanes extends Lanes {
  paint(canvas, view, chosen) {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [Math.round(this.width * ratio), Math.round(this.height * ratio)];
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    canvas.style.height = `${this.height}px`;
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, this.height);
    this.pen = pen;
    this.view = view;
    this.theme = Object.fromEntries(["page", "panel", "ink", "quiet", "line", "accent"].map((name) => [name, themed(name)]));
    this.x = (moment) => this.left + ((moment - view.from) / (view.to - view.from)) * (this.right - this.left);
    this.hatch = hatched(pen, this.theme, ratio);
    this.ground();
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.right - this.left, this.height);
    pen.clip();
    const computed = this.step.bars.filter(computes);
    for (const bar of computed) this.solid(bar);
    for (const item of this.step.blocked) this.wait(item);
    for (const bar of computed) this.named(bar);
    for (const bar of this.step.bars) if (!computes(bar)) this.talk(bar);
    if (this.predicted) this.prediction();
    this.arrows(chosen);
    this.emphasis(chosen);
    pen.restore();
  }

  ground() {
    const { pen, theme } = this;
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const places = ticks(this.view.from, this.view.to, (this.right - this.left) / 90);
    pen.textAlign = "center";
    for (const place of places) {
      const x = Math.round(this.x(place)) + 0.5;
      pen.fillStyle = theme.line;
      pen.fillRect(x - 0.5, AXIS - 4, 1, this.height - AXIS);
      const text = tickText(place, places, this.step.length);
      const half = pen.measureText(text).width / 2;
      pen.fillStyle = theme.quiet;
      pen.fillText(text, Math.min(Math.max(x, this.left + half), this.right - half), 14);
    }
    // Which piece of the step is in view.
    const whole = (moment) => this.left + (moment / this.step.length) * (this.right - this.left);
    pen.fillStyle = theme.line;
    pen.fillRect(this.left, 0, this.right - this.left, 3);
    pen.fillStyle = theme.accent;
    pen.fillRect(whole(this.view.from), 0, Math.max(whole(this.view.to) - whole(this.view.from), 2), 3);
    pen.textAlign = "left";
    for (const row of this.rows) this.names(row);
  }

  names(row) {
    const { pen, theme } = this;
    pen.fillStyle = theme.panel;
    pen.fillRect(this.left, row.compute, this.right - this.left, this.computeHeight);
    pen.fillStyle = theme.ink;
    pen.font = `600 ${this.computeHeight < 20 ? 11 : this.narrow ? 12 : 13}px system-ui, sans-serif`;
    pen.fillText(`rank ${row.rank}`, 0, row.compute + this.computeHeight / 2);
    if (this.narrow || this.computeHeight < 20) return;
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = theme.quiet;
    pen.textAlign = "right";
    pen.fillText("compute", this.left - 8, row.compute + this.computeHeight / 2 + 0.5);
    if (row.lines) pen.fillText("communication", this.left - 8, row.talk + this.talkHeight / 2 + 0.5);
    if (this.predicted) pen.fillText("predicted", this.left - 8, row.top + 5.5);
    pen.textAlign = "left";
  }

  // The part of a bar that is in view, at least a hair wide; null if none is.
  extent(start, end) {
    if (end < this.view.from || start > this.view.to) return null;
    const from = Math.max(this.x(start), this.left - 4);
    return { from, width: Math.max(Math.min(this.x(end), this.right + 4) - from, 1) };
  }

  solid(bar) {
    const seen = this.extent(bar.start, bar.end);
    if (!seen) return;
    const { top, height } = this.box(bar);
    this.pen.fillStyle = colour(bar.kind);
    fillBar(this.pen, seen.from, top, seen.width, height);
    if (bar.row) {
      this.pen.strokeStyle = this.theme.page;
      this.pen.strokeRect(seen.from, top, seen.width, height);
    }
  }

  // Its name, in the widest piece of it that no wait covers.
  named(bar) {
    const pieces = this.uncovered.get(bar).map(([start, end]) => this.extent(start, end)).filter(Boolean);
    if (!pieces.length) return;
    const { top, height } = this.box(bar);
    const widest = pieces.reduce((one, other) => (other.width > one.width ? other : one));
    this.write([bar.name, bar.kind], widest, top + height / 2 + 0.5, ink(bar.kind));
  }

  // The first of these words that has room, in the middle if it only just has, or none.
  write(words, seen, y, fill) {
    if (seen.width < 14) return;
    const { pen } = this;
    pen.font = "12px system-ui, sans-serif";
    const from = Math.max(seen.from, this.left);
    const room = Math.min(seen.from + seen.width, this.right) - from;
    const text = words.find((word) => pen.measureText(word).width <= room - 3);
    if (text === undefined) return;
    pen.fillStyle = fill;
    pen.fillText(text, from + Math.min(6, (room - pen.measureText(text).width) / 2), y);
  }

  wait(item) {
    const seen = this.extent(item.start, item.end);
    if (!seen) return;
    const { pen, theme } = this;
    const { top, height } = this.box(item);
    pen.fillStyle = theme.page;
    pen.fillRect(seen.from, top, seen.width, height);
    pen.fillStyle = item.what === 0 ? this.hatch : colour("collective");
    fillBar(pen, seen.from, top, seen.width, height);
    if (item.what === 0 && seen.width > 64) {
      pen.font = "11px system-ui, sans-serif";
      const text = seen.width > 150 ? `waits for rank ${item.whom}` : "waits";
      const wide = pen.measureText(text).width;
      const at = Math.max(seen.from, this.left) + 6;
      pen.fillStyle = theme.page;
      pen.fillRect(at - 3, top + height / 2 - 8, wide + 6, 16);
      pen.fillStyle = theme.ink;
      pen.fillText(text, at, top + height / 2 + 0.5);
    } else if (item.what === 1) {
      this.write(["communicates"], seen, top + height / 2 + 0.5, ink("collective"));
    }
  }

  talk(bar) {
    const { top, height } = this.box(bar);
    const before = bar.begun > bar.start ? this.extent(bar.start, bar.begun) : null;
    if (before) {
      this.pen.globalAlpha = 0.28;
      this.pen.fillStyle = colour(bar.kind);
      fillBar(this.pen, before.from, top + height / 2 - 2, before.width, 4);
      this.pen.globalAlpha = 1;
    }
    const during = this.extent(bar.begun, bar.end);
    if (!during) return;
    this.pen.fillStyle = colour(bar.kind);
    fillBar(this.pen, during.from, top, during.width, height);
    if (height > 10) this.write([bar.name, bar.name.split("(")[0]], during, top + height / 2 + 0.5, ink(bar.kind));
  }

  prediction() {
    const { pen } = this;
    for (const bar of this.step.predicted.bars) {
      const seen = bar.rank < this.ranks ? this.extent(bar.start, bar.end) : null;
      if (!seen) continue;
      const { top, height } = this.box(bar);
      pen.fillStyle = colour(bar.kind);
      fillBar(pen, seen.from, top, seen.width, height);
    }
    const end = this.x(this.step.predicted.length);
    pen.setLineDash([4, 4]);
    pen.strokeStyle = this.theme.ink;
    pen.beginPath();
    pen.moveTo(end, AXIS - 4);
    pen.lineTo(end, this.height);
    pen.stroke();
    pen.setLineDash([]);
  }

  // Messages, from their send to their receive, once there are few enough to be told apart.
  arrows(chosen) {
    const messages = new Map();
    for (const bar of this.step.bars) {
      if (bar.kind !== "send" && bar.kind !== "receive") continue;
      const message = messages.get(bar.meeting) ?? {};
      message[bar.kind] = bar;
      messages.set(bar.meeting, message);
    }
    const seen = [...messages.values()].filter(({ send, receive }) => send && receive && receive.end >= this.view.from && send.start <= this.view.to);
    this.messages = seen.length;
    this.tooMany = seen.length > (this.right - this.left) / 14;
    for (const { send, receive } of seen) {
      const mine = chosen !== null && chosen.meeting !== undefined && chosen.meeting === send.meeting;
      if (!this.tooMany || mine) this.arrow(send, receive, mine);
    }
  }

  arrow(send, receive, strong) {
    const { pen } = this;
    const [from, to] = [this.box(send), this.box(receive)];
    const [x1, y1, x2, y2] = [this.x(send.start), from.top + from.height / 2, this.x(receive.end), to.top + to.height / 2];
    pen.strokeStyle = pen.fillStyle = strong ? this.theme.accent : this.theme.ink;
    pen.globalAlpha = strong ? 1 : 0.55;
    pen.lineWidth = strong ? 2 : 1.2;
    pen.beginPath();
    pen.moveTo(x1, y1);
    const bend = Math.max((x2 - x1) / 2, 8);
    pen.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x2, y2);
    pen.lineTo(x2 - 7, y2 - 4);
    pen.lineTo(x2 - 7, y2 + 4);
    pen.fill();
    pen.globalAlpha = pen.lineWidth = 1;
  }

  // A frame around what was chosen, and around the other ranks' side of the same communication.
  emphasis(chosen) {
    if (!chosen) return;
    const meeting = chosen.meeting ?? chosen.cause?.meeting ?? null;
    const together = meeting === null ? [] : this.step.bars.filter((bar) => bar.meeting === meeting);
    const related = chosen.expected ? this.step.bars.filter((bar) => isTheSame(bar, chosen)) : together;
    this.pen.lineWidth = 2;
    for (const item of [...related, chosen]) {
      const seen = this.extent(item.start, item.end);
      if (!seen) continue;
      const { top, height } = this.box(item);
      this.pen.strokeStyle = item === chosen ? this.theme.ink : this.theme.accent;
      this.pen.strokeRect(seen.from, top, seen.width, height);
    }
    this.pen.lineWidth = 1;
  }
}

function fillBar(pen, x, y, width, height) {
  if (width < 4) {
    pen.fillRect(x, y, width, height);
    return;
  }
  pen.beginPath();
  pen.roundRect(x, y, width - 0.5, height, Math.min(3, height / 2));
  pen.fill();
}

// Slanted lines: nothing was done here.
function hatched(pen, theme, ratio) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8 * ratio;
  const own = tile.getContext("2d");
  own.scale(ratio, ratio);
  own.fillStyle = theme.panel;
  own.fillRect(0, 0, 8, 8);
  own.strokeStyle = theme.quiet;
  own.lineWidth = 1.3;
  own.beginPath();
  for (const shift of [-8, 0, 8]) {
    own.moveTo(shift - 1, 9);
    own.lineTo(shift + 9, -1);
  }
  own.stroke();
  const pattern = pen.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / ratio));
  return pattern;
}

// Marks of one axis share a unit, and have as many digits as tell them apart.
function tickText(place, places, length) {
  const [scale, unit] = length >= 1e6 ? [1e6, "s"] : length >= 1e3 ? [1e3, "ms"] : [1, "µs"];
  const distance = places.length > 1 ? (places[1] - places[0]) / scale : 1;
  const digits = Math.min(Math.max(0, -Math.floor(Math.log10(distance) + 1e-9)), 6);
  return `${(place / scale).toFixed(digits)} ${unit}`;
}
