"""The site in a real browser: search from a disk, phones, calculators, pages to step through."""

from pathlib import Path

import pytest
from tests.pairwise import every

import microparallel as mp
from microparallel.program import Parameters
from microparallel.trace import Sizes

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(str(path.relative_to(DOCS).with_suffix(".html")) for path in DOCS.rglob("*.md"))

# Formulas that have to be scrolled, and words of figures that are too small to read.
CUT_FORMULAS = """[...document.querySelectorAll('.md-content div.formula')].filter(
    (one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.textContent)"""
TINY_WORDS = """[...document.querySelectorAll('.md-content svg text')].filter((one) => {
    const by = one.getScreenCTM(), size = parseFloat(getComputedStyle(one).fontSize) * Math.hypot(by.a, by.b);
    return one.getBoundingClientRect().width > 0 && size < 8;
}).map((one) => one.textContent)"""


def unfold(browser):
    browser.value("document.querySelectorAll('.md-content details').forEach((one) => { one.open = true; })")


def search(browser, words):
    browser.value("document.querySelector('.md-search__input').focus()")
    browser.call("Input.insertText", text=words)
    browser.call("Input.dispatchKeyEvent", type="keyUp", key=words[-1])  # what the search box listens to
    browser.until("document.querySelectorAll('.md-search-result__link').length > 0")
    return browser.value("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")


@pytest.mark.parametrize("start", ["index.html", "reference/api/errors.html"])
def test_search_works_from_a_disk_without_a_network(browser, site, start):
    browser.open(site / start)
    found = search(browser, "bubble")
    assert browser.complaints == []
    assert all(link.startswith("file:") for link in found)
    assert any("/pipeline/" in link for link in found)


@pytest.mark.parametrize("page", every(3, PAGES))
def test_nothing_is_wider_than_a_phone(browser, site, page):
    browser.open(site / page, width=390, height=844, touch=True)
    wide = """[...document.querySelectorAll('.md-content *')].filter((one) => {
        const box = one.getBoundingClientRect();
        if (box.width === 0 || box.right <= innerWidth + 1) return false;
        for (let up = one; up; up = up.parentElement) {
            if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(up).overflowX) && up !== document.documentElement
                && up !== document.body && up.getBoundingClientRect().right <= innerWidth + 1) return false;
        }
        return true;
    }).map((one) => one.outerHTML.slice(0, 120))"""
    unfold(browser)
    assert browser.value("document.documentElement.scrollWidth") <= 390
    assert browser.value(wide) == []
    assert browser.value(CUT_FORMULAS) == []
    assert browser.value(TINY_WORDS) == []
    assert browser.complaints == []


def calculator(browser, name):
    return f"document.querySelector('[data-calculator={name}]')"


def result(browser, name, number):
    return float(browser.value(f"{calculator(browser, name)}.dataset.result{number}"))


def give(browser, name, **values):
    for field, value in values.items():
        browser.value(
            f"""(() => {{ const input = {calculator(browser, name)}.querySelector('[name={field}]');
            input.value = {str(value)!r}; input.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"""
        )


def words(browser, name):
    return browser.value(f"{calculator(browser, name)}.querySelector('.calculator-verdict').textContent")


def test_the_memory_calculator(browser, site):
    browser.open(site / "pipeline" / "01_memory_wall.html")
    give(browser, "memory", parameters=10, bytes=4, optimizer=2, batch=0, device=24, stages=1, flight=1)
    assert result(browser, "memory", "weights") == 40  # 10 B parameters × 4 bytes, in GB
    assert result(browser, "memory", "whole") == 160  # weights, gradients, Adam's two values
    assert "The weights alone take 40 GB against 24 GB" in words(browser, "memory")
    assert "does not fit" in words(browser, "memory")
    give(browser, "memory", stages=8)
    assert result(browser, "memory", "stage") == 20
    assert "Each of 8 stages needs 20 GB: it fits." in words(browser, "memory")
    give(browser, "memory", optimizer=0, stages=1, batch=4, sequence=1024, width=1000, layers=10, kept=2)
    assert result(browser, "memory", "activations") == pytest.approx(4 * 1024 * 1000 * 10 * 2 * 4 / 1e9)
    give(browser, "memory", stages=2, flight=3)
    assert result(browser, "memory", "stage") == pytest.approx(40 + 1.5 * result(browser, "memory", "activations"))
    assert browser.complaints == []


def test_a_calculator_says_what_it_cannot_compute_with(browser, site):
    browser.open(site / "pipeline" / "01_memory_wall.html")
    give(browser, "memory", parameters="")
    assert words(browser, "memory") == "Parameters (billions): give a number that is at least 0."
    give(browser, "memory", parameters=1, stages=0)
    assert "Stages" in words(browser, "memory")


def test_the_data_calculator(browser, site):
    browser.open(site / "data_parallel" / "02_data_wall.html")
    give(browser, "data", samples=1_000_000, epochs=10, rate=100, ranks=1, batch=250)
    give(browser, "data", parameters=250, bandwidth=50, latency=1000)
    assert result(browser, "data", "one") == result(browser, "data", "many") == 100_000
    assert result(browser, "data", "steps") == 40_000
    give(browser, "data", ranks=8)
    ring = 14 * 0.001 + 2 * 7 / 8 * 1e9 / 50e9  # 2(n−1) latencies, 2(n−1)/n of 250 million × 4 bytes
    assert result(browser, "data", "communication") == pytest.approx(ring)
    assert result(browser, "data", "many") == pytest.approx(100_000 / 8 + 40_000 * ring)
    assert result(browser, "data", "speedup") == pytest.approx(100_000 / 14_460)
    assert "49 ms of communication in each. One rank: 27.8 hours. 8 ranks: 4.02 hours" in words(browser, "data")
    give(browser, "data", rate=0)
    assert "divided by" in words(browser, "data")


def test_the_data_calculator_agrees_with_its_page(browser, site):
    browser.open(site / "data_parallel" / "02_data_wall.html")
    hours = {"one": 55.6, "half": 14.1, "many": 7.2}  # the lines of 1, 4 and 8 ranks in the page's table
    assert {name: round(result(browser, "data", name) / 3600, 1) for name in hours} == hours
    give(browser, "data", batch=32, bandwidth=1.25)  # an answer to the exercise
    assert result(browser, "data", "many") >= result(browser, "data", "half")
    assert "Half as many ranks" in words(browser, "data")
    assert "so the other half gains nothing" in words(browser, "data")


def test_the_saving_calculator(browser, site):
    browser.open(site / "surviving" / "01_what_if_a_rank_dies.html")
    hours = 5 * 365.25 * 24 / 1000  # a failure; the page's own numbers
    assert result(browser, "saving", "mean") == pytest.approx(hours * 3600)
    assert result(browser, "saving", "best") == pytest.approx((2 * 30 * hours * 3600) ** 0.5)
    assert "A failure every 43.8 hours. Save every 51.3 minutes" in words(browser, "saving")
    give(browser, "saving", machines=20_000, cost=0.4, start=0)
    assert result(browser, "saving", "lost") == pytest.approx(0.01, rel=0.01)
    give(browser, "saving", machines=100_000, cost=300)
    assert "in truth it is more" in words(browser, "saving")
    give(browser, "saving", cost=0)
    assert "divided by" in words(browser, "saving")


@pytest.mark.parametrize(("weights", "gradients", "state"), [(4, 4, 8), (2, 2, 12)])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (2, 2), (4, 3), (5, 3)])
def test_the_sharding_calculator_agrees_with_the_simulator(
    browser, site, weights, gradients, state, ranks, microbatches
):
    """Six layers of a billion parameters, each a bucket, so that its bytes are gigabytes."""
    layers = 6
    browser.open(site / "sharding" / "01_what_a_rank_holds.html")
    give(browser, "sharding", parameters=layers, weights=weights, gradients=gradients, state=state)
    give(browser, "sharding", ranks=ranks, microbatches=microbatches, bucket=1000 * gradients)

    def size(value):
        return weights if isinstance(value, Parameters) else gradients

    sizes = Sizes(parameters=weights, gradients=gradients, optimizer=state, activations=0)
    costs = mp.Costs(bytes_per_value=size, seconds_per_byte=0.1, sizes=sizes)
    programs = [
        mp.schedules.ddp(layers, layers, ranks),
        mp.schedules.zero(1, layers, ranks, microbatches),
        mp.schedules.zero(2, layers, ranks, microbatches),
    ]
    for level, program in enumerate(programs):
        trace = mp.simulate(program, costs)
        assert result(browser, "sharding", f"sent{level}") == pytest.approx(max(trace.bytes_sent))
        if ranks > 1:  # a rank that is alone keeps its gradients whole, and needs no buckets beside them
            assert result(browser, "sharding", f"held{level}") == pytest.approx(max(trace.peak_memory))


def test_the_sharding_calculator_agrees_with_its_page(browser, site):
    browser.open(site / "sharding" / "01_what_a_rank_holds.html")
    held = [result(browser, "sharding", f"held{level}") for level in range(4)]
    assert held == pytest.approx([160, 90, 55.05, 20])
    assert "Data parallelism 160 GB, ZeRO-1 90 GB, ZeRO-2 55 GB, ZeRO-3 20 GB" in words(browser, "sharding")
    assert "ZeRO-3 fits into 24 GB, before any activations." in words(browser, "sharding")
    give(browser, "sharding", ranks=64, device=40)
    assert "None fits" not in words(browser, "sharding")
    give(browser, "sharding", ranks=0)
    assert words(browser, "sharding") == "Ranks (p): give a number that is at least 1."


def test_formulas_stand_beside_the_calculators(browser, site):
    for page, name in (
        ("pipeline/01_memory_wall.html", "memory"),
        ("data_parallel/02_data_wall.html", "data"),
        ("sharding/01_what_a_rank_holds.html", "sharding"),
    ):
        browser.open(site / page)
        assert browser.value(f"{calculator(browser, name)}.querySelectorAll('.calculator-formulas li').length") >= 4


def test_copying_a_console_gives_its_commands_alone(browser, site):
    browser.open(site / "index.html")
    copied = browser.value("document.querySelector('.console').dataset.copy")
    assert copied == "microparallel train --ranks 2 --steps 40 --out runs/first"
    assert browser.value("document.querySelectorAll('.console .md-clipboard, .console .md-code__button').length") >= 1


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_both_palettes(browser, site, dark):
    # Before any script of the page's own: each page writes down the palette that it begins with.
    forgets = browser.call("Page.addScriptToEvaluateOnNewDocument", source="localStorage.clear()")
    browser.open(site / "outline.html", dark=dark)
    scheme = browser.value("document.body.dataset.mdColorScheme")
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **forgets)
    assert scheme == ("slate" if dark else "default")


def test_pages_to_step_through_are_as_high_as_what_they_show(browser, site):
    pages = [page for page in PAGES if 'class="stepped"' in (site / page).read_text()]
    assert pages, "no lesson has a page to step through"
    browser.open(site / pages[0])
    browser.value("document.querySelector('iframe.stepped').scrollIntoView()")
    fits = """((frame) => frame.contentDocument?.body?.childElementCount > 2
        && frame.clientHeight >= frame.contentDocument.documentElement.scrollHeight)(
        document.querySelector('iframe.stepped'))"""
    browser.until(fits)
