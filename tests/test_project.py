"""The project's own files: what installs it, and what it promises in writing."""

import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_uv_and_pip_install_the_same_versions():
    assert PROJECT["tool"]["uv"]["constraint-dependencies"] == pins()
    assert "torch==2.13.0" in pins()


def test_make_installs_every_development_tool():
    makefile = (ROOT / "Makefile").read_text()
    tools = re.search(r"^DEV_TOOLS := (.*)$", makefile, re.MULTILINE).group(1).split()
    assert tools == PROJECT["dependency-groups"]["dev"]


def test_everything_that_is_installed_is_pinned():
    """Every requirement, and what those require in turn, as far as it is installed here."""
    from importlib.metadata import PackageNotFoundError, requires, version

    known = {re.sub("[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins()}
    open_names = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["dev"], "hatchling"]
    seen = set()
    while open_names:
        requirement = open_names.pop()
        name = re.sub("[-_.]+", "-", re.match(r"[\w.-]+", requirement).group()).lower()
        if name in seen or "extra ==" in requirement:
            continue
        seen.add(name)
        try:
            version(name)
        except PackageNotFoundError:
            continue  # needed elsewhere: another system, another Python
        assert name in known, f"{name} is not in constraints.txt"
        open_names += requires(name) or []


def python_blocks(file):
    return re.findall(r"^```python\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", python_blocks(ROOT / "README.md"), ids=lambda block: block.splitlines()[0])
def test_the_readme_s_python_runs(block, tmp_path, monkeypatch, quick_ranks, fresh):
    (tmp_path / "example.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    if fresh:
        subprocess.run([sys.executable, "example.py"], timeout=50, check=True)
    else:
        runpy.run_path("example.py", run_name="__main__")


def test_the_readme_s_commands_exist():
    """Every `microparallel VERB --flag` of the README is one that the command line knows."""
    from typer.main import get_command

    from microparallel.cli.app import app

    verbs = get_command(app).commands
    text = (ROOT / "README.md").read_text()
    commands = "\n".join(re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    calls = re.findall(r"microparallel (\w+)((?: +[^\s`|#]+)*)", commands)
    assert calls
    for verb, arguments in calls:
        assert verb in verbs
        command = verbs[verb]
        if hasattr(command, "commands"):  # as in `bench allreduce`
            command = command.commands[arguments.split()[0]]
        flags = {name for parameter in command.params for name in parameter.opts}
        assert set(re.findall(r"--[\w-]+", arguments)) <= flags


QUICK = re.findall(r"^microparallel ((?:draw|simulate|verify) [^#\n]*[^#\s])", (ROOT / "README.md").read_text(), re.M)


@pytest.mark.parametrize("command", QUICK)
def test_the_readme_s_quick_commands_run(command, tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "microparallel", *command.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == (1 if "blocking" in command else 0), result.stderr


def test_the_readme_s_links_and_pictures_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", (ROOT / "README.md").read_text()):
        path = target[0] or target[1]
        assert path.startswith("http") or (ROOT / path).exists(), path
