"""The command line, called in this process: one of its own would have to import torch again."""

import signal
import subprocess
import sys

import pytest

from microparallel.cli import main


@pytest.fixture
def microparallel(tmp_path, monkeypatch, capfd, quick_ranks):
    """Call `microparallel …` in an empty folder; the answer is what `subprocess.run` would give."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)

    def call(*arguments, **environment):
        monkeypatch.setattr(sys, "argv", ["microparallel", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(sys.argv, ended.value.code, *capfd.readouterr())

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield call
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]  # another test may have a module of that name
