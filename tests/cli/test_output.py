"""Whether a file can be written is known before the work begins."""

import pytest

import microparallel as mp
from microparallel.cli.flags import require_writable


def test_looking_leaves_nothing_behind(tmp_path):
    require_writable(tmp_path / "plot.svg", "--plot")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("absent/plot.svg", "there is no folder .*absent"),
        ("folder.svg", "this is a folder"),
        ("/proc/plot.svg", "cannot be written"),  # without permission
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path, name, words):
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(mp.errors.UsageError, match=words):
        require_writable(tmp_path / name, "--plot")
