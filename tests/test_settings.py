"""A setting is declared once; what is wrong with a value is said in one line, with the fix."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from microparallel.errors import ConfigError
from microparallel.settings import AT_LEAST_ONE, POSITIVE, Range, check_all, check_value, declared, setting


def _even(value: int, given: str) -> None:
    if value % 2:
        raise ConfigError(f"{given}: must be even; try {value + 1}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = setting(2, "How many.", "World", within=AT_LEAST_ONE, check=_even)
    lr: float | None = setting(None, "Rate.", shown="small", within=POSITIVE, example=0.001)
    kind: str = setting("one", choices=("one", "two", "three"))
    save_every: int | None = setting(None, within=Range(at_least=0, at_most=2**32 - 1))
    loud: bool | None = setting(None, "Say more.")
    undeclared: int = 0

    def __post_init__(self) -> None:
        check_all(self)


def test_a_field_tells_its_name_type_default_and_help() -> None:
    known = declared(Settings)
    assert list(known) == ["ranks", "lr", "kind", "save_every", "loud"]
    assert [one.flag for one in known.values()] == ["--ranks", "--lr", "--kind", "--save-every", "--loud"]
    assert [(one.kind, one.optional) for one in known.values()] == [
        (int, False),
        (float, True),
        (str, False),
        (int, True),
        (bool, True),
    ]
    assert [one.shown for one in known.values()] == ["2", "small", "one", None, None]
    assert known["kind"].setting.meaning == "one, two or three."
    assert (known["ranks"].setting.meaning, known["ranks"].setting.group) == ("How many.", "World")


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"ranks": 0}, "--ranks 0: must be at least 1; try 2, or leave it out"),
        ({"ranks": 3}, "--ranks 3: must be even; try 4"),
        ({"ranks": 2.0}, "--ranks 2.0: a whole number is needed, and this is a number; it looks like  4"),
        ({"ranks": None}, "--ranks None: a whole number is needed, and this is NoneType; it looks like  4"),
        ({"lr": float("nan")}, "--lr nan: must be above 0; try 0.001, or leave it out"),
        ({"kind": "tow"}, "--kind tow: did you mean 'two'?"),
        ({"kind": "zzz"}, "--kind zzz: choose one of one, two, three"),
        ({"save_every": -1}, "--save-every -1: must be from 0 to 4294967295; try 0, or leave it out"),
        ({"loud": 1}, "--loud 1: true or false is needed, and this is a whole number; it looks like  true"),
    ],
)
def test_a_wrong_value_is_refused_when_the_object_is_made(values: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**values)  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_the_place_may_be_another() -> None:
    with pytest.raises(ConfigError, match=r"ranks = 0 in run\.toml: must be at least 1"):
        check_value(declared(Settings)["ranks"], 0, "ranks = 0 in run.toml")


def test_ranges_in_words() -> None:
    assert [str(one) for one in (AT_LEAST_ONE, POSITIVE, Range(at_least=0, below=1))] == [
        "at least 1",
        "above 0",
        "at least 0 and below 1",
    ]
    assert 1 in AT_LEAST_ONE and 0 not in POSITIVE and float("inf") not in POSITIVE and 1 not in Range(below=1)
