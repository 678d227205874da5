"""The puzzles: each is solved by its stored solution, refuses its wrong moves in words, and its numbers are right."""

import json
import subprocess
import sys

import pytest

import microparallel as mp
from microparallel.playground import Board, Refused, all_levels, showing, solving
from microparallel.playground.hints import hint
from microparallel.playground.levels import SETS, solved
from microparallel.program import TrainingStep, to_text

LEVELS = all_levels()


def played(level, moves):
    board = Board(level)
    for move in moves:
        board = board.after(move)
    return board


def test_there_are_enough_levels_and_every_set_has_some():
    assert len(LEVELS) >= 24
    assert {level.set for level in LEVELS.values()} == set(SETS)
    assert LEVELS.keys() == solved().keys()


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_is_solved_by_its_stored_solution_and_keeps_its_promises(name):
    level, known = LEVELS[name], solved()[name]
    board = played(level, known["best"]["moves"])
    score = board.score(known["best"])
    assert (score.makespan, score.second) == pytest.approx((known["best"]["makespan"], known["best"]["second"]))
    assert score.stars == showing.most_stars(level)
    assert known["bound"]["makespan"] <= known["best"]["makespan"] + 1e-9
    assert known["par"] is None or known["par"]["makespan"] >= known["best"]["makespan"] - 1e-9
    mp.verify(board.program)
    shown = showing.shown(board)["score"]
    assert mp.program.from_text(shown["program"]).goal == level.goal
    assert json.dumps(shown)


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_refuses_its_wrong_moves_in_words(name):
    assert LEVELS[name].wrong
    for wrong in LEVELS[name].wrong:
        moves, _, words = wrong.partition(" | ")
        *before, last = moves.split()
        board = played(LEVELS[name], before)
        with pytest.raises(Refused) as refused:
            board.after(last)
        assert words in str(refused.value), str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["two-stages", "six-hops", "overlap", "gather-first"])
def test_hints_lead_from_the_first_move_to_the_last(name):
    board = Board(LEVELS[name])
    board = board.after(solved()[name]["best"]["moves"][0])
    for _ in range(60):
        if not board.missing():
            break
        board = board.after(hint(board)["move"])
    assert board.score(solved()[name]["best"]).stars == showing.most_stars(LEVELS[name])


def test_operations_can_be_put_between_others_and_taken_away():
    board = played(LEVELS["two-micro-batches"], ["0:F0.1", "0@0:F0.0"])
    assert list(map(str, board.lists[0])) == ["F0.0", "F0.1"]
    assert list(map(str, board.after("0@0:-").lists[0])) == ["F0.1"]
    with pytest.raises(Refused, match=r"needs A0\.0"):
        played(LEVELS["two-stages"], ["0:F0.0", "1:F1.0"]).after("0@0:-")  # rank 1 has used it


@pytest.mark.parametrize("move", ["", "9:F0.0", "0:F7.7", "0@5:F0.0", "0:-", "0:<b>", "x", "0>1:C0"])
def test_what_is_no_move_is_refused_in_words(move):
    with pytest.raises(Refused):
        Board(LEVELS["two-stages"]).after(move)


@pytest.mark.parametrize("move", ["", "next", "0>0:+C0", "0>9:+C0", "0>1:+C9", "0:F0.0", "0>1:+P0", "0>1:+C5:2"])
def test_what_is_no_message_is_refused_in_words(move):
    with pytest.raises(mp.errors.UsageError):
        Board(LEVELS["six-hops"]).after(move)


def test_a_memory_limit_counts_what_is_held_up_to_here():
    board = played(LEVELS["gradients-too"], ["0:F0.0", "0:F1.0"])
    full = Board(LEVELS["gradients-too"], [f"0:{op}" for op in LEVELS["gradients-too"].trays[0]])
    assert board.peak_memory() < full.peak_memory()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_stored_is_what_the_searches_find():
    result = subprocess.run([sys.executable, solving.__file__, "--check"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-500:]


PIPELINES = [name for name, level in LEVELS.items() if level.kind == "pipeline"]


def losses(comms, text, stages, microbatches):
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(stages))).double()
    data = torch.randn(2 * microbatches, 4, dtype=torch.float64)
    alone = torch.nn.functional.mse_loss(model(data), torch.zeros_like(data)).item()
    schedule = mp.program.from_text(text)
    pipe = mp.Pipeline(model, comms, schedule=schedule, microbatches=microbatches, loss_fn=torch.nn.functional.mse_loss)
    return float(pipe.step(data, torch.zeros_like(data))), alone


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_solved_schedule_runs_on_real_ranks(pool, name):
    level = LEVELS[name]
    assert isinstance(level.goal, TrainingStep)
    board = played(level, solved()[name]["best"]["moves"])
    for loss, alone in pool.run(
        losses, level.ranks, to_text(board.program), level.goal.stages, level.goal.microbatches
    ):
        assert loss == pytest.approx(alone, rel=1e-12)
