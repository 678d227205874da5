// The editor of a program's text: CodeMirror, with operations in the colours of the drawings, and errors underlined.
import { defaultKeymap, history, historyKeymap } from "../../playground/parts/editor/codemirror-commands.js";
import { lintKeymap, setDiagnostics } from "../../playground/parts/editor/codemirror-lint.js";
import { EditorState } from "../../playground/parts/editor/codemirror-state.js";
import { Decoration, drawSelection, EditorView, keymap, lineNumbers, MatchDecorator, ViewPlugin }
  from "../../playground/parts/editor/codemirror-view.js";

const KINDS = {
  F: "forward", B: "backward", I: "input", W: "weight", S: "step", ">": "send", "<": "receive", "!": "free", "*": "sum",
  "%": "sum", "~": "gather", "^": "gather", "=": "step",
};
const marks = Object.fromEntries(Object.values(KINDS).concat("word", "remark").map((name) => [name, Decoration.mark({ class: `pg-${name}` })]));
const colours = new MatchDecorator({
  regexp: /#.*|^(?:program|goal:|mesh:)|^\s*rank +\d+:|(?<=[\s:])[FBIWS><!*%~^=]\S*/gm,
  decoration: ([text]) => {
    if (text.startsWith("#")) return marks.remark;
    if (/^(program|goal|mesh|\s*rank)/.test(text)) return marks.word;
    return text.includes("&") ? marks.step : marks[KINDS[text[0]]];
  },
});
const coloured = ViewPlugin.fromClass(class {
  constructor(view) { this.decorations = colours.createDeco(view); }
  update(update) { this.decorations = colours.updateDeco(update, this.decorations); }
}, { decorations: (plugin) => plugin.decorations });

/** An editor in a place. `changed` is told the text when a person has changed it. */
export function editor(place, name, text, changed) {
  let quiet = false;
  const view = new EditorView({
    parent: place,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(), history(), drawSelection(), coloured, EditorView.lineWrapping,
        keymap.of([...defaultKeymap, ...historyKeymap, ...lintKeymap]),
        EditorView.contentAttributes.of({ "aria-label": name, spellcheck: "false", autocapitalize: "off", autocorrect: "off" }),
        EditorView.updateListener.of((update) => { if (update.docChanged && !quiet) changed(update.state.doc.toString()); }),
      ],
    }),
  });
  return {
    view,
    get text() { return view.state.doc.toString(); },
    set text(next) {
      if (next === view.state.doc.toString()) return;
      quiet = true;
      view.dispatch({ changes: { from: 0, to: view.state.doc.length, insert: next } });
      quiet = false;
    },
    /** Underline pieces of the text; the words stand with each. */
    underline(pieces, words) {
      const end = view.state.doc.length;
      const found = pieces.filter(([from, to]) => to <= end).map(([from, to]) => ({ from, to, severity: "error", message: words }));
      view.dispatch(setDiagnostics(view.state, found.sort((one, other) => one.from - other.from)));
    },
  };
}
