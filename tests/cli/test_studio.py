"""`microparallel studio`: it prints its address, answers there, and ends when it is interrupted."""

import os
import re
import signal
import time
import urllib.request


def test_the_studio_prints_its_address_answers_and_ends_when_interrupted(start, tmp_path):
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.toml").write_text('model = "mlp"\n')
    command = start("microparallel", "studio", "--no-open", "--port", 0)
    deadline = time.monotonic() + 50
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", command.output)):
        assert command.poll() is None, command.errors
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with urllib.request.urlopen(found[0], timeout=10) as answer:
        assert "first" in answer.read().decode()
    os.kill(command.pid, signal.SIGINT)
    assert command.wait(20) == 130
    assert "Traceback" not in command.errors


def test_a_wrong_call_is_told_in_one_line(microparallel, tmp_path):
    result = microparallel("studio", "--site", tmp_path)
    assert (result.returncode, result.stderr.count("\n")) == (2, 1)
    assert "make docs" in result.stderr
    assert microparallel("studio", "--host", "1.2.3.4", "--no-open").returncode == 2
