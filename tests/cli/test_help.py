"""Help is there at once: neither torch nor another verb is imported for it."""

import subprocess
import sys

import pytest
import typer

from microparallel.cli.app import VERBS, Verbs, app, load

HELPS = [
    [],
    *([verb] for verb in ("train", "compare", "analyze", "report", "why", "draw", "simulate", "verify", "doctor")),
    *([verb] for verb in ("chaos", "checkpoints", "learn", "studio")),
    *(["learn", verb] for verb in ("init", "list", "check", "hint", "reset", "solution")),
    ["bench", "allreduce"],
    ["bench", "dp"],
    ["bench", "pp"],
    ["bench", "predict"],
]


@pytest.mark.parametrize("verb", HELPS, ids=lambda verb: " ".join(verb) or "main")
def test_help_shows_an_example(microparallel, verb):
    result = microparallel(*verb, "--help")
    assert result.returncode == 0
    assert "microparallel train --ranks 4" in result.stdout or "Examples" in result.stdout


def test_no_help_imports_torch():
    """One process asks for all of it, one after the other."""
    program = (
        "import sys\n"
        "from microparallel.cli import main\n"
        f"for verb in {HELPS!r}:\n"
        "    sys.argv = ['microparallel', *verb, '--help']\n"
        "    try: main()\n"
        "    except SystemExit as ended: print(verb, 'ended with', ended.code, 'torch' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    for verb in HELPS:
        assert f"{verb} ended with 0 False" in result.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["trian"]], ids=" ".join)
def test_a_verb_is_imported_only_when_it_is_called(arguments):
    """What takes time is to import: the verbs bring the whole pure half, pages and figures with them."""
    program = (
        "import sys\n"
        "from microparallel.cli import main\n"
        f"sys.argv = ['microparallel', *{arguments!r}]\n"
        "try: main()\n"
        "finally: print(*sys.modules, file=sys.stderr)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    imported = result.stderr.split()
    ours = {name for name in imported if name.startswith("microparallel.") and "topology" not in name}
    page = {"microparallel.cli.front_page"} if arguments == ["--help"] else set()
    assert (
        ours
        == {"microparallel.cli", "microparallel.cli.app", "microparallel.errors", "microparallel.broken_pipe"} | page
    )
    assert not {"torch", "numpy", "typer.rich_utils", "rich.markdown", "rich.traceback"} & set(imported)


@pytest.mark.parametrize("width", ["60", "80", "200"])
def test_the_first_page_looks_as_typer_would_show_it(microparallel, monkeypatch, capfd, width):
    ours = microparallel("--help", COLUMNS=width).stdout
    group = typer.main.get_group(app)
    monkeypatch.delattr(Verbs, "format_help")
    typer.echo(group.get_help(group.make_context("microparallel", [], resilient_parsing=True)))
    assert ours == capfd.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_a_verbs_line_in_the_list_is_the_first_of_its_own_help(verb):
    assert VERBS[verb] == " ".join(load(verb).help.split("\n\n")[0].split())


def test_every_verb_has_a_line_in_the_list(microparallel):
    listed = microparallel("--help", COLUMNS=200).stdout
    for verb, line in VERBS.items():
        assert any(row.split()[1:2] == [verb] and line in row for row in listed.splitlines())


def test_a_mistyped_verb_is_told_which_one_was_meant(microparallel):
    result = microparallel("trian")
    assert (result.returncode, result.stdout) == (2, "")
    assert "No such command 'trian'. Did you mean 'train'?" in result.stderr


@pytest.mark.parametrize(("typed", "offered"), [("", [*VERBS]), ("dr", ["draw"]), ("--v", ["--version"])])
def test_verbs_can_be_completed(typed, offered):
    command = typer.main.get_command(app)
    context = command.make_context("microparallel", ["draw"])
    assert [item.value for item in command.shell_complete(context, typed)] == offered


def test_the_package_itself_is_quick_to_import():
    program = (
        "import sys, microparallel\n"
        "print('torch' in sys.modules, hasattr(microparallel, 'launch'), 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.split() == ["False", "True", "True"]


def test_version():
    result = subprocess.run(
        [sys.executable, "-m", "microparallel", "--version"], capture_output=True, text=True, timeout=30, check=True
    )
    assert result.stdout.startswith("microparallel 0.")
