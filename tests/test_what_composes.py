"""The reference's tables of what composes with what are what small trainings give."""

import pytest
import torch
from tests.composition import FEATURES, METHODS, ON_A_GPU, PAGE, outcome, page, pairs, rounded_pairs, sample_of_page
from tests.rounded import RATE, OneProcess
from torch import nn

import microparallel as mp
from microparallel.compression import parse


@pytest.mark.timeout(200)  # a busy machine; alone it takes about 10 seconds
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself
def test_the_page_has_what_every_sixth_case_gives(warm_ranks):
    places = []
    for place, said, found in sample_of_page(warm_ranks.run, PAGE.read_text(encoding="utf-8")):
        assert found == said, place
        places.append(place)
    assert len(places) > 25
    rows, columns = ({title for titles in places for title in titles[end : end + 1]} for end in (0, 1))
    assert rows > {title for name, title in FEATURES.items() if name not in ON_A_GPU}
    assert columns > {method.title for method in METHODS.values()}


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself
def test_the_page_has_what_the_cases_give(warm_ranks):
    text = PAGE.read_text(encoding="utf-8")
    assert page(warm_ranks.run, text).splitlines() == text.splitlines(), (
        "to write what they give now: PYTHONPATH=src python -m tests.composition"
    )


@pytest.mark.parametrize(
    ("method", "first", "second"),
    [
        ("dp", "bf16 topk", "no_sync"),
        ("dp", "fp16 powersgd", "uneven"),
        ("zero-2", "fp16", "clip"),
        ("zero-3", "bf16", "tied"),
        ("1f1b", "bf16 topk", "tied"),
        ("zb-h1", "fp16 powersgd", "backwards"),
    ],
)
def test_some_that_round_with_others(warm_ranks, method, first, second):
    assert outcome(warm_ranks.run, method, [first, second]) == "works"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_works_or_is_refused_in_one_line(warm_ranks):
    """With every method; `outcome` raises if a result is wrong, and one process's is not there."""
    for method, first, second in pairs():
        outcome(warm_ranks.run, method, [first, second])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_with_one_that_rounds_works_or_is_refused_in_one_line(warm_ranks):
    for method, first, second in rounded_pairs():
        outcome(warm_ranks.run, method, [first, second])


# ── the judge of trainings that round ───────────────────────────────────────────────────────────────────────────────


def judged(comms, fault, **options):
    """Two steps; the second has a fault."""
    torch.manual_seed(0)
    plain = nn.Linear(8, 8).double()
    given = dict(options)
    if "compress" in given:
        given["compress"] = parse(given["compress"], smallest=1)
    wrapped = nn.Linear(8, 8).double()
    wrapped.load_state_dict(plain.state_dict())
    model = mp.DataParallel(wrapped, comms, **({} if fault == "plain" else given))
    optimizers = [torch.optim.SGD(one.parameters(), lr=RATE) for one in (plain, model)]
    beside = OneProcess(plain, comms, model)
    for step in range(2):
        inputs = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        mine = inputs.chunk(2)[0 if fault == "same samples" else comms.rank]
        beside.begin()
        for one, part in ((plain, inputs), (model, mine)):
            one.zero_grad()
            one(part).square().mean().backward()
        optimizers[0].step()
        beside.end()
        if step == 1 and fault == "forgotten" and "compress" in options:
            state = model.compression_state()
            state["residuals"] = {name: one * 0 for name, one in state["residuals"].items()}
            model.load_compression_state([state] * comms.world_size)
        optimizers[1].step()
    if fault == "one rank" and comms.rank:
        with torch.no_grad():
            model.weight[0, 0] += 1e-6
    return beside.wrong(options)


@pytest.mark.parametrize(
    ("fault", "options", "words"),
    [
        (None, {"precision": "bf16"}, None),
        (None, {"compress": "topk:0.1"}, None),
        ("plain", {"precision": "bf16"}, "nothing was rounded to 16 bits"),
        ("plain", {"compress": "topk:0.1"}, "nothing was compressed"),
        ("same samples", {"precision": "bf16"}, "has moved otherwise than in one process"),
        ("forgotten", {"compress": "topk:0.1"}, "has moved otherwise than in one process"),
        ("one rank", {"precision": "fp16"}, "ranks have different weights"),
    ],
)
def test_what_is_wrong_with_a_training_that_rounds(pool, fault, options, words):
    for found in pool.run(judged, 2, fault, **options, transport="shm", timeout=30):
        assert (found is None) if words is None else (words in found)
