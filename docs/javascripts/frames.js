/* A page to step through is as high as what it shows, so that it never scrolls inside the lesson. */
"use strict";

(() => {
  function fit(frame) {
    const page = frame.contentDocument;
    if (!page?.body) return;
    const resize = () => { frame.style.height = `${Math.ceil(page.documentElement.getBoundingClientRect().height) + 2}px`; };
    new ResizeObserver(resize).observe(page.body);
    resize();
  }

  function start() {
    for (const frame of document.querySelectorAll("iframe.stepped")) {
      frame.addEventListener("load", () => fit(frame));
      fit(frame);
    }
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
