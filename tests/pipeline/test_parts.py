"""mp.pipeline_layers: models with a forward of their own, cut into stages, beside one process."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from tests.pairwise import every
from tests.pipeline.oracle import far, wrong_gradients
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.tokenization_utils_base import BatchEncoding

import microparallel as mp
from microparallel.errors import PartitionError, UsageError
from microparallel.pipeline.parts import joined

WORDS, LENGTH = 23, 7
SMALL = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
ENCODER = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 24,
}


def gpt2(tied=True, dropout=0.0):
    config = GPT2Config(
        n_positions=24, n_embd=8, n_layer=3, n_head=2, tie_word_embeddings=tied, embd_pdrop=dropout, **SMALL,
        attn_pdrop=dropout, resid_pdrop=dropout,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama(tied=False):
    return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, num_key_value_heads=1, **ENCODER, **SMALL))


def bert(head=BertForSequenceClassification):
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    return head(BertConfig(**ENCODER, **SMALL, **quiet))


def t5(tied=True):
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 2}
    config = T5Config(
        **sizes, dropout_rate=0.0, decoder_start_token_id=0, tie_word_embeddings=tied, vocab_size=WORDS, pad_token_id=0,
        eos_token_id=2, feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


MODELS = {
    "gpt2": gpt2,
    "gpt2 untied": functools.partial(gpt2, tied=False),
    "llama": llama,
    "llama tied": functools.partial(llama, tied=True),
    "bert": bert,
    "bert words": functools.partial(bert, BertForMaskedLM),
    "t5": t5,
    "t5 untied": functools.partial(t5, tied=False),
}


def made(kind):
    """A model in float64, its norms too: those of Llama and T5 would use float32, whose rounding hides errors."""
    torch.manual_seed(0)
    model = MODELS[kind]().double()
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                setattr(module, name, nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, dtype=torch.float64))
    return model


def words(samples, length=LENGTH, seed=0):
    return torch.randint(3, WORDS, (samples, length), generator=torch.Generator().manual_seed(seed))


def batch(kind, samples=6, seed=0):
    """Inputs with padding, of another length in each sample, and the targets; padding is -100 in these."""
    ids = words(samples, seed=seed)
    mask = torch.ones_like(ids)
    for sample in range(samples):
        mask[sample, LENGTH - sample % 4 :] = 0
    inputs = {"input_ids": ids * mask, "attention_mask": mask}
    if kind == "bert":
        return BatchEncoding(inputs | {"token_type_ids": ids % 2}), ids[:, 0] % 3
    if kind.startswith("gpt2"):
        inputs["position_ids"] = torch.arange(LENGTH).flip(0).repeat(samples, 1)
    targets = ids.masked_fill(mask == 0, -100)
    if kind.startswith("t5"):
        inputs["decoder_input_ids"] = words(samples, 5, seed + 1)
        targets = targets[:, :5]
    return BatchEncoding(inputs), targets


def token_loss(output, targets):
    """The sum over what is not padding, and how many tokens that is."""
    loss = cross_entropy(output.logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return loss, (targets != -100).sum()


def of_one_process(kind, steps=2):
    """The losses, the gradients of the last step, and the weights after it."""
    model = made(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(steps):
        inputs, targets = batch(kind, seed=number)
        optimizer.zero_grad()
        total, count = token_loss(model(**inputs), targets)
        (total / count).backward()
        losses.append((total / count).detach())
        optimizer.step()
    gradients = {name: one.grad for name, one in model.named_parameters(remove_duplicate=False)}
    return losses, gradients, model.state_dict()


def trains(comms, kinds, schedules, replicas):
    torch.set_num_threads(1)
    wrong = []
    for kind in kinds:
        losses, gradients, weights = of_one_process(kind)
        for name in schedules:
            pipe = mp.Pipeline(mp.pipeline_layers(made(kind)), comms, name, 3, token_loss, replicas=replicas)
            optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
            for number, expected in enumerate(losses):
                inputs, targets = batch(kind, seed=number)
                optimizer.zero_grad()
                loss = pipe.step(*shared(inputs, targets, pipe))
                if far(loss, expected, 1e-12):
                    wrong.append(f"{kind}, {name}: loss {loss} and not {expected} in step {number}")
                optimizer.step()
            wrong += [f"{kind}, {name}: {what}" for what in wrong_gradients(pipe.named_parameters(), gradients, 1e-11)]
            whole = pipe.whole_state_dict()
            if whole is not None:
                if whole.keys() != weights.keys():
                    wrong.append(f"{kind}, {name}: names {whole.keys() ^ weights.keys()}")
                wrong += [f"{kind}, {name}: {at}" for at, one in weights.items() if far(whole[at], one, 1e-11)]
    return wrong


def shared(inputs, targets, pipe):
    """The samples of a replica."""
    half = slice(0, 3) if pipe.replica == 0 else slice(3, 6)
    if pipe.mesh.dp == 1:
        return inputs, targets
    return {name: one[half] for name, one in inputs.items()}, targets[half]


@pytest.mark.parametrize(
    "kinds", every(2, [["gpt2", "llama tied"], ["gpt2 untied", "llama"], ["bert", "bert words"], ["t5 untied"], ["t5"]])
)
def test_a_model_is_trained_as_in_one_process(pool, kinds):
    assert pool.run(trains, 2, kinds, ["gpipe", "1f1b", "zb-h1"], 1, transport="shm", timeout=50) == [[]] * 2


def test_three_stages_and_replicas_of_a_model_are_trained_as_in_one_process(pool):
    assert pool.run(trains, 3, ["t5"], ["1f1b"], 1, transport="shm", timeout=50) == [[]] * 3
    assert pool.run(trains, 4, ["gpt2"], ["zb-h1"], 2, transport="shm", timeout=50) == [[]] * 4


def parameters_held(comms):
    """How many numbers are alive on this rank when its pipeline is made and the model dropped, of how many."""
    model = gpt2()
    alive = [weakref.ref(one) for one in model.parameters()]
    whole = sum(one.numel() for one in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing here holds the whole model
        pipe = mp.Pipeline(mp.pipeline_layers(model), comms, "1f1b", 2, token_loss)
    pipe.step({"input_ids": words(2)}, words(2))
    del model
    gc.collect()
    return sum(one().numel() for one in alive if one() is not None), pipe.count_parameters(), whole


def test_each_rank_holds_its_own_part(pool):
    held = pool.run(parameters_held, 2, transport="shm", timeout=30)
    assert all(counted == whole for _, counted, whole in held)
    assert sum(numbers for numbers, _, _ in held) == held[0][2] + WORDS * 8  # the embedding, which is tied, is on both
    assert all(numbers < 0.8 * whole for numbers, _, whole in held)


def loads_and_predicts(comms):
    wrong = []
    for kind in ("gpt2", "bert", "t5"):
        other = made(kind)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.01)
        pipe = mp.Pipeline(mp.pipeline_layers(made(kind).float()), comms, "1f1b", 3, token_loss)
        pipe.evaluate(*batch(kind, 4))
        pipe.to(torch.float64).load_state_dict(other.state_dict())
        inputs, targets = batch(kind, 4)  # and three micro-batches
        output = pipe.predict(inputs)
        expected = other(**inputs)
        if output is not None and far(output.logits, expected.logits, 1e-12):
            wrong.append(f"{kind}: logits")
        if output is not None and kind == "t5" and far(output[-1], expected.encoder_last_hidden_state, 1e-12):
            wrong.append(f"{kind}: what the encoder returned")
        total, count = token_loss(expected, targets)
        if far(pipe.evaluate(inputs, targets), total / count, 1e-12):
            wrong.append(f"{kind}: evaluate")
    return wrong


def test_the_state_of_the_plain_model_is_loaded_and_answers_alike(pool):
    assert pool.run(loads_and_predicts, 2, transport="shm", timeout=40) == [[]] * 2


def generates(comms):
    wrong = []
    prompts = words(3, 4)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]])
    for kind in ("gpt2", "llama", "t5"):
        model = made(kind).eval()
        pipe = mp.Pipeline(mp.pipeline_layers(copy.deepcopy(model)), comms, "1f1b", 2)
        for end in (None, 5):
            options = {"attention_mask": mask, "eos_token_id": end, "pad_token_id": 0}
            expected = model.generate(prompts, do_sample=False, use_cache=False, max_new_tokens=6, **options)
            found = pipe.generate(prompts, 6, decoder_start_token_id=0 if kind == "t5" else None, **options)
            if not torch.equal(found, expected):
                wrong.append(f"{kind}, {end}: {found.tolist()} and not {expected.tolist()}")
    return wrong


def test_greedy_generation_is_that_of_one_process(pool):
    assert pool.run(generates, 2, transport="shm", timeout=40) == [[]] * 2


@pytest.mark.parametrize("kind", ["gemma3", "bart", "vit", "gpt2 classifier"])
def test_other_families_are_cut_without_being_known(kind):
    torch.manual_seed(0)
    model, inputs, cuts = FAMILIES[kind]()
    expected = copy.deepcopy(model).double()
    output = expected(**inputs)[0]
    output.square().sum().backward()
    layers = mp.pipeline_layers(model.double(), example=inputs if kind == "vit" else None)
    assert len(layers) == cuts + 1
    pieces = [joined(layers[:2])[0], *layers[2:]]
    value = inputs
    for piece in pieces:
        value = piece(value)
    value[0].square().sum().backward()
    assert not far(value[0], output, 1e-12)
    assert not wrong_gradients(model.named_parameters(), {name: one.grad for name, one in expected.named_parameters()})
    assert set().union(*(piece.state_dict() for piece in pieces)) == set(model.state_dict())


def _gemma3():
    windows = {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    config = Gemma3TextConfig(head_dim=4, num_key_value_heads=1, **windows, **ENCODER, **SMALL)
    return Gemma3ForCausalLM(config), dict(batch("gemma3")[0]), 3


def _bart():
    sides, sizes = ("encoder", "decoder"), ("layers", "ffn_dim", "attention_heads")
    sizes = {f"{side}_{size}": 2 for side in sides for size in sizes}
    config = BartConfig(d_model=8, dropout=0.0, max_position_embeddings=24, decoder_start_token_id=2, **sizes, **SMALL)
    return BartForConditionalGeneration(config), dict(batch("t5")[0]), 4


def _vit():
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {name: size for name, size in ENCODER.items() if name != "max_position_embeddings"}
    config = ViTConfig(image_size=8, patch_size=4, **shape, **quiet)
    return ViTForImageClassification(config), {"pixel_values": torch.randn(4, 3, 8, 8).double()}, 3


def _gpt2_classifier():
    return GPT2ForSequenceClassification(gpt2().config), dict(batch("bert words")[0]), 3


FAMILIES = {"gemma3": _gemma3, "bart": _bart, "vit": _vit, "gpt2 classifier": _gpt2_classifier}


# ── models of one's own ─────────────────────────────────────────────────────────────────────────────────────────────


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, hidden, shift):
        return (self.inner(hidden) + shift[:, None]).relu_(), shift.sin()


class Residual(nn.Module):
    """Adds around its blocks, passes on a tensor that they change, has a parameter of its own and an unused list."""

    def __init__(self, skips=False):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.unused = nn.ModuleList([nn.Linear(2, 2)])
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(6, 3))
        self.skips = skips

    def forward(self, x, shift):
        hidden = first = self.first(x) * self.scale
        for block in self.blocks:
            added, shift = block(hidden, shift=shift)
            hidden = hidden + added
        return self.head(hidden * self.scale + (first if self.skips else 0))


def residual(skips=False):
    torch.manual_seed(0)
    return Residual(skips).double()


CUTS = ["blocks.0", "head.0", "head.1"]  # before blocks.0, it is an argument of that


def example(samples=6):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator).double(), torch.randn(samples, generator=generator).double()
    return inputs, torch.randint(3, (samples,), generator=generator)


def trains_its_own(comms, at, balance, recompute):
    inputs, targets = example()
    model = residual()
    loss = cross_entropy(model(*inputs), targets)
    loss.backward()
    wanted = {name: one.grad for name, one in model.named_parameters()}
    layers = mp.pipeline_layers(residual(), at=at, example=inputs)
    wrong = []
    for name in ("gpipe", "1f1b", "zb-h1", "interleaved"):
        pipe = mp.Pipeline(
            layers, comms, name, 3, cross_entropy, balance if name != "interleaved" else "auto", example=inputs,
            recompute=recompute,
        )  # fmt: skip
        pipe.zero_grad()
        if far(pipe.step(inputs, targets), loss, 1e-12):
            wrong.append(f"{name}: loss")
        wrong += [f"{name}: {what}" for what in wrong_gradients(pipe.named_parameters(), wanted)]
    return wrong


def test_a_model_of_ones_own_is_cut_where_asked(pool):
    run = functools.partial(pool.run, trains_its_own, 2, transport="shm", timeout=40)
    assert run(None, "time", False) == [[]] * 2
    assert run(["blocks.1", "blocks.3", "head.1"], "auto", True) == [[]] * 2


# ── mixed precision ─────────────────────────────────────────────────────────────────────────────────────────────────


def built(kind):
    """A float32 model; a norm of Llama's is left in the dtype that it chooses."""
    torch.manual_seed(0)
    return Residual() if kind == "residual" else MODELS[kind]()


def of(kind):
    if kind != "residual":
        return *batch(kind), token_loss
    (inputs, shift), targets = example()
    return {"x": inputs.float(), "shift": shift.float()}, targets, cross_entropy


def in_16_bits(comms, kind, name, precision):
    """Beside one process with the same copies, which adds the two gradients of a tied weight in 16 bits."""
    torch.set_num_threads(1)
    mine = [comms.group([rank]) for rank in range(comms.world_size)][comms.rank]
    inputs, targets, loss_fn = of(kind)
    alone = mp.DataParallel(built(kind), mine, precision=precision)
    halves = [{name: one[half] for name, one in inputs.items()} for half in (slice(0, 3), slice(3, 6))]
    for half, answers in zip(halves, targets.chunk(2), strict=True):
        found = loss_fn(alone(**half), answers)
        (found[0] / 6 if isinstance(found, tuple) else found / 2).backward()
    factor = 1.0 if kind == "residual" else 6 / int((targets != -100).sum())
    named = alone.named_parameters(remove_duplicate=False)
    wanted = {name: one.grad * factor for name, one in named if one.grad is not None}
    layers = mp.pipeline_layers(built(kind), example=inputs if kind == "residual" else None)
    pipe = mp.Pipeline(layers, comms, name, 2, loss_fn, precision=precision)
    pipe.step(inputs, targets)
    tied = {tie.parameter for tie in pipe._ties}
    wrong = []
    for at, parameter in pipe.named_parameters():
        relative = 2**-8 if parameter in tied else 1e-6
        if parameter.dtype is not torch.float32 or far(parameter.grad, wanted.get(at), relative):
            wrong.append(f"gradient of {at}")
    answer = pipe.predict(inputs)
    if answer is not None and kind != "residual":
        alone.eval()
        with torch.no_grad():
            expected = torch.cat([alone(**half).logits for half in halves])
        if answer.logits.dtype is not torch.float32 or not torch.equal(answer.logits, expected):
            wrong.append("answers")
    return wrong


@pytest.mark.parametrize(
    ("kind", "name", "precision"),
    [
        ("gpt2", "1f1b", "bf16"),
        ("llama", "zb-h1", "bf16"),
        ("bert", "1f1b", "fp16"),
        ("residual", "zb-h1", "fp16"),
        ("t5", "gpipe", "bf16"),
    ],
)
def test_a_model_in_16_bits_is_that_of_one_process(pool, kind, name, precision):
    assert pool.run(in_16_bits, 2, kind, name, precision, transport="shm", timeout=50) == [[]] * 2


def test_layers_are_found_and_what_cannot_be_cut_is_refused():
    inputs, _ = example()
    parts = mp.pipeline_layers(residual(), example=inputs)
    assert [len(list(part.parameters())) for part in parts] == [5, 3, 3, 3, 3, 1, 3]
    assert sorted(dict(parts[2].named_parameters())) == ["blocks.1.inner.bias", "blocks.1.inner.weight", "scale"]
    whole = joined(parts)
    assert len(whole) == 1
    assert whole[0].state_dict().keys() == residual().state_dict().keys()
    assert torch.equal(whole[0](inputs), residual()(*inputs))
    # What is used again after the blocks is in the way of cuts between them, and not of others.
    assert [part.plan.flow.cuts for part in mp.pipeline_layers(residual(skips=True), example=inputs)[:1]] == [CUTS]
    refused = functools.partial(mp.pipeline_layers, residual(skips=True), example=inputs)
    with pytest.raises(PartitionError, match=r"^cannot cut at blocks\.2: something that was computed before"):
        refused(at=["blocks.2"])
    with pytest.raises(PartitionError, match=r"this Residual has no module 'block\.2'; did you mean 'blocks\.2'\?$"):
        refused(at=["block.2"])
    with pytest.raises(PartitionError, match=r"^cannot cut at unused\.0: it is not called in a forward on the example"):
        refused(at=["unused.0"])
    with pytest.raises(PartitionError, match=r"head\.1 is inside head; cut at one of them"):
        refused(at=["head", "head.1"])
    with pytest.raises(UsageError, match=r"at='head': give the names of modules"):
        refused(at="head")
    with pytest.raises(UsageError, match=r"Residual\.forward takes no input_ids \(x, shift\): pass a small batch"):
        mp.pipeline_layers(residual())
    with pytest.raises(PartitionError, match=r"^found no place to cut a Linear"):
        mp.pipeline_layers(nn.Linear(2, 2), example=torch.zeros(1, 2))
    with pytest.raises(PartitionError, match=r"could not be run on the example without contents: TypeError.*'shift'"):
        mp.pipeline_layers(residual(), example=inputs[0])
    with pytest.raises(PartitionError, match=r"^blocks\.0 \(Block\) cannot be run without contents: RuntimeError"):
        mp.pipeline_layers(residual(), example=(inputs[0], torch.zeros(5)))


def test_what_no_stage_has_is_not_returned():
    model = made("gpt2")
    layers = mp.pipeline_layers(model)
    with pytest.raises(UsageError, match=r"^output_attentions=True: no stage of a pipeline has those of all layers"):
        layers[0]({"input_ids": words(1), "output_attentions": True})
    model.config.output_hidden_states = True
    with pytest.raises(UsageError, match=r"^output_hidden_states=True: no stage"):
        mp.pipeline_layers(model)


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.read = read

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            x = x * 2 if self.read(x) else x
        return x


READS = [lambda x: x.sum() > 0, lambda x: x.max().item() > 0, lambda x: int(x.argmax()), lambda x: 0.0 in x.detach()]


@pytest.mark.parametrize("read", READS)
def test_a_forward_that_reads_what_modules_computed_is_refused(read):
    with pytest.raises(PartitionError, match=r"^the forward reads the contents of what modules computed, with"):
        mp.pipeline_layers(Reading(read), example=torch.ones(1, 2))
    with pytest.raises(PartitionError, match=r" before blocks\.2 is called: stages that do not compute it"):
        mp.pipeline_layers(Reading(read), at=["blocks.2"], example=torch.ones(1, 2))
    assert len(mp.pipeline_layers(Reading(lambda x: len(x) == x.dim()), example=torch.ones(1, 2))) == 3


class Holder(nn.Module):
    """What one might write oneself: a layer that holds the model it comes from."""

    def __init__(self, model, index):
        super().__init__()
        self.model = model
        self.index = index

    def forward(self, x):
        return self.model[self.index](x)


def holds_all(comms):
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    with pytest.warns(UserWarning, match=r"each of the 2 stages holds 48 of the model's 48 parameters, so every"):
        mp.Pipeline([Holder(model, index) for index in range(4)], comms)
    return True


def test_layers_that_all_hold_the_whole_model_are_warned_of(pool):
    assert pool.run(holds_all, 2, transport="shm") == [True, True]
