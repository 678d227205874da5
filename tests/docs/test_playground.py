"""The playground and the puzzles in a real browser, served by the studio."""

import json
import random
import re

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.playground import Move, all_levels, answer, showing
from microparallel.playground.levels import solved
from microparallel.program import to_text

pytestmark = pytest.mark.timeout(240)  # the first of these tests builds the site
LEVELS = all_levels()
PAGE, PUZZLES = "site/playground/index.html", "site/playground/puzzles.html"
HEAD = "program mine\ngoal: training step of 2 stages, 1 micro-batch\n"


def side(number=0):
    return f"document.querySelectorAll('.pg-side')[{number}]"


def looked(visitor, number=0):
    visitor.until(f"{side(number)}?.dataset.looks")


def write(visitor, text):
    """Put a text into the editor, as pasting does, and wait until it was looked at."""
    before = int(visitor.value(f"{side()}.dataset.looks"))
    visitor.value(f"{side()}.querySelector('.cm-content').focus()")
    visitor.key("a", "KeyA", 65, modifiers=2)
    visitor.call("Input.insertText", text=text)
    visitor.until(f"Number({side()}.dataset.looks) > {before}")
    return visitor.value(f"{side()}.querySelector('.pg-verdict').textContent")


def underlined(visitor):
    return visitor.value(f"[...{side()}.querySelectorAll('.cm-lintRange-error')].map((one) => one.textContent)")


def test_a_program_is_judged_drawn_and_measured_while_it_is_written(visitor):
    visitor.open(PAGE)
    looked(visitor)
    assert visitor.value(f"{side()}.querySelectorAll('.cell').length") == 64  # 1F1B, 4 ranks, 8 micro-batches
    assert "makespan33" in visitor.value(f"{side()}.querySelector('.pg-numbers').textContent")
    assert "needs G0.0" in write(visitor, HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0\n")
    visitor.until(f"{side()}.querySelector('.cm-lintRange-error')")
    assert underlined(visitor) == ["B0.0"]
    assert write(visitor, HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n").startswith("Right: mine")
    assert underlined(visitor) == []
    assert visitor.value(f"{side()}.querySelectorAll('.cell').length") == 4
    visitor.value("location.hash = ''")
    assert visitor.complaints == []
    assert all(url.startswith((visitor.base, "data:")) for url in visitor.asked)
    assert any(url.endswith("pyodide.asm.wasm") for url in visitor.asked)  # workers are seen, too


def level(visitor, name):
    visitor.value(f"location.hash = {name!r}")
    visitor.until(f"document.querySelector('.puzzles').dataset.level === {name!r}")
    count = "document.querySelector('.puzzles').dataset.moves"
    if visitor.value(count) != "0":
        visitor.value(
            "[...document.querySelectorAll('.pz button')].find((b) => b.textContent === 'Start again').click()"
        )
        visitor.until(f"{count} === '0'")


def play(visitor, text):
    """Make a move by the buttons that a person would press; what the page says then."""
    before = visitor.value("document.querySelector('.puzzles').dataset.moves")
    visitor.value("document.querySelector('.pz-said').className = 'pz-said'")
    move = Move(text).sending
    if move is None:
        visitor.value(f"document.querySelector('[data-move=\"' + CSS.escape({text!r}) + '\"]').click()")
    else:
        sender, to, adds, value = move
        start, _, stop = value[1:].partition(":")
        way = "add" if adds else "replace"
        how = f"""(() => {{ const way = document.querySelector('.pz-board select');
            if (way) {{ way.value = {way!r}; way.dispatchEvent(new Event('change')); }} }})()"""
        chosen = "document.querySelector('.pz-slice[aria-pressed=true]')"
        if visitor.value(f"{chosen} !== null"):  # of a move that was refused
            visitor.value(f"{chosen}.click()")
        for index in range(int(start), int(stop or int(start) + 1)):
            visitor.value(f"document.querySelector('[data-slice=\"{sender}.{index}\"]').click()")
        visitor.value(how)
        visitor.value(f"document.querySelector('[data-send=\"{to}\"]').click()")
    moved = f"document.querySelector('.puzzles').dataset.moves !== {before!r}"
    visitor.until(f"{moved} || document.querySelector('.pz-said.is-refused')")
    return visitor.value("document.querySelector('.puzzles').dataset.said")


def solve(visitor, name):
    level(visitor, name)
    for move in solved()[name]["best"]["moves"]:
        play(visitor, move)
    most = showing.most_stars(LEVELS[name])
    assert visitor.value("document.querySelector('.pz-done .pz-stars').textContent") == "★" * most


def test_a_puzzle_is_solved_kept_and_refuses_what_is_wrong(visitor):
    visitor.open(PUZZLES)
    visitor.until("document.querySelector('.puzzles').dataset.shown === 'list'")
    solve(visitor, "two-stages")
    level(visitor, "two-stages")
    assert "(A0.0). Place F0.0 on rank 0 first." in play(visitor, "1:F1.0")
    visitor.open(PUZZLES)
    visitor.until("document.querySelector('.puzzles').dataset.shown === 'list'")
    assert "★★★" in visitor.value("document.querySelector('[data-level=two-stages]').textContent")
    assert visitor.complaints == []


NO_PYTHON = "window.Worker = class extends EventTarget { postMessage() {} terminate() {} };"


def test_the_list_of_puzzles_does_not_wait_for_python(visitor):
    script = visitor.call("Page.addScriptToEvaluateOnNewDocument", source=NO_PYTHON)["identifier"]
    try:
        visitor.open(PUZZLES)
        visitor.until("document.querySelector('.puzzles').dataset.shown === 'list'")
        assert visitor.value("document.querySelectorAll('.pz-list button').length") == len(LEVELS)
        order = visitor.value("[...document.querySelector('.puzzles').children].map((one) => one.className)")
        assert order.index("pg-status") < order.index("pg pz")
        assert visitor.value("document.querySelector('.puzzles .pg-status').textContent") == "Loading Python …"
    finally:
        visitor.call("Page.removeScriptToEvaluateOnNewDocument", identifier=script)


def test_a_board_is_found_again_as_it_was_left(visitor):
    visitor.open(PUZZLES)
    level(visitor, "two-micro-batches")
    assert visitor.value("document.querySelector('.pz-about').open")  # it is read for the first time
    play(visitor, "0:F0.0")
    play(visitor, "0:F0.1")
    lesson = "document.querySelector('.pz-about a')"
    assert visitor.value(f"[{lesson}.target, {lesson}.rel]") == ["_blank", "noopener"]
    visitor.open(f"{PUZZLES}#two-micro-batches")
    moves = "document.querySelector('.puzzles').dataset.moves"
    visitor.until(f"{moves} === '2'")
    assert visitor.value("document.querySelectorAll('.pz-strip')[0].textContent") == "F0.0F0.1"
    assert not visitor.value("document.querySelector('.pz-about').open")
    visitor.value("document.querySelector('[data-do=again]').click()")
    visitor.until(f"{moves} === '0'")
    visitor.open(f"{PUZZLES}#two-micro-batches")
    visitor.until(f"{moves} === '0'")
    visitor.value("localStorage.setItem('microparallel-puzzles-boards', JSON.stringify({ 'two-stages': ['0:B0.0'] }))")
    visitor.open(f"{PUZZLES}#two-stages")  # what was kept is no board any more
    visitor.until("document.querySelector('.puzzles').dataset.level === 'two-stages'")
    assert visitor.value(moves) == "0"
    assert visitor.complaints == []


def test_each_move_is_told_and_the_end_takes_the_focus(visitor):
    visitor.open(PUZZLES)
    level(visitor, "two-ranks")
    visitor.value("document.querySelector('[data-slice=\"0.0\"]').click()")
    label = "document.querySelector('[data-send]').getAttribute('aria-label')"
    assert visitor.value(label) == "send C0 of rank 0 to rank 1"
    visitor.value("document.querySelector('[data-send]').click()")
    heard = "document.querySelector('.pz-heard[role=status]').textContent"
    visitor.until(f"{heard} === 'Rank 0 sends rank 1 its C0, to be added there.'")
    play(visitor, "1>0:+C0")
    assert visitor.value("document.activeElement.textContent") == "Solved: 3 of 3 stars."
    assert visitor.value("document.querySelector('.pz-done pre').textContent").startswith("import torch")
    assert visitor.value("getComputedStyle(document.querySelector('.md-top')).display") == "none"
    assert visitor.complaints == []


def test_a_hint_says_more_each_time_it_is_asked_for(visitor):
    visitor.open(PUZZLES)
    level(visitor, "two-stages")
    said = "document.querySelector('.puzzles').dataset.said"
    told = []
    for _ in range(3):
        before = visitor.value(said)
        visitor.value("document.querySelector('[data-do=hint]').click()")
        visitor.until(f"{said} !== {json.dumps(before)}")
        told.append(visitor.value(said).partition(" (Press")[0])
    assert told == [
        LEVELS["two-stages"].hint,
        "In the solution that is known, a forward on rank 0 comes next.",
        "Next: place the forward of stage 0, micro-batch 0 (F0.0) on rank 0.",
    ]
    assert visitor.value("document.querySelector('.pz-chip.is-new').textContent") == "F0.0"


def test_on_a_phone_what_is_said_stays_in_sight_and_four_ranks_stand_two_by_two(visitor):
    visitor.open(f"{PUZZLES}#six-hops", width=390, height=500, touch=True)
    visitor.until("document.querySelector('.puzzles').dataset.level === 'six-hops'")
    boxes = "[...document.querySelectorAll('.pz-rank')].map((one) => one.getBoundingClientRect())"
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = visitor.value(f"{boxes}.map((box) => [box.x, box.y])")
    assert x0 == x2 < x1 == x3
    assert y0 == y1 < y2 == y3
    visitor.value("document.querySelectorAll('.pz-rank')[2].scrollIntoView({ block: 'start' })")
    box = "document.querySelector('.pz-said').getBoundingClientRect()"
    assert 0 <= visitor.value(f"{box}.top") < visitor.value(f"{box}.bottom") <= 170


def test_opened_from_a_disk_the_pages_say_how_to_open_them(browser, site):
    for page in ("playground/index.html", "playground/puzzles.html"):
        browser.open(site / page)
        browser.until("!!document.querySelector('.pg-missing')")
        assert "microparallel studio" in browser.value("document.querySelector('.pg-missing').textContent")
        assert browser.complaints == []


# ── all of it: slow ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def puzzles(visitor):
    visitor.open(PUZZLES)
    visitor.until("document.querySelector('.puzzles').dataset.shown === 'list'")
    return visitor


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", LEVELS)
def test_every_level_is_solved_and_refuses_its_wrong_moves(puzzles, name):
    solve(puzzles, name)
    for wrong in LEVELS[name].wrong:
        moves, _, words = wrong.partition(" | ")
        *before, last = moves.split()
        if last not in offered(name, before):
            continue  # the page has no button for it
        level(puzzles, name)
        for move in before:
            play(puzzles, move)
        assert words in play(puzzles, last)
    assert puzzles.complaints == []


def offered(name, moves):
    """The moves for which the page has buttons: all messages, and what is left in the trays."""
    if LEVELS[name].kind == "messages":
        return {move for wrong in LEVELS[name].wrong for move in wrong.partition(" | ")[0].split()}
    board = json.loads(answer(json.dumps({"ask": "open", "level": name, "moves": moves})))["answer"]
    return {f"{which}:{one['op']}" for which, row in enumerate(board["rows"]) for one in row["left"]}


ASK = "import('/site/javascripts/playground/python.js').then(({{ python }}) => python().ask({question}))"


def mutated(dice):
    """A program of a builder in which a few operations have changed their places, or are gone."""
    name, ranks = dice.choice(["1f1b", "gpipe", "zbv", "interleaved", "zb-h1"]), dice.randint(1, 4)
    program = mp.schedules.build(name, ranks, dice.randint(1, 4))
    if dice.random() < 0.4:
        program = mp.collectives.build(dice.choice(["ring", "tree", "direct", "all-gather"]), dice.randint(1, 5))
    lines = to_text(program).splitlines()
    for _ in range(dice.randint(0, 3)):
        at = dice.randrange(2, len(lines))
        head, _, ops = lines[at].partition(": ")
        words = ops.split()
        if words:
            word = words.pop(dice.randrange(len(words)))
            if dice.random() < 0.7:
                words.insert(dice.randint(0, len(words)), word)
        lines[at] = f"{head}: {' '.join(words)}"
    return "\n".join(lines) + "\n"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_python_in_the_browser_says_what_python_says_here(visitor):
    visitor.open(PAGE)
    looked(visitor)

    def same(question):
        here = json.loads(answer(json.dumps(question)))
        there = visitor.promise(ASK.format(question=json.dumps(question)))
        assert there == here["answer"]

    dice = random.Random(7)
    for _ in range(25):
        same({"ask": "look", "text": mutated(dice), "costs": {"latency": 0.5}})

    words = st.sampled_from(
        ["F0.0", "B0.0", "F1.0", "B1.0", "I1.0", "W1.0", ">A0.0@1", "<A0.0@0", "!A0.0", "S", "=", "Q"]
    )
    texts = st.lists(st.lists(words, max_size=5), min_size=1, max_size=3)

    @given(texts)
    @settings(max_examples=30, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
    def any_text(ranks):
        same({"ask": "look", "text": HEAD + "".join(f"rank {n}: {' '.join(ops)}\n" for n, ops in enumerate(ranks))})

    any_text()
    for name, known in solved().items():
        same({"ask": "open", "level": name, "moves": known["best"]["moves"]})


EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>'


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_nothing_a_text_contains_is_run(visitor):
    visitor.open(PAGE)
    looked(visitor)
    for text in (
        f"program {EVIL}\ngoal: training step of 1 stage, 1 micro-batch\nrank 0: F0.0 B0.0\n",
        f"program x\ngoal: {EVIL}\nrank 0: F0.0\n",
        HEAD + f"rank 0: {EVIL.replace(' ', '')}\n",
        f"program {EVIL}\ngoal: all-reduce of 1 slice\nrank 0: >C0@1 <+C0@1\nrank 1: >C0@0 <+C0@0\n",
    ):
        write(visitor, text)
        assert visitor.value("window.evil") is None
        assert visitor.value("document.querySelectorAll('.pg img, .pg script').length") == 0
    markup = """<svg onload="window.evil=1"><a href="javascript:window.evil=1"><text>x</text></a>
        <rect style="fill:url(http://elsewhere/x)" onclick="window.evil=1"></rect><image href="http://elsewhere/x"></image>
        <foreignObject><iframe srcdoc="x"></iframe></foreignObject></svg><img src=x onerror="window.evil=1">"""
    made = visitor.promise(
        "import('/site/javascripts/playground/drawing.js').then(({ safe }) => {"
        " const box = document.createElement('div');"
        f" box.append(...safe({json.dumps(markup)})); document.body.append(box); return box.innerHTML; }})"
    )
    assert not re.search(r"on\w+=|javascript:|elsewhere|iframe|<img|image", made), made
    assert visitor.value("window.evil") is None
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_address_holds_two_programs_and_their_costs_and_a_wrong_one_is_refused(visitor):
    visitor.open(PAGE)
    looked(visitor)
    visitor.value(
        "[...document.querySelectorAll('.pg button')].find((b) => b.textContent.startsWith('Compare')).click()"
    )
    looked(visitor, 1)
    write(visitor, HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n")
    visitor.until("location.hash.startsWith('#p=')")
    time = "document.querySelector('.pg-costs input')"
    visitor.value(f"{time}.value = 3; {time}.dispatchEvent(new Event('input'))")
    before = visitor.value("location.hash")
    visitor.until(f"location.hash !== {before!r}")
    fragment = visitor.value("location.hash")
    visitor.open(PAGE + fragment)
    looked(visitor, 1)
    assert "program mine" in visitor.value(f"{side()}.querySelector('.cm-content').textContent")
    assert visitor.value("document.querySelector('.pg-costs input').value") == "3"
    assert visitor.value(f"{side(1)}.querySelector('select').value") == "pipelines/gpipe"
    for wrong in ("#p=AAAA", "#p=" + "A" * 5000, fragment[:-20]):
        visitor.open(PAGE + wrong)
        looked(visitor)
        assert "could not be read" in visitor.value("document.querySelector('.pg > .pg-status').textContent")
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "page", [PAGE, *(f"{PUZZLES}#{name}" for name in ("gpipe", "six-hops", "overlap", "prefetch"))]
)
def test_a_phone_shows_all_of_it(visitor, page):
    visitor.open(page, width=390, height=844, touch=True)
    visitor.until(f"{side()}?.dataset.looks || document.querySelector('.puzzles')?.dataset.level")
    assert visitor.value("document.documentElement.scrollWidth") <= 390
    small = """[...document.querySelectorAll('.pg button, .pg select, .pg summary')]
        .filter((one) => one.offsetParent !== null).filter((one) => one.getBoundingClientRect().height < 24).length"""
    assert visitor.value(small) == 0
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_puzzle_is_solved_with_the_keyboard_alone(visitor):
    visitor.open(f"{PUZZLES}#two-stages")
    level(visitor, "two-stages")
    label = "document.activeElement.getAttribute('aria-label')"
    for op in ("F0.0", "F1.0", "B1.0", "B0.0"):
        for _ in range(60):
            if str(visitor.value(label)).startswith(f"place {op},"):
                break
            visitor.key("Tab", number=9)
        moves = visitor.value("document.querySelector('.puzzles').dataset.moves")
        visitor.key("Enter", number=13, text="\r")
        visitor.until(f"document.querySelector('.puzzles').dataset.moves !== {moves!r}")
        visitor.value("document.activeElement.blur()")
    assert visitor.value("document.querySelector('.pz-done .pz-stars').getAttribute('aria-label')") == "3 of 3 stars"
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_operation_is_dragged_to_its_place_and_taken_away(visitor):
    visitor.open(f"{PUZZLES}#two-micro-batches")
    level(visitor, "two-micro-batches")

    def drag(move, x):
        """From the tray to the first list, to this share of its width."""
        spots = f"""[document.querySelector('[data-move="{move}"]'), document.querySelector('.pz-strip')]
            .map((one) => one.getBoundingClientRect()).map((box) => [box.x, box.y, box.width, box.height])"""
        visitor.value("document.querySelector('.pz-board').scrollIntoView({ block: 'center' })")
        (fx, fy, fw, fh), (tx, ty, tw, th) = visitor.value(spots)
        start, end = (fx + fw / 2, fy + fh / 2), (tx + tw * x, ty + th / 2)
        count = visitor.value("document.querySelector('.puzzles').dataset.moves")
        visitor.mouse("Pressed", *start, button="left", clickCount=1)
        visitor.mouse("Moved", *((a + b) / 2 for a, b in zip(start, end, strict=True)), button="left", buttons=1)
        visitor.mouse("Moved", *end, button="left", buttons=1)
        visitor.mouse("Released", *end, button="left", clickCount=1)
        visitor.until(f"document.querySelector('.puzzles').dataset.moves !== {count!r}")
        return visitor.value("[...document.querySelectorAll('.pz-strip')][0].textContent")

    assert drag("0:F0.1", 0.5) == "F0.1"
    assert drag("0:F0.0", 0.02) == "F0.0F0.1"  # before what stands there
    visitor.value("document.querySelectorAll('.pz-strip [data-at]')[1].focus()")
    visitor.key("Delete", number=46)
    visitor.until("document.querySelector('.puzzles').dataset.moves === '3'")
    assert visitor.value("[...document.querySelectorAll('.pz-strip')][0].textContent") == "F0.0"
    visitor.key("z", "KeyZ", 90, modifiers=2)
    visitor.until("document.querySelector('.puzzles').dataset.moves === '2'")
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_editor_and_the_drawing_need_no_mouse_and_every_control_has_a_name(visitor):
    visitor.open(PAGE)
    looked(visitor)
    nameless = """[...document.querySelectorAll('.pg button, .pg input, .pg select, .pg [role=textbox], .pg summary')]
        .filter((one) => !(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length))
        .map((one) => one.outerHTML)"""
    assert visitor.value(nameless) == []
    visitor.value(f"{side()}.querySelector('.cm-content').focus()")
    visitor.key("Tab", number=9)
    assert not visitor.value("document.activeElement.closest('.cm-editor')")  # Tab leads out again
    visitor.value(f"{side()}.querySelector('.cell[tabindex=\"0\"]').focus()")
    visitor.key("ArrowRight", number=39)
    visitor.key("ArrowDown", number=40)
    assert visitor.value(f"{side()}.querySelector('.pg-details').textContent").startswith("F")
    assert "rank 1" in visitor.value("document.activeElement.getAttribute('aria-label')")


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_lesson_s_panel_opens_when_it_is_asked_for(visitor):
    visitor.open("site/pipeline/06_1f1b.html")
    assert not any("pyodide" in url for url in visitor.asked)
    visitor.value("document.querySelector('.pg-open').click()")
    looked(visitor)
    assert visitor.value(f"{side()}.querySelectorAll('.cell').length") == 64
    assert visitor.complaints == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_progress_goes_into_a_file_and_comes_back_judged(visitor):
    visitor.open(PUZZLES)
    visitor.until("document.querySelector('.puzzles').dataset.shown === 'list'")
    best = solved()["gpipe"]["best"]["moves"]
    load = """Promise.all(['progress', 'python'].map((name) => import(`/site/javascripts/playground/${{name}}.js`)))
        .then(async ([{{ Progress }}, {{ python }}]) => {{
            const mine = new Progress(python(), await python().ask({{ ask: 'levels' }}));
            mine.clear();
            const words = await mine.load({text}); return [words, mine.stars('gpipe'), mine.stars('overlap')]; }})"""
    honest = {"v": 1, "levels": {"gpipe": {"stars": 1, "moves": best}, "overlap": {"stars": 2, "moves": ["0:S"]}}}
    words, stars, none = visitor.promise(load.format(text=json.dumps(json.dumps(honest))))
    assert (stars, none) == (3, 0)
    assert words == "1 of 2 solutions taken, 1 do not solve their level."
    for wrong in ("", "[]", '{"v": 2}', EVIL):
        assert "holds no progress" in visitor.promise(load.format(text=json.dumps(wrong)))[0]
