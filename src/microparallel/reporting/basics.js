// What all figures share: the data, elements, numbers as people write them, and colours that follow the page's theme.
"use strict";

const report = JSON.parse(document.getElementById("data").textContent);
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const dark = matchMedia("(prefers-color-scheme: dark)");

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const colour = (kind) => report.colours[kind][0];
const ink = (kind) => report.colours[kind][1];
const themed = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// ── numbers ──────────────────────────────────────────────────────────────────────────────────────────────────────

// A number in three digits: 12.3, 0.5, 1,234.
function short(number) {
  if (number === 0) return "0";
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(number))));
  return number.toLocaleString("en", { maximumFractionDigits: Math.min(digits, 12) });
}

// Microseconds, in the unit that suits them.
function time(microseconds, scale = Math.abs(microseconds)) {
  if (scale >= 1e6) return `${short(microseconds / 1e6)}\u00a0s`;
  return scale >= 1e3 ? `${short(microseconds / 1e3)}\u00a0ms` : `${short(microseconds)}\u00a0µs`;
}

function size(bytes) {
  for (const [unit, scale] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (bytes >= scale) return `${short(bytes / scale)}\u00a0${unit}`;
  }
  return bytes === 1 ? "1 byte" : `${bytes} bytes`;
}

function percent(share) {
  const points = 100 * share;
  return `${points !== 0 && points < 9.95 ? points.toFixed(1) : Math.round(points)}\u00a0%`;
}

// Round places for the marks of an axis, at most that many.
function ticks(from, to, most) {
  const rough = (to - from) / Math.max(most, 1);
  if (!(rough > 0)) return [from];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough * 0.999);
  const found = [];
  for (let number = Math.ceil(from / step - 1e-9); number * step <= to + step * 1e-9; number += 1) found.push(number * step);
  return found;
}

// Call it when the element has another width, or the page other colours.
function redrawn(target, draw) {
  let width = target.clientWidth;
  new ResizeObserver(() => {
    if (target.clientWidth !== width) {
      width = target.clientWidth;
      draw();
    }
  }).observe(target);
  dark.addEventListener("change", draw);
}
