"""Data of anybody's: other lengths, streams, workers; the same weights on any number of ranks, and an exact resume."""

import json
import os
import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset, TensorDataset

import microparallel as mp
from microparallel.train import checkpoint
from microparallel.train.config import TrainConfig
from microparallel.train.loop import train_on_rank as train

SAMPLES, PAD = 30, -100


def configuration(out, model="Tagger", data="sentences", **changes):
    settings = {
        **{"out": str(out), "model": f"{__name__}:{model}", "data": f"{__name__}:{data}", "precision": "float64"},
        **{"batch": 9, "steps": 7, "optimizer": "adamw", "lr": 0.01, "validate_every": 4},
    }
    return TrainConfig(**settings | changes).resolved()


def run(pool, config, resume=None):
    return pool.run(train, config.world_size, config, resume, True, timeout=50)[0]


def metrics(folder, name):
    records = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [record[name] for record in records if name in record]


def weights(folder, step=7):
    return checkpoint.load(Path(folder) / "checkpoints" / f"step-{step:08d}").model


def assert_same(ours, theirs, rel=1e-11):
    for name in ("loss", "validation_loss"):
        assert metrics(ours, name) == pytest.approx(metrics(theirs, name), rel=rel)
    for name, tensor in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], tensor, rtol=1e-9, atol=1e-11)


# ── samples of different lengths ────────────────────────────────────────────────────────────────────────────────────


def rows(count=SAMPLES):
    """Rows of 1 to 8 tokens, each with a tag for each token."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    tokens = [torch.randint(20, (length,), generator=generator) for length in lengths]
    return [(row, row % 3) for row in tokens]


def sentences():
    return rows()[:22], rows()[22:]


def pad(samples):
    """To the longest of the batch, which depends on who is in it."""
    tokens, tags = zip(*samples, strict=True)
    return pad_sequence(tokens, batch_first=True), pad_sequence(tags, batch_first=True, padding_value=PAD)


def padded_dict(samples):
    tokens, tags = pad(samples)
    return {"tokens": tokens, "labels": tags}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.embed(tokens))


def of_all_tokens(outputs, tags):
    """The sum over tokens that are not padding, and how many these are."""
    total = nn.functional.cross_entropy(outputs.flatten(0, 1), tags.flatten(), ignore_index=PAD, reduction="sum")
    return total, (tags != PAD).sum()


class WithLoss(Tagger):
    def forward(self, tokens, tags):
        return of_all_tokens(super().forward(tokens), tags)


def make_layers():
    tagger = Tagger()
    return nn.Sequential(tagger.embed, tagger.head)


VARIABLE = {"collate": f"{__name__}:pad", "loss": f"{__name__}:of_all_tokens", "strategy": "auto"}


@pytest.fixture(scope="module")
def alone(pool, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "alone"
    run(pool, configuration(out, **VARIABLE))
    return out


def test_the_loss_is_a_mean_over_tokens(alone):
    """The first batch, by hand."""
    tokens, tags = pad([rows()[:22][index] for index in mp.ShardedSampler(22, 9).__iter__().__next__()])
    torch.manual_seed(0)
    model = Tagger().double()
    wanted = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tags.flatten(), ignore_index=PAD)
    assert metrics(alone, "loss")[0] == pytest.approx(wanted.item(), rel=1e-12)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 2},
        {"ranks": 4},
        {"ranks": 2, "accumulate": 3},
        {"accumulate": 4},
        {"ranks": 2, "collate": f"{__name__}:padded_dict"},
        {"ranks": 3, "model": "WithLoss", "loss": None},
        {"ranks": 2, "workers": 2},
        {"ranks": 2, "clip": 0.05},
    ],
    ids=lambda changes: " ".join(f"{name}={str(value).partition(':')[2] or value}" for name, value in changes.items()),
)
def test_a_mean_over_tokens_is_the_same_on_any_number_of_ranks(pool, alone, tmp_path, changes):
    config = configuration(tmp_path / "run", **VARIABLE | changes)
    if "clip" in changes:
        run(pool, configuration(tmp_path / "alone", **VARIABLE, clip=changes["clip"]))
        assert metrics(tmp_path / "alone", "loss") != metrics(alone, "loss")
        alone = tmp_path / "alone"
    run(pool, config)
    assert_same(tmp_path / "run", alone)


@pytest.mark.parametrize("layout", [{"pp": 2}, {"dp": 2, "pp": 2}], ids=["pp", "dp and pp"])
def test_a_mean_over_tokens_is_the_same_in_pipelines(pool, alone, tmp_path, layout):
    run(pool, configuration(tmp_path / "run", model="make_layers", microbatches=2, **VARIABLE | layout))
    for name in ("loss", "validation_loss"):
        assert metrics(tmp_path / "run", name) == pytest.approx(metrics(alone, name), rel=1e-11)
    for ours, theirs in zip(weights(tmp_path / "run").values(), weights(alone).values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


class Masked(nn.Module):
    """Not a list of layers: each layer gets the mask, too."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens):
        mask, hidden = (tokens > 0).unsqueeze(-1), self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu() * mask
        return self.head(hidden)


class CutByItself(Masked):
    def pipeline_layers(self):
        return mp.pipeline_layers(self, at=["layers.2"], example=torch.ones(2, 3, dtype=torch.long))


@pytest.mark.parametrize("model", ["Masked", "CutByItself"])
def test_a_model_with_a_forward_of_its_own_is_cut_for_a_pipeline(pool, tmp_path, model):
    run(pool, configuration(tmp_path / "alone", model=model, **VARIABLE))
    run(pool, configuration(tmp_path / "run", model=model, pp=2, microbatches=2, **VARIABLE | {"steps": 4}))
    run(pool, configuration(tmp_path / "run", model=model, pp=2, microbatches=2, **VARIABLE), tmp_path / "run")
    assert_same(tmp_path / "run", tmp_path / "alone")


@pytest.mark.parametrize("strategy", ["naive", "hooks", "torch-ddp"])
def test_strategies_that_weigh_by_samples_refuse_a_sum_and_a_count(pool, tmp_path, strategy):
    with pytest.raises(mp.errors.RankFailed, match=r"\(sum, count\), and this step weighs batches by their samples"):
        run(pool, configuration(tmp_path / "run", **VARIABLE | {"strategy": strategy, "ranks": 2}))


def test_different_lengths_without_a_collate_function_say_what_to_do(pool, tmp_path):
    with pytest.raises(mp.errors.RankFailed) as caught:
        run(pool, configuration(tmp_path / "run"))
    assert re.search(r"cannot be put together in a batch: .*--collate my_module:collate, which pads", str(caught.value))


# ── streams ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Lines(IterableDataset):
    """Samples one after another, in an order drawn at random; it knows where it stands."""

    def __init__(self, count=25, first=0):
        self.count, self.first, self.position, self.epoch = count, first, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(self.count, generator=generator).tolist()
        while self.position < self.count:
            self.position += 1
            yield self.sample(order[self.position - 1])
        self.position = 0

    def sample(self, index):
        inputs = torch.randn(4, generator=torch.Generator().manual_seed(self.first + index), dtype=torch.float64)
        return inputs, inputs[:3].argmax()

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Forgetful(IterableDataset):
    """The same in every pass, but without a state; noisy by torch's, Python's and numpy's global generators."""

    def __iter__(self):
        for inputs, target in Lines(25):
            yield inputs + torch.rand(1) + random.random(), target


class WithLength(Forgetful):
    def __len__(self):
        return 25


def lines():
    return Lines(), Lines(11, first=100)


def forgetful():
    return Forgetful(), Lines(11, first=100)


def with_length():
    return WithLength(), Lines(11, first=100)


def classifier():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def noisy():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))


def stream(out, **changes):
    return configuration(out, **{"model": "classifier", "data": "lines"} | changes)


@pytest.fixture(scope="module")
def streamed(pool, tmp_path_factory):
    """Passes of 25 samples in batches of 9, 9 and 7."""
    folder = tmp_path_factory.mktemp("runs")
    for data in ("lines", "forgetful"):
        run(pool, stream(folder / data, data=data))
    return folder


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "layout",
    [{"ranks": 2}, {"ranks": 4, "accumulate": 2}, {"ranks": 2, "workers": 1}, {"pp": 2, "dp": 2, "microbatches": 2}],
    ids=str,
)
@pytest.mark.parametrize("data", ["lines", "forgetful"])
def test_each_rank_takes_its_share_of_a_stream(pool, streamed, tmp_path, data, layout):
    run(pool, stream(tmp_path / "run", data=data, **layout))
    assert_same(tmp_path / "run", streamed / data)
    assert metrics(tmp_path / "run", "epoch") == [0, 0, 0, 1, 1, 1, 2]


def test_a_stream_that_knows_its_length_needs_no_steps(pool, tmp_path):
    summary = run(pool, stream(tmp_path / "run", data="with_length", steps=None, epochs=2, ranks=2))
    assert summary["steps"] == 6


@pytest.mark.in_turn
@pytest.mark.parametrize("data", ["lines", "forgetful"])
@pytest.mark.parametrize("changes", [{}, {"ranks": 2, "workers": 1}, {"dp": 1, "pp": 2}], ids=str)
def test_a_stream_goes_on_where_it_stood(pool, tmp_path, data, changes):
    """At step 3 the first pass has just been read, at step 5 the second is under way."""
    settings = {"data": data, "model": "noisy", "precision": "float32"} | changes
    run(pool, stream(tmp_path / "whole", **settings))
    for steps in (3, 5, 7):
        resume = tmp_path / "parts" if steps > 3 else None
        run(pool, stream(tmp_path / "parts", **settings | {"steps": steps}), resume)
    assert metrics(tmp_path / "parts", "loss") == metrics(tmp_path / "whole", "loss")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(weights(tmp_path / "parts")[name], tensor)


def test_a_stream_goes_on_with_other_ranks(pool, streamed, tmp_path):
    run(pool, stream(tmp_path / "run", steps=4, ranks=2))
    run(pool, stream(tmp_path / "run", ranks=4), tmp_path / "run")
    assert metrics(tmp_path / "run", "loss") == pytest.approx(metrics(streamed / "lines", "loss"), rel=1e-11)
    saved = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000007").state["sampler"]
    assert saved == {"epoch": 2, "batch": 1, "data": {"position": 9}}


class Nothing(IterableDataset):
    def __iter__(self):
        return iter(())


class Breaks(IterableDataset):
    def __iter__(self):
        yield torch.ones(4), 1
        raise ValueError("deliberate")


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("data", "words"),
    [("Nothing", "the stream of samples yielded none in pass 0"), ("Breaks", "the data raised ValueError: deliberate")],
)
def test_streams_that_break_say_so(pool, tmp_path, data, words, workers):
    with pytest.raises(mp.errors.RankFailed) as caught:
        run(pool, stream(tmp_path / "run", data=data, workers=workers))
    assert words in caught.value.refusal and "\n" not in caught.value.refusal


# ── workers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Augmented(TensorDataset):
    """Each sample is changed at random when it is loaded, and says which process did it."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + torch.rand(1, dtype=torch.float64) * 0.1 + random.random() * 0.1, target


def augmented():
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Augmented(inputs, inputs[:, :3].argmax(1))


class ProcessNumbers(TensorDataset):
    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return torch.full_like(inputs, os.getpid()), target


def process_numbers():
    inputs = torch.zeros(SAMPLES, 4, dtype=torch.float64)
    return ProcessNumbers(inputs, torch.zeros(SAMPLES, dtype=torch.int64))


def loaded_by(comms, config):
    from microparallel.train.build import build

    training = build(config, comms)
    numbers = {int(batch.arguments[0][0, 0]) for _ in range(4) for batch in training.draw()[0]}
    training.close()
    return os.getpid(), numbers


def test_workers_load_the_data_and_a_rank_without_them_does_it_itself(pool, tmp_path):
    for workers in (0, 2):
        config = stream(tmp_path, data="process_numbers", workers=workers, ranks=2)
        for own, numbers in pool.run(loaded_by, 2, config, timeout=50):
            assert numbers == {own} if not workers else (len(numbers) == 2 and own not in numbers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_with_workers_goes_on_bit_for_bit(pool, tmp_path, workers):
    """Also what workers draw at random; an epoch has 4 batches, and the run is stopped within the second."""
    settings = {"data": "augmented", "ranks": 2, "model": "noisy", "workers": workers}
    run(pool, stream(tmp_path / "whole", **settings))
    run(pool, stream(tmp_path / "parts", **settings | {"steps": 5}))
    run(pool, stream(tmp_path / "parts", **settings | {"workers": 3 - workers}), tmp_path / "parts")
    assert metrics(tmp_path / "parts", "loss") == metrics(tmp_path / "whole", "loss")


class BadSample(TensorDataset):
    def __getitem__(self, index):
        if index == 7:
            raise ValueError("deliberate")
        return super().__getitem__(index)


def bad_sample():
    return BadSample(torch.zeros(SAMPLES, 4, dtype=torch.float64), torch.zeros(SAMPLES, dtype=torch.int64))


def test_what_goes_wrong_in_a_worker_is_one_line(pool, tmp_path):
    with pytest.raises(mp.errors.RankFailed) as caught:
        run(pool, stream(tmp_path / "run", data="bad_sample", workers=1))
    assert re.fullmatch(
        r"sample 7 of the data raised ValueError: deliberate \(test_your_data.py:\d+\)", caught.value.refusal
    )
