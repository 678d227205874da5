"""What a step does not do: hooks where there is one rank, a copy for each gradient on a GPU, waiting for a GPU."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import microparallel as mp
from microparallel.data_parallel import bucket as buckets
from microparallel.models import GPT
from microparallel.torch_private import hooks_of_gradient

ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpt(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    return GPT(64, 8, dim=16, heads=2, depth=3).to(device, dtype)


def tokens(comms, step=0):
    return (torch.arange(16).view(2, 8) * (3 + comms.rank + step) % 64).to(comms.device)


# ── one rank ────────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIONS = [{}, {"find_unused_parameters": False}, {"check_finite": True}, {"precision": "fp16"}, {"precision": "bf16"}]


def hooks_of_a_lonely_model(comms):
    found = []
    for options in OPTIONS:
        model = mp.DataParallel(gpt(comms.device), comms, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(tokens(comms)).float().sum().backward()
        optimizer.step()
        found.append(sum(len(hooks_of_gradient(parameter)) for parameter in model.parameters()))
    return found


def test_one_rank_has_no_hooks_on_gradients(pool):
    assert pool.run(hooks_of_a_lonely_model, 1) == [[0] * len(OPTIONS)]


class Twice(nn.Module):
    """Two layers of which one may be left out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, inputs, both=True):
        return self.second(self.first(inputs)) if both else self.first(inputs)


def message(act):
    try:
        act()
    except mp.errors.GradientError as error:
        return str(error)
    return "nothing"


def unused_alone(comms):
    model = mp.DataParallel(Twice(), comms, find_unused_parameters=False)
    inputs = torch.ones(2, 3)
    model.third.requires_grad_(False)
    said = [message(lambda: model(inputs).sum().backward())]
    said.append(message(lambda: model(inputs, both=False).sum().backward()))  # the gradients of before are there
    model.zero_grad()
    said.append(message(lambda: model(inputs, both=False).sum().backward()))
    model.zero_grad()
    with model.no_sync():
        said.append(message(lambda: model(inputs, both=False).sum().backward()))
    model.zero_grad()
    found = message(lambda: torch.autograd.grad(model(inputs, both=False).sum(), [model.first.weight]))
    return [*said, found]


def test_unused_parameters_of_one_rank_are_an_error_on_request(pool):
    [[fine, kept, unused, local, asked]] = pool.run(unused_alone, 1)
    assert (fine, kept, local, asked) == ("nothing",) * 4
    assert unused == (
        "step 3: no gradients for parameters of rank 0: second.bias, second.weight\n"
        "  try: find_unused_parameters=True, which counts them as zero"
    )


def not_finite_alone(comms):
    model = mp.DataParallel(Twice(), comms, check_finite=True)
    inputs = torch.ones(2, 3)
    said = [message(lambda: model(inputs).sum().backward())]
    model.zero_grad()
    said.append(message(lambda: (model(inputs) * torch.tensor([float("inf"), 0.0, 0.0])).sum().backward()))
    return said


def test_gradients_of_one_rank_that_are_not_finite_are_named(pool):
    [[fine, bad]] = pool.run(not_finite_alone, 1)
    assert fine == "nothing"
    assert bad.startswith("step 2: gradients that are not finite for parameters of rank 0: second.bias, second.weight")


def overflow_alone(comms):
    model = mp.DataParallel(gpt(comms.device), comms, precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for step in range(4):
        optimizer.zero_grad()
        before = next(model.parameters()).detach().clone()
        loss = model(tokens(comms, step)).square().mean()
        (loss * float("inf") if step == 1 else loss).backward()
        optimizer.step()
        taken.append(not torch.equal(before, next(model.parameters()).detach()))
    return taken, model.loss_scale.skipped


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_one_rank_skips_a_step_whose_gradients_are_not_finite(pool, device):
    assert pool.run(overflow_alone, 1, device=device) == [([True, False, True, True], 1)]


def recompute(comms):
    """A layer that is computed again in backward reads the copies of its weights, also where nobody looks on."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dtypes = nn.Linear(4, 4), []

        def forward(self, inputs):
            return checkpoint(self._compute, inputs, use_reentrant=False)

        def _compute(self, inputs):
            self.dtypes.append(self.layer.weight.dtype)
            return self.layer(inputs)

    module = Checkpointed()
    mp.DataParallel(module, comms, precision="bf16")(torch.ones(2, 4)).sum().backward()
    return module.dtypes == [torch.bfloat16] * 2 and module.layer.weight.grad.dtype is torch.float32


def test_one_rank_computes_again_in_16_bits(pool):
    assert pool.run(recompute, 1) == [True]


# ── several ranks ───────────────────────────────────────────────────────────────────────────────────────────────────


def learn(comms, together, **options):
    """Train with gradients that stay, that are added to, and that are kept; everything that came of it."""
    moves = buckets.moves_together
    buckets.moves_together = lambda device: together or moves(device)
    try:
        model = mp.DataParallel(gpt(comms.device, torch.float64), comms, bucket_cap_mb=0.01, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        kept = None
        for step in range(5):
            optimizer.zero_grad(set_to_none=step != 2)  # then gradients are added to the buckets themselves
            if step == 3:
                with model.no_sync():
                    model(tokens(comms, 9)).square().mean().backward()
            with model.weighted(1.0 + comms.rank):
                model(tokens(comms, step)).square().mean().backward()
            optimizer.step()
            if step == 3:
                kept = model.layers[1].attention.project.weight.grad
                seen.append(kept.clone())
        assert torch.equal(kept, seen[0])  # step 4 has left it alone
        buckets_of = model._reducer.buckets
        assert all(one._together is together for one in buckets_of) or comms.device.type == "cuda"
        return [parameter.detach().cpu() for parameter in model.parameters()] + [seen[0].cpu()]
    finally:
        buckets.moves_together = moves


def compare(comms, options):
    one, other = learn(comms, False, **options), learn(comms, True, **options)
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "options", [{}, {"check_finite": True, "find_unused_parameters": False}, {"compress": "topk:0.2"}]
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_that_are_moved_together_are_the_same_bits(any_pool, ranks, options):
    assert any_pool.run(compare, ranks, options, timeout=40) == [True] * ranks


def spoil_one(comms, together):
    moves = buckets.moves_together
    buckets.moves_together = lambda device: together or moves(device)
    try:
        model = mp.DataParallel(Twice(), comms, check_finite=True, bucket_cap_mb=4e-5)
        factor = torch.ones(3)
        factor[0] = float("nan") if comms.rank == 1 else 1.0
        return message(lambda: (model.module.third(model(torch.ones(2, 3)) * factor)).sum().backward())
    finally:
        buckets.moves_together = moves


@pytest.mark.parametrize("together", [False, True])
def test_gradients_that_are_not_finite_are_named_by_rank(pool, together):
    for said in pool.run(spoil_one, 2, together):
        assert "rank 0:" not in said
        assert "rank 1: third.weight" in said and "first.weight" in said


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────


def count_waits(comms, options):
    """How often the host waits for the GPU in a step: torch says so when it is asked to warn."""
    model = mp.DataParallel(gpt(comms.device), comms, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(batch).float().square().mean().backward()
        optimizer.step()

    batch = tokens(comms)
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [str(one.message) + f" {one.filename}:{one.lineno}" for one in caught if "synchroniz" in str(one.message)]


@ON_A_GPU
@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, 0), ({"precision": "bf16"}, 0), ({"find_unused_parameters": False}, 1), ({"check_finite": True}, 1)],
)
def test_the_host_waits_for_the_gpu_only_where_it_must_know_something(pool, options, waits):
    for found in pool.run(count_waits, 2, options, device="cuda", timeout=50):
        assert len(found) <= waits, found


def other_streams(comms):
    """Forward on a stream of the user's, with a branch on another one: gradients are what one stream gives."""
    torch.manual_seed(0)
    results = []
    for streams in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(512, 512).to(comms.device) for _ in range(4)]
        model = mp.DataParallel(Branches(layers, streams), comms)
        stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for step in range(5):
                model.zero_grad()
                inputs = torch.full((256, 512), 0.01 * (step + comms.rank), device=comms.device)
                model(inputs).square().mean().backward()
                results.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.cuda.synchronize()
    half = len(results) // 2
    return [
        step
        for step in range(half)
        if not all(torch.allclose(one, other) for one, other in zip(results[step], results[half + step], strict=True))
    ]


class Branches(nn.Module):
    """Two branches, each perhaps on a stream of its own."""

    def __init__(self, layers, streams):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.side = torch.cuda.Stream() if streams else None

    def forward(self, inputs):
        if self.side is None:
            return self.layers[1](self.layers[0](inputs)) + self.layers[3](self.layers[2](inputs))
        here = torch.cuda.current_stream()
        self.side.wait_stream(here)
        with torch.cuda.stream(self.side):
            one = self.layers[1](self.layers[0](inputs))
        other = self.layers[3](self.layers[2](inputs))
        here.wait_stream(self.side)
        one.record_stream(here)
        return one + other


@ON_A_GPU
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_gradients_of_several_streams_are_averaged(pool, transport):
    assert pool.run(other_streams, 2, transport=transport, device="cuda", timeout=50) == [[], []]
