"""The reference's tables of what composes with what are what small trainings give."""

import pytest
from tests.composition import PAGE, outcome, page, pairs


@pytest.mark.timeout(200)  # a busy machine; alone it takes about 20 seconds
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns itself
def test_the_page_has_what_the_cases_give(warm_ranks):
    text = PAGE.read_text(encoding="utf-8")
    assert page(warm_ranks.run, text).splitlines() == text.splitlines(), (
        "to write what they give now: PYTHONPATH=src python -m tests.composition"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_pair_works_or_is_refused_in_one_line(warm_ranks):
    """With every method; `outcome` raises if a result is wrong, and one process's is not there."""
    for method, first, second in pairs():
        outcome(warm_ranks.run, method, [first, second])
