from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from microparallel.errors import ConfigError
from microparallel.train.config import DEFAULTS, TrainConfig, config_text, merge, read_config


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_torch_is_not_imported() -> None:
    code = "import sys, microparallel.train.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("model", ["mlp", "gpt", "my_module:make_model"])
def test_resolving_leaves_nothing_open_that_the_model_needs(model: str) -> None:
    config = TrainConfig(model=model, data="digits").resolved()
    for name in DEFAULTS.get(model, DEFAULTS["module:function"]):
        assert getattr(config, name) is not None
    assert config.strategy == "single"
    assert (config.steps is None) != (config.epochs is None)
    assert config.resolved() == config


def test_resolving_keeps_what_was_given() -> None:
    config = TrainConfig(model="gpt", dim=32, epochs=2, ranks=2, batch=5).resolved()
    assert (config.dim, config.depth, config.epochs, config.steps) == (32, DEFAULTS["gpt"]["depth"], 2, None)
    assert (config.strategy, config.batch, config.data) == ("ddp", 5, "text")


def test_how_often_to_average_decides_the_strategy() -> None:
    assert TrainConfig(average_every=4, ranks=2).resolved().strategy == "averaging"
    assert TrainConfig(average_every=4, ranks=2, strategy="averaging").resolved().average_every == 4
    assert TrainConfig(accumulate=4, ranks=2).resolved().strategy == "ddp"


def test_only_the_strategy_has_an_auto_to_resolve() -> None:
    config = TrainConfig(data="auto").resolved()  # a file may be called that
    assert (config.data, config.device, config.transport) == ("auto", "auto", "auto")


names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
whole = st.integers(1, 2**62)


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    model = draw(st.sampled_from(["mlp", "gpt", "my_module:make_model"]))
    heads = draw(st.integers(1, 8))
    values: dict[str, Any] = draw(
        st.fixed_dictionaries(
            {"data": names},
            optional={
                **dict.fromkeys(("validate_every", "save_every", "keep"), whole),
                **{"loss": st.sampled_from(["mse", "cross-entropy", "a.b:c"]), "out": names},
                **{"ranks": st.integers(1, 4), "batch": st.integers(4, 2**62), "seed": st.integers(0, 2**32 - 1)},
                **{"lr": st.floats(0, exclude_min=True, allow_infinity=False), "precision": st.just("float64")},
            },
        )
    )
    if model == "gpt":
        values |= {"heads": heads, "dim": heads * draw(st.integers(1, 64))}
    if draw(st.booleans()):
        values |= {"optimizer": "sgd", "momentum": draw(st.floats(0, 1, exclude_max=True))}
    values |= draw(st.sampled_from([{}, {"steps": 7}, {"epochs": 7}]))
    return TrainConfig(model=model, **values)


@given(configs())
def test_text_reads_back_to_the_same_configuration(config: TrainConfig) -> None:
    for one in (config, config.resolved()):
        assert TrainConfig(**tomllib.loads(config_text(one))) == one


def test_a_file_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = TrainConfig(model="gpt", ranks=2, lr=0.1 + 0.2, out="rüns/über").resolved()
    path = written(tmp_path, config_text(config))
    assert TrainConfig(**read_config(path)) == config


def test_the_text_keeps_the_order_of_the_fields() -> None:
    assert config_text(TrainConfig(ranks=2)).startswith('model = "mlp"\naccumulate = 1\nmomentum = 0.0\n')


def test_flags_win_over_the_file() -> None:
    merged = merge({"ranks": 4, "lr": 0.1, "epochs": 3}, {"ranks": 2, "lr": None, "batch": 8, "epochs": None})
    assert merged == {"ranks": 2, "lr": 0.1, "epochs": 3, "batch": 8}


def test_a_length_in_the_flags_replaces_the_other_length_in_the_file() -> None:
    assert merge({"epochs": 3}, {"steps": 10}) == {"steps": 10}
    assert merge({"steps": 3}, {"epochs": 10}) == {"epochs": 10}


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"ranks": 0}, "--ranks 0: must be at least 1; try 1"),
    ({"ranks": -3}, "--ranks -3: must be at least 1"),
    ({"batch": 2, "ranks": 4}, "--batch 2 is smaller than --ranks 4: .* try --batch 4 or --ranks 2"),
    ({"ranks": 65}, "--batch 64 is smaller than --ranks 65"),
    ({"lr": 0.0}, "--lr 0.0: .*above 0"),
    ({"lr": float("nan")}, "--lr nan"),
    ({"lr": float("inf")}, "--lr inf"),
    ({"lr": -1}, "--lr -1"),
    ({"optimizer": "admw"}, "--optimizer admw: did you mean 'adamw'?"),
    ({"optimizer": "zzz"}, "--optimizer zzz: choose one of adadelta, .*, sgd .your own: my_module:make_optimizer"),
    ({"strategy": "naiv"}, "--strategy naiv: did you mean 'naive'?"),
    ({"precision": "float23"}, "did you mean 'float32'"),
    ({"device": "gpu0"}, "choose one of auto, cpu, cuda"),
    ({"transport": "glo"}, "did you mean 'gloo'"),
    ({"model": "mpl"}, "--model mpl: did you mean 'mlp'. .your own: my_module:my_function"),
    ({"model": "module:"}, "my_module:my_function"),
    ({"model": "mine:make"}, "--model mine:make has no data of its own; try --data"),
    ({"model": "mine:make", "data": "digits", "depth": 3}, "--depth 3 means nothing to --model mine:make"),
    ({"heads": 3}, "--heads 3 means nothing to --model mlp"),
    ({"model": "gpt", "heads": 3}, "--dim 128 cannot be split evenly over --heads 3; try --dim 126"),
    ({"model": "gpt", "dim": 2, "heads": 3}, "try --dim 3"),
    ({"loss": "mes"}, "did you mean 'mse'"),
    ({"strategy": "single", "ranks": 2}, "--strategy single is for one rank, and --ranks is 2"),
    ({"steps": 1, "epochs": 1}, "--steps 1 and --epochs 1 both"),
    ({"steps": 0}, "--steps 0: must be at least 1"),
    ({"epochs": -1}, "--epochs -1"),
    ({"save_every": 0}, "--save-every 0: must be at least 1"),
    ({"validate_every": -5}, "--validate-every -5"),
    ({"keep": 0}, "--keep 0"),
    ({"accumulate": 0}, "--accumulate 0: must be at least 1"),
    (
        {"accumulate": 33, "ranks": 2},
        "--accumulate 33: of --batch 64 each of 2 ranks has only 32 .*--accumulate 32",
    ),
    ({"accumulate": 65}, "--accumulate 65: of --batch 64 there are only 64 samples .* or --batch 65"),
    ({"accumulate": 2, "ranks": 2, "strategy": "hooks"}, "--accumulate 2: --strategy hooks computes a step at once"),
    ({"average_every": 0, "ranks": 2}, "--average-every 0: must be at least 1"),
    ({"average_every": 4}, "--average-every 4: one rank has no other rank to average with; try --ranks 2"),
    ({"average_every": 4, "ranks": 2, "strategy": "ddp"}, "--average-every 4 is for --strategy averaging, .* is ddp"),
    ({"strategy": "averaging", "ranks": 2}, "--strategy averaging needs .* try --average-every 4"),
    ({"seed": -1}, "--seed -1: .* from 0 to"),
    ({"seed": 2**32}, "--seed 4294967296"),
    ({"momentum": 1.0, "optimizer": "sgd"}, "--momentum 1.0: .*try 0.9"),
    ({"momentum": 0.9}, "--momentum 0.9 is for sgd, and --optimizer is adam"),
    ({"ranks": "4"}, "a whole number is needed, and this is text in quotes; it looks like  4"),
    ({"ranks": 4.0}, "a whole number is needed, and this is a number"),
    ({"ranks": True}, "a whole number is needed, and this is true or false"),
    ({"ranks": None}, "a whole number is needed"),
    ({"model": 3}, "text in quotes is needed"),
    ({"lr": "0.1"}, "a number is needed"),
    ({"lr": [0.1]}, "a number is needed, and this is list"),
    ({"out": ""}, "--out .*: empty"),
    ({"data": "\udcff"}, "--data .*cannot be written down"),
]


@pytest.mark.parametrize(("values", "message"), MISTAKES, ids=str)
def test_mistakes_are_named_in_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")) as caught:
        TrainConfig(**values)
    assert "\n" not in str(caught.value)


def test_absurd_numbers_of_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    TrainConfig(ranks=128, batch=1000)
    with pytest.raises(ConfigError, match=r"--ranks 129: this machine has 2 cores, .*try 2"):
        TrainConfig(ranks=129, batch=1000)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    with pytest.raises(ConfigError, match="this machine has 1 core,"):
        TrainConfig(ranks=65, batch=1000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnaks = 4", "unknown key 'rnaks'; did you mean 'ranks'"),
        ("save-every = 4", "did you mean 'save_every'"),
        ("[train]\nranks = 4", "unknown key 'train'"),
        ("qqq = 1", "choose one of model, data"),
        ("ranks = 4\nbatch = = 2", "line 2"),
        ('ranks = "4"', "ranks = '4' in .*run.toml: a whole number is needed"),
        ("ranks = 0", "ranks = 0 in .*run.toml: must be at least 1"),
        ("lr = inf", "lr = inf in .*run.toml"),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_mistakes_in_a_file_name_the_file(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(written(tmp_path, text))
    assert "run.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_of_an_older_version_is_understood(tmp_path: Path) -> None:
    assert read_config(written(tmp_path, "chunks = 3")) == {"stages_per_rank": 3}


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: there is no such file"):
        read_config(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match=f"{tmp_path.name}: cannot be read: Is a directory"):
        read_config(tmp_path)
