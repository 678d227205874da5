// The playground: a program's text, and what verify, simulate and draw say of it while it is written.
import { packed, unpacked } from "./address.js";
import { timeline } from "./drawing.js";
import { editor } from "./editor.js";
import { stepper } from "./hops.js";
import { button, copy, keep, make, slider } from "./make.js";
import { python } from "./python.js";

const NUMBERS = {
  ranks: "Ranks", microbatches: "Micro-batches", stages_per_rank: "Stages a rank", layers: "Layers", buckets: "Buckets",
  prefetch: "Prefetch (units ahead)", ranks_per_node: "Ranks a node",
};
const COSTS = [
  { name: "forward", words: "Forward (F)", least: 0, most: 5, step: 0.25, usual: 1, of: "training" },
  { name: "backward_input", words: "Backward, input half (I)", least: 0, most: 5, step: 0.25, usual: 1, of: "training" },
  { name: "backward_weight", words: "Backward, weight half (W)", least: 0, most: 5, step: 0.25, usual: 1, of: "training" },
  { name: "latency", words: "Latency of a message", least: 0, most: 5, step: 0.1, of: "both" },
  { name: "seconds_per_byte", words: "Time a byte (1 / bandwidth)", least: 0, most: 5, step: 0.1, of: "both" },
  { name: "bytes_per_value", words: "Bytes a value", least: 0, most: 16, step: 0.5, usual: 1, of: "both" },
];
const FIRST = { kind: "pipelines", name: "1f1b", numbers: { ranks: 4, microbatches: 8 } };
const SECOND = { kind: "pipelines", name: "gpipe", numbers: { ranks: 4, microbatches: 8 } };

/** Show the playground in its place; a panel in a lesson is the same with one program, and without an address of its own. */
export async function show(place, root) {
  const whole = place.dataset.kind === "page";
  const ask = python();
  const status = make("p", { class: "pg-status", role: "status" }, "Loading Python …");
  place.append(status);
  const builders = await new Promise((resolve, reject) => {
    ask.watch((state, words) => { if (state === "failed") reject(new Error(words)); });
    ask.ask({ ask: "starts" }).then(resolve, reject);
  });
  let state = { sides: [whole ? FIRST : JSON.parse(place.dataset.start)], costs: {} };
  let trouble = "";
  if (whole) {
    try { state = await unpacked(location.hash) ?? state; } catch (error) { trouble = `The address could not be read: ${error.message}`; }
  }
  const page = new Page(place, root, ask, builders, state, whole);
  status.remove();
  place.append(page.element);
  ask.watch((now) => page.say(now === "loading" ? "Python is starting again …" : trouble));
  trouble = "";
  if (whole) addEventListener("hashchange", async () => {
    try { page.load(await unpacked(location.hash) ?? { sides: [FIRST], costs: {} }); } catch (error) { page.say(error.message); }
  });
  place.dataset.shown = "yes";
}

class Page {
  constructor(place, root, ask, builders, state, whole) {
    Object.assign(this, { place, root, ask, builders, whole, costs: {} });
    this.message = make("p", { class: "pg-status", role: "status" });
    this.columns = make("div", { class: "pg-sides" });
    this.sliders = make("div", { class: "pg-sliders" });
    const open = make("details", { class: "pg-costs", open: whole && innerWidth >= 1000 },
      make("summary", {}, "What things cost"), this.sliders,
      button("The usual costs", () => { this.costs = {}; this.paintCosts(); this.lookAll(); }));
    this.other = button("Compare with another program", () => this.toggle(), { "aria-pressed": "false" });
    const share = button("Copy a link to this", async (event) => copy(await this.address(), event.currentTarget));
    const bar = make("div", { class: "pg-row" }, whole ? this.other : null, whole ? share
      : button("Open in the playground", async () => { location.href = await this.address(); }));
    this.element = make("div", { class: `pg ${whole ? "pg-whole" : "pg-panel"}` }, bar, open, this.message, this.columns);
    this.load(state);
  }

  load({ sides, costs }) {
    this.costs = Object.fromEntries(COSTS.filter(({ name }) => name in costs).map(({ name }) => [name, costs[name]]));
    this.sides = [];
    this.columns.replaceChildren();
    for (const side of sides) this.add(side);
    this.paintCosts();
  }

  add(start) {
    const side = new Side(this, this.sides.length, start);
    this.sides.push(side);
    this.columns.append(side.element);
    this.columns.classList.toggle("pg-two", this.sides.length === 2);
    this.other.setAttribute("aria-pressed", String(this.sides.length === 2));
    this.other.textContent = this.sides.length === 2 ? "Only one program" : "Compare with another program";
  }

  toggle() {
    if (this.sides.length === 2) {
      this.sides.pop().element.remove();
      this.columns.classList.remove("pg-two");
      this.other.setAttribute("aria-pressed", "false");
      this.other.textContent = "Compare with another program";
      this.compare();
      this.remember();
    } else this.add(SECOND);
  }

  say(words) {
    this.message.textContent = words;
  }

  paintCosts() {
    const kinds = new Set(this.sides.map((side) => side.kind));
    const usual = this.sides[0]?.usual ?? {};
    this.sliders.replaceChildren(...COSTS.filter(({ of }) => of === "both" || kinds.has(of) || kinds.size === 0).map((cost) => (
      slider({
        ...cost,
        value: this.costs[cost.name] ?? usual[cost.name] ?? cost.usual ?? 0,
        say: (number) => String(Math.round(number * 100) / 100),
        change: (number) => { this.costs[cost.name] = number; this.lookAll(); },
      }))));
  }

  lookAll() {
    for (const side of this.sides) side.look();
  }

  /** Two programs side by side: which of two numbers is less. */
  compare() {
    const [one, other] = this.sides.map((side) => side.numbers);
    for (const [index, side] of this.sides.entries()) {
      const against = this.sides.length === 2 ? [other, one][index] : null;
      side.paintNumbers(against);
    }
  }

  remember() {
    clearTimeout(this.clock);
    if (this.whole) this.clock = setTimeout(async () => history.replaceState(null, "", new URL(await this.address()).hash), 400);
  }

  async address() {
    const page = this.whole ? new URL(location.href) : new URL("playground/index.html", this.root);
    page.hash = `p=${await packed({ v: 1, sides: this.sides.map((side) => side.state), costs: this.costs })}`;
    return page.href;
  }
}

class Side {
  constructor(page, index, start) {
    Object.assign(this, { page, index, start: null, numbers: [], kind: "training", hop: 0 });
    const name = index === 0 ? "Program" : "Second program";
    this.choice = this.choices(name);
    this.controls = make("div", { class: "pg-sliders" });
    this.place = make("div", { class: "pg-editor" });
    this.editor = editor(this.place, `${name}: its text`, "", (text) => { this.start = null; this.paintStart(); this.look(text); });
    this.verdict = make("p", { class: "pg-verdict", role: "status" });
    this.table = make("dl", { class: "pg-numbers" });
    this.figure = make("div", { class: "pg-figure" });
    this.hops = make("div", {});
    this.waits = make("details", { class: "pg-more" });
    this.run = make("details", { class: "pg-more" });
    this.messages = button("Write the messages out", () => this.change({ ask: "messages", text: this.editor.text }));
    const files = ["text", "svg", "chrome"].map((form) => button({ text: "Text", svg: "SVG", chrome: "Chrome trace" }[form],
      () => this.keep(form), { "aria-label": `download ${name.toLowerCase()}: ${form}` }));
    const written = make("div", { class: "pg-written" },
      make("div", { class: "pg-row" }, make("label", { class: "pg-choice" }, `${name}: start with `, this.choice)), this.controls,
      this.place, this.verdict, make("div", { class: "pg-row" }, this.messages, make("span", { class: "pg-quiet" }, "Download:"), ...files));
    const seen = make("div", { class: "pg-seen" }, this.table, this.figure, this.hops, this.waits, this.run);
    this.element = make("section", { class: "pg-side", "aria-label": name }, written, seen);
    if (start.text !== undefined) { this.editor.text = start.text; this.paintStart(); this.look(); } else this.begin(start);
  }

  get state() {
    return this.start ?? { text: this.editor.text };
  }

  choices(name) {
    const groups = Map.groupBy?.(this.page.builders, ({ kind }) => kind)
      ?? this.page.builders.reduce((all, one) => all.set(one.kind, [...(all.get(one.kind) ?? []), one]), new Map());
    const choice = make("select", { "aria-label": `${name}: start with` }, make("option", { value: "" }, "your own text"),
      ...[...groups].map(([kind, ones]) => make("optgroup", { label: kind }, ...ones.map((one) => (
        make("option", { value: `${kind}/${one.name}` }, one.name))))));
    choice.addEventListener("change", () => {
      const [kind, builder] = choice.value.split("/");
      if (kind) this.begin({ kind, name: builder, numbers: { ranks: this.start?.numbers?.ranks ?? 4 } });
    });
    return choice;
  }

  /** Begin with a builder's program; the sliders belong to it until its text is changed. */
  begin(start) {
    const builder = this.page.builders.find(({ kind, name }) => kind === start.kind && name === start.name);
    if (builder === undefined) { this.page.say(`There is no ${start.name} to start with.`); return; }
    const numbers = Object.fromEntries(builder.sliders.map((one) => [one.name,
      Math.max(one.least, Math.min(one.most, Math.round(start.numbers?.[one.name] ?? one.start)))]));
    this.start = { kind: start.kind, name: start.name, numbers };
    this.paintStart(builder);
    this.change({ ask: "start", ...this.start }, true);
  }

  async change(question, begins = false) {
    try {
      const answer = await this.page.ask.ask(question, `start ${this.index}`);
      if (answer === null) return;
      this.editor.text = answer.text;
      if (!begins) { this.start = null; this.paintStart(); }
      this.look();
    } catch (error) { this.refuse(error.message); }
  }

  paintStart(builder = null) {
    this.choice.value = this.start === null ? "" : `${this.start.kind}/${this.start.name}`;
    if (this.start === null) {
      this.controls.replaceChildren();
      return;
    }
    this.controls.replaceChildren(...builder.sliders.map((one) => slider({
      words: NUMBERS[one.name], least: one.least, most: one.most, value: this.start.numbers[one.name],
      change: (number) => {
        this.start = { ...this.start, numbers: { ...this.start.numbers, [one.name]: number } };
        this.change({ ask: "start", ...this.start }, true);
      },
    })));
  }

  async look(text = this.editor.text) {
    this.page.remember();
    const begun = performance.now();
    let seen;
    try {
      seen = await this.page.ask.ask({ ask: "look", text, costs: this.page.costs }, `look ${this.index}`);
    } catch (error) { this.refuse(error.message); return; }
    if (seen === null || text !== this.editor.text) return; // a newer text is on its way
    this.paint(seen);
    this.element.dataset.lookMs = Math.round(performance.now() - begun);
    this.element.dataset.looks = Number(this.element.dataset.looks ?? 0) + 1;
  }

  refuse(words) {
    this.verdict.className = "pg-verdict is-wrong";
    this.verdict.textContent = words;
  }

  paint(seen) {
    const wrong = seen.problem !== "";
    this.verdict.className = `pg-verdict ${wrong ? "is-wrong" : "is-right"}`;
    this.verdict.textContent = wrong ? seen.problem : `Right: ${seen.title}. No rank waits for ever, and the goal is reached.`;
    this.editor.underline(seen.marks, seen.problem.split("\n")[0]);
    this.messages.hidden = !seen.completed;
    if (seen.title === "" || seen.figure === "") { // no program, or none that comes to its end: the drawing is of the last that did
      for (const part of [this.figure, this.table, this.hops]) part.classList.toggle("is-old", part.childElementCount > 0);
      return;
    }
    if (seen.kind !== this.kind || this.usual === undefined) {
      this.kind = seen.kind;
      this.usual = seen.costs;
      if (this.index === 0) this.page.paintCosts();
    }
    for (const part of [this.figure, this.table, this.hops]) part.classList.remove("is-old");
    const scrolled = this.figure.querySelector(".scroll")?.scrollLeft ?? 0;
    this.figure.replaceChildren(...timeline(seen.figure));
    const scroll = this.figure.querySelector(".scroll");
    if (scroll) scroll.scrollLeft = scrolled;
    this.hops.replaceChildren(...(seen.hops ? [stepper(seen.hops, this.hop, (hop) => { this.hop = hop; })] : []));
    this.paintWaits(seen);
    this.paintRun(seen.run);
    this.numbers = seen.numbers;
    this.page.compare();
  }

  paintNumbers(against) {
    this.table.replaceChildren(...this.numbers.map(([name, words, number]) => {
      const other = against?.find((one) => one[0] === name)?.[2];
      const less = other !== undefined && number !== null && other !== null && number < other - 1e-9;
      const value = make("dd", { class: less ? "is-less" : null }, words, less ? make("span", { class: "pg-quiet" }, " less") : null);
      return make("div", {}, make("dt", {}, name), value);
    }));
  }

  paintWaits({ waits, kind }) {
    const head = kind === "collective" ? ["", "computes", "communicates", "waits"] : ["", "computes", "only communicates", "waits"];
    const rows = waits.map((row) => make("tr", {}, make("th", { scope: "row" }, row[0]), ...row.slice(1).map((cell) => make("td", {}, cell))));
    const table = make("table", { class: "pg-table" },
      make("thead", {}, make("tr", {}, ...head.map((words) => make("th", { scope: "col" }, words)))), make("tbody", {}, ...rows));
    this.waits.replaceChildren(make("summary", {}, "Where each rank's time goes"), table);
  }

  paintRun(lines) {
    this.run.hidden = lines.length === 0;
    const parts = lines.map((line, index) => (index % 2 === 0 ? make("p", {}, line)
      : make("div", { class: "pg-command" }, make("pre", { tabindex: "0" }, make("code", {}, line)),
        button("Copy", (event) => copy(line, event.currentTarget)))));
    this.run.replaceChildren(make("summary", {}, "Run it on real ranks"), ...parts);
  }

  async keep(form) {
    const text = this.editor.text;
    if (form === "text") { keep("mine.txt", "text/plain", text); return; }
    try {
      const file = await this.page.ask.ask({ ask: "file", text, costs: this.page.costs, form });
      keep(file.name, file.type, file.content);
    } catch (error) { this.refuse(error.message); }
  }
}
