/* The playground's parts are large, so a page loads them only when it shows them, and a lesson when its reader asks.
 *
 *   <div class="playground" data-kind="page"></div>            the whole page
 *   <div class="playground" data-kind="panel" data-start="…">   a panel in a lesson: a figure and a button, until it is opened
 *   <div class="puzzles"></div>                                 the puzzles
 */
"use strict";

(() => {
  const root = new URL("../../", document.currentScript.src);
  const FROM_A_DISK = "This page runs Python, which a browser allows only on a server: open it with `microparallel studio`, or "
    + "run `python -m http.server` in this site's folder.";

  /** One line in the place of what cannot be shown; `…` in it is code. */
  function say(place, words) {
    const line = document.createElement("p");
    line.className = "pg-missing";
    line.setAttribute("role", "status");
    words.split("`").forEach((part, index) => {
      const piece = index % 2 ? document.createElement("code") : document.createElement("span");
      piece.textContent = part;
      line.append(piece);
    });
    place.querySelector(".pg-missing")?.remove();
    place.append(line);
  }

  async function open(place) {
    if (location.protocol === "file:") return say(place, FROM_A_DISK);
    if (place.dataset.missing) return say(place, place.dataset.missing);
    const name = place.classList.contains("puzzles") ? "puzzles.js" : "panel.js";
    try {
      import(new URL("javascripts/playground/python.js", root).href).then(({ python }) => python(), () => {}); // the slowest part first
      const { show } = await import(new URL(`javascripts/playground/${name}`, root).href);
      await show(place, root);
    } catch (error) {
      say(place, `This part of the page could not be loaded: ${error.message}`);
    }
  }

  function start() {
    for (const place of document.querySelectorAll(".playground, .puzzles")) {
      const button = place.querySelector("button.pg-open");
      if (button === null) open(place);
      else button.addEventListener("click", () => { button.disabled = true; open(place); });
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
