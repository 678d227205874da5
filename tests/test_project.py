"""The project's own files: what installs it, and what it promises in writing."""

import ast
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
    assert len(rows) == 8
    assert all(row in site for row in rows), "change both tables"


SOURCE = ROOT / "src" / "microparallel"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def definitions(body, prefix=""):
    """The names of the functions, classes and methods that a module defines."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from definitions(node.body, f"{prefix}{node.name}.")


def test_the_walk_through_a_step_finds_every_name_where_it_says():
    walk = CONTRIBUTING.partition("## One step through the house")[2].partition("\n## ")[0]
    places = re.findall(r"`([\w/]+\.py): ([\w.]+)`", walk.replace("\n", " "))
    assert len(places) > 50
    for file, name in places:
        module = ast.parse((SOURCE / file).read_text())
        assert name in set(definitions(module.body)), f"CONTRIBUTING: {file} has no {name}"
    for file in re.findall(r"`(?:src/microparallel/)?([\w/]+\.py)`", walk):
        assert (SOURCE / file).exists(), f"CONTRIBUTING: there is no {file}"


def test_the_tree_is_in_the_order_that_imports_must_keep():
    tree = CONTRIBUTING.partition("src/microparallel/\n")[2].partition("\ndocs/")[0]
    above, below = (re.findall(r"^  (\w+)(?:/|\.py)", half, re.MULTILINE) for half in tree.split("── torch below"))
    layers, pure, *_ = PROJECT["tool"]["importlinter"]["contracts"]
    assert [*above, *below] == layers["layers"][::-1]
    assert {f"microparallel.{name}" for name in above} == set(pure["source_modules"]) - {"microparallel.reporting"}
