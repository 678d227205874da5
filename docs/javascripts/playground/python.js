// A page's side of its worker: questions go out one at a time, and of those that wait only the newest of each kind is asked.

const PATIENCE = 20000; // milliseconds that Python may take for one question, before it is started anew

export class Python {
  constructor() {
    this.count = 0;
    this.waiting = []; // questions: { kind, question, resolve, reject }
    this.asked = null; // the one that is with the worker
    this.listeners = [];
    this.start();
  }

  /** Be told what state Python is in: "loading", "ready", or "failed", with words. */
  watch(listener) {
    this.listeners.push(listener);
    listener(this.state, this.words);
  }

  tell(state, words = "") {
    this.state = state;
    this.words = words;
    document.documentElement.dataset.python = state;
    for (const listener of this.listeners) listener(state, words);
  }

  start() {
    this.ready = false;
    this.tell("loading");
    this.worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
    this.worker.addEventListener("message", ({ data }) => this.hear(data));
    this.worker.addEventListener("error", (event) => {
      event.preventDefault();
      this.hear({ failed: event.message || "the worker could not be started" });
    });
  }

  hear(data) {
    if (data.ready !== undefined) {
      this.ready = true;
      document.documentElement.dataset.pythonReadyMs = Math.round(data.ready);
      this.tell("ready");
    } else if (data.failed !== undefined) {
      this.tell("failed", data.failed);
      for (const one of [this.asked, ...this.waiting].filter(Boolean)) one.reject(new Error(data.failed));
      this.asked = null;
      this.waiting = [];
      return;
    } else if (this.asked?.id === data.id) {
      const { resolve, reject } = this.asked;
      clearTimeout(this.asked.clock);
      this.asked = null;
      if (data.lost) this.again();
      if (data.trouble !== undefined) reject(new Error(data.trouble));
      else resolve(data.answer);
    }
    this.next();
  }

  again() {
    this.worker.terminate();
    this.start();
  }

  /** Ask; a question of the same kind that still waits is forgotten: its promise gives null. */
  ask(question, kind = null) {
    return new Promise((resolve, reject) => {
      if (this.state === "failed") { reject(new Error(this.words)); return; }
      if (kind !== null) {
        const older = this.waiting.findIndex((one) => one.kind === kind);
        if (older >= 0) this.waiting.splice(older, 1)[0].resolve(null);
      }
      this.waiting.push({ kind, question, resolve, reject });
      this.next();
    });
  }

  next() {
    if (!this.ready || this.asked !== null || this.waiting.length === 0) return;
    const one = this.waiting.shift();
    this.count += 1;
    one.id = this.count;
    one.clock = setTimeout(() => {
      this.asked = null;
      this.again();
      one.reject(new Error(`this takes longer than ${PATIENCE / 1000} seconds here: make the program smaller`));
    }, PATIENCE);
    this.asked = one;
    this.worker.postMessage({ id: one.id, ...one.question });
  }
}

let only = null;

/** The Python of this page: several panels share one. */
export function python() {
  only ??= new Python();
  return only;
}
