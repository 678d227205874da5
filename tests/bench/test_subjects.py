"""What the benchmarks train: models by name and size, with their samples."""

import pytest
import torch

from microparallel.bench.settings import Size
from microparallel.bench.subjects import find_subject, pipeline_subject, require_cuttable
from microparallel.errors import ConfigError
from microparallel.schedules import PIPELINES


@pytest.mark.parametrize(("name", "batch"), [("mlp-1024", 32), ("mlp-512", 64), ("mlp-128", 32), ("gpt", 8)])
def test_models_have_a_batch_that_suits_them(name, batch):
    subject = find_subject(name)
    assert (subject.name, subject.batch) == (name, batch)
    assert find_subject(name, 3).batch == 3


def test_ranks_have_the_same_model_and_different_samples():
    subject = find_subject("gpt-32", 2)
    state = torch.get_rng_state()
    first, second = subject.model().state_dict(), subject.model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(subject.on_rank(0)[0], subject.on_rank(1)[0])
    assert torch.equal(torch.get_rng_state(), state)
    inputs, targets = subject.on_rank(0)
    assert inputs.shape == targets.shape == (2, 64) and torch.equal(inputs[:, 1:], targets[:, :-1])


@pytest.mark.parametrize("name", ["mlp", "mlp-0", "mlp-x", "gtp", "gpt-33", "mlp-100000", ""])
def test_there_are_no_other_models(name):
    with pytest.raises(ConfigError, match="gpt-"):
        find_subject(name)


def test_models_are_as_large_as_was_said():
    assert (Size().filled, Size().layers) == ((16, 512, 256), 16)
    assert (Size("gpt").filled, Size("gpt", depth=2).layers) == ((8, 128, 16), 4)
    subject = pipeline_subject(Size(depth=3, width=8, batch=5))
    assert len(subject.model().pipeline_layers()) == 3
    inputs, targets = subject.on_rank(0)
    assert inputs.shape == (5, 8) and subject.model()(inputs, targets).isfinite()
    assert len(pipeline_subject(Size("gpt", depth=2, width=32)).model().pipeline_layers()) == 4


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ({"model": "mpl"}, "--model mpl: did you mean 'mlp'"),
        ({"depth": 0}, "--depth 0: .* try 16"),
        ({"width": 10**9}, "--width 1000000000"),
        ({"batch": 0}, "--batch 0"),
        ({"model": "gpt", "width": 33}, "--width 33: .* try 64"),
    ],
)
def test_there_are_no_other_sizes(size, problem):
    with pytest.raises(ConfigError, match=problem):
        pipeline_subject(Size(**size))


@pytest.mark.parametrize(
    ("size", "schedules", "microbatches", "words"),
    [
        ({"depth": 3}, tuple(PIPELINES), 4, "interleaved on 2 ranks has 4 stages, and this mlp 3 .* try --depth 4"),
        ({"batch": 8}, ("1f1b",), 9, r"--microbatches 9: .* try --batch 9"),
    ],
)
def test_more_stages_than_layers_and_more_microbatches_than_samples_are_refused(size, schedules, microbatches, words):
    require_cuttable(Size(depth=4, batch=4), tuple(PIPELINES), ranks=2, microbatches=4)
    with pytest.raises(ConfigError, match=words):
        require_cuttable(Size(**size), schedules, ranks=2, microbatches=microbatches)


@pytest.mark.parametrize("name", ["mlp-16", "gpt-32"])
def test_samples_to_learn_from_follow_the_same_rule_on_every_rank(name):
    subject = find_subject(name, 64, learnable=True)
    (inputs, targets), (others, _) = subject.on_rank(0), subject.on_rank(1)
    assert not torch.equal(inputs, others)
    assert torch.equal(find_subject(name, 64, learnable=True).on_rank(0)[0], inputs)
    if name == "gpt-32":
        successors = {}
        for before, after in zip(inputs.flatten().tolist(), targets.flatten().tolist(), strict=True):
            successors.setdefault(before, []).append(after)
        usual = [max(map(after.count, set(after))) / len(after) for after in successors.values()]
        assert 0.7 < sum(usual) / len(usual) < 0.95
    else:
        means = torch.stack([inputs[targets == one].mean(0) for one in range(2)])
        nearest = (inputs[:, None] - means).norm(dim=2).argmin(1)
        assert (nearest == targets).float().mean() > 0.9


def test_the_large_gpt_has_85_million_parameters_in_its_blocks():
    subject = find_subject("gpt-85m")
    with torch.device("meta"):
        layers = subject.build().pipeline_layers()
    sizes = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    assert sum(sizes[1:-1]) == pytest.approx(85e6, rel=0.002) and sum(sizes) < 86e6
    assert subject.batch == 8 and find_subject("gpt-85m", 2).batch == 2
    inputs, targets = subject.data(2)
    assert inputs.shape == targets.shape == (2, 512)
    assert (Size("gpt-85m").filled, Size("gpt-85m").layers) == ((12, 768, 32), 14)
    with pytest.raises(ConfigError, match="--width 100: a head of gpt-85m takes 64 numbers; try 128"):
        pipeline_subject(Size("gpt-85m", width=100))
    with pytest.raises(ConfigError, match="nothing to learn"):
        find_subject("gpt-85m", learnable=True)
