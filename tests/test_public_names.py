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
    ("module", "old", "now"),
    [
        (mp, "UsageError", "microparallel.errors.UsageError"),
        (mp, "ddp_step", "microparallel.course.ddp_step"),
        (mp, "HookTracker", "microparallel.course.HookTracker"),
        (mp, "DDPPerformanceAnalyzer", "microparallel.analyze.DDPPerformanceAnalyzer"),
        (mp, "Request", "microparallel.comms.Request"),
        (mp, "Mesh", "microparallel.topology.Mesh"),
        (mp, "Nothing", ""),
        (mp.program, "Chunk", "microparallel.program.Slices"),
    ],
)
def test_an_old_name_says_where_it_is_now(module, old, now):
    hint = f"; it is {now} now" if now else ""  # a name that never was is refused as Python does
    with pytest.raises(AttributeError, match=rf"^module '{module.__name__}' has no attribute '{old}'{hint}$"):
        getattr(module, old)


def test_importing_the_package_imports_neither_torch_nor_numpy():
    told = "import sys, microparallel; microparallel.program; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_a_module_of_ours_can_be_imported_from_the_package_without_the_course():
    """Python first asks the package for such a name, which must not look for it in all other modules."""
    told = "import sys; from microparallel import torch_private; print('microparallel.course' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout == "False\n"
