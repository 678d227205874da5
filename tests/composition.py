"""Small trainings that put two things together, each beside one process; and the tables of what came of them.

`train` trains one small model with a *method* (`METHODS`: data parallelism, ZeRO, a pipeline) and any number of
*features* (`FEATURES`: accumulation, tied weights, a transport, …; `ROUNDED`: 16 bits, compression). It returns how far
the weights are from those of one process, or the line that refuses it. `page` runs a case for each cell, and puts the
tables into docs/reference/what_composes.md. To write the page anew:

PYTHONPATH=src python -m tests.composition
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.rounded import RATE, ROUNDED, OneProcess, is_rounded, options_of, title_of
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import microparallel as mp
from microparallel.errors import UsageError

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "what_composes.md"
WIDTH, STEPS = 6, 3
LARGEST = 1e-12  # difference to one process, in float64


# ── what is put together ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Method:
    """A way to train: what the table calls it, and how many ranks a case needs."""

    title: str
    ranks: int = 2
    pipeline: bool = False


METHODS = {
    "dp": Method("data parallel"),
    "zero-1": Method('`shard="optimizer"`'),
    "zero-2": Method('`shard="gradients"`'),
    "zero-3": Method("fully sharded"),
    "hybrid": Method("hybrid", ranks=4),
    "1f1b": Method("pipeline `1f1b`", pipeline=True),
    "zb-h1": Method("pipeline `zb-h1`", pipeline=True),
}

FEATURES = {
    "backwards": "several backwards, one update",
    "no_sync": "`no_sync()` around all backwards but the last",
    "uneven": "uneven batches",
    "without": "a rank without samples",
    "join": "`join()`",
    "clip": "`clip_grad_norm_` of the model",
    "torch_clip": "torch's `clip_grad_norm_`",
    "checkpointing": "activation checkpointing",
    "blocks_compiled": "`block.compile()`",
    "compiled": "`torch.compile(model)` of the wrapped model",
    "tied": "tied weights",
    "frozen": "frozen parameters",
    "sync_batch_norm": "`mp.SyncBatchNorm`",
    "torch_optimizer": "an optimizer of torch's",
    "sharded_optimizer": "`mp.ShardedOptimizer`",
    "deferred": "`mp.deferred_init()`",
    "shm": "transport `shm`",
    "gloo": "transport `gloo`",
    "gpu_gloo": "CUDA tensors, transport `gloo`",
    "gpu_nccl": "CUDA tensors, transport `nccl`, one rank",
}
ON_A_GPU = {"gpu_gloo": "gloo", "gpu_nccl": "nccl"}
NOT_IN_PIPELINES = ("no_sync", "join", "compiled")
# Those that are combined with each other, and those of them that exclude each other.
PAIRED = ("backwards", "no_sync", "uneven", "without", "clip", "checkpointing", "tied", "frozen", "deferred", "gloo")
EXCLUDE = ({"uneven", "without"}, {"backwards", "no_sync"})


class WrongInSilence(Exception):
    """A result that is not that of one process, and no error."""


def is_there(feature: str, method: str) -> bool:
    """Whether a method has such a thing."""
    if METHODS[method].pipeline:
        return feature not in NOT_IN_PIPELINES
    return "compress_activations" not in ROUNDED.get(feature, {})


class Block(nn.Module):
    """A layer with a residual connection; with batch normalisation and activation checkpointing, if that is wanted."""

    def __init__(self, normalised: bool, checkpointed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8, bias=not normalised), nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(8) if normalised else nn.Identity()
        self.checkpointed = checkpointed

    def compute(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.down(self.norm(self.up(inputs)).tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.compute, inputs, use_reentrant=False) if self.checkpointed else self.compute(inputs)


def build(features: frozenset[str]) -> nn.Sequential:
    """Three blocks and a head, the same in every process."""
    torch.manual_seed(0)
    blocks = [Block("sync_batch_norm" in features, "checkpointing" in features) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, 4)).double()
    if "tied" in features:
        blocks[2].down.weight = blocks[0].down.weight
    if "frozen" in features:
        blocks[1].up.requires_grad_(False)
        blocks[0].down.bias.requires_grad_(False)
    return model


def samples(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    inputs, targets = (torch.randn(count, size, dtype=torch.float64, generator=generator) for size in (WIDTH, 4))
    return inputs, targets


def has_replicas(features: frozenset[str]) -> bool:
    """Whether a case of a pipeline needs several: a replica without samples, or sums that are compressed."""
    return "without" in features or "compress" in options_of(features)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The loss, in the dtype of the outputs."""
    return functional.mse_loss(outputs, targets.to(outputs.dtype))


def counts_of(features: frozenset[str], ranks: int) -> list[int]:
    """How many samples each rank (of a pipeline, each replica) has of a batch."""
    if "uneven" in features:
        return [3 - rank % 2 for rank in range(ranks)]
    return [0 if "without" in features and rank == ranks - 1 else 2 for rank in range(ranks)]


def optimizer_for(
    parameters: Iterator[nn.Parameter], comms: mp.Comms | None, features: frozenset[str]
) -> torch.optim.Optimizer:
    """AdamW, or SGD where numbers are rounded; with comms, one whose state is kept in parts."""
    kind, rate = (torch.optim.SGD, RATE) if is_rounded(features) else (torch.optim.AdamW, 0.01)
    return kind(parameters, lr=rate) if comms is None else mp.ShardedOptimizer(parameters, kind, comms, lr=rate)


# ── a training ──────────────────────────────────────────────────────────────────────────────────────────────────────


def train(comms: mp.Comms, method: str, features: frozenset[str]) -> float | str:
    """Train with a method and some features.

    Returns:
        The largest difference to one process in the state, or the text of the error that refuses it.
    """
    torch.set_num_threads(1)
    try:
        return (_train_pipeline if METHODS[method].pipeline else _train)(comms, method, features)
    except UsageError as error:
        return str(error)


def _train(comms: mp.Comms, method: str, features: frozenset[str]) -> float:
    plain = build(features).to(comms.device)
    whole = optimizer_for(plain.parameters(), None, features)
    model = _wrapped(comms, method, features)
    in_parts = method in ("zero-1", "zero-2") and "torch_optimizer" not in features
    optimizer = optimizer_for(
        model.parameters(), comms if in_parts or "sharded_optimizer" in features else None, features
    )
    beside = OneProcess(plain, comms, model) if is_rounded(features) else None
    called = torch.compile(model, backend="eager") if "compiled" in features else model
    with model.join() if "join" in features else contextlib.nullcontext():
        for step in range(STEPS):
            counts = counts_of(features, comms.world_size)
            if "join" in features and step == STEPS - 1:
                counts[-1] = 0
            whole.zero_grad()
            if beside is not None:
                beside.begin()
            mine = counts[comms.rank] or "join" not in features
            if mine:
                optimizer.zero_grad()
            for number in range(2 if features & {"backwards", "no_sync"} else 1):
                local = "no_sync" in features and number == 0
                inputs, targets = (one.to(comms.device) for one in samples(10 * step + number, sum(counts)))
                functional.mse_loss(plain(inputs), targets).backward()
                if mine:
                    share = slice(sum(counts[: comms.rank]), sum(counts[: comms.rank + 1]))
                    _pass(model, called, inputs[share], targets[share], features, local)
            _clip(model, plain, features)
            whole.step()
            if beside is not None:
                beside.end()
            if mine:
                optimizer.step()
    if beside is not None:
        return _required(beside, features)
    return _difference(model.state_dict(), plain.state_dict())


def _wrapped(comms: mp.Comms, method: str, features: frozenset[str]) -> mp.DataParallel:
    with mp.deferred_init() if "deferred" in features else contextlib.nullcontext():
        module = build(features)
    if "sync_batch_norm" in features:
        mp.SyncBatchNorm.convert(module, comms)
    if "blocks_compiled" in features:
        _compile_blocks(module)
    options = options_of(features, can_compress=method == "dp")
    if method in ("zero-3", "hybrid"):
        return mp.FullyShardedDataParallel(module, comms, replicas=2 if method == "hybrid" else 1, **options)
    shard = {"dp": None, "zero-1": "optimizer", "zero-2": "gradients"}[method]
    if comms.device.type != "cpu":
        module = module.to(comms.device)
    return mp.DataParallel(module, comms, bucket_cap_mb=3e-4, shard=shard, **options)


def _compile_blocks(model: nn.Sequential) -> None:
    model[0].compile(backend="aot_eager")  # the others would take as long, and tell no more


def _pass(
    model: mp.DataParallel,
    called: Callable[..., Any],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    features: frozenset[str],
    local: bool,
) -> None:
    """A forward and a backward of this rank's samples; or its part in the others', if it has none."""
    is_weighted = features & {"uneven", "without"}
    with contextlib.ExitStack() as around:
        if is_weighted:
            around.enter_context(model.weighted(len(inputs)))
        if local:
            around.enter_context(model.no_sync())
        if len(inputs):
            mean_square(called(inputs), targets).backward()
        else:
            model.sit_out()


def _clip(model: Any, plain: nn.Module, features: frozenset[str]) -> None:
    if features & {"clip", "torch_clip"}:
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        own = "clip" in features
        mine = model.clip_grad_norm_(0.05) if own else nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        if abs(float(mine) - float(norm)) > (0.05 * float(norm) if is_rounded(features) else LARGEST):
            raise WrongInSilence(f"the norm is {mine}, and {norm} in one process")


def _required(beside: OneProcess, features: frozenset[str]) -> float:
    if wrong := beside.wrong(options_of(features)):
        raise WrongInSilence(wrong)
    return 0.0


def _difference(mine: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert list(mine) == list(wanted)
    return max(float((mine[name].cpu().double() - one.cpu().double()).abs().max()) for name, one in wanted.items())


def _train_pipeline(
    comms: mp.Comms, schedule: str, features: frozenset[str], replicas: int = 1, shard: Any = None
) -> float:
    replicas = 2 if has_replicas(features) else replicas
    options = options_of(features)
    plain = build(features).to(comms.device)
    whole = optimizer_for(plain.parameters(), None, features)
    with mp.deferred_init() if "deferred" in features else contextlib.nullcontext():
        module = build(features)
    if "sync_batch_norm" in features:
        mp.SyncBatchNorm.convert(module, comms)
    if "blocks_compiled" in features:
        _compile_blocks(module)
    pipe = mp.Pipeline(module, comms, schedule, 2, mean_square, replicas=replicas, shard=shard, **options)
    in_parts = "sharded_optimizer" in features or (shard is not None and "torch_optimizer" not in features)
    optimizer = optimizer_for(pipe.parameters(), comms if in_parts else None, features)
    beside = OneProcess(plain, comms, pipe) if is_rounded(features) else None
    for step in range(STEPS):
        counts = counts_of(features, replicas)
        counts[0] += 2  # three or more samples, for two micro-batches
        share = slice(sum(counts[: pipe.replica]), sum(counts[: pipe.replica + 1]))
        whole.zero_grad()
        optimizer.zero_grad()
        if beside is not None:
            beside.begin()
        for number in range(2 if "backwards" in features else 1):
            inputs, targets = (one.to(comms.device) for one in samples(10 * step + number, sum(counts)))
            functional.mse_loss(plain(inputs), targets).backward()
            batch = (inputs[share], targets[share]) if counts[pipe.replica] else (None, None)
            pipe.step(*batch, samples=sum(counts) if replicas > 1 else None)
        _clip(pipe, plain, features)
        whole.step()
        if beside is not None:
            beside.end()
        optimizer.step()
    if beside is not None:
        return _required(beside, features)
    wanted = dict(plain.named_parameters(remove_duplicate=False))
    return max(float((one - wanted[name]).detach().abs().max()) for name, one in pipe.named_parameters())


# ── one inside of another ───────────────────────────────────────────────────────────────────────────────────────────

OUTER = {
    "dp": "`mp.DataParallel` of",
    "zero-3": "`mp.FullyShardedDataParallel` of",
    "1f1b": "`mp.Pipeline`, `1f1b`, of",
    "zb-h1": "`mp.Pipeline`, `zb-h1`, of",
    "1f1b replicas": "the replicas of `mp.Pipeline`, `1f1b`",
    "zb-h1 replicas": "the replicas of `mp.Pipeline`, `zb-h1`",
}
INNER = ("dp", "zero-1", "zero-2", "zero-3")


def nest(comms: mp.Comms, outer: str, inner: str) -> float | str:
    """Wrap a wrapped model, or let the replicas of a pipeline share; returns as `train` does."""
    torch.set_num_threads(1)
    nothing: frozenset[str] = frozenset()
    try:
        if outer.endswith("replicas"):
            shard = {"dp": None, "zero-1": "optimizer", "zero-2": "gradients", "zero-3": "parameters"}[inner]
            return _train_pipeline(comms, outer.removesuffix(" replicas"), nothing, replicas=2, shard=shard)
        model = _wrapped(comms, inner, nothing)
        if outer == "dp":
            mp.DataParallel(model, comms)
        elif outer == "zero-3":
            mp.FullyShardedDataParallel(model, comms)
        else:
            mp.Pipeline([model, nn.Linear(4, 4).double()], comms, outer, 2, functional.mse_loss)
    except UsageError as error:
        return str(error)
    raise WrongInSilence(f"{outer} of {inner} was not refused")


# ── the tables ──────────────────────────────────────────────────────────────────────────────────────────────────────

Run = Callable[..., list[Any]]  # of a pool: runs a function on ranks, and returns what each of them returned
Key = tuple[str, str]


def outcome(run: Run, method: str, features: Iterable[str]) -> str:
    """Run one case: "works", or the line that refuses it; raises `AssertionError` if it is wrong in silence."""
    chosen = frozenset(features)
    ranks = 4 if METHODS[method].pipeline and has_replicas(chosen) else METHODS[method].ranks
    options: dict[str, Any] = {"transport": "gloo" if "gloo" in chosen else "shm", "device": "cpu"}
    if on_gpu := chosen & set(ON_A_GPU):
        options = {"transport": ON_A_GPU[next(iter(on_gpu))], "device": "cuda"}
        ranks = 1 if options["transport"] == "nccl" else ranks
    found = run(train, ranks, method, chosen, timeout=50, **options)
    return judged(found, f"{method} with {', '.join(sorted(chosen))}", 1e-9 if on_gpu else LARGEST)


def judged(found: list[float | str], what: str, largest: float = LARGEST) -> str:
    """All ranks must have the numbers of one process, or all must refuse, in one line: that of rank 0 is returned."""
    if all(isinstance(one, float) for one in found):
        assert max(found) < largest, f"{what}: there is no error, and a difference of {max(found)} to one process"
        return "works"
    assert all(isinstance(one, str) and "\n" not in one for one in found), f"{what}: not one line on all ranks: {found}"
    return re.sub(r"^\w+: (?=this gradient is)", "…: ", str(found[0]))  # a function of torch's, in this version


def page(run: Run, old: str) -> str:
    """The page with tables of what the cases give now. Rows that need a GPU stay as they are where there is none."""
    notes: dict[str, int] = {}

    def cell(text: str) -> str:
        if text in ("works", "—", "not run here"):
            return text
        return f"no[^{notes.setdefault(text, len(notes) + 1)}]"

    found = {(one, method): _outcome_or_not(run, method, one) for method in METHODS for one in FEATURES}
    features = []
    for feature, title in FEATURES.items():
        row = [title, *(cell(found[feature, method]) for method in METHODS)]
        kept = re.search(rf"^\| {re.escape(title)} \|.*$", old, re.MULTILINE)
        without_gpu = feature in ON_A_GPU and not torch.cuda.is_available()
        features.append(kept[0] if without_gpu and kept else _row(row))
    rounded = [
        _row([title_of(name), *(cell(_outcome_or_not(run, method, name)) for method in METHODS)]) for name in ROUNDED
    ]
    nested = []
    for outer, title in OUTER.items():
        ranks = 4 if outer.endswith("replicas") else 2
        results = {one: run(nest, ranks, outer, one, transport="shm", device="cpu", timeout=50) for one in INNER}
        nested.append(_row([title, *(cell(judged(each, f"{outer} of {one}")) for one, each in results.items())]))
    pairs = []
    for number, first in enumerate(PAIRED[:-1]):
        row = [FEATURES[first], *[""] * number]
        row += [cell(_pair(run, "zero-3", first, second)) for second in PAIRED[number + 1 :]]
        pairs.append(_row(row))
    titles = [METHODS[method].title for method in METHODS]
    text = _replaced(old, "features", [*_header(["", *titles]), *features])
    text = _replaced(text, "rounded", [*_header(["", *titles]), *rounded])
    text = _replaced(text, "nested", [*_header(["", *(METHODS[one].title for one in INNER)]), *nested])
    text = _replaced(text, "pairs", [*_header(["", *(FEATURES[one] for one in PAIRED[1:])]), *pairs])
    lines = [f"[^{number}]: `{line}`" for line, number in notes.items()]
    return _replaced(text, "notes", [part for line in lines for part in (line, "")][:-1])


def shown(text: str, name: str) -> dict[Key, str]:
    """What a table of the page says: by the titles of row and column, the line that refuses it for its footnote."""
    notes = dict(re.findall(r"^\[\^(\d+)\]: `(.*)`$", text, re.MULTILINE))
    table = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0].strip().splitlines()
    (_, *titles), _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table)
    said = {(row, title): cell for row, *cells in rows for title, cell in zip(titles, cells, strict=True)}
    return {place: notes[cell[4:-1]] if cell.startswith("no[^") else cell for place, cell in said.items()}


def sample_of_page(run: Run, text: str) -> Iterator[tuple[Key, str, str]]:
    """Every sixth case, some of each row and column: their titles, what the page says and what they give now."""
    for name, features in (("features", FEATURES), ("rounded", {name: title_of(name) for name in ROUNDED})):
        said = shown(text, name)
        for (row, feature), (column, method) in itertools.product(enumerate(features), enumerate(METHODS)):
            if (row + column) % 6 == 0 and feature not in ON_A_GPU:
                place = features[feature], METHODS[method].title
                yield place, said[place], _outcome_or_not(run, method, feature)
    said = shown(text, "pairs")
    for number, (first, second) in enumerate(itertools.combinations(PAIRED, 2)):
        if number % 6 == 0:
            yield (
                (FEATURES[first], FEATURES[second]),
                said[FEATURES[first], FEATURES[second]],
                _pair(run, "zero-3", first, second),
            )


def _outcome_or_not(run: Run, method: str, feature: str) -> str:
    if not is_there(feature, method):
        return "—"
    if feature in ON_A_GPU and (not torch.cuda.is_available() or (feature == "gpu_nccl" and METHODS[method].ranks > 2)):
        return "not run here"
    return outcome(run, method, [feature])


def _pair(run: Run, method: str, first: str, second: str) -> str:
    if {first, second} in EXCLUDE or not (is_there(first, method) and is_there(second, method)):
        return "—"
    return outcome(run, method, [first, second])


def pairs() -> Iterator[tuple[str, str, str]]:
    """All pairs of features with all methods, the compiled ones too; few enough for a long test only."""
    for method, (first, second) in itertools.product(METHODS, itertools.combinations((*PAIRED, "blocks_compiled"), 2)):
        if {first, second} not in EXCLUDE and is_there(first, method) and is_there(second, method):
            yield method, first, second


def rounded_pairs() -> Iterator[tuple[str, str, str]]:
    """All methods that round with all of the other features, except that compressed gradients are not clipped.

    Where a compressed sum is cut off, what was cut off is not sent later: then there is nothing to compare with.
    """
    for method, first, second in itertools.product(METHODS, ROUNDED, PAIRED):
        clips = second == "clip" and "compress" in ROUNDED[first]
        if not clips and is_there(first, method) and is_there(second, method):
            yield method, first, second


def _header(titles: list[str]) -> list[str]:
    return [_row(titles), "|---" * len(titles) + "|"]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _replaced(text: str, name: str, lines: list[str]) -> str:
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    assert end in rest, f"the page has no {begin} … {end}"
    return f"{before}{begin}\n\n" + "\n".join(lines) + f"\n\n{end}" + rest.partition(end)[2]


if __name__ == "__main__":
    with mp.Pool() as pool:
        PAGE.write_text(page(pool.run, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
