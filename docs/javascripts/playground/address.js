// What the address behind # holds: {"v": 1, "sides": [{"text"} or {"kind", "name", "numbers"}], "costs": {}}, as JSON, deflated,
// in base64 for addresses. It may come from anybody: it is checked, it is only ever shown as text, and its size is limited.

const MOST = 300000; // characters of JSON

async function through(stream, bytes, most = Infinity) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const parts = [];
  for (let size = 0; ;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) { await reader.cancel(); throw new Error("this address holds too much"); }
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

export async function packed(state) {
  const bytes = await through(new CompressionStream("deflate-raw"), new TextEncoder().encode(JSON.stringify(state)));
  let text = "";
  for (const byte of bytes) text += String.fromCharCode(byte);
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

/** The state in an address; null where there is none. */
export async function unpacked(fragment) {
  const found = /^#?p=([\w-]+)$/.exec(fragment);
  if (found === null) return null;
  const text = atob(found[1].replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = await through(new DecompressionStream("deflate-raw"), Uint8Array.from(text, (one) => one.charCodeAt(0)), MOST);
  return checked(JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes)));
}

function checked(state) {
  const isText = (one) => typeof one === "string";
  const isSide = (side) => typeof side === "object" && side !== null
    && (isText(side.text) || (isText(side.kind) && isText(side.name) && isNumbers(side.numbers ?? {})));
  const isNumbers = (one) => typeof one === "object" && one !== null && !Array.isArray(one)
    && Object.values(one).every((number) => Number.isFinite(number));
  if (state?.v !== 1 || !Array.isArray(state.sides) || state.sides.length < 1 || state.sides.length > 2
      || !state.sides.every(isSide) || !isNumbers(state.costs ?? {})) throw new Error("this address holds no program");
  return { sides: state.sides, costs: state.costs ?? {} };
}
