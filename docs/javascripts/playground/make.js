// Elements, made of text only: nothing that a program or a file says becomes markup here.

/** An element: attributes by name (`on…` are listeners), then its children; a string among them is text. */
export function make(tag, attributes = {}, ...children) {
  const one = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) one.addEventListener(name.slice(2), value);
    else if (name === "style") one.style.cssText = value;
    else one.setAttribute(name, value === true ? "" : value);
  }
  one.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return one;
}

export function button(words, press, more = {}) {
  return make("button", { type: "button", class: "pg-button", onclick: press, ...more }, words);
}

let labels = 0;

/** A labelled slider that says its number. */
export function slider({ words, least, most, step = 1, value, change, say = String }) {
  labels += 1;
  const id = `pg-slider-${labels}`;
  const number = make("output", { for: id }, say(value));
  const input = make("input", { type: "range", id, min: least, max: most, step, value });
  input.addEventListener("input", () => {
    number.textContent = say(input.valueAsNumber);
    input.setAttribute("aria-valuetext", say(input.valueAsNumber));
    change(input.valueAsNumber);
  });
  const whole = make("div", { class: "pg-slider" }, make("label", { for: id }, words), number, input);
  whole.set = (next) => { input.value = next; number.textContent = say(next); };
  whole.input = input;
  return whole;
}

/** Let the reader keep a file. */
export function keep(name, type, content) {
  const address = URL.createObjectURL(new Blob([content], { type }));
  const link = make("a", { href: address, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Copy a text, and say so on the button that was pressed. */
export async function copy(text, pressed) {
  const before = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "copied";
  } catch {
    const area = make("textarea", { style: "position:fixed;opacity:0" });
    area.value = text;
    document.body.append(area);
    area.select();
    pressed.textContent = document.execCommand("copy") ? "copied" : "could not be copied";
    area.remove();
  }
  setTimeout(() => { pressed.textContent = before; }, 1500);
}
