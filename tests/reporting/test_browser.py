"""The page in a real browser: it is drawn at once, and answers to mouse, fingers and keys."""

from dataclasses import replace

import pytest
from tests.reporting.conftest import pipeline_step, scaled
from tests.spans import recorded, span

from microparallel.program.ops import Observed
from microparallel.reporting import Run, report_page

DETAILS = "document.getElementById('details').innerText"
WINDOW = "document.getElementById('window').textContent.replaceAll('\\u00a0', ' ')"


@pytest.fixture
def shown(tmp_path, browser):
    """Show a run's page; at its end, nobody may have complained."""

    def show(run, **how):
        file = tmp_path / "report.html"
        file.write_text(report_page(run, "0"), encoding="utf-8")
        browser.open(file, **how)
        return browser

    yield show
    assert browser.complaints == []
    assert browser.value("document.documentElement.dataset.error") is None


def place_of(browser, rank, moment, lane="compute"):
    """Where on the screen a rank's lane is at a moment, in microseconds."""
    return browser.value(f"""(() => {{
        const canvas = document.getElementById("lanes");
        canvas.scrollIntoView({{ block: "center" }});
        const box = canvas.getBoundingClientRect();
        const lanes = timeline.lanes;
        return [box.left + lanes.x({moment}), box.top + lanes.rows[{rank}].{lane} + 5];
    }})()""")


def text(browser, expression=DETAILS):
    return browser.value(expression).replace("\u00a0", " ")


def test_everything_is_drawn(shown, run):
    browser = shown(run)
    assert int(browser.value("document.documentElement.dataset.shownMs")) > 0
    assert browser.value("document.querySelectorAll('#plot-loss path').length") == 2
    assert browser.value("document.querySelectorAll('.share').length") == 4
    assert browser.value("document.querySelectorAll('.arrival').length") == 3
    assert "step 30: training 0.1" in text(browser, "document.querySelector('.readout').innerText")
    assert text(browser, "document.getElementById('step-choice').selectedOptions[0].text").endswith("typical")


def bars_of_one_step(count):
    """So many, on four ranks, each too narrow to have its name in it."""
    each = range(count // 4)
    events = [span(rank, "forward", f"F{n}", n * 1e-4, n * 1e-4 + 9e-5) for rank in range(4) for n in each]
    return recorded(4, events)


def test_ten_thousand_bars_of_one_step_are_painted_once_each(shown, run):
    """What keeps the page quick, without a clock; `python -m benchmarks.report_page` has the clock."""
    elements = []
    for bars in (5_000, 10_000):
        browser = shown(replace(run, trace=bars_of_one_step(bars)))
        assert browser.value("timeline.step.bars.length") == bars
        assert bars <= browser.value("painted") < bars + 200  # a rectangle for each, and the axis and the ranks' names
        elements.append(browser.value("document.querySelectorAll('*').length"))
    assert elements[0] == elements[1]  # bars are no elements of the page


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_nothing_is_wider_than_the_screen(shown, run, width, dark):
    browser = shown(run, width=width, touch=width < 500, dark=dark)
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    page = browser.value("getComputedStyle(document.body).backgroundColor")
    assert page == ("rgb(16, 20, 26)" if dark else "rgb(255, 255, 255)")


def test_the_timeline_is_really_painted(shown, run):
    """Where rank 0 computes forward, the canvas has forward's colour; where it waits, lines on the page's ground."""
    browser = shown(run)
    pixel = """((moment) => {
        const [x, y] = [timeline.lanes.x(moment), timeline.lanes.rows[0].compute + 3];
        return [...timeline.canvas.getContext("2d").getImageData(x, y, 12, 1).data.slice(0, 3)];
    })"""
    assert browser.value(f"{pixel}(1000)") == [0x56, 0xB4, 0xE9]


def test_pointing_at_a_wait_says_for_whom(shown, run):
    browser = shown(run)
    browser.value("document.getElementById('step-choice').selectedIndex = 1")
    browser.value("document.getElementById('step-choice').dispatchEvent(new Event('change'))")
    browser.mouse("Moved", *place_of(browser, 0, 18_500))
    assert "waiting: rank 0 had nothing to do until rank 3 came" in text(browser)
    assert "all_reduce(float32[250000], op='sum')" in text(browser)
    browser.mouse("Moved", *place_of(browser, 0, 2_000))
    assert "forward of GPT on rank 0, from 0 ms, takes 5 ms" in text(browser)
    browser.mouse("Moved", *place_of(browser, 0, 21_000, lane="talk"))
    assert "1 MB" in text(browser)
    assert "when rank 3 came" in text(browser)


def test_zooming_and_moving_with_the_mouse(shown, run):
    browser = shown(run, height=4000)  # so high that the wheel has nothing to scroll
    whole = text(browser, WINDOW)
    assert "in all" in whole
    place = place_of(browser, 0, 10_000)
    browser.mouse("Wheel", *place, deltaX=0, deltaY=-300)
    assert text(browser, WINDOW) == whole  # the wheel belongs to the page
    browser.mouse("Wheel", *place, deltaX=0, deltaY=-300, modifiers=2)
    browser.until(f"!{WINDOW}.includes('in all')")
    before = browser.value("timeline.view.from")
    browser.mouse("Pressed", *place, button="left", clickCount=1)
    browser.mouse("Moved", place[0] - 80, place[1], button="left", buttons=1)
    browser.mouse("Released", place[0] - 80, place[1], button="left", clickCount=1)
    assert browser.value("timeline.view.from") > before
    browser.value("document.getElementById('fit').click()")
    assert text(browser, WINDOW) == whole


def test_dragging_over_the_axis_shows_that_piece(shown, run):
    browser = shown(run)
    left, top = place_of(browser, 0, 5_000)
    right, _ = place_of(browser, 0, 10_000)
    axis = top - 5 - browser.value("timeline.lanes.rows[0].compute") + 12
    browser.mouse("Pressed", left, axis, button="left", clickCount=1)
    browser.mouse("Moved", right, axis, button="left", buttons=1)
    browser.mouse("Released", right, axis, button="left", clickCount=1)
    assert browser.value("timeline.view.from") == pytest.approx(5_000, abs=100)
    assert browser.value("timeline.view.to") == pytest.approx(10_000, abs=100)


def test_fingers(shown, run):
    browser = shown(run, width=390, height=800, touch=True)
    x, y = place_of(browser, 1, 2_000)
    browser.touch("Start", (x, y))
    browser.touch("End")
    browser.until(f"{DETAILS}.includes('forward of GPT')")
    length = browser.value("timeline.view.to - timeline.view.from")
    browser.touch("Start", (150, y), (200, y))
    for apart in (10, 30, 60):
        browser.touch("Move", (150 - apart, y), (200 + apart, y))
    browser.touch("End")
    assert browser.value("timeline.view.to - timeline.view.from") < 0.6 * length


def test_keys(shown, run):
    browser = shown(run)
    browser.value("document.getElementById('lanes').focus()")
    browser.press("ArrowRight")
    assert "forward of GPT on rank 0" in text(browser)
    browser.press("ArrowRight")
    assert "backward on rank 0" in text(browser)
    browser.press("ArrowDown")
    assert "all_reduce" in text(browser)
    browser.press("ArrowDown")
    assert "on rank 1" in text(browser)
    browser.press("+", "+")
    assert "in all" not in text(browser, WINDOW)
    browser.press("0", "0")
    assert "in all" in text(browser, WINDOW)
    browser.press("Escape")
    assert "Point at a bar" in text(browser)


def test_motion_ends_where_it_should(shown, run):
    browser = shown(run, calm=False)
    browser.value("document.getElementById('zoom-in').click()")
    browser.until("Math.abs((timeline.view.to - timeline.view.from) / timeline.step.length - 0.5) < 1e-6")


def test_messages_are_arrows_and_what_was_predicted_is_told(shown, pipeline):
    faster = recorded(2, [scaled(event, 0.5) for event in pipeline_step()])
    browser = shown(Run("pipeline", {}, [], {}, pipeline, faster))
    assert browser.value("timeline.lanes.messages") == 2
    assert not browser.value("timeline.lanes.tooMany")
    browser.mouse("Moved", *place_of(browser, 1, 2_000, lane="talk"))
    assert "model.py:90" in text(browser)
    assert "rank 0 sent it 4 ms after rank 1 had asked for it" in text(browser)
    assert "predicted 14 ms, took 28 ms: 100 % more" in text(browser, "document.getElementById('legend').innerText")
    x, y = place_of(browser, 1, 6_000, lane="top")
    browser.mouse("Moved", x, y - 3)
    assert "measured: from 10 ms, took 8 ms" in text(browser)
    browser.value("document.getElementById('predicted').click()")
    assert not browser.value("timeline.lanes.predicted")


def test_evil_names_are_only_words(shown, run):
    evil = "</script><img src=x onerror=alert(1)>"
    events = [event._replace(op=Observed(evil, event.kind), place=evil) for event in run.trace.events]
    browser = shown(replace(run, config={"model": evil}, trace=replace(run.trace, events=events)))
    assert browser.value("document.querySelector('h1').textContent") == f"{evil} on 4 ranks"
    browser.mouse("Moved", *place_of(browser, 0, 2_000))
    assert evil in text(browser)
    assert browser.value("document.images.length") == 0


def test_without_a_recording(shown, run):
    browser = shown(replace(run, trace=None))
    assert "microparallel train --trace" in text(browser, "document.body.innerText")


def test_memory(shown, run):
    metrics = [{"step": 1, "memory": 5e6}, {"step": 2, "memory": 6e6}]
    browser = shown(replace(run, metrics=metrics, summary={"peak_memory": [1e6, 2e6]}))
    words = text(browser, "document.getElementById('memory').innerText")
    assert "2 MB" in words
    assert "peak memory" in words


def test_one_rank_one_step_one_bar(shown):
    shown(Run("small", {}, [{"step": 1, "loss": 1.0}], {}, recorded(1, [span(0, "forward", "F0.0", 1.0, 1.0)])))
