// The worker of a page: a WebAssembly Python that runs the course's own code, and answers one question after another.
// What a question and an answer are, says src/microparallel/playground/answers.py.

const parts = new URL("../../playground/parts/", import.meta.url);
const PREPARE = `
import sys
sys.path.insert(0, "/course")
from microparallel.playground import answer
answer
`;

async function prepare() {
  const { loadPyodide } = await import(new URL("python/pyodide.mjs", parts).href);
  const course = fetch(new URL("course.zip", parts)).then((found) => {
    if (!found.ok) throw new Error(`course.zip: ${found.status}`);
    return found.arrayBuffer();
  });
  const python = await loadPyodide({ indexURL: new URL("python/", parts).href });
  python.unpackArchive(await course, "zip", { extractDir: "/course" });
  return python.runPython(PREPARE);
}

const begun = performance.now();
const ready = prepare();
ready.then(
  () => postMessage({ ready: performance.now() - begun }),
  (error) => postMessage({ failed: String(error.message ?? error).trim().split("\n").pop() }),
);

addEventListener("message", async ({ data }) => {
  const { id, ...question } = data;
  try {
    const answer = await ready;
    const begin = performance.now();
    const said = JSON.parse(answer(JSON.stringify(question)));
    postMessage({ id, ...said, took: performance.now() - begin });
  } catch (error) {
    postMessage({ id, trouble: `Python stopped: ${String(error.message ?? error).trim().split("\n").pop()}`, lost: true });
  }
});
