"""The project's own files: what installs it, and what it promises in writing."""

import re
import tomllib
from pathlib import Path

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


def test_the_readme_s_links_and_pictures_are_there():
    for target in re.findall(r"\]\(([^)#]+)\)|src=\"([^\"]+)\"", (ROOT / "README.md").read_text()):
        path = target[0] or target[1]
        assert path.startswith("http") or (ROOT / path).exists(), path


def test_the_readme_and_the_site_say_the_same_about_what_has_been_run():
    site = (ROOT / "docs" / "reference" / "measured.md").read_text().partition("## What has been run")[2]
    readme = (ROOT / "README.md").read_text().partition("## What has been run")[2].partition("Measured")[0]
    rows = [line for line in readme.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 5
    assert all(row in site for row in rows), "change both tables"
