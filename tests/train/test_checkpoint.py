from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from microparallel.errors import CheckpointError
from microparallel.files.tensor_file import checksum
from microparallel.train import checkpoint
from microparallel.train.checkpoint_folder import best_of, manifest, mark_best

PART = "part-00000.safetensors"
FILES = [PART, "state.json", "manifest.json"]
STATE = {"sampler": {"epoch": 1, "batch": 7}, "loss": 0.1 + 0.2, "history": [1.5, None, True, "text", {}]}


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal to the bit, and of equal types."""
    if isinstance(one, Tensor):
        whole = isinstance(other, Tensor) and (one.dtype, one.shape) == (other.dtype, other.shape)
        raw = [tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, other)] if one.numel() else [one] * 2
        return whole and torch.equal(*raw)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)


def trained(
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)
    optimizer = make(model.parameters(), **options)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    def loss() -> Tensor:
        optimizer.zero_grad()
        inputs = torch.linspace(-1, 1, 15, dtype=next(model.parameters()).dtype).view(5, 3)
        value: Tensor = model(inputs).square().mean()
        value.backward()
        return value.detach()

    return float(optimizer.step(loss))


def save_simple(folder: Path, number: int, value: float = 0.0, keep: int = 3) -> Path:
    return checkpoint.save(folder, number, {"weight": torch.full((3,), value)}, {"state": {}}, STATE, keep=keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.1 + 0.2, "amsgrad": True}),
        (torch.optim.AdamW, {"betas": (0.8, 0.95)}),
        (torch.optim.LBFGS, {"max_iter": 2}),
        (torch.optim.Adam, {"lr": torch.tensor(0.01)}),
    ],
    ids=["sgd", "momentum", "adam", "adamw", "lbfgs", "tensor-lr"],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype
) -> None:
    model, optimizer = trained(make, dtype, **options)
    path = checkpoint.save(tmp_path, 2, model.state_dict(), optimizer.state_dict(), STATE)
    loaded = checkpoint.load(path)
    assert loaded.step == 2
    assert same(loaded.model, dict(model.state_dict()))
    assert same(loaded.optimizer_state, optimizer.state_dict())
    assert same(loaded.state, STATE)

    model_again, optimizer_again = trained(make, dtype, **options)
    step(model_again, optimizer_again)
    model_again.load_state_dict(loaded.model)
    optimizer_again.load_state_dict(loaded.optimizer_state)
    assert [step(model, optimizer) for _ in range(3)] == [step(model_again, optimizer_again) for _ in range(3)]
    assert same(dict(model.state_dict()), dict(model_again.state_dict()))


def test_the_files_are_as_the_format_says(tmp_path: Path) -> None:
    model, optimizer = trained()
    path = checkpoint.save(tmp_path / "run" / "checkpoints", 100, model.state_dict(), optimizer.state_dict(), {})
    assert path == tmp_path / "run" / "checkpoints" / "step-00000100"
    assert names(path) == sorted(FILES)
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format"] == 2
    assert manifest["files"]["state.json"]["bytes"] == (path / "state.json").stat().st_size
    stored = safetensors.torch.load_file(path / PART)  # any program that knows safetensors can read it
    assert same(stored["model.0.weight"], model.state_dict()["0.weight"])
    assert same(stored["optimizer.state.0.exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_kind_come_back(tmp_path: Path, dtype: torch.dtype) -> None:
    base = torch.randint(0, 2, (4, 6)).to(dtype)
    tensors = {"scalar": base[0, 0].clone(), "empty": base[:0].clone(), "across": base.t(), "every other": base[:, ::2]}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 1, tensors, {}, {}))
    assert same(loaded.model, tensors)
    loaded.model["across"].zero_()  # what comes back may be written to, and belongs to nobody else
    assert same(loaded.model["every other"], base[:, ::2])


def test_values_that_are_not_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("-inf"), -0.0, 5e-324], dtype=torch.float64)
    state = {"loss": float("-inf"), "tiny": 5e-324, "minus": -0.0, "big": 2**80, "\udcff": "\udcff"}
    loaded = checkpoint.load(checkpoint.save(tmp_path, 1, {"odd": odd}, {}, state))
    assert same(loaded.model, {"odd": odd})
    assert same(loaded.state, state)


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    tensors = {"head": weight, "embed": weight, "part": weight[10:20], "alone": torch.ones(2)}
    path = checkpoint.save(tmp_path, 1, tensors, {}, {})
    assert (path / PART).stat().st_size < 5000
    loaded = checkpoint.load(path).model
    assert same(loaded, tensors)
    assert loaded["head"] is loaded["embed"]


plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.text() | st.integers()
nested = st.recursive(
    plain | st.integers(0, 3).map(lambda size: torch.arange(size, dtype=torch.float64)),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner),
    max_leaves=12,
)


@given(nested)
def test_optimizer_states_of_any_shape_come_back(value: Any) -> None:
    state = {"state": value, "param_groups": [{"value": value}]}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # a hundred examples, which need not survive a power cut
        assert same(checkpoint.load(checkpoint.save(Path(folder), 1, {}, state, {})).optimizer_state, state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({}, {"state": {0: {"hook": print}}}, {}), r"optimizer\.state\.0\.hook is a builtin_function"),
        (({}, {}, {"seen": {1, 2}}), r"state\.seen is a set, which a checkpoint cannot hold"),
        (({}, {}, {"mean": [torch.ones(1)]}), r"state\.mean\.0 is a Tensor"),
        (({}, {}, {"table": {(1, 2): 3}}), r"state\.table is a dict"),
        (({"extra": 3}, {}, {}), "model tensor extra is a int"),
        (({"holes": torch.eye(2).to_sparse()}, {}, {}), r"model tensor holes is torch\.sparse_coo"),
        (({"ghost": torch.ones(1, device="meta")}, {}, {}), "model tensor ghost is .* on meta"),
        (({"wave": torch.ones(1, dtype=torch.complex128)}, {}, {}), "complex128"),
    ],
)
def test_what_cannot_be_stored_is_named_before_anything_is_written(
    tmp_path: Path, arguments: tuple[Any, Any, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        checkpoint.save(tmp_path / "checkpoints", 1, *arguments)
    assert names(tmp_path) == []


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        save_simple(tmp_path, number, keep=2)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]
    with pytest.raises(CheckpointError, match="keep=0"):
        save_simple(tmp_path, 6, keep=0)


def test_going_back_keeps_the_new_checkpoint_and_leaves_later_ones(tmp_path: Path) -> None:
    for number in (10, 20, 30, 15):
        save_simple(tmp_path, number, keep=1 if number == 15 else 3)
    assert names(tmp_path) == ["step-00000015", "step-00000020", "step-00000030"]


def test_steps_beyond_eight_digits_are_in_order(tmp_path: Path) -> None:
    save_simple(tmp_path, 99_999_999)
    save_simple(tmp_path, 100_000_000)
    assert checkpoint.latest(tmp_path)[0].step == 100_000_000


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_simple(tmp_path, 1, 1.0)
    save_simple(tmp_path, 1, 2.0)
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.latest(tmp_path)[0].model["weight"][0] == 2


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    model, optimizer = trained()
    return checkpoint.save(folder, 2, model.state_dict(), optimizer.state_dict(), STATE)


@given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(1, 255), st.sampled_from(["flip", "cut", "add"]))
def test_damage_at_any_byte_is_found(intact: Path, name: str, position: int, bits: int, kind: str) -> None:
    path = intact / name
    data = path.read_bytes()
    position %= len(data)
    flipped = data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :]
    try:
        path.write_bytes({"flip": flipped, "cut": data[:position], "add": data + bytes([bits])}[kind])
        with pytest.raises(CheckpointError, match=r"is damaged: .*\.(json|safetensors)|has format") as caught:
            checkpoint.load(intact)
        assert "\n" not in str(caught.value)
    finally:
        path.write_bytes(data)
    checkpoint.load(intact)


def test_every_byte_of_the_manifest_counts(intact: Path) -> None:
    path = intact / "manifest.json"
    data = path.read_bytes()
    for position in range(len(data)):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x20]) + data[position + 1 :])
        with pytest.raises(CheckpointError):
            checkpoint.load(intact)
    path.write_bytes(data)


def damage(path: Path, kind: str) -> str:
    """Damage a checkpoint and return what the warning must say."""
    if kind == "flip":
        data = bytearray((path / PART).read_bytes())
        data[-1] ^= 1
        (path / PART).write_bytes(data)
        return f"the bytes of {PART} are not those that were written"
    if kind == "cut":
        data = bytearray((path / "state.json").read_bytes())
        (path / "state.json").write_bytes(data[:-5])
        return f"state.json has {len(data) - 5} bytes, and {len(data)} were written"
    if kind == "manifest":
        (path / "manifest.json").unlink()
        return "manifest.json is missing"
    if kind == "json":
        (path / "manifest.json").write_text("{")
        return "manifest.json cannot be understood"
    if kind == "newer":
        manifest = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(manifest.replace('"format": 2', '"format": 3'))
        return "has format 3, and this version reads 2 and older; install a newer microparallel"
    if kind == "folder":
        (path / "state.json").unlink()
        (path / "state.json").mkdir()
        return "cannot be read: state.json: Is a directory"
    (path / kind).unlink()
    return f"{kind} is missing"


KINDS = ["flip", "cut", "manifest", "json", "newer", "folder", "state.json", PART]


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoints_are_skipped_with_a_warning(tmp_path: Path, kind: str) -> None:
    for number in (1, 2, 3):
        save_simple(tmp_path, number)
    expected = damage(tmp_path / "step-00000003", kind)
    found, warnings = checkpoint.latest(tmp_path)
    assert found.step == 2
    [warning] = warnings
    assert expected in warning
    assert "step-00000003" in warning
    assert "\n" not in warning
    save_simple(tmp_path, 3)
    assert checkpoint.latest(tmp_path)[1] == []


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        checkpoint.latest(tmp_path)


def test_when_none_is_left_all_are_named(tmp_path: Path) -> None:
    for folder in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match="holds no checkpoint to resume from"):
            checkpoint.latest(folder)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*nowhere"):
        checkpoint.load(tmp_path / "nowhere")
    for number in (1, 2):
        damage(save_simple(tmp_path, number), "flip")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used") as caught:
        checkpoint.latest(tmp_path)
    assert all(name in str(caught.value) for name in ("step-00000001", "step-00000002"))


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what state.json says, and make the manifest fit it."""
    record = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps(change(record)))
    sums = {name: checksum(path / name) for name in FILES if name != "manifest.json"}
    (path / "manifest.json").write_bytes(manifest(sums))


def test_whole_files_of_another_making_are_refused(tmp_path: Path) -> None:
    path = save_simple(tmp_path, 1)
    rewrite(path, lambda record: [])
    with pytest.raises(CheckpointError, match="is whole, but not a checkpoint of this library"):
        checkpoint.load(path)


class Crash(BaseException):
    """The end of the process: no except clause and no cleaning up may depend on it."""


CALLS = ["fsync", "rename", "mkdir", "rmdir", "unlink"]


def interrupt(monkeypatch: pytest.MonkeyPatch, at: int, error: BaseException) -> list[int]:
    """Make the `at`-th call that changes the disk raise instead; the list returned holds how many there were."""
    count = [0]

    def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == at:
                raise error
            return real(*arguments, **options)

        return call

    for name in CALLS:
        monkeypatch.setattr(os, name, wrap(getattr(os, name)))
    return count


def interrupted_saves(tmp_path: Path, number: int, keep: int, error: BaseException) -> list[Path]:
    """Return one folder for each moment at which saving a step over two earlier ones can be interrupted."""
    folders: list[Path] = []
    while True:
        folder = tmp_path / f"{len(folders)}"
        save_simple(folder, 1, 1.0)
        save_simple(folder, 2, 2.0)
        with pytest.MonkeyPatch.context() as monkeypatch:
            count = interrupt(monkeypatch, len(folders) + 1, error)
            with contextlib.suppress(Crash, CheckpointError):
                save_simple(folder, number, 9.0, keep=keep)
        if count[0] <= len(folders):
            shutil.rmtree(folder)
            return folders
        folders.append(folder)


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("number", [2, 3], ids=["same step", "new step"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_checkpoint(tmp_path: Path, number: int, keep: int) -> None:
    folders = interrupted_saves(tmp_path, number, keep, Crash())
    assert len(folders) > 10
    for folder in folders:
        found, warnings = checkpoint.latest(folder)
        assert (found.step, float(found.model["weight"][0])) in [(2, 2.0), (number, 9.0)]
        assert warnings == []
        save_simple(folder, 4, 4.0, keep=5)
        assert not [name for name in names(folder) if name.startswith(".")]
        again, warnings = checkpoint.latest(folder)
        assert (again.step, warnings) == (4, [])
        assert "step-00000002" in names(folder) or keep == 1


@pytest.mark.parametrize("number", [2, 3], ids=["same step", "new step"])
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path, number: int) -> None:
    for folder in interrupted_saves(tmp_path, number, 3, OSError(28, "No space left on device")):
        assert names(folder)[:2] == ["step-00000001", "step-00000002"]
        assert not [name for name in names(folder) if name.startswith(".")]
        assert checkpoint.latest(folder)[1] == []


def test_a_full_disk_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt(monkeypatch, 3, OSError(28, "No space left on device"))
    with pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*: No space left on device; make room"):
        save_simple(tmp_path / "checkpoints", 1)


def test_an_old_checkpoint_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    save_simple(tmp_path, 1)
    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(CheckpointError, match=r"step 2 is saved, but .*step-00000001 cannot be removed: Permission"):
        save_simple(tmp_path, 2, keep=1)
    assert checkpoint.latest(tmp_path)[0].step == 2


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["best", ".hidden", "step-1", ".step-00000001", "step-00000001-writing", "step-00000009.bak"]
    for name in others:
        (tmp_path / name).mkdir()
    save_simple(tmp_path, 2, keep=1)
    assert names(tmp_path) == sorted([*others, "step-00000002"])
    assert checkpoint.latest(tmp_path)[0].step == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    model, _ = trained()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    loaded = checkpoint.load(checkpoint.save(tmp_path, 1, model.state_dict(), optimizer.state_dict(), {}))
    assert same(loaded.model, {name: tensor.cpu() for name, tensor in model.state_dict().items()})
    optimizer.load_state_dict(loaded.optimizer_state)
    assert next(iter(optimizer.state.values()))["exp_avg"].is_cuda


def test_what_is_not_finite_never_pushes_good_states_out(tmp_path: Path) -> None:
    for number in range(1, 7):
        finite = number < 3
        checkpoint.save(tmp_path, number, {"weight": torch.ones(3)}, {}, {}, keep=2, finite=finite)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000006"]


def test_the_best_and_every_so_many_steps_are_kept(tmp_path: Path) -> None:
    for number in range(1, 9):
        path = checkpoint.save(tmp_path, number, {}, {}, {}, keep=1, keep_every=4)
        if number in (2, 3):
            mark_best(path, loss=1 / number)
    assert best_of(tmp_path) == (3, 1 / 3)
    assert names(tmp_path) == ["best.json", "step-00000003", "step-00000004", "step-00000008"]
