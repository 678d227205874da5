"""`module:name` finds what a user wrote, or says what is wrong with it."""

import sys
from collections import OrderedDict

import pytest

from microparallel.errors import UsageError
from microparallel.train.user_code import call, load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_from_the_current_directory_and_from_what_is_installed(folder):
    (folder / "my_models.py").write_text("def make(dim): return dim * 2")
    assert load("my_models:make", "model")(4) == 8
    assert load("collections:OrderedDict", "model") is OrderedDict
    (folder / "package").mkdir()
    (folder / "package" / "inner.py").write_text("def make(): return 1")
    assert load("package.inner:make", "model")() == 1


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("my_models", r"model 'my_models' does not name a function: write module:function, as in my_module:make_model"),
        ("my_models:", "does not name a function"),
        (":make", "does not name a function"),
        ("my_models.py:make", "names a file: name the module instead, my_models:make"),
        ("folder/my_models:make", "names a file.* my_models:make"),
        ("my_model:make", r"no module 'my_model' in .*did you mean 'my_models'\?"),
        ("my_models.inner:make", "no module 'my_models.inner'"),
        ("my_models:meke", "has no 'meke'; did you mean 'make'"),
        ("my_models:zzz", "has no 'zzz'; there is make"),
        ("my_models:size", "is int, not a function"),
        ("needs_missing:make", "importing needs_missing raised ModuleNotFoundError: No module named 'not_installed'"),
        ("broken:make", "importing broken raised SyntaxError"),
    ],
)
def test_mistakes(folder, spec, words):
    (folder / "my_models.py").write_text("size = 3\ndef make(): pass")
    (folder / "needs_missing.py").write_text("import not_installed")
    (folder / "broken.py").write_text("def (")
    with pytest.raises(UsageError, match=words):
        load(spec, "model")


def test_call_names_the_place_and_chains_the_traceback():
    with pytest.raises(UsageError, match=r"model 'a:b' raised ZeroDivisionError") as caught:
        call(lambda x: x / 0, "model 'a:b'", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
