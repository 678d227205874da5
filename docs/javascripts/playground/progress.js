// What was reached, kept in this browser, and as a file. A file's solutions are played again: stars come from the board alone.
// Beside it the browser keeps the moves of each board that was begun, so that its player finds them again.

const KEY = "microparallel-puzzles";
const BOARDS = "microparallel-puzzles-boards";
const MOST = 1000000; // characters of a file

export function stars(reached, most) {
  return "★".repeat(reached) + "☆".repeat(most - reached);
}

function areMoves(moves) {
  return Array.isArray(moves) && moves.length <= 200 && moves.every((move) => typeof move === "string" && move.length < 60);
}

export class Progress {
  constructor(ask, sets) {
    this.ask = ask;
    this.known = new Map(sets.flatMap((set) => set.levels.map((level) => [level.id, level.stars])));
    this.levels = {};
    this.boards = {};
    this.trouble = "";
    try { this.boards = this.begun(JSON.parse(localStorage.getItem(BOARDS) ?? "{}")); } catch { /* they begin anew */ }
    try { this.levels = this.checked(JSON.parse(localStorage.getItem(KEY) ?? "{}")); } catch {
      this.trouble = "What this browser has kept cannot be read; it begins anew.";
    }
  }

  checked(found) {
    const levels = typeof found?.levels === "object" && found.levels !== null ? found.levels : {};
    const whole = (number) => Number.isInteger(number) && number >= 0 && number <= 3;
    return Object.fromEntries(Object.entries(levels).filter(([name, one]) => this.known.has(name) && whole(one?.stars) && areMoves(one.moves)));
  }

  begun(found) {
    return Object.fromEntries(Object.entries(found ?? {}).filter(([name, moves]) => this.known.has(name) && areMoves(moves)));
  }

  /** Whether a level was opened in this browser before. */
  seen(name) {
    return name in this.boards;
  }

  /** The moves with which a level was left. */
  board(name) {
    return this.boards[name] ?? [];
  }

  keep(name, moves) {
    this.boards[name] = moves;
    try { localStorage.setItem(BOARDS, JSON.stringify(this.boards)); } catch { /* nothing is kept; `save` says so */ }
  }

  /** Its stars; a level may have had one more when they were kept. */
  stars(name) {
    return Math.min(this.levels[name]?.stars ?? 0, this.known.get(name));
  }

  note(name, { score, moves }) {
    const before = this.levels[name];
    if (before !== undefined && before.stars >= score.stars) return;
    this.levels[name] = { stars: score.stars, makespan: score.makespan, second: score.second, moves };
    this.save();
  }

  save() {
    try { localStorage.setItem(KEY, this.file()); } catch { this.trouble = "This browser keeps nothing: export your progress to keep it."; }
  }

  file() {
    return JSON.stringify({ v: 1, levels: this.levels });
  }

  /** Take what a file holds, where it is better; what came of it, in words. */
  async load(text) {
    let found;
    try {
      if (text.length > MOST) throw new Error("too large");
      found = JSON.parse(text);
      if (found?.v !== 1) throw new Error("not a file of these puzzles");
      found = this.checked(found);
    } catch { return "This file holds no progress of these puzzles."; }
    let taken = 0;
    let refused = 0;
    for (const [name, one] of Object.entries(found)) {
      try {
        const board = await this.ask.ask({ ask: "open", level: name, moves: one.moves });
        if (!board.score) throw new Error("not solved");
        if (board.score.stars > this.stars(name)) { this.note(name, board); taken += 1; }
      } catch { refused += 1; }
    }
    return `${taken} of ${Object.keys(found).length} solutions taken${refused ? `, ${refused} do not solve their level` : ""}.`;
  }

  clear() {
    this.levels = {};
    this.boards = {};
    try { localStorage.removeItem(KEY); localStorage.removeItem(BOARDS); } catch { /* there is nothing to remove */ }
  }
}
