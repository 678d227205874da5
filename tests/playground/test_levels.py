"""The puzzles: each is solved by its stored solution, refuses its wrong moves in words, and its numbers are right."""

import json
import subprocess
import sys

import pytest

import microparallel as mp
from microparallel.playground import Board, Refused, all_levels, answer, showing, solving
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
    with pytest.raises(Refused, match=r"\(A0\.0\)"):
        played(LEVELS["two-stages"], ["0:F0.0", "1:F1.0"]).after("0@0:-")  # rank 1 has used it


@pytest.mark.parametrize("move", ["", "9:F0.0", "0:F7.7", "0@5:F0.0", "0:-", "0:<b>", "x", "0>1:C0"])
def test_what_is_no_move_is_refused_in_words(move):
    with pytest.raises(Refused):
        Board(LEVELS["two-stages"]).after(move)


@pytest.mark.parametrize("move", ["", "next", "0>0:+C0", "0>9:+C0", "0>1:+C9", "0:F0.0", "0>1:+P0", "0>1:+C5:2"])
def test_what_is_no_message_is_refused_in_words(move):
    with pytest.raises(mp.errors.UsageError):
        Board(LEVELS["six-hops"]).after(move)


MEMORY = [name for name, level in LEVELS.items() if level.counted == "memory"]


@pytest.mark.parametrize("name", MEMORY)
def test_the_memory_that_a_board_shows_begins_with_the_rank_s_own_parts_and_never_falls(name):
    level = LEVELS[name]
    sizes, goal = level.costs.sizes, level.goal
    shards = [1, level.ranks][goal.sharded]
    own = goal.stages * (sizes.parameters / shards + sizes.optimizer / level.ranks)
    boards = [Board(level)]
    for move in solved()[name]["best"]["moves"]:
        boards.append(boards[-1].after(move))
    shown = [board.peak_memory() for board in boards]
    assert shown[0] == own
    assert shown == sorted(shown)
    assert shown[-1] >= max(boards[-1].trace().peak_memory)


@pytest.mark.parametrize("name", LEVELS)
def test_buckets_are_counted_from_the_last_layer_as_in_the_lessons(name):
    goal = LEVELS[name].goal
    layers = list(goal.buckets or ()) if isinstance(goal, TrainingStep) else []
    assert layers == sorted(layers, reverse=True)


def test_a_layer_that_is_not_freed_is_held_also_if_nothing_reads_it_any_more():
    board = played(LEVELS["one-at-a-time"], ["0:~T1@dp", "0:F0.0"])
    with pytest.raises(Refused, match="would hold 44 bytes"):
        board.after("0:~T0@dp")
    assert board.after("0:!T1").after("0:~T0@dp").peak_memory() == 32


# ── words ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def asked(**question):
    return json.loads(answer(json.dumps(question)))["answer"]


def is_sentence(words):
    return words[-1] in ".?!" and "@dp" not in words and words[0] == words[0].upper()


@pytest.mark.parametrize("name", LEVELS)
def test_all_that_is_said_is_in_sentences_without_the_axis(name):
    moves: list[str] = []
    for move in solved()[name]["best"]["moves"]:
        for step in (1, 2, 3):
            assert is_sentence(asked(ask="hint", level=name, moves=moves, step=step)["words"])
        told = asked(ask="move", level=name, moves=moves, move=move)
        assert is_sentence(told["words"])
        moves.append(move)
    for wrong in LEVELS[name].wrong:
        *before, last = wrong.partition(" | ")[0].split()
        assert is_sentence(asked(ask="move", level=name, moves=before, move=last)["refused"])
    shown = asked(ask="open", level=name, moves=moves)
    assert all(map(is_sentence, [*shown["level"]["rules"], *shown["score"]["known"]]))


@pytest.mark.parametrize("name", LEVELS)
def test_a_legend_has_the_signs_that_are_in_the_trays_and_no_others(name):
    level = LEVELS[name]
    signs = [sign for sign, _ in showing.legend_of(level)]
    if level.kind == "messages":
        assert {"hop", "new"} <= set(signs)
        return
    ops = [str(op).removesuffix("@dp") for tray in level.trays for op in tray]
    assert set(signs) <= set(ops)
    assert {sign[: 1 + (sign[0] == "!")] for sign in signs} == {op[: 1 + (op[0] == "!")] for op in ops}
    assert len(signs) == len({sign[: 1 + (sign[0] == "!")] for sign in signs})


def test_a_legend_says_what_sums_take_as_the_simulator_has_it():
    legend = dict(showing.legend_of(LEVELS["slow-network"]))
    assert "3 for a bucket of 1 layer, 6 for a bucket of 2 layers" in legend["*U0"]
    legend = dict(showing.legend_of(LEVELS["parts"]))
    for sign in ("%U0", "~T0"):
        assert "1 for a bucket of 1 layer (an all-reduce takes 2)" in legend[sign]


def test_what_is_asked_of_a_player_is_said_with_its_numbers():
    assert "At most 6 hops." in showing.rules_of(LEVELS["six-hops"])
    assert "A rank may hold at most 2 activations at once." in showing.rules_of(LEVELS["short-of-memory"])
    assert showing.targets_of(LEVELS["two-stages"]) == [
        "solved",
        "time at most 6",
        "at most 1 activation held at once by any one rank",
    ]
    assert showing.targets_of(LEVELS["two-ranks"])[2] == "at most 1 whole tensor sent by any one rank"
    held = showing.about(LEVELS["prefetch"])
    assert (held["measure"], held["most"]) == ("bytes held at once by any one rank", 64)


def test_a_star_that_is_missing_is_named_with_what_it_lacks():
    level = LEVELS["two-micro-batches"]
    naive = ["0:F0.0", "1:F1.0", "1:B1.0", "0:B0.0", "0:F0.1", "1:F1.1", "1:B1.1", "0:B0.1"]
    score = showing.shown(played(level, naive))["score"]
    assert score["stars"] == 2
    assert score["missing"] == ["The star for the time is missing: 12 is 3 too long."]
    level = LEVELS["one-at-a-time"]
    score = showing.shown(Board(level, [f"0:{op}" for op in level.trays[0]]))["score"]
    assert score["missing"] == ["The star for memory is missing: 40 bytes held at once by any one rank is 2 too many."]


def test_hints_say_more_and_more_a_direction_a_place_a_move():
    level = LEVELS["gather-first"]
    board = played(level, ["0:~T0@dp", "0:F0.0"])
    assert hint(board, 1) == {"words": level.hint}
    assert hint(board, 2) == {"words": "In the solution that is known, a backward comes next."}
    assert hint(board, 3) == {"words": "Next: place the backward of layer 0 (B0.0).", "move": "0:B0.0"}


def test_a_hint_beside_the_known_solution_says_where_it_differs_and_leads_back():
    board = played(LEVELS["two-micro-batches"], ["0:F0.0", "1:F1.0", "1:B1.0", "0:B0.0"])
    assert "On rank 0, number 2 is B0.0, and there it is F0.1." in hint(board, 2)["words"]
    assert hint(board, 3)["words"].startswith("Undo 1 move: ")
    assert "move" in hint(Board(board.level, board.moves[:-1]), 3)


def test_what_is_used_up_is_told_with_what_to_take_away():
    board = played(LEVELS["gather-first"], ["0:~T0@dp", "0:F0.0", "0:!T0"])
    with pytest.raises(Refused, match=r"already freed\. ~T0 is used up: take !T0 away"):
        board.after("0:B0.0")


# ── what arrives in a hop ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_arrived_in_this_hop_cannot_be_sent_on_in_it():
    told = played(LEVELS["broadcast"], ["0>1:C0"])
    with pytest.raises(Refused, match="rank 1 received C0 in this hop, and can send it on in the next"):
        told.after("1>2:C0")
    assert told.after("next").after("1>2:C0").holdings()[2] == told.holdings()[1]


def test_what_is_wrong_also_one_hop_later_is_refused_with_its_own_reason():
    board = played(LEVELS["least-latency"], ["0>1:+C0"])
    with pytest.raises(Refused, match="rank 0's part 2 times"):
        board.after("next").after("1>0:+C0")
    with pytest.raises(Refused, match="this changes nothing"):
        played(LEVELS["broadcast"], ["0>1:C0"]).after("2>3:C0")


def test_a_rank_may_send_what_it_had_before_something_arrived_and_is_told_so():
    told = asked(ask="move", level="two-ranks", moves=["0>1:+C0"], move="1>0:+C0")
    assert told["words"] == (
        "Rank 1 sends rank 0 its C0, to be added there; it is what the rank held when this hop began."
    )
    assert told["board"]["score"]["stars"] == 3
    told = asked(ask="move", level="all-gather", moves=["1>0:C1", "next"], move="0>2:C0:2")
    assert told["words"] == "Rank 0 sends rank 2 its C0 to C1."


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
