// The timeline's bars: what they are, and where each rank's lanes put them.
"use strict";

const BAR_FIELDS = ["rank", "kind", "name", "start", "end", "begun", "waited", "bytes", "meeting", "last", "place", "row"];
const AXIS = 30;

// A step's rows, as objects with names instead of numbers.
function unpacked(step, measured) {
  const bar = (row) => {
    const made = Object.fromEntries(BAR_FIELDS.map((field, place) => [field, row[place] ?? null]));
    made.kind = measured.kinds[made.kind];
    made.name = measured.names[made.name];
    made.place = made.place === null ? "" : measured.places[made.place];
    return made;
  };
  const bars = step.bars.map(bar);
  const blocked = step.blocked.map(([rank, start, end, what, cause, whom]) => ({ rank, start, end, what, cause: bars[cause] ?? null, whom }));
  const prediction = measured.predictions[step.predicted];
  const expected = (row) => ({ ...bar(row), expected: true });
  const predicted = prediction ? { ...prediction, bars: prediction.bars.map(expected) } : null;
  return { ...step, bars, blocked, predicted };
}

// Whether a prediction and what was measured are about the same operation.
const isTheSame = (one, other) => one.rank === other.rank && one.kind === other.kind && one.name === other.name;
const computes = (bar) => !["collective", "send", "receive"].includes(bar.kind);

class Lanes {
  constructor(step, ranks, width, predicted) {
    Object.assign(this, { step, ranks, width, predicted });
    this.narrow = width < 640;
    this.left = this.narrow ? 50 : 118;
    this.right = width - 6;
    const many = ranks > 12;
    this.computeHeight = many ? 14 : 26;
    this.talkHeight = many ? 6 : 13;
    this.arrange(many);
    this.lists();
    this.pieces();
  }

  arrange(many) {
    let top = AXIS + 4;
    this.rows = [];
    for (let rank = 0; rank < this.ranks; rank += 1) {
      const talking = this.step.bars.filter((bar) => bar.rank === rank && !computes(bar));
      const lines = talking.length ? 1 + talking.reduce((most, bar) => Math.max(most, bar.row), 0) : 0;
      const compute = top + (this.predicted ? 15 : 0);
      const talk = compute + this.computeHeight + 4;
      const end = talk + lines * (this.talkHeight + 2);
      this.rows.push({ rank, top, compute, talk, lines, end });
      top = end + (many ? 5 : 12);
    }
    this.height = top;
  }

  // What a pointer can hit and arrow keys walk through: of each rank first what it computed, then what it said.
  lists() {
    const inOrder = (items) => items.sort((one, other) => one.start - other.start || one.end - other.end);
    this.items = this.rows.flatMap(({ rank }) => {
      const mine = this.step.bars.filter((bar) => bar.rank === rank);
      const waits = this.step.blocked.filter((item) => item.rank === rank);
      return [inOrder([...mine.filter(computes), ...waits]), inOrder(mine.filter((bar) => !computes(bar)))];
    });
  }

  // The pieces of each computation during which its rank did not wait.
  pieces() {
    this.uncovered = new Map();
    for (let rank = 0; rank < this.ranks; rank += 1) {
      const waits = this.items[2 * rank].filter((item) => item.what !== undefined);
      let first = 0;
      for (const bar of this.items[2 * rank].filter((item) => item.what === undefined)) {
        while (waits[first] && waits[first].end <= bar.start) first += 1;
        const found = [];
        let from = bar.start;
        for (let next = first; waits[next] && waits[next].start < bar.end; next += 1) {
          if (waits[next].start > from) found.push([from, waits[next].start]);
          from = Math.max(from, waits[next].end);
        }
        if (from < bar.end) found.push([from, bar.end]);
        this.uncovered.set(bar, found);
      }
    }
  }

  box(item) {
    const row = this.rows[item.rank];
    if (item.expected) return { top: row.top + (computes(item) ? 0 : 7), height: computes(item) ? 6 : 4 };
    if (item.what !== undefined) return { top: row.compute, height: this.computeHeight };
    if (computes(item)) return { top: row.compute + 5 * item.row, height: this.computeHeight - 5 * item.row };
    return { top: row.talk + item.row * (this.talkHeight + 2), height: this.talkHeight };
  }

  laneOf(item) {
    return 2 * item.rank + (item.what !== undefined || computes(item) ? 0 : 1);
  }
}
