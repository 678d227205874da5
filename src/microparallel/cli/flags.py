"""What the verbs share: common flags, the examples of a help, checks of files, and flags made from settings."""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from microparallel.errors import ConfigError
from microparallel.settings import Declared, declared

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="A TOML file with these settings; flags win over it.")
]


def examples(*lines: tuple[str, str]) -> str:
    """The end of a verb's help: commands to copy, each with what it does."""
    return "**Examples**\n\n" + "\n\n".join(f"`{command}`  \n{meaning}" for command, meaning in lines)


# ── files that a verb writes ────────────────────────────────────────────────────────────────────────────────────────


def require_writable(path: Path, flag: str) -> None:
    """Raise `ConfigError` before the work begins if a file cannot be written there; `flag` is what asked for it."""
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file in it")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{flag} {path}: this is not an ordinary file; name one that may be replaced")
    if not path.parent.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {path.parent}; create it, or choose another")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permissions do not tell, for root and on odd file systems
            writable = not path.exists() or os.access(path, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ConfigError(f"{flag} {path}: this place cannot be written to; choose another")


# ── flags from the settings that a dataclass declares ───────────────────────────────────────────────────────────────


def takes(
    settings: type, names: Iterable[str] | None = None, changed: Mapping[str, Mapping[str, Any]] | None = None
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a verb the flags of these settings beside its own.

    The verb's first parameter is a dictionary of the settings that were given, by name; a flag that was left out is not
    in it, so that a file or the dataclass decides.

    Args:
        settings: a dataclass whose fields are settings (see `microparallel.settings`).
        names: those that the verb knows; all by default.
        changed: attributes of `Setting` that are others for this verb, as a default of its own.
    """
    known = declared(settings)
    chosen = [known[name] for name in (known if names is None else names)]
    for name, attributes in (changed or {}).items():
        place = [one.name for one in chosen].index(name)
        chosen[place] = replace(chosen[place], setting=replace(chosen[place].setting, **attributes))
    flags = [_flag(one) for one in chosen]

    def decorate(verb: Callable[..., int]) -> Callable[..., int]:
        _, *own = inspect.signature(verb, eval_str=True).parameters.values()

        @functools.wraps(verb)
        def command(**values: Any) -> int:
            answers = {one.name: _answer(one, values.pop(one.name)) for one in chosen}
            return verb({name: answer for name, answer in answers.items() if answer is not None}, **values)

        # typer reads the flags from here
        parameters = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in (*flags, *own)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return decorate


def _flag(one: Declared) -> inspect.Parameter:
    """A setting as typer wants it. Its default is None, "not given"; what `--help` shows is another matter."""
    name = one.flag if one.kind is bool or one.setting.flag else None  # a bool by its name would get a --no- as well
    option = typer.Option(
        *([name] if name else []),
        help=one.setting.meaning,
        metavar=one.setting.metavar,
        show_default=one.shown or False,
        rich_help_panel=one.setting.group,
    )
    kind: Any = str if one.setting.parse else one.kind
    kind = list[kind] if one.setting.several else kind
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _answer(one: Declared, value: Any) -> Any:
    """What a flag's value means; None where it was not given."""
    if value is None or not one.setting.several:
        return value if value is None or one.setting.parse is None else one.setting.parse(value, one.flag)
    return " ".join(value) or None
