// Tell pure_story.py in a WebAssembly Python: node pure_story.mjs PYODIDE_FOLDER REPOSITORY
// This Python reads the repository's own files, so it runs what CPython runs.
import path from "node:path";
import { pathToFileURL } from "node:url";

const TELL = `
import sys
sys.dont_write_bytecode = True  # it would land beside the sources
sys.path += ["/repository/src", "/repository/tests"]
import pure_story
pure_story.story()
`;

const [pyodideFolder, repository] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(pyodideFolder, "pyodide.mjs")));
const python = await loadPyodide();
python.mountNodeFS("/repository", repository);
try {
  process.stdout.write(python.runPython(TELL));
} catch (error) {
  console.error(error.message); // node would print the line that raised it, which is a megabyte of pyodide
  process.exitCode = 1;
}
