// The puzzles: a list of levels, one level at a time, and what was reached, which stays in this browser.
import { packed } from "./address.js";
import { parts, said } from "./hops.js";
import { button, copy, keep, make } from "./make.js";
import { draggable } from "./drag.js";
import { Progress, stars } from "./progress.js";
import { python } from "./python.js";

export function show(place, root) {
  const sets = JSON.parse(place.dataset.sets);
  const status = make("p", { class: "pg-status", role: "status" });
  const heard = make("p", { class: "pz-heard", role: "status" }); // what a screen reader is told of each move
  place.prepend(status);
  const ask = python();
  ask.watch((state, words) => {
    status.textContent = { loading: "Loading Python …", failed: `Python could not be started: ${words}` }[state] ?? "";
  });
  const game = new Game(place, root, ask, sets, heard);
  addEventListener("hashchange", () => game.follow());
  game.follow();
}

const HINTS = 3; // steps, as hints.py has them

class Game {
  constructor(place, root, ask, sets, heard) {
    Object.assign(this, { place, root, ask, sets, heard, progress: new Progress(ask, sets) });
    this.order = sets.flatMap((set) => set.levels.map((level) => level.id));
    this.element = make("div", { class: "pg pz" });
    place.append(heard, this.element);
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

  /** The page's own words above the puzzles: open until they were read once, and beside the list. */
  introduce(open) {
    const intro = document.querySelector(".pz-intro");
    if (intro !== null) intro.open = open;
  }

  // ── the list ──────────────────────────────────────────────────────────────────────────────────────────────────────

  overview() {
    delete this.place.dataset.level;
    this.introduce(this.order.every((name) => !this.progress.seen(name)));
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
    this.mode = { before: null, slices: null, arrive: "auto", hints: 0, reads: !this.progress.seen(name) };
    this.name = name;
    this.introduce(false);
    await this.play(this.progress.board(name));
    this.progress.keep(name, this.board.moves);
    this.element.querySelector("h2")?.focus();
  }

  /** Show the board after these moves. */
  async play(moves, words = "", kind = "") {
    const name = this.name;
    const ask = (made) => this.ask.ask({ ask: "open", level: name, moves: made });
    try {
      const board = await ask(moves).catch((error) => (moves.length ? ask([]) : Promise.reject(error))); // kept by an older level
      if (name !== this.name) return; // another level was chosen meanwhile
      this.board = board;
      this.mode.slices = null;
      this.progress.keep(name, board.moves);
      this.paint(words, kind);
    } catch (error) { this.complain(error); }
  }

  async move(text, focus = null) {
    if (this.busy) return;
    this.busy = true;
    this.mode.before = null;
    try {
      const { board, refused, words } = await this.ask.ask({ ask: "move", level: this.name, moves: this.board.moves, move: text });
      if (refused !== undefined) { this.paint(refused, "refused"); this.refocus(focus); return; }
      this.board = board;
      this.mode.slices = null;
      this.mode.hints = Math.min(this.mode.hints, 1); // the direction was told; a place and a move are told anew
      this.progress.keep(this.name, board.moves);
      if (board.score) this.progress.note(this.name, board);
      if (board.score) {
        this.paint(`Solved: ${board.score.stars} of ${board.score.most} stars.`, "solved");
        this.words.focus({ preventScroll: false });
      } else { this.paint(words); this.refocus(focus); }
    } catch (error) { this.complain(error); } finally { this.busy = false; }
  }

  refocus(focus) {
    const next = (focus && this.element.querySelector(focus)) ?? this.element.querySelector(".pz-board button:not([disabled])");
    next?.focus({ preventScroll: true });
  }

  say(words, kind = "") {
    this.words.className = `pz-said ${kind ? `is-${kind}` : ""}`;
    this.words.textContent = words || this.wanted();
    this.place.dataset.said = words;
    this.heard.textContent = "";
    requestAnimationFrame(() => { this.heard.textContent = this.words.textContent; }); // also when it says the same again
  }

  complain(error) {
    if (this.board?.level.id === this.name) this.say(error.message, "refused");
    else this.element.replaceChildren(make("p", { class: "pz-said is-refused", role: "status" }, error.message));
  }

  /** What a player is to do next. */
  wanted() {
    const { slices, before } = this.mode;
    if (this.board.score) return `Solved: ${this.board.score.stars} of ${this.board.score.most} stars.`;
    if (this.board.level.kind !== "messages") return before === null ? "Choose what comes next." : "Choose what comes before it.";
    return slices === null ? "Choose a slice of a rank. Its neighbours can be chosen with it, and travel together."
      : `${named(slices)} of rank ${slices.rank} ${slices.to - slices.from > 1 ? "are" : "is"} chosen: now the rank to send to.`;
  }

  async undo() {
    if (this.board.moves.length === 0) { this.say("There is no move to take back."); return; }
    const moves = this.board.moves.slice(0, -1);
    await this.play(moves, "One move taken back.");
    this.refocus("[data-do=undo]");
  }

  async hint() {
    const step = Math.min(this.mode.hints + 1, HINTS);
    try {
      const hint = await this.ask.ask({ ask: "hint", level: this.name, moves: this.board.moves, step });
      this.mode.hints = step;
      this.say(hint.words + (step < HINTS && !this.board.score ? " (Press Hint again for more.)" : ""));
      for (const chip of this.element.querySelectorAll(".is-new")) chip.classList.remove("is-new");
      if (hint.move) this.element.querySelector(`[data-move="${CSS.escape(hint.move)}"]`)?.classList.add("is-new");
    } catch (error) { this.complain(error); }
  }

  paint(words = "", kind = "") {
    const { level } = this.board;
    this.words = make("p", { tabindex: "-1" });
    const index = this.order.indexOf(this.name);
    const board = level.kind === "messages" ? this.messages() : this.lists();
    board.addEventListener("keydown", (event) => this.key(event));
    const stands = [`Time ${this.board.makespan || 0}`, level.measure ? `${level.measure}: ${this.board.second || 0}${level.most ? ` of ${level.most}` : ""}` : "", this.standing(level)];
    this.element.replaceChildren(
      make("div", { class: "pg-row" }, button("‹ All puzzles", () => { location.hash = ""; }),
        make("span", { class: "pg-quiet" }, `Puzzle ${index + 1} of ${this.order.length} · ${level.set}`)),
      make("h2", { tabindex: "-1" }, level.title),
      this.about(level),
      this.aims(level),
      this.words,
      board,
      make("p", { class: "pz-stands" }, stands.filter(Boolean).join(" · ")),
      make("div", { class: "pg-row" },
        button("Undo", () => this.undo(), { "data-do": "undo", disabled: this.board.moves.length === 0 }),
        button("Hint", () => this.hint(), { "data-do": "hint" }),
        button("Start again", () => this.play([], "From the beginning."), { "data-do": "again", disabled: this.board.moves.length === 0 })),
      this.board.score ? this.done(index) : "");
    this.say(words, kind);
    this.place.dataset.shown = "level";
    this.place.dataset.level = this.name;
    this.place.dataset.moves = this.board.moves.length;
  }

  /** What is asked, what the signs mean, and the rules: folded away when it has been read once. */
  about(level) {
    const lesson = new URL(`${level.lesson}.html`, this.root).href;
    return make("details", { class: "pz-about", open: this.mode.reads, ontoggle: (event) => { this.mode.reads = event.target.open; } },
      make("summary", {}, "What is asked, and the rules"),
      make("p", {}, level.story),
      make("div", { class: "pz-facts" }, make("dl", { class: "pz-legend" }, ...level.legend.map(([sign, words]) => make("div", {}, make("dt", {}, make("code", {}, sign)), make("dd", {}, words)))),
      make("ul", { class: "pz-rules" }, ...level.rules.map((rule) => make("li", {}, rule)),
        make("li", {}, "Lesson: ", make("a", { href: lesson, target: "_blank", rel: "noopener" }, "what is behind it"), " (opens in a new tab)."))));
  }

  /** A star for each aim. */
  aims(level) {
    return make("p", { class: "pz-aims" }, "Stars: ", level.targets.flatMap((words, index) => [index ? " · " : "", make("span", {}, `★ ${words}`)]));
  }

  standing(level) {
    if (this.board.score) return "solved";
    if (level.kind !== "messages") return this.board.missing;
    const open = this.board.hops.holds.flat().filter((slice) => slice.wanted && !slice.whole).length;
    return open ? `${open} ${open === 1 ? "slice is" : "slices are"} not whole yet where the goal wants them` : this.board.missing;
  }

  done(index) {
    const { score, level } = this.board;
    const next = this.order[index + 1];
    const run = score.run.map((line, place) => (place % 2 === 0 ? make("p", {}, line) : make("pre", { tabindex: "0" }, make("code", {}, line))));
    const command = score.run[1];
    return make("section", { class: "pz-done", "aria-label": "solved" },
      make("p", { class: "pz-stars", "aria-label": `${score.stars} of ${score.most} stars` }, stars(score.stars, score.most)),
      ...score.missing.map((line) => make("p", { class: "pz-lacks" }, line)),
      ...score.known.map((line) => make("p", {}, line)),
      ...run,
      make("div", { class: "pg-row" },
        next ? button("Next puzzle ›", () => this.go(next), { class: "pg-button is-main", "data-do": "next" }) : null,
        button("Download the program", () => keep("mine.txt", "text/plain", score.program)),
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
    const order = ordered && row.placed.length ? make("div", {}, make("p", { class: "pg-quiet pz-label" }, "the list, in order"), make("ol", { class: "pz-order", "aria-label": `the list of ${row.name}` },
      ...row.placed.map((one) => make("li", {}, this.placed(one, which, row))))) : null;
    const before = this.mode.before;
    const target = before !== null && before.which === which;
    const tray = make("div", { class: "pz-chips", role: "group", "aria-label": `to place on ${row.name}` },
      ...row.left.map((one) => this.chip(one, { "data-move": `${which}:${one.op}`, "aria-label": `place ${one.name}, ${one.word}, on ${row.name}` },
        () => this.move(`${which}${target ? `@${before.at}` : ""}:${one.op}`, `[aria-label="to place on ${row.name}"] button`), which)));
    const note = target ? make("p", { class: "pg-quiet" }, `What you choose next stands before ${row.placed[before.at]?.name}. `,
      button("Take it away", () => this.move(`${which}@${before.at}:-`), { "aria-label": `take ${row.placed[before.at]?.name} away from ${row.name}` }), " ",
      button("Never mind", () => { this.mode.before = null; this.paint(); }, { "aria-label": `choose nothing on ${row.name}` })) : null;
    return make("section", { class: "pz-row", "aria-label": row.name }, make("p", { class: "pz-name" }, row.name),
      make("div", { class: "pz-scroll", tabindex: row.placed.length ? null : "-1" }, make("div", { style: `width:${width}` }, ...strips, axis)), order, note,
      make("p", { class: "pg-quiet pz-label" }, row.left.length ? "to place" : "all placed"), row.left.length ? tray : null);
  }

  /** An operation that is placed: choosing it lets one place another before it, or take it away. */
  placed(one, which, row, style = "") {
    const pressed = this.mode.before?.which === which && this.mode.before.at === one.at;
    return this.chip(one, {
      "aria-pressed": String(pressed), "data-away": `${which}@${one.at}:-`, "data-at": one.at,
      "aria-label": `${one.name}, ${one.word}, on ${row.name}, from ${tidy(one.start)} to ${tidy(one.end)}; choose it to place something before it, delete takes it away`,
    }, () => {
      this.mode.before = pressed ? null : { which, at: one.at };
      this.paint(pressed ? "" : `${one.name} is chosen: what you choose next stands before it.`);
      this.refocus(`[data-away="${which}@${one.at}:-"]`);
    }, null, style);
  }

  chip(one, more, press, from = null, style = "") {
    const chip = make("button", { type: "button", class: "pz-chip", title: `${one.name}: ${one.word}`, onclick: press, style: `--fill:${one.fill};--ink:${one.ink};${style}`, ...more }, one.name);
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
          ? button(`Send ${named(chosen)} here`, () => this.send(rank),
            { class: "pg-button pz-send is-main", "data-send": rank, "aria-label": `send ${named(chosen)} of rank ${chosen.rank} to rank ${rank}` }) : null);
      return card;
    });
    const last = hops.sent.length - 1;
    const sent = make("ol", { class: "pz-hops" }, ...hops.sent.map((messages, hop) => make("li", {},
      messages.length ? make("ul", {}, ...messages.map((message) => make("li", {}, message))) : hop === last ? "nothing is sent in this hop yet" : "")));
    return make("div", { class: "pz-board" },
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
    this.paint();
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
