"""Logging that was set up before `launch` holds in ranks."""

import io
import logging
import logging.handlers
import sys
import threading

import pytest

import microparallel as mp
from microparallel.world import logs


@pytest.fixture
def clean_logging(monkeypatch):
    """Logging as in a new process, once a test calls this; whatever it sets up goes away."""
    root = logging.root
    level, before = root.level, []

    def clean():
        before.append(root.handlers)  # pytest's own, which capture what a test logs
        root.handlers = []
        return root

    monkeypatch.setattr(logs, "_said", set())
    yield clean
    for handler in root.handlers:
        handler.close()
    root.handlers = before[0]
    root.setLevel(level)
    logging.getLogger("tests.mine").setLevel(logging.NOTSET)
    logging.disable(logging.NOTSET)


def log(comms):
    logging.info("rank %d is here", comms.rank)
    logging.debug("too much")
    logging.getLogger("tests.mine").debug("in detail")
    logging.getLogger("tests.other").debug("not this")


def test_basic_config_holds_in_ranks(clean_logging, quick_ranks, capfd):
    clean_logging()
    logging.basicConfig(level="INFO", format="{levelname}|{message}", style="{", stream=sys.stdout)
    logging.getLogger("tests.mine").setLevel("DEBUG")
    mp.launch(log, 2, device="cpu")
    out, errors = capfd.readouterr()
    wanted = ["DEBUG|in detail"] * 2 + ["INFO|rank 0 is here", "INFO|rank 1 is here"]
    assert sorted(out.splitlines()) == wanted and errors == ""


def test_a_file_is_appended_to(clean_logging, quick_ranks, tmp_path, capfd):
    clean_logging()
    file = tmp_path / "run.log"
    logging.basicConfig(level="INFO", filename=file, filemode="w", format="%(message)s", encoding="utf-8")
    logging.info("begin")
    mp.launch(log, 2, device="cpu", prefix=True)
    logging.info("end")
    lines = file.read_text().splitlines()
    assert lines[0] == "begin" and lines[-1] == "end"
    assert sorted(lines[1:-1]) == ["rank 0 is here", "rank 1 is here"]
    assert capfd.readouterr() == ("", "")


class Shouting(logging.Formatter):
    def format(self, record):
        return super().format(record).upper()


class NotRank1(logging.Filter):
    def filter(self, record):
        return "rank 1" not in record.getMessage()


def test_formatters_levels_and_filters_are_carried(clean_logging, quick_ranks, capfd):
    root = clean_logging()
    handler = logging.StreamHandler()  # to stderr
    handler.setFormatter(Shouting("%(message)s"))
    handler.addFilter(NotRank1())
    handler.setLevel("INFO")
    root.addHandler(handler)
    root.setLevel("DEBUG")
    mp.launch(log, 2, device="cpu")
    assert capfd.readouterr().err.splitlines() == ["RANK 0 IS HERE"]


def test_each_run_of_a_pool_has_the_logging_of_its_time(clean_logging, quick_ranks, capfd):
    root = clean_logging()
    with mp.Pool() as pool:
        logging.basicConfig(level="INFO", format="first %(message)s")
        pool.run(log, 1, device="cpu")
        logging.basicConfig(level="WARNING", format="second %(message)s", force=True)
        pool.run(log, 1, device="cpu")
        root.handlers.clear()
        pool.run(lambda comms: logging.getLogger().warning("third"), 1, device="cpu")
        logging.disable(logging.CRITICAL)
        pool.run(lambda comms: logging.getLogger().warning("never"), 1, device="cpu")
    assert capfd.readouterr().err.splitlines() == ["first rank 0 is here", "third"]


class Elsewhere(logging.Handler):
    def __init__(self, records):
        super().__init__()
        self.records = records

    def emit(self, record):
        self.records.append(record.getMessage())


class Locked(logging.Formatter):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_handler_that_cannot_be_carried_is_named_once(clean_logging, tmp_path):
    root = clean_logging()
    records = []
    root.addHandler(Elsewhere(records))
    root.addHandler(logging.StreamHandler(io.StringIO()))  # a test's capture: nothing to say about that
    with (tmp_path / "file").open("w") as file:
        root.addHandler(logging.StreamHandler(file))
        assert b"_Handler" not in logs.describe()
        logs.describe()  # says nothing more
    first, second = records
    assert first.startswith("what ranks log does not go to this process's Elsewhere: only those to stderr")
    assert "StreamHandler: it writes to an open file" in second
    root.handlers[2] = logging.StreamHandler()
    root.handlers[2].setFormatter(Locked())
    logs._said.clear()
    logs.describe()
    assert "its formatter or a filter cannot be pickled" in records[-1]


def test_a_file_that_the_parent_rotates_is_appended_to(clean_logging, pool, tmp_path):
    root = clean_logging()
    handler = logging.handlers.RotatingFileHandler(tmp_path / "run.log", maxBytes=10, backupCount=3)
    root.addHandler(handler)
    pool.run(lambda comms: [logging.warning("a longer line") for _ in range(3)], 1)
    assert (tmp_path / "run.log").read_text() == "a longer line\n" * 3
