"""How long until the page of `microparallel report` is drawn? In Chromium, from opening the file to its first picture.

python -m benchmarks.report_page
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import typer
from tests.reporting.conftest import Browser, ddp_step
from tests.reporting.test_browser import bars_of_one_step
from tests.spans import recorded

from microparallel.reporting import Run, report_page

_SHOWN = "Number(document.documentElement.dataset.shownMs)"


def runs() -> dict[str, Run]:
    """Four ranks: a trace of ten steps with forty buckets each, and one step with very many bars."""
    steps = [ddp_step(number, buckets=40, begin=250 * number) for number in range(10)]
    metrics = [{"step": step, "loss": 3 / step, "samples_per_second": 900.0} for step in range(1, 1001)]
    events = [event for step in steps for event in step]
    usual = Run("usual", {"model": "gpt", "ranks": 4}, metrics, {}, recorded(4, events))
    many = {f"{bars} bars in a step": bars_of_one_step(bars) for bars in (1_000, 10_000, 100_000)}
    return {"10 steps of 40 buckets": usual} | {name: replace(usual, trace=trace) for name, trace in many.items()}


def main(times: int = 15) -> None:
    """Open each page some times, and print how long it took."""
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(Path(folder) / "chromium")
        print(f"{'4 ranks':<26}{'page':>9}{'drawn after':>14}   quartiles")
        for name, run in runs().items():
            page = Path(folder) / "report.html"
            page.write_text(report_page(run, "0"), encoding="utf-8")
            taken = []
            for _ in range(times + 1):
                browser.open(page)
                taken.append(float(browser.value(_SHOWN)))
            low, middle, high = statistics.quantiles(taken[1:], n=4)
            size = page.stat().st_size
            print(f"{name:<26}{size / 1e6:>6.2f} MB{middle:>11.0f} ms   {low:.0f}–{high:.0f}")
        browser.close()


if __name__ == "__main__":
    typer.run(main)
