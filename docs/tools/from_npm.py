"""What the site takes from npm: a WebAssembly Python and an editor for the playground, and KaTeX for formulas.

python docs/tools/from_npm.py        fetch them into build/browser, unless they are there; `make docs` does so, too

npm holds what it fetches against the hashes of npm/package-lock.json. Where npm or the network is missing, the site is
built all the same: the playground's pages say what they lack, and formulas are shown as they are written.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

NPM = Path(__file__).resolve().parent / "npm"
FETCHED = NPM.parents[2] / "build" / "browser"
_TIME = 300  # seconds npm may take: 18 MB on a slow line


def fetch() -> str:
    """Let npm fetch what the lock file names, unless that is there; what went wrong, in one line, or nothing."""
    if is_fetched():
        return ""
    if shutil.which("npm") is None:
        return "there is no npm here"
    FETCHED.mkdir(parents=True, exist_ok=True)
    for file in ("package.json", "package-lock.json", ".npmrc"):
        shutil.copyfile(NPM / file, FETCHED / file)
    command = [
        "npm",
        "ci",
        "--ignore-scripts",
        "--no-fund",
        "--no-audit",
        "--fetch-retries=1",
        "--fetch-timeout=60000",
        "--loglevel=error",
    ]
    try:
        done = subprocess.run(command, cwd=FETCHED, capture_output=True, text=True, timeout=_TIME, check=False)
    except subprocess.TimeoutExpired:
        return f"npm did not answer for {_TIME} s"
    if done.returncode:
        said = re.findall(r"npm (?:error|ERR!) (?:code )?(.+)", done.stderr)
        return f"npm could not fetch them: {said[0] if said else f'exit code {done.returncode}'}"
    (FETCHED / "fetched").write_text(_wanted())  # last: npm has compared every hash
    return ""


def is_fetched() -> bool:
    """Whether everything is there that the lock file names now."""
    stamp = FETCHED / "fetched"
    return stamp.exists() and stamp.read_text(encoding="utf-8") == _wanted()


def _wanted() -> str:
    return (NPM / "package-lock.json").read_text(encoding="utf-8")


if __name__ == "__main__":
    if trouble := fetch():
        what = "the playground lacks Python and editor, and formulas are shown as TeX source"
    elif shutil.which("node") is None:
        trouble, what = "there is no node here", "formulas are shown as TeX source"
    if trouble:
        print(f"note: {what}: {trouble}", file=sys.stderr)
