// The puzzles: a list of levels, one level at a time, and what was reached, which stays in this browser.
import { packed } from "./address.js";
import { parts, said } from "./hops.js";
import { button, copy, keep, make } from "./make.js";
import { draggable } from "./drag.js";
import { Progress, stars } from "./progress.js";
import { python } from "./python.js";

export async function show(place, root) {
  const status = make("p", { class: "pg-status", role: "status" }, "Loading Python …");
  place.append(status);
  const ask = python();
  const sets = await new Promise((resolve, reject) => {
    ask.watch((state, words) => { if (state === "failed") reject(new Error(words)); });
    ask.ask({ ask: "levels" }).then(resolve, reject);
  });
  status.remove();
  const game = new Game(place, root, ask, sets);
  addEventListener("hashchange", () => game.follow());
  game.follow();
}

class Game {
  constructor(place, root, ask, sets) {
    Object.assign(this, { place, root, ask, sets, progress: new Progress(ask, sets) });
    this.order = sets.flatMap((set) => set.levels.map((level) => level.id));
    this.element = make("div", { class: "pg pz" });
    place.append(this.element);
  }

  async follow() {
    const name = location.hash.slice(1); // ids of levels have letters and hyphens alone
    if (this.order.includes(name)) await this.open(name);
    else this.overview();
  }

  go(name) {
    if (location.hash.slice(1) === name) this.follow();
    else location.hash = name;
  }

  // ── the list ──────────────────────────────────────────────────────────────────────────────────────────────────────

  overview() {
    delete this.place.dataset.level;
    const file = make("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "file with progress" });
    const words = make("p", { class: "pz-said", role: "status" }, this.progress.trouble);
    file.addEventListener("change", async () => {
      words.textContent = "Playing what the file holds …";
      words.textContent = await this.progress.load(await file.files[0].text());
      this.overview();
      this.element.querySelector(".pz-said").textContent = words.textContent;
    });
    const total = this.sets.flatMap((set) => set.levels);
    const reached = total.reduce((sum, level) => sum + this.progress.stars(level.id), 0);
    const lists = this.sets.map((set) => [
      make("h2", { class: "pz-set", id: `set-${set.name}` }, set.title),
      make("ul", { class: "pz-list", "aria-label": set.title }, ...set.levels.map((level) => make("li", {},
        button([level.title, make("span", { class: "pz-stars", "aria-label": `${this.progress.stars(level.id)} of ${level.stars} stars` },
          stars(this.progress.stars(level.id), level.stars))], () => this.go(level.id), { "data-level": level.id })))),
    ]);
    this.element.replaceChildren(
      make("p", { class: "pz-stands" }, `${reached} of ${total.reduce((sum, level) => sum + level.stars, 0)} stars. `
        + "They are kept in this browser alone."),
      ...lists.flat(),
      make("div", { class: "pg-row" },
        button("Export progress", () => keep("microparallel-puzzles.json", "application/json", this.progress.file())),
        button("Import progress", () => file.click()), file,
        button("Forget all", () => { if (confirm("Forget all stars in this browser?")) { this.progress.clear(); this.overview(); } })),
      words);
    this.place.dataset.shown = "list";
  }

  // ── a level ───────────────────────────────────────────────────────────────────────────────────────────────────────

  async open(name) {
    this.mode = { before: null, slices: null, arrive: "auto" };
    this.name = name;
    await this.play([]);
    this.element.querySelector("h2")?.focus();
  }

  /** Show the board after these moves. */
  async play(moves, words = "", kind = "") {
    try {
      this.board = await this.ask.ask({ ask: "open", level: this.name, moves });
      this.paint(words, kind);
    } catch (error) { this.paint(error.message, "refused"); }
  }

  async move(text, focus = null) {
    if (this.busy) return;
    this.busy = true;
    this.mode.before = null;
    try {
      const { board, refused, words } = await this.ask.ask({ ask: "move", level: this.name, moves: this.board.moves, move: text });
      if (refused !== undefined) { this.say(refused, "refused"); return; }
      this.board = board;
      this.mode.slices = null;
      if (board.score) this.progress.note(this.name, board);
      this.paint(board.score ? "Solved." : words, board.score ? "solved" : "");
      this.refocus(focus);
    } catch (error) { this.say(error.message, "refused"); } finally { this.busy = false; }
  }

  refocus(focus) {
    const next = (focus && this.element.querySelector(focus)) ?? this.element.querySelector(".pz-board button:not([disabled])");
    next?.focus({ preventScroll: true });
  }

  say(words, kind = "") {
    this.words.className = `pz-said ${kind ? `is-${kind}` : ""}`;
    this.words.textContent = words || "Choose what comes next.";
    this.place.dataset.said = words;
  }

  async undo() {
    if (this.board.moves.length === 0) { this.say("There is no move to take back."); return; }
    const moves = this.board.moves.slice(0, -1);
    await this.play(moves, "One move taken back.");
    this.refocus("[data-do=undo]");
  }

  async hint() {
    try {
      const hint = await this.ask.ask({ ask: "hint", level: this.name, moves: this.board.moves });
      this.say(hint.words);
      for (const chip of this.element.querySelectorAll(".is-new")) chip.classList.remove("is-new");
      if (hint.move) this.element.querySelector(`[data-move="${CSS.escape(hint.move)}"]`)?.classList.add("is-new");
    } catch (error) { this.say(error.message, "refused"); }
  }

  paint(words, kind) {
    const { level } = this.board;
    this.words = make("p", { role: "status", "aria-live": "assertive" });
    const index = this.order.indexOf(this.name);
    const board = level.kind === "messages" ? this.messages() : this.lists();
    board.addEventListener("keydown", (event) => this.key(event));
    const second = level.measure ? `; ${level.measure}: ${this.board.second || 0}` : "";
    this.element.replaceChildren(
      make("div", { class: "pg-row" }, button("‹ All puzzles", () => { location.hash = ""; }),
        make("span", { class: "pg-quiet" }, `${level.set}, ${index + 1} of ${this.order.length}`)),
      make("h2", { tabindex: "-1" }, level.title),
      make("p", {}, level.story),
      make("ul", { class: "pz-rules" }, ...level.rules.map((rule) => make("li", {}, rule)), make("li", {}, this.aims(level)),
        make("li", {}, "Lesson: ", make("a", { href: new URL(`${level.lesson}.html`, this.root).href }, "what is behind it"), ".")),
      this.words,
      board,
      make("p", { class: "pz-stands" }, `Time ${this.board.makespan || 0}${second}. `
        + (this.board.score ? "Solved." : this.standing(level))),
      make("div", { class: "pg-row" },
        button("Undo", () => this.undo(), { "data-do": "undo", disabled: this.board.moves.length === 0 }),
        button("Hint", () => this.hint(), { "data-do": "hint" }),
        button("Start again", () => this.play([], "From the beginning."), { disabled: this.board.moves.length === 0 })),
      this.board.score ? this.done(index) : "");
    this.say(words, kind);
    this.place.dataset.shown = "level";
    this.place.dataset.level = this.name;
    this.place.dataset.moves = this.board.moves.length;
  }

  aims(level) {
    return level.stars === 3 ? `Stars: one for solving it, one for the shortest time that is known, one for as little as in that solution of this: ${level.measure}.`
      : "Stars: one for solving it, one for the shortest time that is known.";
  }

  standing(level) {
    if (level.kind !== "messages") return `${this.board.missing}.`;
    const open = this.board.hops.holds.flat().filter((slice) => slice.wanted && !slice.whole).length;
    return open ? `${open} ${open === 1 ? "slice is" : "slices are"} not whole yet where the goal wants them.` : this.board.missing;
  }

  done(index) {
    const { score, level } = this.board;
    const next = this.order[index + 1];
    const [save, command, ...more] = score.run;
    return make("section", { class: "pz-done", "aria-label": "solved" },
      make("p", { class: "pz-stars", "aria-label": `${score.stars} of ${score.most} stars` }, stars(score.stars, score.most)),
      ...score.known.map((line) => make("p", {}, line)),
      make("p", {}, save), command ? make("pre", { tabindex: "0" }, make("code", {}, [command, ...more].join("\n"))) : null,
      make("div", { class: "pg-row" },
        next ? button("Next puzzle ›", () => this.go(next), { class: "pg-button is-main", "data-do": "next" }) : null,
        button("Download the program", () => keep(`${level.id}.txt`, "text/plain", score.program)),
        button("Copy the command", (event) => copy(command ?? score.program, event.currentTarget)),
        button("Open in the playground", async () => {
          const page = new URL("playground/index.html", this.root);
          page.hash = `p=${await packed({ v: 1, sides: [{ text: score.program }], costs: {} })}`;
          location.href = page.href;
        })));
  }

  key(event) {
    if ((event.ctrlKey || event.metaKey) && event.key === "z") { event.preventDefault(); this.undo(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.localName !== "button") return;
    if (event.key === "u") this.undo();
    else if (event.key === "h") this.hint();
    else if (event.key.startsWith("Arrow")) this.walk(event);
    else if ((event.key === "Delete" || event.key === "Backspace") && event.target.dataset.away) this.move(event.target.dataset.away);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Arrow keys go to the nearest button in that direction. */
  walk(event) {
    const all = [...event.currentTarget.querySelectorAll("button:not([disabled])")];
    const at = event.target.getBoundingClientRect();
    const across = event.key === "ArrowLeft" || event.key === "ArrowRight";
    const ahead = event.key === "ArrowRight" || event.key === "ArrowDown" ? 1 : -1;
    const far = (one) => {
      const box = one.getBoundingClientRect();
      const [along, aside] = across ? [box.x + box.width / 2 - at.x - at.width / 2, box.y + box.height / 2 - at.y - at.height / 2]
        : [box.y + box.height / 2 - at.y - at.height / 2, box.x + box.width / 2 - at.x - at.width / 2];
      return along * ahead > 4 && !(across && Math.abs(aside) > at.height) ? Math.abs(along) + 3 * Math.abs(aside) : Infinity;
    };
    const best = all.reduce((found, one) => (far(one) < far(found) ? one : found), event.target);
    if (best !== event.target) best.focus();
  }

  // ── lists: a schedule ─────────────────────────────────────────────────────────────────────────────────────────────

  lists() {
    const end = Math.max(this.board.length, 6) * 1.08;
    const shortest = Math.min(1, ...this.board.rows.flatMap((row) => row.placed).map((one) => one.end - one.start).filter((one) => one > 0));
    const width = `max(100%, ${Math.round(end / shortest * 30)}px)`;
    return make("div", { class: "pz-board" }, ...this.board.rows.map((row, which) => this.list(row, which, end, width)));
  }

  list(row, which, end, width) {
    const comm = row.placed.concat(row.left).some((one) => one.lane === "comm");
    const ordered = row.placed.concat(row.left).some((one) => one.lane === "comm" || one.op.startsWith("!"));
    const at = (one) => `left:${one.start / end * 100}%;width:calc(${(one.end - one.start) / end * 100}% - 2px)`;
    const chips = (lane) => row.placed.filter((one) => one.lane === lane && one.end > one.start)
      .map((one) => this.placed(one, which, row, at(one)));
    const strips = [make("div", { class: "pz-strip", "data-which": which }, ...chips("compute"))];
    if (comm) strips.push(make("div", { class: "pz-strip is-comm", "data-which": which }, ...chips("comm")));
    const step = Math.max(1, Math.ceil(end / 12));
    const axis = make("div", { class: "pz-axis", "aria-hidden": "true" },
      ...Array.from({ length: Math.floor(end / step) + 1 }, (_, index) => make("span", { style: `left:${index * step / end * 100}%` }, String(index * step))));
    const order = ordered ? make("div", {}, make("p", { class: "pg-quiet pz-label" }, "the list, in order"), make("ol", { class: "pz-order", "aria-label": `the list of ${row.name}` },
      ...row.placed.map((one) => make("li", {}, this.placed(one, which, row))))) : null;
    const before = this.mode.before;
    const target = before !== null && before.which === which;
    const tray = make("div", { class: "pz-chips", role: "group", "aria-label": `to place on ${row.name}` },
      ...row.left.map((one) => this.chip(one, { "data-move": `${which}:${one.op}`, "aria-label": `place ${one.op}, ${one.word}, on ${row.name}` },
        () => this.move(`${which}${target ? `@${before.at}` : ""}:${one.op}`, `[aria-label="to place on ${row.name}"] button`), which)));
    const note = target ? make("p", { class: "pg-quiet" }, `What you choose next stands before ${row.placed[before.at]?.op}. `,
      button("Take it away", () => this.move(`${which}@${before.at}:-`)), " ", button("Never mind", () => { this.mode.before = null; this.paint(""); })) : null;
    return make("section", { class: "pz-row", "aria-label": row.name }, make("p", { class: "pz-name" }, row.name),
      make("div", { class: "pz-scroll", tabindex: row.placed.length ? null : "-1" }, make("div", { style: `width:${width}` }, ...strips, axis)), order, note,
      make("p", { class: "pg-quiet pz-label" }, row.left.length ? "to place" : "all placed"), row.left.length ? tray : null);
  }

  /** An operation that is placed: choosing it lets one place another before it, or take it away. */
  placed(one, which, row, style = "") {
    const pressed = this.mode.before?.which === which && this.mode.before.at === one.at;
    return this.chip(one, {
      "aria-pressed": String(pressed), "data-away": `${which}@${one.at}:-`, "data-at": one.at,
      "aria-label": `${one.op}, ${one.word}, on ${row.name}, from ${tidy(one.start)} to ${tidy(one.end)}; choose it to place something before it, delete takes it away`,
    }, () => {
      this.mode.before = pressed ? null : { which, at: one.at };
      this.paint(pressed ? "" : `${one.op} is chosen.`);
      this.refocus(`[data-away="${which}@${one.at}:-"]`);
    }, null, style);
  }

  chip(one, more, press, from = null, style = "") {
    const chip = make("button", { type: "button", class: "pz-chip", title: `${one.op}: ${one.word}`, onclick: press, style: `--fill:${one.fill};--ink:${one.ink};${style}`, ...more }, one.name);
    if (from !== null) draggable(chip, `.pz-strip[data-which="${from}"]`, (strip, x) => {
      const chips = [...strip.closest(".pz-row").querySelectorAll(".pz-strip [data-at]")];
      const after = chips.filter((other) => { const box = other.getBoundingClientRect(); return box.x + box.width / 2 < x; });
      const at = after.length === chips.length ? "" : `@${Math.min(...chips.filter((other) => !after.includes(other)).map((other) => Number(other.dataset.at)))}`;
      this.move(`${from}${at}:${one.op}`);
    });
    return chip;
  }

  // ── messages: a collective ────────────────────────────────────────────────────────────────────────────────────────

  messages() {
    const { hops, level } = this.board;
    const chosen = this.mode.slices;
    const ways = { auto: "decide for me", add: "add it", replace: "replace what is there" };
    const how = make("label", { class: "pg-choice" }, "When it arrives: ", make("select", { onchange: (event) => { this.mode.arrive = event.target.value; } },
      ...Object.entries(ways).map(([name, words]) => make("option", { value: name, selected: this.mode.arrive === name }, words))));
    const ranks = hops.holds.map((slices, rank) => {
      const card = make("section", { class: "pz-rank", "aria-label": `rank ${rank}`, "data-rank": rank }, make("p", { class: "pz-name" }, `rank ${rank}`),
        ...slices.map((slice, index) => this.slice(slice, hops.begin[rank][index], rank, index)),
        chosen !== null && chosen.rank !== rank
          ? button(`Send ${named(chosen)} here`, () => this.send(rank), { class: "pg-button pz-send is-main", "data-send": rank }) : null);
      return card;
    });
    const last = hops.sent.length - 1;
    const sent = make("ol", { class: "pz-hops" }, ...hops.sent.map((messages, hop) => make("li", {},
      messages.length ? messages.join("; ") : hop === last ? "nothing is sent in this hop yet" : "")));
    return make("div", { class: "pz-board" },
      make("p", { class: "pg-quiet" }, chosen === null ? "Choose a slice of a rank (several that lie next to each other travel together), then the rank it goes to."
        : `${named(chosen)} of rank ${chosen.rank} is chosen: now the rank it goes to.`),
      make("div", { class: "pz-ranks" }, ...ranks),
      make("div", { class: "pg-row" }, level.goal.startsWith("all-reduce") || level.goal.startsWith("reduce") ? how : null,
        button("Next hop", () => this.move("next", "[data-do=hop]"), { "data-do": "hop", disabled: hops.sent[last].length === 0, "data-move": "next" })),
      sent);
  }

  slice(slice, begin, rank, index) {
    const chosen = this.mode.slices;
    const pressed = chosen !== null && chosen.rank === rank && chosen.from <= index && index < chosen.to;
    const fresh = JSON.stringify(slice.of) !== JSON.stringify(begin.of);
    const words = `rank ${rank}, slice ${index}: ${said(slice)}${fresh ? "; what arrived in this hop can be sent in the next" : ""}`;
    const one = make("button", {
      type: "button", class: `pz-slice${slice.whole ? " is-whole" : ""}`, "aria-pressed": String(pressed), "aria-label": words, "data-slice": `${rank}.${index}`,
      onclick: () => this.choose(rank, index),
    }, make("span", { class: "pg-slice-name", "aria-hidden": "true" }, `C${index}`), make("span", { "aria-hidden": "true" }, ...parts(slice.of, this.board.level.ranks)),
      fresh ? make("span", { class: "pz-fresh", "aria-hidden": "true" }, "new") : null);
    draggable(one, ".pz-rank", (card) => {
      if (!pressed) this.mode.slices = { rank, from: index, to: index + 1 };
      this.send(Number(card.dataset.rank));
    });
    return one;
  }

  choose(rank, index) {
    const now = this.mode.slices;
    let next = { rank, from: index, to: index + 1 };
    if (now !== null && now.rank === rank) {
      if (index === now.to) next = { ...now, to: index + 1 };
      else if (index === now.from - 1) next = { ...now, from: index };
      else if (index >= now.from && index < now.to) next = now.to - now.from === 1 ? null : index === now.from ? { ...now, from: index + 1 } : { ...now, to: index };
    }
    this.mode.slices = next;
    this.paint("");
    this.element.querySelector(`[data-slice="${rank}.${index}"]`)?.focus({ preventScroll: true });
  }

  send(to) {
    const { rank, from, to: stop } = this.mode.slices;
    const value = stop === from + 1 ? `C${from}` : `C${from}:${stop}`;
    let adds = this.mode.arrive === "add";
    if (this.mode.arrive === "auto") { // what arrives replaces what it contains; else it is added
      const { begin, holds } = this.board.hops;
      adds = !Array.from({ length: stop - from }, (_, index) => from + index)
        .every((index) => holds[to][index].of.every((one) => begin[rank][index].of.includes(one)));
    }
    this.move(`${rank}>${to}:${adds ? "+" : ""}${value}`, `[data-slice="${rank}.${from}"]`);
  }
}

function named({ from, to }) {
  return to === from + 1 ? `C${from}` : `C${from} to C${to - 1}`;
}

function tidy(number) {
  return String(Math.round(number * 100) / 100);
}
