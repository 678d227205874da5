"""What the site takes from npm, and what it says without."""

import json
import subprocess
import sys
from pathlib import Path

import from_npm
import in_browser
import pytest

ROOT = Path(__file__).parents[2]


def test_the_course_is_packed_with_all_that_it_needs(tmp_path):
    """In a Python that has nothing but the archive, as in the browser."""
    in_browser.pack(tmp_path / "course.zip")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path / 'course.zip')!r}]\n"
        "import json\n"
        "from microparallel.playground import answer\n"
        "for question in ({'ask': 'levels'}, {'ask': 'open', 'level': 'gpipe', 'moves': []},\n"
        "                 {'ask': 'start', 'kind': 'pipelines', 'name': '1f1b', 'numbers': {}}):\n"
        "    said = json.loads(answer(json.dumps(question)))\n"
        "    assert 'answer' in said, said\n"
        "print(len(json.loads(answer(json.dumps({'ask': 'starts'})))['answer']))\n"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30


def test_the_same_sources_make_the_same_bytes(tmp_path):
    for name in ("one", "other"):
        in_browser.pack(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()


def test_without_npm_the_pages_say_what_they_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(from_npm, "FETCHED", tmp_path / "nothing")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert from_npm.fetch() == "there is no npm here"
    for html in (
        in_browser.playground(""),
        in_browser.playground("1f1b --ranks 2 --microbatches 2"),
        in_browser.puzzles(),
    ):
        assert "was not built into this site" in html
    in_browser.add_parts(tmp_path / "site")
    assert [path.name for path in (tmp_path / "site" / in_browser.PARTS).iterdir()] == ["course.zip"]


def test_npm_that_fails_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(from_npm, "FETCHED", tmp_path / "nothing")
    npm = tmp_path / "npm"
    npm.write_text("#!/bin/sh\necho 'npm error code EINTEGRITY' >&2\nexit 1\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert from_npm.fetch() == "npm could not fetch them: EINTEGRITY"
    assert in_browser.missing()


@pytest.mark.parametrize("line", ["1f1bb --ranks 4", "1f1b --layers 4"])
def test_a_start_that_is_none_ends_the_build(line):
    with pytest.raises(ValueError, match=r"1f1bb|does not start"):
        in_browser.playground(line)


def test_what_is_fetched_is_pinned_with_its_hash_and_without_an_address():
    lock = json.loads((ROOT / "docs" / "tools" / "npm" / "package-lock.json").read_text())
    packages = {name: about for name, about in lock["packages"].items() if name}
    assert {"node_modules/pyodide", "node_modules/@codemirror/view"} <= packages.keys()
    assert all(about["integrity"].startswith("sha512-") for about in packages.values())
    assert not [name for name, about in packages.items() if "resolved" in about]
