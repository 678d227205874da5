// Dragging with a mouse or a pen; a finger taps instead, so that the page can be scrolled.
import { make } from "./make.js";

/** Let an element be dragged to one that a selector finds; `dropped` is told that one, and where across the page. */
export function draggable(element, selector, dropped) {
  element.addEventListener("pointerdown", (down) => {
    if (down.button !== 0 || down.pointerType === "touch") return;
    let ghost = null;
    let over = null;
    const find = (event) => document.elementFromPoint(event.clientX, event.clientY)?.closest(selector) ?? null;
    const move = (event) => {
      if (ghost === null) {
        if (Math.hypot(event.clientX - down.clientX, event.clientY - down.clientY) < 6) return;
        ghost = make("div", { class: "pz-ghost pg pz", "aria-hidden": "true" }, element.cloneNode(true));
        document.body.append(ghost);
      }
      ghost.style.left = `${event.clientX + 4}px`;
      ghost.style.top = `${event.clientY + 4}px`;
      const now = find(event);
      if (now !== over) { over?.classList.remove("is-target"); now?.classList.add("is-target"); over = now; }
    };
    const up = (event) => {
      removeEventListener("pointermove", move);
      removeEventListener("pointerup", up);
      removeEventListener("pointercancel", up);
      over?.classList.remove("is-target");
      if (ghost === null) return;
      ghost.remove();
      const swallow = (click) => { click.stopImmediatePropagation(); click.preventDefault(); }; // the click that ends a drag
      addEventListener("click", swallow, { capture: true, once: true });
      setTimeout(() => removeEventListener("click", swallow, { capture: true }), 0);
      const place = event.type === "pointerup" ? find(event) : null;
      if (place !== null) dropped(place, event.clientX);
    };
    addEventListener("pointermove", move);
    addEventListener("pointerup", up);
    addEventListener("pointercancel", up);
  });
}
