"""What the pages ask: every start is right, errors stand at their place, and nothing that is asked breaks it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import microparallel as mp
from microparallel.playground import answer
from microparallel.playground.reading import marks_of, read
from microparallel.playground.starts import starts


def ask(**question):
    return json.loads(answer(json.dumps(question)))


def look(text, **costs):
    return ask(ask="look", text=text, costs=costs)["answer"]


@pytest.mark.parametrize("start", starts(), ids=lambda start: f"{start['kind']}/{start['name']}")
def test_every_builder_s_program_is_a_start_that_is_right(start):
    numbers = {"ranks": 3}
    text = ask(ask="start", kind=start["kind"], name=start["name"], numbers=numbers)["answer"]["text"]
    seen = look(text)
    assert seen["problem"] == ""
    assert seen["figure"].startswith("<div")
    assert {"makespan", "messages sent", "bytes sent"} <= {row[0] for row in seen["numbers"]}
    assert seen["run"]


def test_all_builders_are_there():
    names = {start["name"] for start in starts()}
    known = [mp.schedules.PIPELINES, mp.schedules.DATA_PARALLEL, mp.collectives.ALL_REDUCES, mp.collectives.OTHERS]
    assert names == {name for builders in known for name in builders}


def test_a_start_comes_without_messages_and_can_have_them_written_out():
    numbers = {"ranks": 2, "microbatches": 2}
    text = ask(ask="start", kind="pipelines", name="1f1b", numbers=numbers)["answer"]["text"]
    assert ">" not in text
    assert ask(ask="messages", text=text)["answer"]["text"] == mp.program.to_text(mp.schedules.build("1f1b", 2, 2))


HEAD = "program mine\ngoal: training step of 2 stages, 1 micro-batch\n"
WRONG = {  # a text, and what is underlined in it
    "missing": (HEAD + "rank 0: B0.0 F0.0\nrank 1: F1.0 B1.0\n", ["B0.0"]),
    "no operation": (HEAD + "rank 0: F0.0 Q0.0\nrank 1: F1.0\n", ["Q0.0"]),
    "other rank": (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0 F1.0\n", ["F1.0"]),
    "never": (HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0\n", ["B0.0"]),
    "goal": ("program mine\ngoal: nonsense\nrank 0: S\n", ["goal: nonsense"]),
    "too many": (HEAD + "rank 0: F0.0 B0.0 F7.0\nrank 1: F1.0 B1.0\n", ["F7.0", "rank 0:"]),
    "deadlock": (
        "program ring\ngoal: all-reduce of 1 slice\nrank 0: <+C0@1 >C0@1\nrank 1: <+C0@0 >C0@0\n",
        ["<+C0@1", "<+C0@0"],
    ),
    "unmatched": ("program x\ngoal: all-reduce of 1 slice\nrank 0: >C0@1\nrank 1:\n", [">C0@1"]),
    "unreached": ("program x\ngoal: all-reduce of 1 slice\nrank 0: >C0@1\nrank 1: <+C0@0\n", ["rank 0:"]),
    "after a remark": ("# 😀 a remark\n" + HEAD + "rank 0: F0.0 Q # Q\nrank 1: F1.0\n", ["Q"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_underlined_at_the_operation_that_verify_names(name):
    text, wanted = WRONG[name]
    seen = look(text)
    assert seen["problem"]
    units = text.encode("utf-16-le")  # as a browser counts
    found = [units[2 * start : 2 * end].decode("utf-16-le") for start, end in seen["marks"]]
    assert found[: len(wanted)] == wanted


def test_a_missing_value_of_a_program_with_its_messages_is_underlined_at_its_own_place():
    text = mp.program.to_text(mp.schedules.build("1f1b", 2, 2)).replace("F0.0 >A0.0@1", ">A0.0@1 F0.0")
    start, end = look(text)["marks"][0]
    assert text[start:end] == ">A0.0@1"


def test_costs_change_the_time_and_wrong_ones_are_named():
    text = mp.program.to_text(mp.schedules.one_f_one_b(2, 2))
    assert {row[0]: row[2] for row in look(text, forward=3)["numbers"]}["makespan"] > 9
    assert "2 stages" in ask(ask="look", text=text, costs={"forward": [1, 2, 3]})["answer"]["problem"]
    for wrong in ({"forward": -1}, {"forward": True}, {"speed": 1}, {"latency": [1, 2]}):
        assert ask(ask="look", text=text, costs=wrong)["answer"]["problem"]


@pytest.mark.parametrize(
    "text",
    [
        "program x\ngoal: training step of 999999999 stages, 999999999 micro-batches\nrank 0: S\n",
        "program x\ngoal: all-reduce of 100000 slices\nrank 0:\n",
        "program x\ngoal: all-reduce of 1 slice\n" + "".join(f"rank {rank}:\n" for rank in range(65)),
        HEAD + "rank 0: " + "F0.0 " * 20_000,
        "x" * 300_000,
    ],
    ids=["stages", "slices", "ranks", "operations", "characters"],
)
def test_what_would_take_too_long_is_refused_by_its_size(text):
    assert look(text)["problem"]


def test_what_a_text_contains_is_escaped_wherever_it_is_drawn():
    name = '<img src=x onerror="alert(1)">'
    text = f"program {name}\ngoal: training step of 1 stage, 1 micro-batch\nrank 0: F0.0 B0.0\n"
    seen = look(text)
    assert seen["figure"]
    assert "<img" not in seen["figure"]
    observed = look(text.replace("B0.0", "B0.0 ?forward/0/%3Cscript%3E"))
    assert "only observed" in observed["problem"]
    assert "<script" not in observed["figure"]


@pytest.mark.parametrize("form", ["text", "svg", "chrome"])
def test_a_program_can_be_kept_as_a_file(form):
    text = mp.program.to_text(mp.collectives.build("ring", 3))
    file = ask(ask="file", text=text, form=form)["answer"]
    assert file["content"]
    assert form != "chrome" or json.loads(file["content"])["traceEvents"]


WORDS = st.sampled_from(
    ["F0.0", "B0.0", "F1.0", "B1.0", ">A0.0@1", "<A0.0@0", "*U0@dp", "!A0.0", "S", "=", "C0+=P1", "Q", "&"]
)
TEXTS = st.lists(st.lists(WORDS, max_size=6), min_size=1, max_size=3).map(
    lambda ranks: HEAD + "".join(f"rank {rank}: {' '.join(ops)}\n" for rank, ops in enumerate(ranks))
)


@given(TEXTS)
@settings(max_examples=60)
def test_any_text_is_answered_with_marks_inside_of_it(text):
    seen = look(text)
    assert all(0 <= start < end <= len(text) for start, end in seen["marks"])
    assert bool(seen["marks"]) == bool(seen["problem"])


QUESTIONS = """

[]
{}
{"ask": "look"}
{"ask": "move", "level": "no such"}
{"ask": "look", "text": 7}
{"ask": "open", "level": "gpipe", "moves": "F"}
{"ask": "start", "kind": "pipelines", "name": "1f1b", "numbers": {"ranks": 9999}}
""".splitlines()[1:]


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_no_question_is_told_in_one_line(question):
    trouble = json.loads(answer(question))["trouble"]
    assert trouble
    assert "\n" not in trouble


def test_marks_of_an_error_without_a_place_fall_on_the_goal():
    text = HEAD + "rank 0: F0.0 B0.0\nrank 1: F1.0 B1.0\n"
    (mark,) = marks_of(mp.errors.ProgramError("something else"), text, read(text))
    assert text[mark.start : mark.end].startswith("goal:")
