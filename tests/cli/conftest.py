"""The command line, called in this process: one of its own would have to import torch again."""

import signal
import subprocess
import sys

import pytest

from microparallel.cli import main


@pytest.fixture
def microparallel(tmp_path, monkeypatch, capfd, quick_ranks, fresh):
    """Call `microparallel …` in an empty folder; the answer is what `subprocess.run` gives."""
    monkeypatch.chdir(tmp_path)
    modules = set(sys.modules)

    def call(*arguments, **environment):
        arguments = [str(argument) for argument in arguments]
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
        if fresh:
            command = [sys.executable, "-m", "microparallel", *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        monkeypatch.setattr(sys, "argv", ["microparallel", *arguments])
        monkeypatch.setattr(sys, "path", [*sys.path])
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
