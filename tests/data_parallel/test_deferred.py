"""Models that are built without memory and filled later, against the same models of one process: bit for bit."""

import contextlib
import copy
import gc
import warnings
import weakref

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import microparallel as mp
from microparallel import torch_private
from microparallel.data_parallel.deferred import deferred_init, fill, is_deferred
from microparallel.errors import UsageError

OUTSIDE = torch.arange(3.0)  # made before any block


def filled(model):
    """What `fill` hands over, by name; and the state that it returns."""
    contents = {}

    def keep(name, tensor):
        assert name not in contents
        contents[name] = tensor.clone()

    return contents, fill(model, keep)


def tensors_of(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def require_same(build, *, meta=True):
    """Build a model in one process, and deferred: everything must be equal."""
    torch.manual_seed(7)
    plain, end = build(), torch.get_rng_state()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with deferred_init():
        model = build()
    assert is_deferred(model) and not is_deferred(plain)
    assert not meta or all(tensor.is_meta for tensor in tensors_of(model).values())
    contents, state = filled(model)
    assert torch.equal(torch.get_rng_state(), before)  # neither the block nor `fill` has drawn from it
    assert torch.equal(state, end)
    assert {name: tensor.requires_grad for name, tensor in tensors_of(model).items()} == {
        name: tensor.requires_grad for name, tensor in tensors_of(plain).items()
    }
    assert contents.keys() == tensors_of(plain).keys()
    for name, tensor in tensors_of(plain).items():
        mine = contents[name]
        assert (mine.dtype, mine.shape, mine.stride()) == (tensor.dtype, tensor.shape, tensor.stride()), name
        assert torch.equal(mine, tensor), name
    return model


class Holds(nn.Module):
    """Has one parameter, or one buffer: what a function returns."""

    def __init__(self, make):
        super().__init__()
        tensor = make()
        if tensor.is_floating_point() or tensor.is_complex():
            self.held = nn.Parameter(tensor)
        else:
            self.register_buffer("held", tensor)


def linear():
    return nn.Linear(4, 3)


def sequence(*builders):
    return nn.Sequential(*(build() for build in builders))


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def gpt(**options):
    return mp.models.GPT(vocabulary=11, context=4, dim=8, heads=2, depth=2, **options)


class Initialised(nn.Module):
    """Initialised as people do it: layer by layer by torch's defaults, then all of it by `apply`, then some again."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 7, bias=False)
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)).view(1, 1, 5, 5))
        self.register_buffer("places", torch.arange(5).expand(1, -1), persistent=False)
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.startswith("layers.1"):
                parameter.data.mul_(0.5)
        self.head.weight = self.embedding.weight

    def initialise(self, module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.weight.data[module.padding_idx].zero_()


MODELS = {
    "linear": linear,
    "mlp": lambda: mp.models.FullMLP(9, 3, 6, 4),
    "gpt": gpt,
    "gpt, tied": lambda: gpt(tied=True),
    "float64": lambda: gpt(tied=True).double(),
    "bfloat16": lambda: gpt(tied=True).to(torch.bfloat16),
    "half": lambda: sequence(linear, lambda: nn.BatchNorm1d(3), linear).half(),
    "initialised": Initialised,
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "transformer": lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
    "lstm": lambda: nn.LSTM(4, 5, 2, bidirectional=True),
    "convolutions": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose1d(2, 2, 3)),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "embeddings": lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.EmbeddingBag(5, 2), nn.LayerNorm(3)),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "list": lambda: nn.ParameterList([torch.randn(2), torch.zeros(3)]),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "moved": lambda: linear().to("cpu").to("cpu", torch.float64).cpu(),
    "copied": lambda: nn.Sequential(*(copy.deepcopy(linear()) for _ in range(2)), linear()),
    "frozen": lambda: nn.Sequential(linear().requires_grad_(False), linear()),
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_a_model_is_filled_as_in_one_process(build):
    require_same(build)


SIZES = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
LLAMA = {**SIZES, "num_key_value_heads": 1}
GPT2 = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
IMAGES = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2}
TRANSFORMERS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, from its configuration": lambda: transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True), dtype=torch.bfloat16
    ),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "swin": lambda: transformers.SwinForImageClassification(transformers.SwinConfig(**IMAGES)),
}


@pytest.mark.parametrize("build", TRANSFORMERS.values(), ids=TRANSFORMERS)
def test_models_of_transformers(build):
    require_same(build)


# ── what code may do in the block ───────────────────────────────────────────────────────────────────────────────────


INITIALISERS = ["trunc_normal_", "orthogonal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"]
INITIALISERS += ["xavier_normal_", "normal_", "uniform_", "eye_", "ones_", "zeros_"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(5, 4), (4, 6)])
@pytest.mark.parametrize("name", INITIALISERS)
def test_initialisers_of_torch(name, shape, dtype):
    require_same(lambda: Holds(lambda: getattr(nn.init, name)(torch.empty(shape, dtype=dtype))))


def set_where(tensor):
    tensor[tensor > 0] = 7
    return tensor


def through_views(tensor):
    tensor.data.normal_()
    tensor.data[1].fill_(3)
    tensor.detach().t().mul_(2)
    tensor[:, 2:].copy_(tensor[:, :2].clone())
    tensor.view(-1)[::3].uniform_()
    return tensor


def relative_positions():
    """As in Swin."""
    flat = torch.stack(torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")).flatten(1)
    between = (flat[:, :, None] - flat[:, None, :]).permute(1, 2, 0).contiguous()
    between[:, :, 0] += 2
    between[:, :, 0] *= 5
    index = torch.zeros(10, 10, dtype=between.dtype)
    index[1:, 1:] = between.sum(-1)
    return index


TENSORS = {
    "dirac": lambda: nn.init.dirac_(torch.empty(3, 3, 3)),
    "sparse": lambda: nn.init.sparse_(torch.empty(5, 3), 0.4),
    "truncated, again and again": lambda: nn.init.trunc_normal_(torch.empty(50, 4), std=3, a=-1, b=2),
    "truncated, a part": lambda: nn.init.trunc_normal_(torch.ones(4, 4)[1:3]),
    "numbers": lambda: torch.tensor([1.0, 2, 3]),
    "numbers as another": lambda: torch.empty(2, dtype=torch.float64).new_tensor([1, 2]),
    "numbers where another is": lambda: torch.as_tensor([1.0, 2], device=torch.empty(1).device),
    "an array": lambda: torch.from_numpy(np.arange(3.0)),
    "the old constructor": lambda: torch.Tensor(3, 4).normal_(),
    "zeros and ones": lambda: torch.cat([torch.zeros(2), torch.ones(3), torch.full((2,), 0.5)]),
    "through views": lambda: through_views(torch.empty(3, 4)),
    "resized": lambda: torch.empty(0).resize_(2, 3).zero_(),
    "set": lambda: torch.empty(0).set_(torch.rand(3)),
    "set by a mask": lambda: set_where(torch.randn(5)),
    "chosen by a mask": lambda: set_where(torch.randn(5))[torch.randn(5) > 0],
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj() * 2,
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "rotations": lambda: torch.polar(torch.ones(4, 3), torch.outer(torch.arange(4.0), 10 ** -(torch.arange(3) / 6))),
    "factored": lambda: torch.linalg.qr(torch.randn(5, 3))[0],
    "singular vectors": lambda: torch.linalg.svd(torch.randn(5, 3))[0],
    "product": lambda: torch.randn(5, 3) @ torch.randn(3, 2),
    "positions": relative_positions,
    "window": lambda: torch.hann_window(8),
    "many draws": lambda: (
        torch.normal(torch.zeros(3), torch.rand(3))
        + torch.empty(3).exponential_()
        + torch.bernoulli(torch.rand(3))
        + torch.empty(3).bernoulli_(0.5)
        + torch.randint(9, (3,))
        + torch.randperm(3)
        + torch.rand_like(torch.empty(3), device="cpu")
    ),
    "a sample": lambda: torch.multinomial(torch.rand(5), 3),
    "with a tensor from outside": lambda: OUTSIDE * torch.rand(3),
    "copied from outside": lambda: torch.empty(3).copy_(OUTSIDE),
    "converted from outside": lambda: OUTSIDE.to(torch.rand(3, dtype=torch.float64)),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS)
def test_ways_to_make_a_tensor(make):
    require_same(lambda: sequence(linear, lambda: Holds(make), linear))


def test_values_may_be_asked_for():
    asked = []

    def build():
        layers = [nn.Dropout(rate.item()) for rate in torch.linspace(0, 0.5, 3)]
        layers += [linear(), nn.Dropout(torch.rand(1, device="cpu").item())]
        scale = torch.randn(3, 4).norm().item()
        layers += [Holds(lambda: torch.randn(2) / scale), linear()]
        if (layers[3].weight > 0.49).any():
            layers.append(linear())
        numbers = torch.rand(2).tolist() + torch.nonzero(torch.randn(4) > 0).flatten().tolist()
        asked.append([numbers, scale, [layer.p for layer in layers if isinstance(layer, nn.Dropout)]])
        return nn.Sequential(*layers, linear())

    require_same(build)
    assert asked[0] == asked[1]


class RealDraws(torch_private.EveryOperation):
    """Counts how often `torch.randn` is really done; the block is inside, so this sees what that does."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += function.overloadpacket.__name__ == "randn" and not result.is_meta
        return result


def test_what_was_drawn_to_answer_a_question_is_not_drawn_for_the_next():
    with RealDraws() as draws, deferred_init():
        for _ in range(5):
            float(torch.randn(3).sum())
    assert draws.count == 5


def test_tensors_from_outside_may_be_changed():
    """They are real, and so is what is drawn into them: as in one process."""
    seen = []

    def build():
        layer, outside = linear(), OUTSIDE.clone()
        outside.add_(layer.bias.detach())
        outside.add_(torch.empty_like(outside).normal_())
        layer.bias.data.copy_(outside)
        seen.append(outside.clone())
        outside.zero_()
        return nn.Sequential(layer, Holds(lambda: torch.ones(3).add(outside.add_(1))), linear())

    require_same(build)
    assert torch.equal(*seen)


def test_tensors_that_have_contents_are_handed_over_as_they_are():
    model = require_same(lambda: nn.Sequential(nn.Embedding.from_pretrained(OUTSIDE[None]), linear()), meta=False)
    assert not model[0].weight.is_meta


def test_a_forward_in_the_block():
    """As people do to find out a size; it changes the statistics of BatchNorm."""

    def build():
        body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten())
        return nn.Sequential(body, nn.Linear(body(torch.rand(2, 3, 6, 6)).shape[1], 3))

    require_same(build)


def test_weights_that_share_memory():
    def build():
        model = nn.Module()
        model.whole = nn.Parameter(torch.randn(3, 4))
        model.turned = nn.Parameter(model.whole.data.t())
        model.copied = nn.Parameter(model.whole.detach().clone())
        nn.init.normal_(model.turned)
        model.parts = nn.ParameterList(torch.randn(6).chunk(2))
        return model

    require_same(build)


def test_a_state_dict_may_be_loaded():
    def build():
        layer = linear()
        layer.load_state_dict({"weight": torch.ones(3, 4), "bias": OUTSIDE})
        return layer

    require_same(build)


def test_another_default_dtype():
    def build():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return nn.Sequential(Holds(lambda: torch.randn(70) + torch.arange(70) / 3), linear())
        finally:
            torch.set_default_dtype(torch.float32)

    require_same(build)


def test_what_is_meant_for_the_meta_device_draws_nothing():
    require_same(lambda: sequence(linear, lambda: (nn.Linear(2, 2, device="meta"), linear())[1]))


# ── the generator ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_seeds_and_states_in_the_block():
    def forked(build):
        with torch.random.fork_rng(devices=[]):
            return build()

    def seeded(build):
        torch.manual_seed(3)
        return build()

    def own_seed():
        return torch.randn(3, generator=torch.Generator().manual_seed(torch.initial_seed() + 1))

    require_same(
        lambda: sequence(
            linear,
            lambda: forked(lambda: seeded(linear)),
            lambda: forked(linear),
            linear,
            lambda: seeded(linear),
            lambda: seeded(lambda: nn.Linear(5, 5)),
            lambda: Holds(own_seed),
            linear,
        )
    )


def test_a_state_that_was_saved_after_a_seed_that_is_used_twice():
    def build():
        torch.manual_seed(3)
        first = linear()
        state = torch.get_rng_state()
        torch.manual_seed(3)
        second = nn.Linear(5, 5)
        torch.set_rng_state(state)
        return nn.Sequential(first, second, linear())

    require_same(build)


def test_a_generator_of_the_programs_own():
    generator = torch.Generator()

    def build():
        first = nn.init.normal_(torch.empty(3), generator=generator)
        second = nn.init.trunc_normal_(torch.empty(5), generator=generator)
        return sequence(linear, lambda: nn.ParameterList([first, second]), linear)

    ends = []
    for block in (contextlib.nullcontext(), deferred_init()):
        generator.manual_seed(5)
        with block:
            build()
        ends.append(generator.get_state())
    assert torch.equal(*ends)

    def seeded():
        generator.manual_seed(5)
        return build()

    require_same(seeded)


def test_after_an_error_in_the_block_all_is_as_before():
    before, function = torch.get_rng_state(), nn.init._no_grad_trunc_normal_
    with pytest.raises(ZeroDivisionError), deferred_init():
        linear()
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    assert nn.init._no_grad_trunc_normal_ is function
    assert not torch.empty(1).is_meta


def test_autocast_around_fill_changes_nothing():
    with deferred_init():
        model = Holds(lambda: torch.randn(3, 4) @ torch.randn(4, 5))
    contents, _ = filled(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = filled(model)
    assert torch.equal(contents["held"], again["held"])


def test_keep_may_draw():
    with deferred_init():
        model = sequence(linear, linear)
    alone, _ = filled(model)
    torch.manual_seed(1)
    with_draws = {}
    fill(model, lambda name, tensor: with_draws.update({name: tensor.clone(), "drawn " + name: torch.rand(())}))
    torch.manual_seed(1)
    drawn = [torch.rand(()) for _ in alone]
    assert all(torch.equal(with_draws[name], tensor) for name, tensor in alone.items())
    assert [tensor for name, tensor in with_draws.items() if name.startswith("drawn")] == drawn


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class LiveBytes(torch_private.EveryOperation):
    """Counts the bytes of all tensors that operations return, until they are gone."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch_private.pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage):
        if id(storage) not in self.known:
            self.known.add(id(storage))
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, id(storage), storage.nbytes())
            self.peak = max(self.peak, self.live)

    def _gone(self, number, nbytes):
        self.known.remove(number)
        self.live -= nbytes


WIDTH, DEPTH = 64, 20
WEIGHT = 4 * WIDTH * WIDTH


def deep(*, initialise=nn.init.normal_, final=lambda model: model):
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))
    for layer in model:
        layer.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))
    model.apply(lambda module: [initialise(one) for one in module.parameters(recurse=False)])
    return final(model)


def scaled(model):
    for parameter in model.parameters():
        parameter.data /= parameter.detach().norm()
    for layer in model:
        layer.mask.mul_(2)
    return model


@pytest.mark.parametrize("final", [lambda model: model, nn.Module.half, nn.Module.double, scaled])
def test_filling_holds_a_few_weights_at_a_time(final):
    require_same(lambda: deep(final=final))
    gc.collect()
    with LiveBytes() as building, deferred_init():
        model = deep(final=final)
    assert building.peak < WEIGHT
    with LiveBytes() as filling:
        fill(model, lambda name, tensor: None)
    assert WEIGHT <= filling.peak <= 4 * WEIGHT  # of about 40
    assert filling.live < WEIGHT


def test_numbers_within_bounds_are_not_drawn_in_the_block():
    """Although torch draws until all of them are."""
    with LiveBytes() as building, deferred_init():
        model = deep(initialise=nn.init.trunc_normal_)
    assert building.peak < WEIGHT
    with LiveBytes() as filling:
        fill(model, lambda name, tensor: None)
    assert filling.peak <= 6 * WEIGHT


def test_the_count_of_live_bytes_counts():
    with LiveBytes() as count:
        held = [torch.ones(10) for _ in range(3)]
        held.append(held[0][:2])
        assert count.live == count.peak == 120
        del held
        assert (count.live, count.peak) == (0, 120)


def test_a_part_of_a_model():
    """What only other parts need is not done, but for the random numbers."""
    torch.manual_seed(7)
    plain, end = deep(), torch.get_rng_state()
    torch.manual_seed(7)
    with deferred_init():
        model = deep()
    contents, state = filled(model[3])
    assert contents.keys() == {"weight", "bias", "mask"}
    assert all(torch.equal(tensor, getattr(plain[3], name)) for name, tensor in contents.items())
    assert torch.equal(state, end)


def test_the_record_lives_as_long_as_the_model():
    with deferred_init():
        model = gpt()
    record = weakref.ref(model.layers[0].token.weight.untyped_storage().deferred[0])
    weight = model.layers[0].token.weight.data[1:]
    del model
    gc.collect()
    assert record() is not None
    del weight
    gc.collect()
    assert record() is None


def test_it_may_be_filled_twice():
    with deferred_init():
        model = nn.Sequential(gpt().half(), Holds(lambda: torch.tensor([1.0, 2.0]).mul_(3)))
    (first, _), (second, _) = filled(model), filled(model)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(tensor.is_meta for tensor in tensors_of(model).values())


def test_a_block_within_a_block():
    def build():
        with deferred_init():
            first = linear()
        return nn.Sequential(first, linear())

    torch.manual_seed(0)
    with deferred_init():
        model = build()
    contents, _ = filled(model)
    plain = sequence(linear, linear)
    assert all(torch.equal(contents[name], tensor) for name, tensor in tensors_of(plain).items())


STEPS = {
    "draw": lambda tensors, which, _: tensors[which].normal_(),
    "part": lambda tensors, which, _: tensors[which][1:].uniform_(),
    "fill": lambda tensors, which, _: tensors[which].fill_(2),
    "scale": lambda tensors, which, _: tensors[which].mul_(1.5),
    "add": lambda tensors, which, other: tensors[which].add_(tensors[other]),
    "copy": lambda tensors, which, other: tensors[which].copy_(tensors[other]),
    "copy a part": lambda tensors, which, other: tensors[which][:2].copy_(tensors[other][2:]),
    "turn": lambda tensors, which, _: tensors[which].t_(),
    "new": lambda tensors, which, other: tensors.__setitem__(which, tensors[other] * 2),
    "same": lambda tensors, which, other: tensors.__setitem__(which, tensors[other]),
    "ask": lambda tensors, which, other: tensors[which].add_(tensors[other][0, 0].item()),
    "seed": lambda tensors, which, _: torch.manual_seed(which),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_any_order_of_operations(steps):
    def build():
        tensors = [torch.rand(4, 4) for _ in range(3)]
        for name, which, other in steps:
            STEPS[name](tensors, which, other)
        return nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])

    require_same(build)


# ── what is refused ─────────────────────────────────────────────────────────────────────────────────────────────────


def built():
    with deferred_init():
        return linear()


def in_block(action):
    with deferred_init():
        action()


def on_meta():
    with torch.device("meta"):
        return linear()


def with_foreign():
    foreign = torch.empty(3, device="meta")
    with deferred_init():
        layer = linear()
        layer.bias.data.add_(foreign)
    return layer


def change_in_another_block():
    layer = built()
    with deferred_init():
        nn.init.ones_(layer.weight)


def under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.ones(2, 2).mm(torch.ones(2, 2))


def move():
    """As `tensor.cuda()` does, but that fails earlier where there is no GPU."""
    torch.ops.aten._to_copy(torch.ones(3), device=torch.device("cuda", 0))


REFUSED = {
    "moved": (lambda: in_block(move), "no contents to move to cuda: move what fill"),
    "numpy": (lambda: in_block(lambda: torch.ones(3).numpy()), r"numpy\(\) of a tensor of shape \[3\].*tolist"),
    "array": (lambda: in_block(lambda: np.asarray(torch.ones(3))), "has no memory inside deferred_init"),
    "address": (lambda: in_block(lambda: torch.ones(3).data_ptr()), "data_ptr"),
    "sparse": (lambda: in_block(lambda: torch.ones(3, 3).to_sparse()), "layout torch.sparse_coo"),
    "negative": (lambda: in_block(lambda: torch.ones(2, dtype=torch.complex64).conj().imag + 1), "use -tensor.imag"),
    "autocast": (lambda: in_block(under_autocast), "build the model without it"),
    "another block's": (change_in_another_block, "build a model in one"),
    "two blocks": (lambda: fill(nn.Sequential(built(), built()), print), "0.weight and 1.weight were made in two"),
    "inside": (lambda: in_block(lambda: fill(linear(), print)), "call it after"),
    "plain meta": (lambda: fill(on_meta(), print), r"weight is on the meta device.*`with mp.deferred_init\(\):`"),
    "copied later": (lambda: fill(copy.deepcopy(built()), print), "weight is on the meta device"),
    "converted later": (lambda: fill(built().half(), print), "copy or convert it, inside"),
    "changed later": (
        lambda: fill(built().apply(lambda layer: nn.init.ones_(layer.bias)), print),
        "bias was changed after",
    ),
    "foreign": (lambda: fill(with_foreign(), lambda *_: None), "made elsewhere: make it inside"),
    "lazy": (lambda: fill(lazy(), print), "weight has no shape"),
}


def lazy():
    with warnings.catch_warnings(), deferred_init():
        warnings.simplefilter("ignore")
        return nn.LazyLinear(3)


@pytest.mark.parametrize(("action", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused(action, words):
    with pytest.raises(UsageError, match=words) as refusal:
        action()
    assert "\n" not in str(refusal.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    "move", [nn.Module.cuda, lambda layer: layer.to("cuda"), lambda layer: layer.to_empty(device="cuda")]
)
def test_moving_to_a_gpu_in_the_block_is_refused(move):
    with pytest.raises(UsageError, match="has no contents to move to cuda"):
        in_block(lambda: move(linear()))


def test_errors_of_the_program_stay_what_they_are():
    with pytest.raises(RuntimeError, match="broadcast"):
        in_block(lambda: torch.ones(3) + torch.ones(4))


def test_what_is_deferred():
    assert is_deferred(built())
    assert not is_deferred(linear()) and not is_deferred(on_meta())
    assert is_deferred(nn.Sequential(linear(), built()))


def test_a_model_with_contents_is_handed_over():
    layer = linear()
    contents, state = filled(layer)
    assert all(torch.equal(contents[name], tensor) for name, tensor in tensors_of(layer).items())
    assert torch.equal(state, torch.get_rng_state())
