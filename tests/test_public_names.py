"""What `import microparallel as mp` offers: few names, and a word about where an old one is."""

import subprocess
import sys

import pytest

import microparallel as mp


def test_every_public_name_can_be_had():
    assert len(mp.__all__) <= 30
    for name in mp.__all__:
        assert getattr(mp, name) is not None
    assert set(mp.__all__) <= set(dir(mp))
    assert {"DataParallel", "Pipeline", "pipeline_layers", "launch"} <= set(mp.__all__)


@pytest.mark.parametrize(
    ("old", "now"),
    [
        ("UsageError", "microparallel.errors.UsageError"),
        ("ddp_step", "microparallel.course.ddp_step"),
        ("HookTracker", "microparallel.course.HookTracker"),
        ("DDPPerformanceAnalyzer", "microparallel.analyze.DDPPerformanceAnalyzer"),
    ],
)
def test_an_old_name_says_where_it_is_now(old, now):
    with pytest.raises(AttributeError, match=rf"^module 'microparallel' has no attribute '{old}'; it is {now} now$"):
        getattr(mp, old)


def test_chunk_is_slices_now():
    with pytest.raises(AttributeError, match=r"'Chunk'; it is microparallel\.program\.Slices now$"):
        mp.program.Chunk  # noqa: B018


def test_a_name_that_never_was_is_refused_as_python_does():
    with pytest.raises(AttributeError, match=r"^module 'microparallel' has no attribute 'Nothing'$"):
        mp.Nothing  # noqa: B018


def test_importing_the_package_imports_neither_torch_nor_numpy():
    told = "import sys, microparallel; microparallel.program; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "set()\n"
