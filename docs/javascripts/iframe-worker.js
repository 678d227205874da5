/* The theme's search runs in a worker, and a page that was opened from a disk may not start one. A hidden frame takes its
 * place: it loads the same script, and messages go both ways. On a server nothing changes. The theme looks for the name
 * IFrameWorker in its parent; the idea is that of https://github.com/squidfunk/iframe-worker.
 */
"use strict";

(() => {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame;
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.deliver(data);
      inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(inside, next)), Promise.resolve());
      this.ready = load(inside, url);
    }

    /** From the frame to the page. */
    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    /** From the page to the frame. */
    postMessage(data) {
      this.ready.then(() => {
        const event = new MessageEvent("message", { data });
        this.frame.contentWindow.dispatchEvent(event);
        this.frame.contentWindow.onmessage?.(event);
      });
    }

    terminate() {
      this.frame.remove();
    }
  }

  function load(inside, url) {
    return new Promise((loaded, failed) => {
      const script = inside.document.createElement("script");
      script.src = new URL(url, location.href).href;
      script.onload = loaded;
      script.onerror = failed;
      inside.document.body.append(script);
    });
  }

  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
})();
