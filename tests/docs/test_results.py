"""The `results` fence: what was measured elsewhere, from the file in which it lies."""

import pytest
import results
from consoles import block_from

COMMAND = "python benchmarks/some.py"


@pytest.fixture
def measured(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (folder / "some.txt").write_text("a machine\n\n── one rank ─────\n1 < 2 ms\n\n── two ranks ─────\n3 ms\n")


def made(text):
    return results.results(block_from("results", (), text))


def test_a_part_goes_to_the_next_heading(measured):
    found = made(f"benchmarks/results/some.txt::one rank\n{COMMAND}")
    assert "1 &lt; 2 ms<" in found and "3 ms" not in found and "a machine" not in found
    assert f"measured by {COMMAND}, in benchmarks/results/some.txt" in found
    whole = made(f"benchmarks/results/some.txt\n{COMMAND}")
    assert "a machine" in whole and "3 ms" in whole


def test_what_nobody_has_measured_is_not_made_up(measured):
    found = made(f"benchmarks/results/none.txt::one rank\n{COMMAND}")
    assert "not measured yet" in found and COMMAND in found and "<pre>" not in found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"src/some.txt\n{COMMAND}", "give a file below benchmarks/results/"),
        ("benchmarks/results/some.txt", "and the command below it"),
        (f"benchmarks/results/some.txt::three ranks\n{COMMAND}", "there are one rank, two ranks"),
    ],
)
def test_what_cannot_be_shown_ends_the_build(measured, text, reason):
    with pytest.raises(ValueError, match=reason):
        made(text)
