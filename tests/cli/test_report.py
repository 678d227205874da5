"""`microparallel report`: what it writes, and what it says when it cannot."""

import json
import webbrowser

import pytest
from tests.spans import recorded, span


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "config.toml").write_text('model = "mlp"\nranks = 2\n')
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "samples_per_second": 10.0}\n')
    events = [span(rank, "forward", "forward", 0.0, 1.0 + rank) for rank in range(2)]
    (folder / "trace.json").write_text(recorded(2, events).to_json())
    return folder


def test_the_page_stands_in_the_run_s_folder(microparallel, run):
    result = microparallel("report", run)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"wrote {run / 'report.html'} (")
    assert "mlp on 2 ranks" in (run / "report.html").read_text()
    assert sorted(file.name for file in run.iterdir()) == ["config.toml", "metrics.jsonl", "report.html", "trace.json"]


def test_elsewhere_and_as_json(microparallel, run, tmp_path):
    result = microparallel("report", run, "--out", "page.html", "--json")
    written = json.loads(result.stdout)
    assert written == {"file": "page.html", "bytes": (tmp_path / "page.html").stat().st_size, "recorded_steps": 1}
    assert not (run / "report.html").exists()


def test_a_run_that_was_not_recorded(microparallel, run):
    (run / "trace.json").unlink()
    result = microparallel("report", run)
    assert result.returncode == 0
    assert "microparallel train --trace" in result.stdout


@pytest.mark.parametrize("found", [True, False])
def test_open_shows_it_in_the_browser(microparallel, run, monkeypatch, fresh, found):
    if fresh:
        pytest.skip("the browser would be a real one")
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or found)
    result = microparallel("report", run, "--open")
    assert result.returncode == 0
    assert opened == [(run / "report.html").as_uri()]
    assert ("no browser was found" in result.stderr) != found


def fails_in_one_line(result):
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_what_is_not_a_run(microparallel, tmp_path):
    assert "there is no such folder" in fails_in_one_line(microparallel("report", "nothing"))
    assert "is not the folder of a run: it has none of" in fails_in_one_line(microparallel("report", tmp_path))
    assert "RUN" in fails_in_one_line(microparallel("report"))


def test_a_broken_trace_leaves_the_old_page(microparallel, run):
    (run / "report.html").write_text("the old one")
    (run / "trace.json").write_text('{"format": 1, "ranks": 2')
    assert "trace.json is broken" in fails_in_one_line(microparallel("report", run))
    assert (run / "report.html").read_text() == "the old one"


def test_a_place_that_cannot_be_written(microparallel, run):
    assert "there is no folder" in fails_in_one_line(microparallel("report", run, "--out", "no/where.html"))
    assert "this is a folder" in fails_in_one_line(microparallel("report", run, "--out", run))


def test_names_that_utf_8_cannot_write(microparallel, run):
    (run / "summary.json").write_text('{"data": "\\ud800"}')
    assert microparallel("report", run).returncode == 0


def test_help_shows_examples(microparallel):
    result = microparallel("report", "--help")
    assert result.returncode == 0
    assert "Examples" in result.stdout
    assert "microparallel report runs/first --open" in " ".join(result.stdout.split())
