"""The state of every random generator of this process, as plain values: taken, put back, seeded."""

from __future__ import annotations

import base64
import random
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from microparallel.errors import CheckpointError


def random_state() -> dict[str, Any]:
    """Return the state of every random generator of this process, so that a resumed run draws what this one would.

    The values are plain, as JSON holds them. The generators are Python's `random`, torch's on the CPU, one for each GPU
    once CUDA is in use, and numpy's global one once numpy is imported: a run that uses neither cannot depend on them.
    """
    state: dict[str, Any] = {"python": _without_tuples(random.getstate()), "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = [_text(generator) for generator in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        import numpy

        state["numpy"] = _without_arrays(numpy.random.get_state(legacy=False))
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Put every generator back to where `random_state` found it; the next draws are bit-identical.

    On a machine with fewer GPUs the generators of the missing ones are left out.
    """
    generator = "python"
    try:
        version, words, gauss = state["python"]
        random.setstate((version, tuple(words), gauss))
        generator = "torch"
        torch.set_rng_state(_tensor(state["torch"]))
        generator = "cuda"
        if "cuda" in state and torch.cuda.is_available():
            for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(_tensor(text), device)
        generator = "numpy"
        if "numpy" in state:
            import numpy

            numpy.random.set_state(state["numpy"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"the random state of {generator} cannot be restored ({error}); "
            "it may have been saved with another version of that library: install that one, or start a new run"
        ) from error


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _without_tuples(value: Any) -> Any:
    return [_without_tuples(part) for part in value] if isinstance(value, tuple) else value


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


# ── seeds ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def seed_generators(text: str) -> None:
    """Seed all generators by a text; of the GPUs, this process's own."""
    number = zlib.crc32(text.encode())
    random.seed(number)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(number)
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed(number)


@contextmanager
def own_randomness(text: str | None = None) -> Iterator[None]:
    """Within this block, draw from generators seeded by this text, if there is one; then put all back as they were."""
    before = random.getstate(), torch.get_rng_state()
    gpus = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    numpys = None
    if "numpy" in sys.modules:
        import numpy

        numpys = numpy.random.get_state()
    if text is not None:
        seed_generators(text)
    try:
        yield
    finally:
        random.setstate(before[0])
        torch.set_rng_state(before[1])
        if gpus is not None:
            torch.cuda.set_rng_state(gpus)
        if numpys is not None:
            numpy.random.set_state(numpys)
