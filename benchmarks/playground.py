"""How large is the playground, how long until it is ready, how long does an edit take? In Chromium, from the studio.

make docs && python -m benchmarks.playground
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import typer

sys.path.append(str(Path(__file__).parents[1] / "docs" / "tools"))
from tests.docs.conftest import Visitor

from microparallel.program import to_text
from microparallel.schedules import one_f_one_b
from microparallel.studio import Studio, site_of

_PAGE = "site/playground/index.html"
_SIDE = "document.querySelector('.pg-side')"


def main(times: int = 5, edits: int = 20) -> None:
    """Open the page in new browsers, and write into it; print sizes, and times with their quartiles."""
    site = site_of(None)
    assert site is not None, "run `make docs` first"
    parts = site / "playground" / "parts"
    for part in ("python", "editor", "course.zip"):
        files = [parts / part] if (parts / part).is_file() else list((parts / part).iterdir())
        print(f"{part:<12}{sum(path.stat().st_size for path in files) / 1e6:>8.2f} MB")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with Studio(Path("runs"), site) as studio:
        threading.Thread(target=studio.serve_forever, daemon=True).start()
        ready, taken = [], []
        for number in range(times):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                visitor = Visitor(chromium, folder, studio)
                begun = time.monotonic()
                visitor.open(_PAGE)
                visitor.until(f"{_SIDE}?.dataset.looks")
                ready.append(time.monotonic() - begun)
                if number == times - 1:
                    taken = [_edit(visitor, edit) for edit in range(edits + 3)][3:]
                visitor.close()
        studio.shutdown()
    _print("ready: from opening the page to its first drawing, s", ready)
    _print("an edit of 1F1B, 8 ranks × 16 micro-batches, until it is drawn, ms", taken)


def _edit(visitor: Visitor, number: int) -> float:
    """Change a program by a remark, which the whole of it is read and drawn again for."""
    looks = int(visitor.value(f"{_SIDE}.dataset.looks"))
    visitor.value(f"{_SIDE}.querySelector('.cm-content').focus()")
    visitor.key("a", "KeyA", 65, modifiers=2)
    visitor.call("Input.insertText", text=f"{to_text(one_f_one_b(8, 16))}# {number}\n")
    visitor.until(f"Number({_SIDE}.dataset.looks) > {looks}")
    return float(visitor.value(f"{_SIDE}.dataset.lookMs"))


def _print(name: str, numbers: list[float]) -> None:
    low, middle, high = statistics.quantiles(numbers, n=4)
    print(f"{name}: {middle:.3g} ({low:.3g} to {high:.3g}; least {min(numbers):.3g}; {len(numbers)} times)")


if __name__ == "__main__":
    typer.run(main)
