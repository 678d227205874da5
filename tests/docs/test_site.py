"""The site builds without a warning, and holds all that it should."""

import html
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import cards
import consoles
import hook
import pages
import pytest
from mkdocs.exceptions import PluginError

import microparallel as mp

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TRACKS = (
    *("data_parallel", "pipeline", "sharding", "fewer_bytes", "surviving", "one_gpu", "real_machines", "capstones"),
    "seeing",
)
LESSONS = sorted(lesson for track in TRACKS for lesson in DOCS.glob(f"{track}/*.md"))
ATTEMPT_FIRST = ["Predict", "What you need", "Attempt", "Reveal", "Run it", "Try", "What goes wrong", "Quiz"]
PARTS_OF = dict.fromkeys(TRACKS, ATTEMPT_FIRST) | {
    "capstones": [
        "What you need",
        "The contract",
        "How it is judged",
        "Milestones",
        "What goes wrong",
        "The answer",
        "Quiz",
    ],
}


@pytest.mark.timeout(150)
def test_it_builds_without_a_warning(built):
    _, result = built
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr, result.stderr


def test_every_page_is_there_and_loads_nothing_from_elsewhere(site):
    sources = [path.relative_to(DOCS).with_suffix(".html") for path in DOCS.rglob("*.md")]
    for source in sources:
        text = (site / source).read_text()
        elsewhere = re.findall(r"<(?:script|img|link|iframe)\b[^>]*?(?:src|href)=\"(https?:[^\"]+)", text)
        assert not elsewhere, f"{source}: {elsewhere}"
    assert len(sources) > 35


def test_links_between_pages_lead_somewhere(site):
    """Also those that were written as HTML, which MkDocs does not look at."""
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', path.read_text())) for path in site.rglob("*.html")}
    broken = []
    for path in anchors:
        for target in re.findall(r'<a\b[^>]*?\bhref="([^"]*)"', path.read_text()):
            file, _, anchor = html.unescape(target).partition("#")
            if re.match(r"[a-z]+:", file) or path.name == "404.html":
                continue
            page = (path.parent / file).resolve() if file else path
            unknown = anchor not in ("", "__top") and page in anchors and anchor not in anchors[page]
            if not page.is_file() or unknown:
                broken.append(f"{path.name}: {target}")
    assert not broken


def test_no_page_shows_the_marks_of_markdown(site):
    """Such as a backslash in a title, and no number at the beginning of an item is taken for a list."""
    made = re.compile(r"<(script|style|pre|code|math|svg)\b.*?</\1>", re.DOTALL)
    shown = {}
    for path in DOCS.rglob("*.md"):
        page = site / path.relative_to(DOCS).with_suffix(".html")
        article = page.read_text().split("<article", 1)[1].split("</article>", 1)[0]
        text = html.unescape(re.sub(r"<[^>]+>", "", made.sub("", article)))
        if marks := re.findall(r".*(?:\\[\"'()\[\]*_`]|\*\*|\]\(|\?\?\? |!!! |```).*|(?m:^ *\|.*\| *$)", text):
            shown[page.name] = marks
        assert not re.search(r"<li>\s*<[ou]l", article), f"{page.name}: a number that became a list"
    assert shown == {}


def test_a_card_says_what_its_lines_are():
    """On a phone, where no headings stand above them."""
    table = "<table><tr><th></th><th>a <code>b</code></th></tr><tr><td>x</td><td style>y</td></tr></table>"
    assert cards.with_labels(table) == table
    labelled = cards.with_labels(f'<div class="cards">{table}</div>')
    assert '<tr><td>x</td><td data-label="a b" style>y</td></tr>' in labelled


def test_no_line_ends_within_a_flag_of_a_sentence():
    code = "<code>a-b -m c --slow-link 2-3=1</code>"
    said = hook.with_whole_flags(f"<p>{code}</p><pre><span></span>{code}</pre>")
    assert '<code>a-b <span class="flag">-m</span> c <span class="flag">--slow-link</span> 2-3=1</code>' in said
    assert said.endswith(f"<pre><span></span>{code}</pre>")


def test_a_sentence_may_be_broken_where_it_is_printed_and_a_row_may_not():
    sentence, row = "  rank 0 waits for rank 1 in a < b and went away", "rank 0 waits for  all of the ranks in a world"
    assert consoles.printed(f"rank < 1\n{sentence}\n{row}\n{row.replace('  ', ' │ ')}") == (
        f'<span class="printed">rank &lt; 1\n<span class="sentence">{sentence.replace("<", "&lt;")}</span>\n'
        f"{row}\n{row.replace('  ', ' │ ')}</span>"
    )


def page_at(path):
    return SimpleNamespace(file=SimpleNamespace(abs_src_path=str(path)))


@pytest.mark.parametrize(
    ("fence", "complaint"),
    [
        ("```draw\n1f1bb --ranks 4\n```", r"'1f1bb' is no program"),
        ("```draw\n1f1b --rnks 4\n```", r"No such option: --rnks"),
        ("```step\n```", r"nothing to draw"),
        ("```include\nsrc/microparallel/collectives/ring.py::square_all_reduce\n```", r"has no square_all_reduce"),
        ("```include\nsrc/microparallel/nowhere.py\n```", r"give one file below"),
        ("```run\nmicroparallel doctor\n```", r"begins with `\$ ` and a command"),
        ("```plot\nx: step\n```", r"draws the output block above it, and there is none"),
    ],
)
def test_a_fence_that_cannot_be_made_ends_the_build(fence, complaint, tmp_path):
    page = tmp_path / "try_me.md"
    page.write_text(f"# Title\n\n{fence}\n")
    with pytest.raises(PluginError, match=rf"try_me\.md:3: .*{complaint}"):
        hook.on_page_markdown(page.read_text(), page_at(page))


def test_every_public_name_has_its_docstring_in_the_reference():
    text = "\n".join(path.read_text() for path in (DOCS / "reference" / "api").glob("*.md"))
    listed = re.findall(r"^::: mp\.([\w.]+)$", text, re.MULTILINE)
    one_by_one = ("analyze", "course", "errors")  # the page of another module lists its names itself
    names = set(mp.__all__).difference(one_by_one)
    names |= {f"{module}.{name}" for module in one_by_one for name in getattr(mp, module).__all__}
    assert sorted(listed) == sorted(names)


def test_the_reference_shows_what_docstrings_say(site):
    text = (site / "reference" / "api" / "launching.html").read_text()
    for expected in ('id="mp.launch"', "in rank order", 'id="mp.Comms"', "reduce_scatter", "world_size"):
        assert expected in text


def test_every_verb_and_flag_is_in_the_reference(site):
    from typer.main import get_command

    from microparallel.cli.app import app

    text = html.unescape(re.sub(r"<[^>]+>", "", (site / "reference" / "cli.html").read_text()))
    verbs = dict(get_command(app).commands)
    while verbs:
        name, verb = verbs.popitem()
        assert f"microparallel {name}" in text
        verbs |= {f"{name} {child}": one for child, one in getattr(verb, "commands", {}).items()}
        for parameter in getattr(verb, "params", []):
            assert all(flag in text for flag in parameter.opts if flag.startswith("--") and flag != "--help"), name


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_lesson_has_its_parts(lesson):
    text = lesson.read_text()
    fenced = "\n".join(block.text for block in pages.blocks_of(lesson))
    headings = [line for line in re.findall(r"^## (.+)$", text, re.MULTILINE) if f"## {line}" not in fenced]
    parts = PARTS_OF[lesson.parent.name]
    assert headings == parts
    assert "question" in text.split(f"## {parts[0]}")[0]
    assert 3 <= len(re.findall(r"^\?\?\? question", text, re.MULTILINE)) <= 6
    kinds = {block.kind for block in pages.blocks_of(lesson)}
    assert kinds & {"draw", "step"}
    assert kinds & {"include", "python"}
    if "Predict" in parts:  # a place for the guess, and what is right is folded away
        guess = text.split("## Predict")[1].split("\n## ")[0]
        assert 'class="guess"' in guess
        assert '??? success "Compare your predictions"' in guess
        assert '??? success "The answer: ' in text.split("\n## Reveal")[1].split("\n## Run it")[0]
        tried = text.split("\n## Try\n")[1].split("\n## ")[0]
        assert len(re.findall(r"^- ", tried, re.MULTILINE)) == len(re.findall(r"^\?\?\? note", tried, re.MULTILINE)) > 0


def test_a_solution_is_shown_without_the_marks_of_its_hole():
    path = "exercises/solutions/data_parallel/01_manual_averaging.py"
    shown = re.sub(r"<[^>]+>", "", hook.sources.included(f"{path}::average_gradients"))
    assert "total" in shown
    assert "hole" not in shown
    assert "NotImplementedError" not in shown


def test_the_outline_names_every_lesson_and_the_glossary_links_every_word():
    outline = (DOCS / "outline.md").read_text()
    for lesson in LESSONS:
        assert f"({lesson.relative_to(DOCS)})" in outline
    glossary = (DOCS / "reference" / "glossary.md").read_text()
    meanings = re.findall(r"^:   (.+)$", glossary, re.MULTILINE)
    assert len(meanings) > 40
    for meaning in meanings:
        assert re.search(r"\. \[[^\]]+\]\([^)]+\)$", meaning), meaning


def test_make_installs_what_the_site_needs():
    makefile = (ROOT / "Makefile").read_text()
    tools = re.search(r"^DOCS_TOOLS := (.*)$", makefile, re.MULTILINE).group(1).split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert tools == project["dependency-groups"]["docs"]


def test_everything_the_site_needs_is_pinned():
    from importlib.metadata import PackageNotFoundError, requires

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    known = {re.sub("[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if "==" in line}
    names, seen = ["mkdocs", "mkdocs-material", "mkdocstrings", "mkdocstrings-python"], set()
    while names:
        name = re.sub("[-_.]+", "-", re.match(r"[\w.-]+", names.pop()).group()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue  # needed elsewhere: another system, another Python
        assert name in known, f"{name} is not in constraints.txt"
        names += [requirement for requirement in needed if "extra ==" not in requirement]


def test_blocks_has_help():
    command = [sys.executable, ROOT / "docs" / "tools" / "blocks.py", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "--write" in result.stdout
