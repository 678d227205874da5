"""mp.Pipeline(precision=…) beside one process that computes the same stages with the same copies, and GradScaler."""

import copy

import pytest
import torch
from tests.pipeline.oracle import batch, far, gpt, mlp, whole_batch, wrong_gradients
from torch import nn

import microparallel as mp
from microparallel.models import cross_entropy

COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Replicas send gradients as they are: then sums over them have the same bits as in one process.
EXACT = {name: mp.MixedPrecision(dtype, reduce=torch.float32) for name, dtype in COMPUTE.items()}


def normalised():
    """BatchNorm has statistics, and so computes with its parameters as they are."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(5, 3))


class Waves(nn.Module):
    """Adds a buffer of real numbers, as sinusoidal positions are."""

    def __init__(self):
        super().__init__()
        self.register_buffer("waves", torch.linspace(-1, 1, 5))

    def forward(self, inputs):
        return inputs + self.waves


def with_waves():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Waves(), nn.Linear(5, 5), nn.Linear(5, 3))


MODELS = {
    "mlp": lambda: mlp(torch.float32, depth=5),
    "tied gpt": lambda: gpt(torch.float32, depth=5),
    "batch norm": normalised,
    "waves": with_waves,
}


class OneProcess:
    """A model whose float32 parameters are trained; it computes with 16-bit copies, micro-batch by micro-batch.

    A weight that several layers share has a copy for each of them, as stages have. Gradients are kept by replica and
    layer, and added up in that order: then sums of two have the same bits as those of ranks.
    """

    def __init__(self, model, compute):
        self.model = copy.deepcopy(model)
        self._compute = compute
        self._in_16_bits = copy.deepcopy(model)
        self._take_copies()

    def _take_copies(self):
        originals = dict(self.model.named_modules())
        for name, module in self._in_16_bits.named_modules():
            for own, parameter in originals[name].named_parameters(recurse=False):
                statistics = any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
                dtype = torch.float32 if statistics else self._compute
                setattr(module, own, nn.Parameter(parameter.detach().to(dtype, copy=True)))
            if isinstance(module, Waves):
                module.waves = originals[name].waves.to(self._compute)

    def gradients(self, replicas, microbatches, scaled=lambda loss: loss, factor=1.0):
        """Leave the gradients of a batch, given as a list of replicas' batches, in the model; returns the loss."""
        self._take_copies()
        total = sum(len(targets) for _, targets in replicas)
        masters = dict(self.model.named_parameters(remove_duplicate=False))
        sums = {name: [] for name in masters}
        loss_of_all = 0.0
        for inputs, targets in replicas:
            mine = dict.fromkeys(masters)
            pairs = zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True)
            for part, answers in pairs:
                part = part.to(self._compute) if part.is_floating_point() else part
                loss = cross_entropy(self._in_16_bits(part).float(), answers) * (len(answers) / total)
                loss_of_all += float(loss.detach())
                scaled(loss).backward()
                for name, parameter in self._in_16_bits.named_parameters(remove_duplicate=False):
                    gradient, parameter.grad = parameter.grad.float() * factor, None
                    mine[name] = gradient if mine[name] is None else mine[name] + gradient
            for name, gradient in mine.items():
                sums[name].append(gradient)
        for parameter in self.model.parameters():
            parameter.grad = None
        for name, parts in sums.items():
            parameter, gradient = masters[name], sum(parts[1:], parts[0])
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return loss_of_all


def by_name(model):
    return {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}


def batches(kind, replicas, samples=4, seed=0):
    kind = "gpt" if "gpt" in kind else "mlp"
    return [batch(kind, samples, torch.float32, seed=seed * replicas + replica) for replica in range(replicas)]


# ── one dtype ───────────────────────────────────────────────────────────────────────────────────────────────────────


def in_float64(comms, replicas, names):
    """A float32 model and float32 inputs: what is computed is what a float64 model computes."""
    torch.set_num_threads(1)
    wrong = []
    for kind, build in (("mlp", mlp), ("gpt", gpt)):
        inputs, targets = batch(kind, 8, torch.float32)
        whole = build(torch.float32).double()
        expected = whole_batch(whole, inputs.double() if kind == "mlp" else inputs, targets)
        for name in names:
            pipe = mp.Pipeline(
                build(torch.float32), comms, name, 4, cross_entropy, replicas=replicas, precision="float64"
            )
            mine = slice(pipe.replica * 8 // replicas, (pipe.replica + 1) * 8 // replicas)
            if far(pipe.step(inputs[mine], targets[mine]), expected[0], 1e-12):
                wrong.append(f"{kind}, {name}: loss")
            wrong += [f"{kind}, {name}: {what}" for what in wrong_gradients(pipe.named_parameters(), expected[1])]
            if pipe.loss_scale is not None:
                wrong.append(f"{kind}, {name}: a loss scale")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "replicas", "names"), [(2, 1, ["gpipe", "1f1b", "interleaved", "zb-h1"]), (4, 2, ["1f1b", "zbv"])]
)
def test_float64_is_a_float64_model(pool, ranks, replicas, names):
    assert pool.run(in_float64, ranks, replicas, names, transport="shm", timeout=40) == [[]] * ranks


# ── 16 bits ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def in_16_bits(comms, kind, name, replicas, more):
    """Two micro-batches for each replica, so that each sum is one of two numbers and has the same bits in any order."""
    torch.set_num_threads(1)
    wrong = []
    for precision, compute in COMPUTE.items():
        given = batches(kind, replicas)
        alone = OneProcess(MODELS[kind](), compute)
        scale = 64.0 if precision == "fp16" else 1.0
        loss = alone.gradients(given, 2, lambda loss, scale=scale: loss * scale, 1 / scale)
        pipe = mp.Pipeline(
            MODELS[kind](), comms, name, 2, cross_entropy, replicas=replicas, precision=EXACT[precision], **more
        )
        if pipe.loss_scale is not None:
            pipe.loss_scale.value = scale
        found = pipe.step(*given[pipe.replica])
        if far(found, torch.tensor(loss), 1e-6):
            wrong.append(f"{precision}: loss {float(found)} instead of {loss}")
        for at, parameter in pipe.named_parameters():
            expected = by_name(alone.model)[at]
            if parameter.dtype is not torch.float32 or not torch.equal(parameter.grad, expected):
                wrong.append(f"{precision}: {at} by {(parameter.grad - expected).norm() / expected.norm():.1e}")
        for at, buffer in pipe.own_layers.named_buffers():
            if buffer.is_floating_point() and buffer.dtype is not torch.float32:
                wrong.append(f"{precision}: {at} is {buffer.dtype}")
    return wrong


@pytest.mark.parametrize(
    ("kind", "name", "ranks", "replicas", "more"),
    [
        ("mlp", "gpipe", 2, 1, {}),
        ("tied gpt", "1f1b", 2, 1, {}),
        ("mlp", "interleaved", 2, 1, {}),
        ("tied gpt", "zb-h1", 2, 1, {}),
        ("batch norm", "1f1b", 2, 1, {}),
        ("waves", "1f1b", 2, 1, {"balance": [2, 2]}),
        ("tied gpt", "1f1b", 2, 1, {"recompute": True}),
        ("mlp", "1f1b", 4, 2, {}),
        ("tied gpt", "zbv", 4, 2, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, str | dict) else None,
)
def test_16_bits_are_those_of_one_process_bit_for_bit(pool, kind, name, ranks, replicas, more):
    assert pool.run(in_16_bits, ranks, kind, name, replicas, more, transport="shm", timeout=40) == [[]] * ranks


class Wide(nn.Module):
    """A layer that returns float32 whatever it is given."""

    def forward(self, inputs):
        return inputs.float()


def sends(comms, name, precision):
    """How many messages this rank sends to other stages in a step, and their bytes; one stage ends in float32."""
    layers = [*mlp(torch.float32, depth=4).layers]
    model = nn.Sequential(*layers[:2], Wide(), *layers[2:])
    pipe = mp.Pipeline(model, comms, name, 4, cross_entropy, [3, 2], precision=precision)
    inputs, targets = batch("mlp", 8, torch.float32)
    _, trace = pipe.traced_step(inputs, targets)
    sent = [event for event in trace.events if event.rank == comms.rank and event.name.startswith(">")]
    return len(sent), sum(event.bytes for event in sent)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_stages_send_half_the_bytes(pool, name):
    wide, narrow = (pool.run(sends, 2, name, one, transport="shm", timeout=30) for one in ("float32", "bf16"))
    assert [(count, size // 2) for count, size in wide] == narrow
    assert min(size for _, size in narrow) > 0


def holds(comms, precision):
    """The most bytes of activations of this rank, in a step that is recorded; and whether the copies are gone."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    pipe = mp.Pipeline(model, comms, "1f1b", 2, nn.functional.mse_loss, precision=precision)
    _, trace = pipe.traced_step(torch.ones(4, 16), torch.ones(4, 16))
    mine = [event.activations for event in trace.events if event.rank == comms.rank and event.activations]
    return max(map(max, mine)), pipe._precision.copies


def test_activations_take_half_the_memory_and_copies_are_not_counted_as_such(pool):
    wide, narrow = (pool.run(holds, 2, one, transport="shm", timeout=30) for one in ("float32", "bf16"))
    assert wide[0][0] == 2 * narrow[0][0] > 0
    assert narrow[1][0] < wide[1][0]  # the last stage's outputs are float32, and so are the targets
    assert all(copies == [] for _, copies in narrow)


def without_gradients(comms, precision):
    """What a pipeline answers is what one process answers that computes with the same copies, in float32."""
    model = MODELS["tied gpt"]()
    pipe = mp.Pipeline(MODELS["tied gpt"](), comms, "1f1b", 2, cross_entropy, precision=precision)
    inputs, targets = batch("gpt", 4)
    with torch.no_grad():
        alone = model.to(COMPUTE[precision])
        expected = torch.cat([alone(part) for part in inputs.chunk(2)]).float()
    before = [one.detach().clone() for one in pipe.parameters()]
    answer = pipe.predict(inputs)
    wrong = answer is not None and (answer.dtype is not torch.float32 or not torch.equal(answer, expected))
    losses = [cross_entropy(*pair) for pair in zip(expected.chunk(2), targets.chunk(2), strict=True)]
    far_off = far(pipe.evaluate(inputs, targets), sum(losses) / 2, 1e-6)
    tokens = inputs[:, :2]
    for _ in range(3):
        tokens = torch.cat([tokens, alone(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
    other = not torch.equal(pipe.generate(inputs[:, :2], 3), tokens)
    same = all(torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True))
    return wrong, far_off, other, same


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_answers_are_those_of_the_copies(pool, precision):
    results = pool.run(without_gradients, 2, precision, transport="shm", timeout=30)
    assert results == [(False, False, False, True)] * 2


def over_replicas(comms, precision, shard):
    """Two replicas beside one process: each replica's gradients are rounded before they are sent."""
    torch.set_num_threads(1)
    compute, scale = COMPUTE[precision], 64.0 if precision == "fp16" else 1.0
    given, alone = batches("mlp", 2), OneProcess(MODELS["mlp"](), COMPUTE[precision])
    sent = {}
    for one in given:
        alone.gradients([one], 2, lambda loss: loss * scale, 1 / scale)
        for at, gradient in by_name(alone.model).items():
            sent.setdefault(at, []).append((gradient / 2 * scale).to(compute).float())
    model, loss_fn = MODELS["mlp"](), cross_entropy
    pipe = mp.Pipeline(model, comms, "1f1b", 2, loss_fn, replicas=2, precision=precision, shard=shard)
    exact = mp.Pipeline(MODELS["mlp"](), comms, "1f1b", 2, loss_fn, replicas=2, precision=EXACT[precision], shard=shard)
    sizes = []
    for one in (pipe, exact):
        if one.loss_scale is not None:
            one.loss_scale.value = scale
        _, trace = one.traced_step(*given[pipe.replica])
        events = [event for event in trace.events if event.rank == comms.rank and event.name[:2] in ("*U", "%U")]
        sizes.append(sum(event.sent for event in events))
    wrong = []
    for at, parameter in pipe.named_parameters():
        first, second = sent[at]
        if shard:
            bucket = pipe._column.bucket_of(parameter)
            places = zip(bucket.pieces, bucket.gradients(), strict=True)
            whole = ((first + second) / scale).reshape(-1)
            pairs = [(whole[p.start : p.stop], one) for p, one in places if bucket.parameters[p.index] is parameter]
        else:
            pairs = [((first + second).to(compute).float() / scale, parameter.grad)]
        wrong += [at for expected, found in pairs if not torch.equal(expected, found)]
    return wrong, sizes[0] / sizes[1]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("shard", [None, "optimizer"])
def test_replicas_send_16_bits_and_add_them_in_float32(pool, precision, shard):
    for wrong, part in pool.run(over_replicas, 4, precision, shard, transport="shm", timeout=30):
        assert not wrong
        assert 0.25 < part < 0.6  # buckets of float32 have gaps between small gradients


class Reads(nn.Module):
    """Notes the dtypes of its weight, as it reads it and as it lists it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen = set()

    def forward(self, inputs):
        (listed,) = self.parameters()
        self.seen.add((self.weight.dtype, listed.dtype, inputs.dtype))
        return inputs * self.weight


def reads(comms):
    given = torch.optim.SGD((layers := nn.Sequential(Reads(), Reads()).double()).parameters(), lr=1.0)
    precision = mp.MixedPrecision(torch.bfloat16)
    pipe = mp.Pipeline(layers, comms, "1f1b", 2, nn.functional.mse_loss, precision=precision)
    pipe.step(torch.ones(4, 3), torch.zeros(4, 3, dtype=torch.float32))
    layer = pipe.own_layers[0]
    before = layer.weight.detach().clone()
    given.step()
    with pytest.raises(mp.errors.UsageError, match=r"made with precision=MixedPrecision.*make another pipeline"):
        pipe.to(torch.float64)
    return layer.seen, layer.weight.dtype, bool((layer.weight != before).all())


def test_a_layer_computes_with_copies_and_an_optimizer_made_before_updates_the_parameters(pool):
    seen = {(torch.bfloat16, torch.float32, torch.bfloat16)}
    assert pool.run(reads, 2, transport="shm", timeout=30) == [(seen, torch.float32, True)] * 2


def refuses(comms):
    with pytest.raises(mp.errors.UsageError, match=r"Pipeline: precision='half'; choose 'float32', 'bf16', 'fp16'"):
        mp.Pipeline(mlp(), comms, "1f1b", 2, precision="half")

    words = r"different settings: rank 0 has precision=None, and rank 1 has precision=MixedPrecision\(compute=torch.bf"
    with pytest.raises(mp.errors.UsageError, match=words):
        mp.Pipeline(mlp(), comms, "1f1b", 2, precision="bf16" if comms.rank else None)


def test_an_unknown_precision_and_ranks_that_disagree_are_refused(pool):
    pool.run(refuses, 2, transport="shm", timeout=30)


# ── torch's own autocast ────────────────────────────────────────────────────────────────────────────────────────────


def under_autocast(comms, name, precision):
    """With and without autocast in turn: a pipeline does what one process does, micro-batch by micro-batch."""
    torch.set_num_threads(1)
    alone, inputs, targets = normalised(), *batches("mlp", 1)[0]
    pipe = mp.Pipeline(normalised(), comms, name, 2, cross_entropy, precision=precision)
    wrong = []
    for number, enabled in enumerate((True, False, True)):
        alone.zero_grad()
        pipe.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = pipe.step(inputs, targets)
            for part, answers in zip(inputs.chunk(2), targets.chunk(2), strict=True):
                (cross_entropy(alone(part), answers) / 2).backward()
        wrong += [f"{what} in step {number}" for what in wrong_gradients(pipe.named_parameters(), by_name(alone), 1e-6)]
        statistics = dict(alone.named_buffers())
        mine = {layer.whole_name(at): one for layer in pipe._layers() for at, one in layer.module.named_buffers()}
        wrong += [f"{at} in step {number}" for at, one in mine.items() if far(one, statistics[at], 1e-6)]
        wrong += [] if found.isfinite() else ["loss"]
    return wrong


@pytest.mark.parametrize(("name", "precision"), [("1f1b", None), ("zb-h1", None), ("interleaved", "float32")])
def test_autocast_around_a_step_is_autocast_in_one_process(pool, name, precision):
    assert pool.run(under_autocast, 2, name, precision, transport="shm", timeout=30) == [[]] * 2


# ── overflow ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Infinite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.inf


class Fragile(nn.Module):
    """A layer some of whose calls, counted from 0, give gradients that are not finite."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.calls = 0
        self.breaks = ()

    def forward(self, inputs):
        outputs = torch.tanh(self.linear(inputs))
        if self.calls in self.breaks:
            outputs = Infinite.apply(outputs)
        self.calls += torch.is_grad_enabled()
        return outputs


def fragile():
    torch.manual_seed(0)
    return nn.Sequential(*(Fragile() for _ in range(4)), nn.Linear(5, 3))


STEPS = 8
BREAKS = {1: (0, 0, 1), 2: (3, -1, 0), 6: (2, 0, 0)}  # by step: the layer, the replica and its micro-batch


def trained_alone(replicas, microbatches=2):
    """The scales after each step, and the weights at the end, of one process with torch's GradScaler."""
    alone = OneProcess(fragile(), torch.float16)
    for step, (layer, replica, microbatch) in BREAKS.items():
        call = (step * replicas + replica % replicas) * microbatches + microbatch
        alone._in_16_bits[layer].breaks += (call,)
    optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.5, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for step in range(STEPS):
        alone.gradients(batches("mlp", replicas, seed=step), microbatches, scaler.scale)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, {name: one.detach() for name, one in alone.model.named_parameters()}


def fragile_layers(pipe):
    """This rank's layers that can break, each with its number in the model."""
    layers = {layer.name: layer.module for stage in pipe.stages.values() for layer in stage.layers}
    return [(int(name), layer) for name, layer in layers.items() if isinstance(layer, Fragile)]


def trained(comms, name, replicas, shard):
    torch.set_num_threads(1)
    expected, weights = trained_alone(replicas)
    pipe = mp.Pipeline(
        fragile(), comms, name, 2, cross_entropy, replicas=replicas, shard=shard, precision=EXACT["fp16"]
    )
    pipe.loss_scale.value, pipe.loss_scale.interval = 256.0, 2
    for index, layer in fragile_layers(pipe):
        hit = [
            (step, part)
            for step, (*where, part) in BREAKS.items()
            if where[0] == index and where[1] % replicas == pipe.replica
        ]
        layer.breaks = tuple(step * 2 + part for step, part in hit)
    options = {"lr": 0.5, "momentum": 0.9}
    if shard:
        optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, **options)
    else:
        optimizer = torch.optim.SGD(pipe.parameters(), **options)
    scales, wrong = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        pipe.step(*batches("mlp", replicas, seed=step)[pipe.replica])
        if (step in BREAKS) != all(one.grad is None for one in pipe.parameters()):
            wrong.append(f"gradients of step {step}")
        pipe.clip_grad_norm_(1e9)
        optimizer.step()
        scales.append(pipe.loss_scale.value)
    if scales != expected:
        wrong.append(f"scales {scales} instead of {expected}")
    wrong += [f"{at}" for at, one in pipe.named_parameters() if not torch.equal(one.detach(), weights[at])]
    if pipe.loss_scale.state_dict() != {"value": expected[-1], "good_steps": 1, "skipped": len(BREAKS)}:
        wrong.append(f"{pipe.loss_scale.state_dict()}")
    return wrong


@pytest.mark.parametrize(
    ("name", "ranks", "replicas", "shard"),
    [
        ("1f1b", 2, 1, None),
        ("zb-h1", 2, 1, None),
        ("interleaved", 2, 1, None),
        ("1f1b", 4, 2, None),
        ("1f1b", 4, 2, "optimizer"),
    ],
)
def test_an_overflow_skips_the_steps_that_grad_scaler_skips(pool, name, ranks, replicas, shard):
    """In one stage, for one micro-batch of one replica; all ranks have the same scales as one process."""
    assert pool.run(trained, ranks, name, replicas, shard, transport="shm", timeout=40) == [[]] * ranks


def accumulated(comms, shard):
    """Two steps of the pipeline for each step of the optimizer; the first stage's layers break in some."""
    replicas = 2 if shard else 1
    pipe = mp.Pipeline(fragile(), comms, "1f1b", 2, cross_entropy, replicas=replicas, shard=shard, precision="fp16")
    pipe.loss_scale.value = 256.0
    for index, layer in fragile_layers(pipe):
        layer.breaks = (2 * 2, 2 * 5) if index == 0 and pipe.replica == 0 else ()  # in steps 2 and 5, counted from 0
    optimizer = mp.ShardedOptimizer(pipe.parameters(), torch.optim.SGD, comms, lr=0.5)
    found = []
    for step in range(4):
        before = [one.detach().clone() for one in pipe.parameters()]
        there = []
        for part in range(2):
            pipe.step(*batches("mlp", 1, seed=2 * step + part)[0])
            there.append(sum(one.grad is not None for one in pipe.parameters()))
        optimizer.step()
        changed = sum(not torch.equal(*pair) for pair in zip(before, pipe.parameters(), strict=True))
        pipe.zero_grad() if step % 2 else optimizer.zero_grad()
        found.append(tuple(bool(count) for count in (*there, changed)))
    return found, pipe.loss_scale.value, pipe.loss_scale.skipped


@pytest.mark.parametrize(("ranks", "shard"), [(2, None), (4, "optimizer")])
def test_gradients_that_add_up_are_whole_or_not_there(pool, ranks, shard):
    """After an overflow in the first of two passes the second leaves no gradients; one in the second removes all."""
    steps = [(True, True, True), (False, False, False), (True, False, False), (True, True, True)]
    assert pool.run(accumulated, ranks, shard, transport="shm", timeout=30) == [(steps, 64.0, 2)] * ranks


def partly_frozen(comms):
    """The rank with the last stage has nothing to train, and so no optimizer."""
    model = fragile()
    for layer in model[2:]:
        layer.requires_grad_(False)
    pipe = mp.Pipeline(model, comms, "1f1b", 2, cross_entropy, [2, 3], precision="fp16")
    pipe.loss_scale.value, pipe.loss_scale.interval = 256.0, 3
    for index, layer in fragile_layers(pipe):
        layer.breaks = (2, 3) if index == 1 else ()
    trained = [one for one in pipe.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5) if trained else None
    scales = []
    for step in range(5):
        pipe.step(*batches("mlp", 1, seed=step)[0])
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        scales.append(pipe.loss_scale.value)
    return scales


def test_a_rank_without_an_optimizer_has_the_scale_of_all(pool):
    assert pool.run(partly_frozen, 2, transport="shm", timeout=30) == [[256.0, 128.0, 128.0, 128.0, 256.0]] * 2


def idle(comms):
    """A replica without samples has the gradients, the overflow and the scale of the other."""
    pipe = mp.Pipeline(fragile(), comms, "1f1b", 2, cross_entropy, replicas=2, precision="fp16")
    pipe.loss_scale.value = 256.0
    for index, layer in fragile_layers(pipe):
        layer.breaks = (2,) if index == 3 else ()  # in the second step
    found = []
    for _ in range(2):
        pipe.step(*(batches("mlp", 1)[0] if pipe.replica == 0 else ()), samples=4)
        found.append([None if one.grad is None else one.grad.clone() for one in pipe.parameters()])
    return found, pipe.loss_scale.value


def test_a_replica_without_samples_skips_the_same_steps(pool):
    results = pool.run(idle, 4, transport="shm", timeout=30)
    for place in range(2):
        (mine, lost), (theirs, lost_too) = results[place][0], results[place + 2][0]
        assert all(map(torch.equal, mine, theirs))
        assert lost == lost_too == [None] * len(mine)
    assert [scale for _, scale in results] == [128.0] * 4


def after_an_error(comms):
    """A stage that fails leaves its layers reading their parameters; the next step is the first one's."""
    pipe = mp.Pipeline(fragile(), comms, "1f1b", 2, cross_entropy, precision="bf16")
    inputs, targets = batches("mlp", 1)[0]
    pipe.step(inputs, targets)
    expected = [one.grad.clone() for one in pipe.parameters()]
    pipe.zero_grad()
    with pytest.raises(mp.errors.StageError):
        pipe.step(inputs, targets + 3)  # classes that there are not
    dtypes = {layer.linear.weight.dtype for _, layer in fragile_layers(pipe)}
    pipe.zero_grad()
    pipe.step(inputs, targets)
    return dtypes, all(map(torch.equal, expected, (one.grad for one in pipe.parameters())))


def test_a_step_after_one_that_failed(pool):
    assert pool.run(after_an_error, 1, transport="shm", timeout=30) == [({torch.float32}, True)]


def resumed(comms):
    pipe = mp.Pipeline(fragile(), comms, "1f1b", 2, cross_entropy, precision="fp16")
    for index, layer in fragile_layers(pipe):
        layer.breaks = (0,) if index == 0 else ()
    pipe.step(*batches("mlp", 1)[0])
    other = mp.Pipeline(fragile(), comms, "1f1b", 2, cross_entropy, precision="fp16")
    other.loss_scale.load_state_dict(pipe.loss_scale.state_dict())
    return other.loss_scale.value, other.loss_scale.skipped


def test_the_scale_goes_on_where_a_checkpoint_left_it(pool):
    assert pool.run(resumed, 2, transport="shm", timeout=30) == [(2.0**15, 1)] * 2
