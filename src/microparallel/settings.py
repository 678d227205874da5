"""A setting is declared once, as a field of a dataclass: its name, type, default, help and range.

    batch: int | None = setting(None, "Samples a step.", within=AT_LEAST_ONE, example=32)

The declaration is read by the dataclass itself when it is made (`check_all`), by the reader of TOML files, by the flags
of the command line (`cli/flags.py`), and through those by `--help` and the reference in the documentation. Neither
torch nor typer is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from microparallel.errors import ConfigError
from microparallel.text import did_you_mean, one_of

# What several declarations choose from.
DEVICES = ("auto", "cpu", "cuda")
TRANSPORTS = ("auto", "shm", "cuda", "gloo", "shm+gloo", "nccl")
MPS = ("auto", "on", "off")
MPS_HELP = "auto, on or off: whether ranks that share a GPU use NVIDIA's MPS; auto: if it is here."

_WORDS = {int: "a whole number", float: "a number", str: "text in quotes", bool: "true or false", tuple: "a tuple"}
_EXAMPLES = {int: "4", float: "0.001", str: '"mlp"', bool: "true", tuple: "(1, 2)"}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Which finite numbers are right, and how to say so: `at least 1`, `above 0`, `from 0 to 9`."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, number: float) -> bool:
        return (
            math.isfinite(number)
            and (self.at_least is None or number >= self.at_least)
            and (self.above is None or number > self.above)
            and (self.at_most is None or number <= self.at_most)
            and (self.below is None or number < self.below)
        )

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:.15g} to {self.at_most:.15g}"
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound:.15g}" for word, bound in bounds.items() if bound is not None)


AT_LEAST_ONE = Range(at_least=1)
POSITIVE = Range(above=0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known about a setting beside its name, type and default.

    Attributes:
        help: a sentence for `--help`; where it is empty, the choices are listed.
        group: the heading under which `--help` shows it.
        shown: what `--help` says of a default that is not the field's own, such as one that depends on the model.
        metavar: what `--help` calls the value; otherwise its type is named.
        flag: how it is called on the command line, where that does not follow from its name.
        parse: makes the value from the text of its flag, where it is a tuple; its arguments are the text and the flag.
        several: whether the flag may be given several times; the values are joined by blanks.
        choices: the only values there are.
        within: the numbers that are right.
        example: a value that would be right, which errors suggest; otherwise the default.
        check: raises a `ConfigError` for a value that is wrong in another way; its arguments are the value and the text
            by which the user gave it.
        may_change: whether a run that is continued may get another value.
    """

    help: str = ""
    group: str | None = None
    shown: str | None = None
    metavar: str | None = None
    flag: str | None = None
    parse: Callable[[str, str], tuple[Any, ...]] | None = None
    several: bool = False
    choices: tuple[str, ...] = ()
    within: Range | None = None
    example: Any = None
    check: Callable[[Any, str], None] | None = None
    may_change: bool = False

    @property
    def meaning(self) -> str:
        """What `--help` says about it."""
        return self.help or f"{one_of(self.choices)}."


@dataclass(frozen=True)
class Declared:
    """A setting, with the name, type and default of its field."""

    name: str
    kind: type  # int, float, str, bool or tuple
    optional: bool  # None stands for a default that is found later
    default: Any
    setting: Setting

    @property
    def flag(self) -> str:
        """Its name on the command line: `--save-every`."""
        return self.setting.flag or f"--{self.name.replace('_', '-')}"

    @property
    def shown(self) -> str | None:
        """The default, as `--help` shows it; None where there is none to show."""
        if self.setting.shown is not None or self.default is None or self.kind is bool:
            return self.setting.shown
        if self.kind is tuple:
            return ",".join(map(str, self.default))
        return f"{self.default:g}" if self.kind is float else str(self.default)

    def given(self, value: Any) -> str:
        """The setting as a user gives it on the command line: `--save-every 10`, `--recompute`."""
        return self.flag if value is True and self.kind is bool else f"{self.flag} {value}"


def setting(default: Any, help: str = "", group: str | None = None, **more: Any) -> Any:
    """Declare a field of a settings dataclass; `more` are the other attributes of `Setting`."""
    return field(default=default, metadata={"setting": Setting(help=help, group=group, **more)})


@cache
def declared(settings: type) -> dict[str, Declared]:
    """Every setting of a dataclass, by name, in the order of the fields."""
    hints = get_type_hints(settings)
    return {one.name: _declared(one, hints[one.name]) for one in fields(settings) if "setting" in one.metadata}


def _declared(one: Field[Any], hint: Any) -> Declared:
    kinds = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    return Declared(one.name, get_origin(kind) or kind, NoneType in kinds, one.default, one.metadata["setting"])


def check_all(settings: Any) -> None:
    """Raise a `ConfigError` if a value of this object cannot be right, whatever the others are."""
    for one in declared(settings.__class__).values():
        check_value(one, getattr(settings, one.name))


def check_value(one: Declared, value: Any, given: str | None = None) -> None:
    """Raise a `ConfigError` in one line that names the value, the place and the fix; `given` is value and place."""
    given = one.given(value) if given is None else given
    if value is None and one.optional:
        return
    if type(value) is not one.kind and (type(value), one.kind) != (int, float):
        actual = _WORDS.get(type(value), type(value).__name__)
        raise ConfigError(
            f"{given}: {_WORDS[one.kind]} is needed, and this is {actual}; it looks like  {_EXAMPLES[one.kind]}"
        )
    if one.kind is str and (not value or re.search("[\0\ud800-\udfff]", value)):  # halves of characters: not UTF-8
        raise ConfigError(f"{given!r}: empty, or with characters that cannot be written down; try a plain name")
    if one.setting.choices and value not in one.setting.choices:
        raise ConfigError(f"{given}: {did_you_mean(value, one.setting.choices)}")
    if one.setting.within is not None and value not in one.setting.within:
        raise ConfigError(f"{given}: must be {one.setting.within}; try {_example(one)}, or leave it out")
    if one.setting.check is not None:
        one.setting.check(value, given)


def _example(one: Declared) -> str:
    candidates = (one.setting.example, one.default, one.setting.within and one.setting.within.at_least)
    return f"{next(value for value in candidates if value is not None):g}"
