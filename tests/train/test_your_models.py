"""Models of anybody's: what they return, how they are called, and metrics that fail."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import microparallel as mp
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train


def configuration(out, model, data="pairs", **changes):
    settings = {
        **{"out": str(out), "model": f"{__name__}:{model}", "data": f"{__name__}:{data}", "precision": "float64"},
        **{"batch": 13, "steps": 5, "optimizer": "sgd", "lr": 0.1, "validate_every": 2, "save_every": 100},
    }
    return TrainConfig(**settings | changes).resolved()


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def metrics(folder, name):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def pairs():
    """30 rows of 4 numbers, each with one of 3 classes; 11 of them are held back."""
    inputs = torch.randn(41, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = inputs[:, :3].argmax(1)
    return TensorDataset(inputs[:30], targets[:30]), TensorDataset(inputs[30:], targets[30:])


class Output:
    """What the models of some libraries return: an object."""

    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs):
        return self.layer(inputs)


class OwnLoss(Plain):
    """Its arguments have any names."""

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layer(x), y)


IN_PARTS = {"shard": "parameters"}


class ReturnsObject(Plain):
    def forward(self, x, y):
        logits = self.layer(x)
        return Output(nn.functional.cross_entropy(logits, y), logits)


class ReturnsDict(Plain):
    def forward(self, x, targets=None):
        logits = self.layer(x)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, targets)}


class ReturnsTuple(Plain):
    def forward(self, x, y):
        logits = self.layer(x)
        return nn.functional.cross_entropy(logits, y), logits


@pytest.fixture(scope="module")
def plain(pool, tmp_path_factory):
    """What a model that returns a tensor learns in one process."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    run(pool, configuration(out, "Plain"))
    return out


@pytest.mark.in_turn
@pytest.mark.parametrize("layout", [{"ranks": 1}, {"ranks": 2}, {"ranks": 2, **IN_PARTS}], ids=str)
@pytest.mark.parametrize("model", ["OwnLoss", "ReturnsObject", "ReturnsDict", "ReturnsTuple"])
def test_a_model_computes_its_own_loss_and_returns_it_in_its_own_way(pool, plain, tmp_path, model, layout):
    run(pool, configuration(tmp_path / "run", model, **layout))
    for name in ("loss", "validation_loss"):
        assert metrics(tmp_path / "run", name) == pytest.approx(metrics(plain, name), rel=1e-12)


class Needs(Plain):
    """It needs both, and returns neither a loss nor anything with one."""

    def forward(self, x, y):
        return self.layer(x)


class TakesThree(Plain):
    def forward(self, a, b, c):
        return self.layer(a)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("Needs", "pairs", r"Needs was given all of a sample, targets too, and returned float64\[.*\] without a loss"),
        ("TakesThree", "pairs", r"a sample has 2 values.* forward\(a, b, c\) of TakesThree takes 3 of them"),
        ("OwnLoss", "dicts", r"forward\(x, y\) of OwnLoss needs 'x', 'y', and the samples have 'inputs', 'labels'"),
        ("Objects", "pairs", r"the model returned Output and the targets are Tensor: name a loss that compares them"),
    ],
)
def test_a_model_that_does_not_fit_its_data_is_named_with_what_to_do(pool, tmp_path, model, data, words):
    with pytest.raises(mp.errors.RankFailed) as caught:
        run(pool, configuration(tmp_path / "run", model, data))
    assert caught.value.refusal is not None
    assert re.search(words, caught.value.refusal), caught.value.refusal
    assert not (tmp_path / "run").exists()


class Objects(Plain):
    """It computes no loss, and returns an object."""

    def forward(self, inputs):
        return Output(None, self.layer(inputs))


def loss_of_logits(outputs, targets):
    return nn.functional.cross_entropy(outputs.logits, targets)


def as_dicts(dataset):
    return [{"inputs": inputs, "labels": targets} for inputs, targets in dataset]


def dicts():
    """The same samples by name."""
    training, validation = pairs()
    return as_dicts(training), as_dicts(validation)


def triples():
    """The same samples, their inputs in two parts."""
    return tuple([(inputs[:1], inputs[1:], target) for inputs, target in part] for part in pairs())


class ByName(Plain):
    def forward(self, inputs=None, labels=None, mask=None):
        logits = self.layer(inputs)
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}


class InTwoParts(Plain):
    def forward(self, first, rest):
        return self.layer(torch.cat([first, rest], 1))


class InTwoPartsWithLoss(Plain):
    def forward(self, first, rest, answers):
        return nn.functional.cross_entropy(self.layer(torch.cat([first, rest], 1)), answers)


class WholeBatch(Plain):
    def forward(self, batch):
        return nn.functional.cross_entropy(self.layer(batch["inputs"]), batch["labels"])


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "layout", [{"ranks": 1}, {"ranks": 2}, {"ranks": 4}, {"ranks": 3, "shard": "parameters"}], ids=str
)
@pytest.mark.parametrize(
    ("model", "data", "loss"),
    [
        ("ByName", "dicts", None),  # forward(inputs=…, labels=…)
        ("Plain", "dicts", None),  # forward(inputs=…), and the loss that fits the labels
        ("WholeBatch", "dicts", None),  # forward({"inputs": …, "labels": …})
        ("InTwoParts", "triples", None),
        ("InTwoPartsWithLoss", "triples", None),
        ("Objects", "pairs", f"{__name__}:loss_of_logits"),
    ],
    ids=lambda value: str(value).partition(":")[2] or value,
)
def test_samples_are_passed_by_name_or_in_their_order(pool, plain, tmp_path, model, data, loss, layout):
    run(pool, configuration(tmp_path / "run", model, data, loss=loss, **layout))
    for name in ("loss", "validation_loss"):
        assert metrics(tmp_path / "run", name) == pytest.approx(metrics(plain, name), rel=1e-12)


@pytest.mark.parametrize("strategy", ["naive", "hooks", "torch-ddp"])
def test_every_strategy_calls_the_model_alike(pool, plain, tmp_path, strategy):
    run(pool, configuration(tmp_path / "run", "ByName", "dicts", strategy=strategy, ranks=3))
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(plain, "loss"), rel=1e-12)


def test_classes_are_counted_wherever_they_can_be_compared(pool, plain, tmp_path):
    run(pool, configuration(tmp_path / "object", "ReturnsObject", ranks=2))
    assert metrics(tmp_path / "object", "validation_accuracy") == metrics(plain, "validation_accuracy")
    run(pool, configuration(tmp_path / "loss alone", "OwnLoss"))
    assert set(metrics(tmp_path / "loss alone", "validation_accuracy")) == {None}


# ── a pipeline ──────────────────────────────────────────────────────────────────────────────────────────────────────


class First(nn.Linear):
    def forward(self, batch):
        return super().forward(batch["inputs"])


def layers_of_dicts():
    return nn.Sequential(First(4, 8), nn.Tanh(), nn.Linear(8, 3))


def test_a_pipeline_takes_dicts_too(pool, tmp_path):
    """Its first layer gets the sample without the labels."""
    run(pool, configuration(tmp_path / "one", "layers_of_dicts", "dicts", pp=1))
    run(pool, configuration(tmp_path / "two", "layers_of_dicts", "dicts", pp=2, dp=2, microbatches=3))
    for name in ("loss", "validation_loss", "validation_accuracy"):
        assert metrics(tmp_path / "two", name) == pytest.approx(metrics(tmp_path / "one", name), rel=1e-12)


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def largest_logit(outputs, targets):
    """A mean over the samples."""
    return outputs.max(1).values.mean()


def right_of_class_1(outputs, targets):
    """A sum over some of the samples, and their number."""
    chosen = targets == 1
    return (outputs.argmax(1) == 1)[chosen].sum(), chosen.sum()


def broken(outputs, targets):
    return outputs.no_such_thing


OWN = f"{__name__}:largest_logit {__name__}:right_of_class_1"


@pytest.mark.parametrize(
    "layout", [{"ranks": 2}, {"ranks": 4}, {"ranks": 3, **IN_PARTS}, {"strategy": "pipeline"}], ids=str
)
def test_metrics_of_ones_own_are_the_same_on_any_number_of_ranks(pool, tmp_path, layout):
    alone = run(pool, configuration(tmp_path / "alone", "Plain", metric=OWN))
    model = "in_layers" if "strategy" in layout else "Plain"
    together = run(pool, configuration(tmp_path / "together", model, metric=OWN, **layout))
    for name in ("validation_largest_logit", "validation_right_of_class_1"):
        assert metrics(tmp_path / "together", name) == pytest.approx(metrics(tmp_path / "alone", name), rel=1e-12)
        assert together[name] == pytest.approx(alone[name], rel=1e-12)
    _, targets = pairs()[1].tensors
    assert 0 <= alone["validation_right_of_class_1"] <= 1
    assert alone["validation_right_of_class_1"] * (targets == 1).sum() % 1 == pytest.approx(0, abs=1e-9)


def in_layers():
    layer = Plain().layer
    return nn.Sequential(layer)


def test_a_metric_that_fails_is_left_out(pool, plain, tmp_path):
    summary = run(pool, configuration(tmp_path / "run", "Plain", metric=f"{__name__}:broken {OWN}", ranks=2))
    assert summary["validation_broken"] is None and summary["validation_largest_logit"] is not None
    assert metrics(tmp_path / "run", "validation_broken") == [None] * 3
    assert metrics(tmp_path / "run", "validation_loss") == pytest.approx(metrics(plain, "validation_loss"), rel=1e-12)


class FailsInEvaluation(Plain):
    def forward(self, inputs):
        if not self.training:
            raise RuntimeError("deliberate")
        return self.layer(inputs)


def test_a_model_that_cannot_be_measured_is_trained_and_saved(pool, plain, tmp_path):
    summary = run(pool, configuration(tmp_path / "run", "FailsInEvaluation", ranks=2))
    assert summary["steps"] == 5 and summary["validation_loss"] is None
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(plain, "loss"), rel=1e-12)


def kills_validation(outputs, targets):
    raise SystemExit(3)


def test_what_was_trained_is_saved_before_it_is_measured(pool, tmp_path):
    """Validation is due after 2 steps, and a checkpoint only at the end; this metric does not raise, it exits."""
    with pytest.raises(mp.errors.RankFailed):
        run(pool, configuration(tmp_path / "run", "Plain", metric=f"{__name__}:kills_validation"))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000000", "step-00000002"]


def test_a_metric_with_the_name_of_another_is_refused(pool, tmp_path):
    with pytest.raises(mp.errors.RankFailed, match="there is a metric called 'loss' already; rename the function"):
        run(pool, configuration(tmp_path / "run", "Plain", metric=f"{__name__}:loss"))


# ── Hugging Face ────────────────────────────────────────────────────────────────────────────────────────────────────


def tiny_gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 50}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(config)


def tiny_bert():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=50, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    return transformers.BertForSequenceClassification(config)


def sentences(labels):
    """Token ids as a tokenizer returns them: a BatchEncoding for each sample."""
    transformers = pytest.importorskip("transformers")
    ids = torch.randint(50, (24, 8), generator=torch.Generator().manual_seed(1))
    return [
        transformers.BatchEncoding({"input_ids": row, "attention_mask": torch.ones_like(row), "labels": labels(row)})
        for row in ids
    ]


def texts():
    data = sentences(lambda row: row)
    return data[:16], data[16:]


def reviews():
    data = sentences(lambda row: row[0] % 2)
    return data[:16], data[16:]


@pytest.mark.parametrize(("model", "data"), [("tiny_gpt2", "texts"), ("tiny_bert", "reviews")])
def test_hugging_face_models_train_as_they_are(pool, tmp_path, model, data):
    pytest.importorskip("transformers")
    settings = {"batch": 7, "steps": 3, "optimizer": "adamw", "lr": 0.01}
    alone = run(pool, configuration(tmp_path / "alone", model, data, **settings))
    together = run(pool, configuration(tmp_path / "together", model, data, **settings, ranks=2))
    run(pool, configuration(tmp_path / "parts", model, data, **settings, ranks=3, shard="parameters"))
    precision = 1e-6 if model == "tiny_gpt2" else 1e-10  # it computes its loss in float32
    for name, how in itertools.product(("loss", "validation_loss"), ("together", "parts")):
        assert metrics(tmp_path / how, name) == pytest.approx(metrics(tmp_path / "alone", name), rel=precision)
    assert alone["steps"] == together["steps"] == 3
    assert (together["validation_accuracy"] is None) == (model == "tiny_gpt2")
