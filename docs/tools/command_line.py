"""The reference of the command line as Markdown, made from what `--help` is made of."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Any

from microparallel.cli.app import VERBS, load


def reference() -> str:
    """Every verb and its subcommands: what it does, its options, its examples."""
    return "\n".join(part for verb in VERBS for part in _verb(f"microparallel {verb}", load(verb)))


def _verb(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}\n"
    yield f"{_words(command.help)}\n"
    children = getattr(command, "commands", {})
    if command.params or not children:
        arguments = [_argument(parameter) for parameter in command.params if not _is_option(parameter)]
        usage = [name, *(["[OPTIONS]"] if command.params else []), *arguments, *(["[COMMAND]"] if children else [])]
        yield f"```text\n{' '.join(usage)}\n```\n"
        yield from _panels(command.params)
    if command.epilog:
        yield _examples(command.epilog)
    for child, one in children.items():
        yield "\n".join(_verb(f"{name} {child}", one)).replace("## ", "### ", 1)


def _is_option(parameter: Any) -> bool:
    return any(name.startswith("-") for name in parameter.opts)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return (name if parameter.required else f"[{name}]") + ("…" if parameter.nargs == -1 else "")


def _panels(parameters: list[Any]) -> Iterator[str]:
    """A list for each panel that `--help` shows."""
    panels: dict[str, list[Any]] = {}
    for parameter in parameters:
        if not getattr(parameter, "hidden", False):
            default = "Options" if _is_option(parameter) else "Arguments"
            panels.setdefault(getattr(parameter, "rich_help_panel", None) or default, []).append(parameter)
    for panel, listed in panels.items():
        terms = "\n\n".join(f"{_flags(parameter)}\n:   {_meaning(parameter)}" for parameter in listed)
        yield f'<div class="options" markdown>\n\n**{panel}**\n\n{terms}\n\n</div>\n'


def _flags(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts] if _is_option(parameter) else [_argument(parameter)]
    takes = "" if not _is_option(parameter) or parameter.is_flag else f" {_kind(parameter)}"
    return ", ".join(f"`{name}{takes}`" for name in names)


def _kind(parameter: Any) -> str:
    return parameter.metavar or {"int": "NUMBER", "float": "NUMBER"}.get(parameter.bare_type(), "VALUE")


def _meaning(parameter: Any) -> str:
    text = _words(parameter.help or "").replace("\n", " ")
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    silent = shown is None or shown is False or callable(shown) or not isinstance(shown, str | int | float)
    return text if silent else f"{text} *Default: {html.escape(str(shown))}.*".replace("..*", ".*")


def _words(text: str | None) -> str:
    """Flags as code, in paragraphs."""
    return re.sub(r"(?<![`\w-])(--[a-z][\w-]*)", r"`\1`", html.escape((text or "").strip(), quote=False))


def _examples(epilog: str) -> str:
    """Each example's command, and under it what it does."""
    pairs = re.findall(r"`([^`\n]+)`  \n(.+)", epilog)
    if not pairs:
        return f"{epilog}\n"
    width = max(len(command) for command, _ in pairs)
    if width > 60:
        lines = [f"# {meaning.replace('`', '')}\n{command}" for command, meaning in pairs]
    else:
        lines = [f"{command:<{width}}  # {meaning.replace('`', '')}" for command, meaning in pairs]
    return '```sh title="Examples"\n' + "\n".join(lines) + "\n```\n"
