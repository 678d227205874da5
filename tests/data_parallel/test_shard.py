"""ZeRO 1 and 2 against one process: losses, gradients, weights and the optimizer's state; and what may go wrong."""

import copy
import gc
import itertools

import pytest
import torch
from tests.pairwise import pairwise
from torch import nn
from torch.nn import functional

import microparallel as mp
from microparallel.data_parallel import replicas_are_identical
from microparallel.data_parallel.sharding import GradientInParts
from microparallel.errors import GradientError, UsageError

WIDTH = 6
SMALL = 3e-4  # megabytes: several buckets
ADAMW = (torch.optim.AdamW, {"lr": 0.01})
SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01})


class Odd(nn.Module):
    """Frozen, unused and single parameters, one that is used twice, one in another memory format."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.twice = nn.Linear(WIDTH, WIDTH)
        self.image = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, inputs):
        first = self.twice(self.frozen(inputs).tanh())
        image = self.image(self.twice(first).view(-1, 2, 3, 1))
        return self.scale * image.flatten(1).tanh()


def build(kind):
    torch.manual_seed(0)
    if kind == "gpt":
        return mp.models.GPT(vocabulary=11, context=4, dim=8, heads=2, depth=1, tied=True).double()
    return (Odd() if kind == "odd" else mp.models.FullMLP(9, 3, WIDTH, 4)).double()


def samples(kind, step, count):
    generator = torch.Generator().manual_seed(step)
    if kind == "gpt":
        tokens = torch.randint(11, (count, 5), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    outputs = 12 if kind == "odd" else 4
    inputs = torch.randn(count, WIDTH, dtype=torch.float64, generator=generator)
    return inputs, torch.randn(count, outputs, dtype=torch.float64, generator=generator)


def loss_of(outputs, targets):
    if outputs.dim() == 3:
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
    return functional.mse_loss(outputs, targets)


def whole_gradients(model):
    """Put the parts of all ranks together, by parameter."""
    found = {}
    for bucket in model._reducer.sharded_buckets:
        flat = torch.zeros(bucket.layout.length, dtype=torch.float64, device=bucket.shard.device)
        for piece, gradient in zip(bucket.pieces, bucket.gradients(), strict=True):
            if gradient is not None:
                piece.of(flat).copy_(gradient)
        model.comms.all_reduce(flat)
        for index, parameter in enumerate(bucket.parameters):
            if parameter.grad is not None:
                found[parameter] = bucket.layout.whole(flat, index).view(parameter.shape)
    return found


def difference(one, other):
    return float((one.detach().cpu() - other.detach().cpu()).abs().max())


def compared(comms, rows, **options):
    """The largest difference to one process, over some steps; and whether all ranks have the same bits."""
    return {row: train_beside_one_process(comms, *row, **options) for row in rows}


def train_beside_one_process(comms, kind, shard, optimizer, accumulate, clip, by, steps=20, device="cpu"):
    optimizer_class, options = {"adamw": ADAMW, "sgd": SGD}[optimizer]
    model = mp.DataParallel(build(kind).to(device), comms, SMALL, shard=shard)
    mine = mp.ShardedOptimizer(model.parameters(), optimizer_class, comms, by=by, bucket_cap_mb=SMALL, **options)
    plain = build(kind).to(device)
    whole = optimizer_class(plain.parameters(), **options)
    worst = 0.0
    for step in range(steps):
        mine.zero_grad()
        whole.zero_grad()
        for number in range(accumulate):
            inputs, targets = (
                one.to(device) for one in samples(kind, step * accumulate + number, 2 * comms.world_size)
            )
            there = loss_of(plain(inputs), targets) / accumulate
            there.backward()
            share = slice(2 * comms.rank, 2 * comms.rank + 2)
            local = number < accumulate - 1 and shard != "gradients"
            with model.no_sync() if local else model.weighted(1.0, float(comms.world_size)):
                here = loss_of(model(inputs[share]), targets[share]) / accumulate
                here.backward()
            worst = max(worst, difference(comms.all_reduce_mean(here.detach()), there))
        if shard is not None and comms.world_size > 1:
            gradients = whole_gradients(model)
            for parameter, same in zip(model.parameters(), plain.parameters(), strict=True):
                assert (parameter in gradients) == (same.grad is not None)
                if same.grad is not None:
                    worst = max(worst, difference(gradients[parameter], same.grad))
        if clip:
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
            worst = max(worst, difference(model.clip_grad_norm_(0.05), norm))
        mine.step()
        whole.step()
        for parameter, same in zip(model.parameters(), plain.parameters(), strict=True):
            worst = max(worst, difference(parameter, same))
    state = mine.state_dict()["state"]
    for number, values in whole.state_dict()["state"].items():
        for key, value in values.items():
            worst = max(worst, difference(state[number][key], value)) if value is not None else worst
    return worst, replicas_are_identical(model.module, comms)


KINDS = ["mlp", "gpt", "odd"]
WHAT = (["optimizer", "gradients", None], ["adamw", "sgd"], [1, 3], [True, False], ["element", "parameter"])


@pytest.mark.timeout(300)  # the whole matrix takes minutes on a busy machine
@pytest.mark.parametrize(
    ("any_pool", "ranks"),
    [
        *itertools.product(["gloo", "shm"], [1, 2]),
        *(("shm", ranks) for ranks in (3, 4)),  # the same on gloo takes three times as long
        *(pytest.param("gloo", ranks, marks=pytest.mark.slow) for ranks in (3, 4)),
    ],
    indirect=["any_pool"],
)
@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        pytest.param(pairwise(KINDS, *WHAT), 4, id="pairs"),
        *(
            pytest.param(list(itertools.product([kind], *WHAT)), 20, id=f"whole {kind}", marks=pytest.mark.slow)
            for kind in KINDS
        ),
    ],
)
def test_parity_with_one_process(any_pool, ranks, rows, steps):
    for found in any_pool.run(compared, ranks, rows, steps=steps, timeout=290):
        for row, (worst, identical) in found.items():
            assert worst < 1e-12, row
            assert identical, row


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("ranks", "transport"), [(1, "nccl"), (2, "gloo"), (4, "gloo")])
def test_parity_on_a_gpu(pool, ranks, transport):
    rows = [
        (kind, shard, optimizer, 2, True, by, 5, "cuda")
        for kind, shard, optimizer, by in (
            ("mlp", "optimizer", "adamw", "element"),
            ("gpt", "gradients", "adamw", "element"),
            ("odd", "gradients", "sgd", "parameter"),
            ("odd", None, "sgd", "element"),
        )
    ]
    for found in pool.run(compared, ranks, rows, transport=transport, device="cuda", timeout=300):
        for row, (worst, identical) in found.items():
            assert worst < 1e-10, row  # a GPU multiplies matrices of other sizes in another order
            assert identical, row


# ── what people do with an optimizer ────────────────────────────────────────────────────────────────────────────────


def with_groups(comms, shard):
    """Groups, a scheduler, a closure, a group that is added later: as torch's own."""

    def make(model, optimizer_class, *more, **options):
        parameters = list(model.parameters())
        groups = [{"params": parameters[:3], "lr": 0.02}, {"params": parameters[3:4], "weight_decay": 0.0}]
        optimizer = optimizer_class(groups, *more, lr=0.01, **options)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[0.02, 0.03], total_steps=12)

    model, plain = mp.DataParallel(build("mlp"), comms, SMALL, shard=shard), build("mlp")
    mine, mine_rate = make(model, mp.ShardedOptimizer, torch.optim.AdamW, comms)
    whole, whole_rate = make(plain, torch.optim.AdamW)
    worst = 0.0
    for step in range(6):
        inputs, targets = samples("mlp", step, 2 * comms.world_size)

        def closure(model, optimizer, inputs, targets):
            def run():
                optimizer.zero_grad()
                loss = loss_of(model(inputs), targets)
                loss.backward()
                return loss

            return run

        share = slice(2 * comms.rank, 2 * comms.rank + 2)
        here = mine.step(closure(model, mine, inputs[share], targets[share]))
        there = whole.step(closure(plain, whole, inputs, targets))
        worst = max(worst, difference(comms.all_reduce_mean(here.detach()), there))
        mine_rate.step()
        whole_rate.step()
        if step == 2:
            for optimizer, one in ((mine, model), (whole, plain)):
                optimizer.add_param_group({"params": list(one.parameters())[4:], "lr": 0.05})
            mine_rate = torch.optim.lr_scheduler.ExponentialLR(mine, 0.9)
            whole_rate = torch.optim.lr_scheduler.ExponentialLR(whole, 0.9)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in (mine, whole)]
    worst = max(worst, *itertools.starmap(difference, zip(model.parameters(), plain.parameters(), strict=True)))
    return worst, rates[0] == rates[1], mine.param_groups[0]["params"][0] is next(iter(model.parameters()))


@pytest.mark.parametrize("shard", ["optimizer", "gradients", None])
def test_groups_schedulers_closures_and_groups_that_come_later(any_pool, shard):
    for worst, same_rates, same_parameters in any_pool.run(with_groups, 2, shard, timeout=50):
        assert worst < 1e-12
        assert same_rates and same_parameters


def saved_and_loaded(comms, folder, save):
    """Save the state on some ranks, and load it on others, in the middle of a run."""
    model = mp.DataParallel(build("mlp"), comms, SMALL, shard="optimizer")
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.01)
    if not save:
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for step in range(3):
        inputs, targets = samples("mlp", 3 * (not save) + step, 12)
        each = 12 // comms.world_size
        share = slice(each * comms.rank, each * (comms.rank + 1))
        optimizer.zero_grad()
        loss_of(model(inputs[share]), targets[share]).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if save and comms.rank == 0:
        torch.save(state, folder / "state.pt")
    return {name: tensor.clone() for name, tensor in state["model"].items()}


def test_a_state_is_loaded_by_other_numbers_of_ranks_and_by_torch_itself(pool, tmp_path):
    pool.run(saved_and_loaded, 3, tmp_path, True, transport="shm", timeout=50)
    found = [
        pool.run(saved_and_loaded, ranks, tmp_path, False, transport="shm", timeout=50)[0] for ranks in (1, 2, 3, 4)
    ]
    plain = build("mlp")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    state = torch.load(tmp_path / "state.pt")
    plain.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for step in range(3, 6):
        optimizer.zero_grad()
        inputs, targets = samples("mlp", step, 12)
        loss_of(plain(inputs), targets).backward()
        optimizer.step()
    for weights in found:
        assert max(difference(weights[name], tensor) for name, tensor in plain.state_dict().items()) < 1e-12


def loaded_from_torch(comms):
    """A state that one process saved, before the first step here and after it; each time the same as saved."""
    plain = build("mlp")
    whole = torch.optim.AdamW(plain.parameters(), lr=0.01)
    loss_of(plain(samples("mlp", 0, 4)[0]), samples("mlp", 0, 4)[1]).backward()
    whole.step()
    optimizer = mp.ShardedOptimizer(build("mlp").parameters(), torch.optim.AdamW, comms, bucket_cap_mb=SMALL)
    optimizer.load_state_dict(copy.deepcopy(whole.state_dict()))
    back = optimizer.state_dict()
    same = [
        torch.equal(value, back["state"][number][key])
        for number, values in whole.state_dict()["state"].items()
        for key, value in values.items()
    ]
    return all(same), len(same), back["param_groups"] == whole.state_dict()["param_groups"]


def test_a_state_of_one_process_comes_back_bit_for_bit(any_pool):
    assert any_pool.run(loaded_from_torch, 3, timeout=50) == [(True, 18, True)] * 3


def in_parts(comms, by):
    """Every rank's parts cover every element of the state once; loaded by parts, the state is the same."""
    parameters = list(build("mlp").parameters())
    optimizer = mp.ShardedOptimizer(parameters, torch.optim.AdamW, comms, by=by, bucket_cap_mb=SMALL)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    parts, whole = optimizer.state_parts(), optimizer.state_dict()["state"]
    covered = {number: torch.zeros(one.numel()) for number, one in enumerate(parameters)}
    right = True
    for number, values in parts["state"].items():
        part = values["exp_avg"]
        stop = part.start + len(part.tensor)
        covered[number][part.start : stop] += 1
        right &= torch.equal(part.tensor, whole[number]["exp_avg"].flatten()[part.start : stop])
    for count in covered.values():
        comms.all_reduce(count)
    read = []

    class Reader:
        def __call__(self, number, key, start=0, stop=None):
            found = whole[number][key].flatten()[start:stop].clone()
            read.append(len(found) * bool(stop))
            return found

        def shapes(self, number):
            return {key: tuple(value.shape) for key, value in whole[number].items()}

    fresh = mp.ShardedOptimizer(build("mlp").parameters(), torch.optim.AdamW, comms, by=by, bucket_cap_mb=SMALL)
    fresh.load_state_parts(parts["param_groups"], Reader())
    again = fresh.state_dict()["state"]
    right &= all(torch.equal(again[number][key], value) for number, row in whole.items() for key, value in row.items())
    everything = 2 * sum(one.numel() for one in parameters)
    return right, all(bool((count == 1).all()) for count in covered.values()), sum(read) / everything


@pytest.mark.parametrize("by", ["element", "parameter"])
def test_each_rank_saves_and_reads_its_own_part(pool, by):
    found = pool.run(in_parts, 3, by, transport="shm", timeout=50)
    assert [(right, once) for right, once, _ in found] == [(True, True)] * 3
    assert sum(share for *_, share in found) == pytest.approx(1)


# ── gradients: kept, removed, missing, not finite ───────────────────────────────────────────────────────────────────


def several_backwards(comms, shard):
    """Backwards that add up without no_sync, gradients removed in several ways, a parameter left out of one step."""
    model, plain = mp.DataParallel(build("mlp"), comms, SMALL, shard=shard), build("mlp")
    mine = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=0.1)
    whole = torch.optim.SGD(plain.parameters(), lr=0.1)
    worst = 0.0
    for step in range(8):
        if step % 4 == 0:
            mine.zero_grad()
        elif step % 4 == 1:
            model.zero_grad(set_to_none=False)
        elif step % 4 == 2:
            for parameter in model.parameters():
                parameter.grad = None
        if step % 4 != 3:  # in the last of four, gradients of the step before count again
            whole.zero_grad()
        for number in range(3):
            inputs, targets = samples("mlp", 3 * step + number, 2 * comms.world_size)
            loss_of(plain(inputs), targets).backward()
            share = slice(2 * comms.rank, 2 * comms.rank + 2)
            with model.no_sync() if number == 1 else model.weighted(1.0):
                loss_of(model(inputs[share]), targets[share]).backward()
            if number == 1:  # asking for gradients alone changes none
                torch.autograd.grad(loss_of(model(inputs[share]), targets[share]), list(model.parameters()))
        if step == 5:
            next(iter(model.parameters())).grad = None
            next(iter(plain.parameters())).grad = None
        mine.step()
        whole.step()
        worst = max(worst, *itertools.starmap(difference, zip(model.parameters(), plain.parameters(), strict=True)))
    return worst


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_gradients_add_up_until_they_are_removed(any_pool, shard):
    assert max(any_pool.run(several_backwards, 2, shard, timeout=50)) < 1e-12


def skipping(comms, shard):
    """Each rank uses other parameters; a rank without data sits out; weights differ."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()
    plain = copy.deepcopy(layers)

    class Chosen(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = layers

        def forward(self, inputs, number):
            return self.layers[number](inputs)

    model = mp.DataParallel(Chosen(layers), comms, SMALL, shard=shard)
    mine = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms, lr=0.1)
    whole = torch.optim.AdamW(plain.parameters(), lr=0.1)
    worst = 0.0
    for step in range(4):
        mine.zero_grad()
        whole.zero_grad()
        total = sum(rank + 1 for rank in range(comms.world_size - 1))
        for rank in range(comms.world_size - 1):
            inputs = samples("mlp", 10 * step + rank, 3)[0]
            (Chosen(plain)(inputs, (rank + step) % 3).pow(2).mean() * (rank + 1) / total).backward()
        if comms.rank < comms.world_size - 1:
            with model.weighted(comms.rank + 1.0):
                inputs = samples("mlp", 10 * step + comms.rank, 3)[0]
                model(inputs, (comms.rank + step) % 3).pow(2).mean().backward()
        else:
            with model.weighted(0):
                model.sit_out()
        mine.step()
        whole.step()
        worst = max(worst, *itertools.starmap(difference, zip(layers.parameters(), plain.parameters(), strict=True)))
    return worst, layers[3].weight.grad is None, replicas_are_identical(layers, comms)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_parameters_that_ranks_skip_and_ranks_without_data(any_pool, shard):
    for worst, never_used, identical in any_pool.run(skipping, 3, shard, timeout=50):
        assert worst < 1e-12
        assert never_used and identical


def mixed(comms, shard):
    """Parameters of two dtypes, frozen and unfrozen on the way; converted after some steps."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, 4))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    plain = copy.deepcopy(model)

    def run(model, inputs):
        return model[1](model[0](inputs).float().tanh())

    class Both(nn.Sequential):
        def forward(self, inputs):
            return run(self, inputs)

    wrapped = mp.DataParallel(Both(*model), comms, shard=shard)
    mine = mp.ShardedOptimizer(wrapped.parameters(), torch.optim.AdamW, comms, lr=0.1)
    whole = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(6):
        for layers in (model, plain):
            layers[0].weight.requires_grad_(step not in (2, 3))
        mine.zero_grad()
        whole.zero_grad()
        inputs = samples("mlp", step, 2 * comms.world_size)[0]
        share = slice(2 * comms.rank, 2 * comms.rank + 2)
        run(plain, inputs).pow(2).mean().backward()
        wrapped(inputs[share]).pow(2).mean().backward()
        mine.step()
        whole.step()
    exact, close = (
        max(itertools.starmap(difference, zip(one.parameters(), other.parameters(), strict=True)))
        for one, other in zip(model, plain, strict=True)
    )
    return exact, close, replicas_are_identical(model, comms)


@pytest.mark.parametrize("shard", ["optimizer", "gradients", None])
def test_mixed_dtypes_and_parameters_that_are_frozen_for_a_while(pool, shard):
    for exact, close, identical in pool.run(mixed, 2, shard, transport="shm", timeout=50):
        assert max(exact, close) < 1e-4  # float32 activations between them
        assert identical


def not_finite(comms, shard):
    model = mp.DataParallel(build("mlp"), comms, SMALL, shard=shard, check_finite=True)
    mine = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=0.1)
    inputs, targets = samples("mlp", 0, 2)
    words = ""
    try:
        loss_of(model(inputs * (float("nan") if comms.rank == 1 else 1.0)), targets).backward()
    except GradientError as error:
        words = str(error)
    before = [parameter.clone() for parameter in model.parameters()]
    mine.step()  # there are no gradients: nothing changes
    unchanged = all(map(torch.equal, before, model.parameters()))
    loss_of(model(inputs), targets).backward()
    mine.step()
    return words, unchanged, not any(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_gradients_that_are_not_finite_stop_every_rank_and_leave_nothing(any_pool, shard):
    for words, unchanged, goes_on in any_pool.run(not_finite, 2, shard, timeout=50):
        assert "not finite" in words and "rank 1: " in words
        assert unchanged and goes_on


def one_gradient(comms, use):
    model = mp.DataParallel(build("mlp"), comms, shard="optimizer")
    inputs, targets = samples("mlp", 0, 2)
    loss_of(model(inputs), targets).backward()
    parameter = next(iter(model.parameters()))
    gradient = parameter.grad
    assert isinstance(gradient, GradientInParts) and gradient.shape == parameter.shape
    assert gradient.dtype == torch.float64 and "GradientInParts" in repr(gradient)
    try:
        use(model)
    except UsageError as error:
        return str(error)
    return ""


def clip_with_torch(model):
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def read(model):
    return next(iter(model.parameters())).grad.sum()


def step_with_torch(model):
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.parametrize("use", [clip_with_torch, read, step_with_torch])
def test_a_gradient_in_parts_is_not_taken_for_a_whole_one(pool, use):
    for words in pool.run(one_gradient, 2, use, transport="shm", timeout=50):
        assert "in parts" in words and "clip_grad_norm_" in words


def compiled(comms, shard):
    """The model is compiled while gradients are in parts."""
    model = mp.DataParallel(build("mlp"), comms, SMALL, shard=shard)
    quick = torch.compile(model, backend="aot_eager")
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=0.1)
    for step in range(4):
        inputs, targets = samples("mlp", step, 2 + step)
        loss_of((model if step == 0 else quick)(inputs), targets).backward()
        optimizer.step()
        if step:
            optimizer.zero_grad()
    return replicas_are_identical(model.module, comms)


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_compiled_models(pool, shard):
    assert pool.run(compiled, 2, shard, transport="shm", timeout=50) == [True, True]


def used_after_the_end(comms):
    """Weights lie in memory that the ranks share; they outlive the connection."""
    model = mp.DataParallel(build("mlp"), comms, shard="gradients")
    optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.SGD, comms, lr=0.1)
    inputs, targets = samples("mlp", 0, 2)
    loss_of(model(inputs), targets).backward()
    optimizer.step()
    module = model.module
    before = module(inputs).detach().clone()
    del model, optimizer
    comms.close()
    gc.collect()
    return torch.equal(module(inputs), before)


def test_weights_outlive_the_connection(quick_ranks):
    assert mp.launch(used_after_the_end, 2, transport="shm", device="cpu", timeout=50) == [True, True]


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


class Own(torch.optim.AdamW):
    """An optimizer of the user's."""


def refusals(comms):
    model = build("mlp")
    parameters = list(model.parameters())

    def sharded(**options):
        return mp.ShardedOptimizer(parameters, torch.optim.SGD, comms, lr=0.1, **options)

    def changed():
        optimizer = mp.ShardedOptimizer(parameters[:3], torch.optim.SGD, comms, lr=0.1)
        optimizer.param_groups[0]["params"].append(parameters[3])
        optimizer.step()

    def joined():
        with mp.DataParallel(build("mlp"), comms, shard="optimizer").join():
            pass

    def not_summed():
        wrapped = mp.DataParallel(build("mlp"), comms, shard="gradients")
        optimizer = mp.ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, comms, lr=0.1)
        with wrapped.no_sync():
            wrapped(samples("mlp", 0, 2)[0]).sum().backward()
        optimizer.step()

    calls = {
        "level": lambda: mp.DataParallel(build("mlp"), comms, shard="parameters"),
        "lbfgs": lambda: mp.ShardedOptimizer(parameters, torch.optim.LBFGS, comms, by="parameter"),
        "adafactor": lambda: mp.ShardedOptimizer(parameters, torch.optim.Adafactor, comms),
        "own": lambda: mp.ShardedOptimizer(parameters, Own, comms),
        "object": lambda: mp.ShardedOptimizer(parameters, torch.optim.SGD(parameters), comms),
        "by": lambda: sharded(by="layer"),
        "bucket": lambda: sharded(bucket_cap_mb=0),
        "empty": lambda: mp.ShardedOptimizer([], torch.optim.SGD, comms),
        "ranks": lambda: mp.ShardedOptimizer(parameters[comms.rank :], torch.optim.SGD, comms),
        "changed": changed,
        "joined": joined,
        "not summed": not_summed,
        "loaded": lambda: sharded().load_state_dict(torch.optim.SGD(parameters[:2]).state_dict()),
        "copied": lambda: copy.deepcopy(sharded()),
    }
    words = {}
    for name, call in calls.items():
        try:
            call()
        except UsageError as error:
            words[name] = str(error)
    return words


REFUSED = {
    "level": "shard='parameters'; choose None, 'optimizer' or 'gradients'",
    "lbfgs": "LBFGS cannot be sharded, since it looks at all parameters together",
    "adafactor": "Adafactor is not known to update each element by itself",
    "own": "Own is not known to update each element by itself",
    "object": "SGD is no class of optimizers",
    "by": "by='layer'; choose 'element' or 'parameter'",
    "bucket": "bucket_cap_mb=0",
    "empty": "there are no parameters",
    "ranks": "group 0 has 6 parameters, the first [9, 6] on rank 0 and 5 parameters, the first [9] on rank 1",
    "changed": "param_groups have 4 parameters, and this optimizer was made for 3; add parameters with add_param_group",
    "joined": "sit_out()",
    "not summed": "outside of no_sync()",
    "loaded": "groups of [2] parameters, and this optimizer has [6]",
    "copied": "cannot be pickled or copied",
}


def test_what_is_refused_is_refused_by_name_on_every_rank(pool):
    for words in pool.run(refusals, 2, transport="shm", timeout=50):
        assert words.keys() == REFUSED.keys()
        for name, part in REFUSED.items():
            assert part in words[name], name
            assert "\n" not in words[name]


def by_parameter(comms, optimizer_class, options):
    """Optimizers that need whole matrices, on whole parameters."""
    model, plain = (nn.ModuleList([nn.Linear(5, 4, bias=False) for _ in range(5)]).double() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    comms.broadcast(torch.zeros(1))
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        comms.broadcast(one.data)
        other.data.copy_(one.data)
    mine = mp.ShardedOptimizer(model.parameters(), optimizer_class, comms, by="parameter", **options)
    whole = optimizer_class(plain.parameters(), **options)
    for step in range(3):
        for number, (one, other) in enumerate(zip(model.parameters(), plain.parameters(), strict=True)):
            generator = torch.Generator().manual_seed(10 * step + number)
            one.grad = torch.randn(one.shape, dtype=torch.float64, generator=generator)
            other.grad = one.grad.clone()
        mine.step()
        whole.step()
    back, state = mine.state_dict()["state"], whole.state_dict()["state"]
    same = all(
        torch.equal(torch.as_tensor(back[number][key]), torch.as_tensor(value))
        for number, values in state.items()
        for key, value in values.items()
    )
    worst = max(itertools.starmap(difference, zip(model.parameters(), plain.parameters(), strict=True)))
    fresh = mp.ShardedOptimizer(model.parameters(), optimizer_class, comms, by="parameter", **options)
    fresh.load_state_dict(mine.state_dict())
    again = fresh.state_dict()["state"]
    same &= all(
        torch.equal(torch.as_tensor(again[number][key]), torch.as_tensor(value))
        for number, values in state.items()
        for key, value in values.items()
    )
    return worst, same


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "AdamW"])
def test_whole_parameters_for_optimizers_that_need_whole_matrices(pool, name):
    optimizer_class = getattr(torch.optim, name)
    for worst, same in pool.run(by_parameter, 3, optimizer_class, {"lr": 0.01}, transport="shm", timeout=50):
        assert worst == 0
        assert same


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_of_all_tensors():
    """What all tensors of this process hold together, each piece of memory counted once."""
    gc.collect()
    alive = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    alive += [one.grad for one in alive if isinstance(one, nn.Parameter) and type(one.grad) is torch.Tensor]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in alive}
    return sum(storages.values())


def held(comms, shard):
    """Bytes of one rank after a step: those that came with the model and its training, and those of one layer."""
    width, layers = 128, 6
    inputs = torch.ones(2, width)
    comms.all_reduce(torch.ones(2**18))  # now this rank has mapped the shared memory of all
    before = bytes_of_all_tensors()
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    one = sum(parameter.nbytes for parameter in module[0].parameters())
    model = mp.DataParallel(module, comms, one / 2**20, shard=shard)
    if shard is None:
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms)
    for _ in range(2):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    return bytes_of_all_tensors() - before, layers * one, one


def recorded(comms, shard):
    """The most that a recorded step says of each kind, and the bytes of one copy of the weights."""
    width, layers = 32, 4
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    one = sum(parameter.nbytes for parameter in module[0].parameters())
    model = mp.DataParallel(module, comms, one / 2**20, shard=shard, overlap=True)
    if shard is None:
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = mp.ShardedOptimizer(model.parameters(), torch.optim.AdamW, comms)
    with mp.record(comms) as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, width)).sum().backward()
            optimizer.step()
    memory = recorder.trace.step(1).memory[comms.rank]
    return {kind: memory.peak_of(kind) for kind in ("parameters", "gradients", "optimizer")}, layers * one, one


@pytest.mark.parametrize(
    ("shard", "weights", "gradients", "state"),
    [
        (None, 1, 1, 2),
        ("optimizer", 1, 1, 2 / 4),
        ("gradients", 1, 1 / 4, 2 / 4),
    ],
)
def test_a_rank_holds_what_the_formula_says(pool, shard, weights, gradients, state):
    """Within 2 %, and at level 2 a buffer for each bucket that is in flight: two, and one that is filled."""
    for held_bytes, model, layer in pool.run(held, 4, shard, transport="shm", timeout=50):
        expected = (weights + gradients + state) * model
        in_flight = 3 * layer * (shard == "gradients")
        assert 0.99 * expected < held_bytes < 1.02 * expected + in_flight


@pytest.mark.parametrize(
    ("shard", "gradients", "state"), [(None, 1, 2), ("optimizer", 1, 2 / 4), ("gradients", 1 / 4, 2 / 4)]
)
def test_a_recorded_step_holds_what_the_formula_says(pool, shard, gradients, state):
    """Adam also keeps a number of steps for each parameter, of 4 bytes."""
    for most, model, layer in pool.run(recorded, 4, shard, transport="shm", timeout=50):
        in_flight = 4 * layer * (shard == "gradients")
        assert most["parameters"] == model
        assert gradients * model <= most["gradients"] <= gradients * model + in_flight
        assert state * model <= most["optimizer"] <= 1.01 * state * model
