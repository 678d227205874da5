"""A batch in shares: whichever pipelines compute them, the step is the same."""

import pytest
import torch
from tests.pipeline.oracle import layers_of_its_own
from torch import nn
from torch.nn.functional import mse_loss

import microparallel as mp
from microparallel.pipeline import Share
from microparallel.pipeline.layers import may_draw
from microparallel.pipeline.programs import repeated
from microparallel.program import from_text, to_text
from microparallel.verifier import verify

LENGTHS = [5, 4, 4, 1, 0]  # samples of each share


def shares_of(numbers, seen=None):
    torch.manual_seed(7)
    inputs, targets = torch.randn(14, 6).double(), torch.randn(14, 2).double()
    parts = list(zip(inputs.split(LENGTHS), targets.split(LENGTHS), strict=True))
    before = [
        None if seen is None else lambda *place, number=number: seen.append((number, *place)) for number in numbers
    ]
    return [Share(*parts[number], one) for number, one in zip(numbers, before, strict=True) if LENGTHS[number]]


class Drawing(nn.Sequential):
    """Another class than torch's: it may draw."""


def step(comms, replicas, schedule, **options):
    """One step of these shares, dealt out; returns the loss, this rank's gradients, and what each layer was told."""
    layers = nn.Sequential(*(Drawing(*layer) for layer in layers_of_its_own(6, 5, 5, 4, 3, 2, 2)))
    most = -(-len(LENGTHS) // replicas)
    pipe = mp.Pipeline(layers, comms, schedule, 2 * most, mse_loss, replicas=replicas, **options)
    mine = [number for number in range(len(LENGTHS)) if number * replicas // len(LENGTHS) == pipe.replica]
    seen = []
    loss = pipe.step_in_shares(shares_of(mine, seen), 2, samples=sum(LENGTHS))
    return float(loss), {name: parameter.grad for name, parameter in pipe.named_parameters()}, seen


def together(results):
    losses, gradients, seen = zip(*results, strict=True)
    assert len({*losses}) == 1
    return (
        losses[0],
        {name: one for mine in gradients for name, one in mine.items()},
        sorted(one for mine in seen for one in mine),
    )


@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule"),
    [(2, 1, "1f1b"), (4, 2, "zb-h1"), (6, 3, "gpipe"), (3, 1, "interleaved"), (2, 1, "dualpipev"), (5, 5, "1f1b")],
)
def test_the_step_is_that_of_one_process_and_layers_are_told_the_same(pool, ranks, replicas, schedule):
    loss, gradients, seen = together(pool.run(step, ranks, replicas, schedule, timeout=50))
    model = layers_of_its_own(6, 5, 5, 4, 3, 2, 2)
    inputs, targets = (
        torch.cat(one) for one in zip(*((s.inputs, s.targets) for s in shares_of(range(5))), strict=True)
    )
    expected = mse_loss(model(inputs), targets)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-13)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-12, atol=1e-14)
    # Two micro-batches of each share, one of that with one sample; six layers and the loss.
    places = [(0, 2), (1, 2), (2, 2), (3, 1)]
    assert seen == [(share, one, layer) for share, count in places for one in range(count) for layer in range(7)]


def test_a_layer_that_computes_again_is_told_again(pool):
    _, _, seen = together(pool.run(step, 2, 1, "1f1b", recompute=True, timeout=50))
    assert seen == sorted(2 * [*dict.fromkeys(seen)]) and len(seen) == 2 * 7 * 7


def test_layers_that_draw_nothing_are_not_told():
    nothing = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), *mp.models.FullMLP(4, 3, 4, 4).pipeline_layers()]
    nothing += mp.models.GPT(context=8, dim=8, heads=2, depth=1).pipeline_layers()
    assert not any(map(may_draw, nothing))
    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda *_: None)
    draws = [nn.Dropout(0.1), nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.RReLU(), Drawing(nn.Linear(2, 2))]
    draws += [nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(2, 2), nn.TransformerEncoderLayer(4, 2), hooked]
    assert all(map(may_draw, draws))


def statistics(comms, recompute, lengths):
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)).double()
    pipe = mp.Pipeline(layers, comms, "1f1b", 6, mse_loss, recompute=recompute)
    inputs = torch.randn(12, 3).double()
    shares = [Share(part, torch.zeros(len(part), 2).double()) for part in inputs.split(4)[:lengths]]
    for _ in range(2):
        pipe.step_in_shares(shares, 2, samples=4 * lengths)
    return {name: one for name, one in pipe.state_dict().items() if "running" in name or "tracked" in name}


@pytest.mark.parametrize("recompute", [False, True])
def test_running_statistics_are_those_of_the_first_share(pool, recompute):
    """Also where layers compute again: that would have counted twice."""
    runs = (pool.run(statistics, 2, again, count, timeout=50) for again, count in ((False, 1), (recompute, 3)))
    found = [first | second for first, second in runs]
    assert len(found[0]) == 3 and found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], one) for name, one in found[0].items())
    assert int(found[0]["1.num_batches_tracked"]) == 4


def test_more_micro_batches_than_the_pipeline_was_made_for_are_refused(pool):
    with pytest.raises(mp.errors.RankFailed, match=r"5 shares of 2 micro-batches.*microbatches=4; make it with 10"):
        pool.run(too_many, 2, timeout=50)


def too_many(comms):
    pipe = mp.Pipeline(layers_of_its_own(6, 5, 2), comms, "1f1b", 4, mse_loss)
    pipe.step_in_shares(shares_of(range(4)) + shares_of([0]), 2, samples=19)


def predicts_alone(comms):
    """The second pipeline has nothing to predict."""
    pipe = mp.Pipeline(layers_of_its_own(6, 5, 2), comms, "1f1b", 4, mse_loss, replicas=2)
    return pipe.predict(torch.ones(3, 6).double()) if pipe.replica == 0 else None


def test_a_pipeline_predicts_without_the_others(pool):
    first, second, *others = pool.run(predicts_alone, 4, timeout=20)
    assert second.shape == (3, 2) and [first, *others] == [None] * 3


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv", "dualpipev"])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_program_that_is_repeated_is_right(schedule, times):
    program = mp.schedules.build(schedule, 2, 4)
    longer = repeated(program, times)
    verify(longer)
    assert longer.goal.microbatches == 4 * times and from_text(to_text(longer)) == longer
