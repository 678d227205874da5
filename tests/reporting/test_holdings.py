"""What each rank held, on the page of a run: as it was measured, and beside it what the simulator says."""

from dataclasses import replace

import microparallel as mp
from microparallel.reporting import Run, report_page
from microparallel.reporting.steps import Measured
from microparallel.simulator.fitted import predicted
from microparallel.trace import Sizes

SIZES = Sizes(parameters=[4000, 4000], gradients=[4000, 4000], optimizer=[8000, 8000], activations=None)


def recorded_pipeline(name="gpipe", microbatches=4):
    """A simulated step, as a recorder would have written it: activations are measured, 1000 bytes each."""
    trace = mp.simulate(mp.schedules.build(name, 2, microbatches))
    held = [0, 0]
    events = []
    for event in sorted(trace.events, key=lambda event: (event.start, event.end)):
        if event.kind in ("forward", "backward"):
            before = held[event.rank]
            held[event.rank] += 1000 if event.kind == "forward" else -1000
            event = event._replace(activations=(before, held[event.rank]))
        events.append(event)
    return replace(trace, events=events, program=None, simulated=False, sizes={0: SIZES})


def test_every_step_has_what_its_ranks_held():
    trace = recorded_pipeline()
    written = Measured(trace, predicted(trace)).written()
    kinds = written["held_kinds"]
    assert kinds == ["parameters", "optimizer state", "gradients", "activations", "in flight"]
    (step,), (prediction,) = written["steps"], written["predictions"]
    for rank, held in enumerate(step["held"]):
        assert max(sum(row[1:]) for row in held) == trace.peak_memory[rank] == 20_000
        assert held[0] == [0, 4000, 8000, 0, 1000 * (rank == 0), 0]
    assert [max(sum(row[1:]) for row in held) for held in prediction["held"]] == [20_000] * 2


def test_of_many_moments_the_highest_stay():
    trace = recorded_pipeline(microbatches=300)
    (step,) = Measured(trace).written()["steps"]
    for held, peak in zip(step["held"], trace.peak_memory, strict=True):
        assert len(held) <= 150 and max(sum(row[1:]) for row in held) == peak


def test_without_sizes_the_page_shows_no_memory():
    trace = replace(recorded_pipeline(), sizes=None)
    (step,) = Measured(trace).written()["steps"]
    assert step["held"] is None


def test_strips_in_a_browser(tmp_path, browser):
    trace = recorded_pipeline()
    for name, expected, strips in (("both", predicted(trace), 4), ("measured", None, 2)):
        file = tmp_path / f"{name}.html"
        file.write_text(report_page(Run(name, {}, [], {}, trace, expected), "0"), encoding="utf-8")
        browser.open(file, width=390)
        assert browser.value("document.querySelectorAll('.holding').length") == strips
        assert browser.value("document.querySelectorAll('.holding polygon').length") == strips * 4
        words = browser.value("document.getElementById('held').innerText").replace("\u00a0", " ")
        assert "20 kB" in words and ("simulator" in words) == (expected is not None)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    file.write_text(report_page(Run("none", {}, [], {}, replace(trace, sizes=None)), "0"), encoding="utf-8")
    browser.open(file)
    assert browser.value("document.getElementById('held').hidden")
    assert browser.complaints == [] and browser.value("document.documentElement.dataset.error") is None
