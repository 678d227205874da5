"""Three hints for each exercise: they lead to the answer, and none of them is the answer."""

import io
import re
import tokenize

import pytest

from microparallel.learn.catalogue import EXERCISES
from microparallel.learn.holes import _lines

TRIVIAL = 16  # characters without spaces: what is shorter, such as `else:` or `request.wait()`, gives nothing away
ENTRY = re.compile(r"\s*([-+*]|\d+[.)])\s")  # how Markdown begins an entry of a list


def only_code(text):
    """A text without spaces, so that it is found however it is broken into lines."""
    return "".join(text.split())


def without_comment(line):
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line.strip() + "\n").readline))
    except (tokenize.TokenError, SyntaxError):  # a line of a longer statement
        return line
    return "".join(token.string for token in tokens if token.type != tokenize.COMMENT)


def answers(exercise):
    """The lines of code that the solution has in its holes, but not those that the learner is given anyway."""
    given = only_code(exercise.task.read_text("utf-8"))
    for line, in_hole in _lines(exercise.solution.read_text("utf-8")):
        code = only_code(without_comment(line))
        if in_hole and not line.lstrip().startswith("#") and len(code) >= TRIVIAL and code not in given:
            yield code


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_no_hint_is_the_answer(exercise):
    lines = list(answers(exercise))
    assert lines, "the solution has no line that a hint could give away"
    for number, hint in enumerate(exercise.hints, 1):
        given_away = [line for line in lines if line in only_code(hint)]
        assert not given_away, f"hint {number} has a line of the answer"


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_hints_are_no_programs(exercise):
    """A fence in a hint shows numbers, shapes or a drawing; a learner cannot paste it into a hole."""
    for hint in exercise.hints:
        assert "```python" not in hint
        assert "raise NotImplementedError" not in hint


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_each_hint_says_something_of_its_own(exercise):
    assert len(exercise.hints) == 3
    assert all(len(hint.split()) >= 20 for hint in exercise.hints)
    assert len(set(exercise.hints)) == 3


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_no_line_of_a_paragraph_begins_like_an_entry_of_a_list(exercise):
    """A paragraph that is broken before a `+` or a number with a dot would be shown as a list."""
    for hint in exercise.hints:
        for paragraph in re.sub(r"```.*?```", "", hint, flags=re.DOTALL).split("\n\n"):
            first, *others = paragraph.strip().split("\n")
            if not ENTRY.match(first):
                assert not [line for line in others if ENTRY.match(line)]
