"""Flags are made from what a dataclass declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer

from microparallel.cli.app import load
from microparallel.cli.flags import takes
from microparallel.settings import declared, setting
from microparallel.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    ranks: int = setting(2, "How many.", "World")
    slow: str | None = setting(None, "Who is slow.", metavar="R", several=True)
    loud: bool | None = setting(None, "Say more.")
    with_torch: bool = setting(True, "Beside torch.", flag="--torch/--no-torch")


def called(*arguments: str, **more: Any) -> tuple[dict[str, Any], bool]:
    """What a verb with these flags is told."""
    told: list[tuple[dict[str, Any], bool]] = []

    @takes(Settings, **more)
    def verb(given: dict[str, Any], *, quiet: Annotated[bool, typer.Option("--quiet")] = False) -> int:
        told.append((given, quiet))
        return 0

    app = typer.Typer()
    app.command()(verb)
    typer.main.get_command(app).main([*arguments], standalone_mode=False)
    [one] = told
    return one


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], {}),
        (["--ranks", "4", "--loud"], {"ranks": 4, "loud": True}),
        (["--slow", "1=3x"], {"slow": "1=3x"}),
        (["--slow", "1=3x", "--slow", "2=2x"], {"slow": "1=3x 2=2x"}),
        (["--no-torch"], {"with_torch": False}),
    ],
)
def test_a_verb_is_told_what_was_given_and_nothing_else(arguments: list[str], given: dict[str, Any]) -> None:
    assert called(*arguments) == (given, False)
    assert called(*arguments, "--quiet") == (given, True)


def test_a_verb_may_know_only_some() -> None:
    assert called("--ranks", "3", names=["ranks"]) == ({"ranks": 3}, False)


def test_a_verb_may_show_another_default() -> None:
    @takes(Settings, ["ranks"], changed={"ranks": {"shown": "all", "help": "Many."}})
    def verb(given: dict[str, Any]) -> int:
        return 0

    app = typer.Typer()
    app.command()(verb)
    [option, *_] = typer.main.get_command(app).params
    assert (option.help, option.show_default, option.rich_help_panel) == ("Many.", "all", "World")  # type: ignore[attr-defined]


def test_every_setting_of_a_training_run_is_a_flag() -> None:
    flags = {name: option for option in load("train").params for name in option.opts}
    for one in declared(TrainConfig).values():
        assert flags[one.flag].help == one.setting.meaning
        assert flags[one.flag].rich_help_panel == one.setting.group
        assert flags[one.flag].default is None  # not given: the file decides


def test_the_second_of_two_slow_ranks_is_read_too(microparallel: Any) -> None:
    result = microparallel("train", "--ranks", "2", "--slow-rank", "0=2x", "--slow-rank", "9=3x")
    assert result.returncode == 2 and "9=3x" in result.stderr
