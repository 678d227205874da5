"""`microparallel train` between hosts."""

import json

import pytest

from microparallel.train.checkpoint import latest

MODEL = """
import torch
def make_model():
    return torch.nn.Linear(64, 10)
"""
QUIET = ("--quiet", "--steps", "4", "--batch", "32")


def run_on_both(bed, flags, other_flags, folder="."):
    """The same command on two hosts, but for some flags; the exit codes, and what was printed on stderr."""
    shared = ["microparallel", "train", *QUIET, "--out", "run"]
    ranks = [
        host.run(*shared, *more, **bed.variables(node, 0, 1))
        for node, (host, more) in enumerate(zip(bed, (flags, other_flags), strict=True))
    ]
    return [rank.wait(40) for rank in ranks], [rank.errors for rank in ranks]


def test_settings_that_differ_are_named_on_every_host_before_the_first_step(hosts, tmp_path):
    codes, errors = run_on_both(hosts(2), ["--lr", "0.1"], ["--lr", "0.2", "--steps", "5"])
    assert codes == [2, 2]
    for said in errors:
        assert "error: the ranks do not agree about this run" in said
        assert "--lr 0.1 on rank 0 (alpha); --lr 0.2 on rank 1 (beta)" in said
        assert "--steps 4 on rank 0 (alpha); --steps 5 on rank 1 (beta)" in said
    assert not (tmp_path / "run").exists()


def test_code_that_differs_is_named(hosts, tmp_path):
    bed = hosts(2, own_files=True)
    for host, text in zip(bed, (MODEL, MODEL.replace("10)", "11)")), strict=True):
        host.do("sh", "-c", f"cat > {tmp_path}/mine.py <<'END'\n{text}\nEND")
    codes, errors = run_on_both(bed, *[["--model", "mine:make_model", "--data", "digits"]] * 2)
    assert codes == [2, 2]
    for said in errors:
        assert "mine with checksum " in said
        assert " on rank 0 (alpha); " in said


# ── what is learned ─────────────────────────────────────────────────────────────────────────────────────────────────

EXACT = ("--quiet", "--precision", "float64", "--transport", "gloo")
MIXED = "shm+gloo:0-1+2-3"  # what "auto" stands for on two hosts with two ranks each
LAYOUTS = {
    "dp": (),
    "pp": ("--dp", "2", "--pp", "2", "--schedule", "1f1b", "--microbatches", "4"),
    "sharded": ("--shard", "parameters"),
}


def ended(ranks, seconds=55):
    for rank in ranks:
        assert rank.wait(seconds) == 0, rank.errors


def weights(run):
    found, warnings = latest(run / "checkpoints")
    assert not warnings
    return {name: stored.whole() for name, stored in found.stored_model.items()}


def difference(one, other):
    """The largest difference of any weight of two runs."""
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_hosts_learn_what_one_process_learns(hosts, tmp_path, layout):
    """The same weights as one process (but for rounding), and to the bit those of four ranks on one host."""
    bed, steps = hosts(2), ("--steps", "8")
    command = ["microparallel", "train", *EXACT, *steps]
    ended(bed.ranks(*command, *LAYOUTS[layout], "--out", "two", on_each=2))
    ended([bed[0].run(*command, "--ranks", "1", "--out", "alone")])
    together = [bed[0].run(*command, *(LAYOUTS[layout] or ("--ranks", "4")), "--out", "together")]
    if layout == "sharded":
        together = [bed[0].run(*command, *LAYOUTS[layout], "--ranks", "4", "--out", "together")]
    ended(together)
    rounding, bits = (difference(tmp_path / "two", tmp_path / other) for other in ("alone", "together"))
    print(f"{layout}: {rounding:.1e} from one process, {bits:g} from four ranks on one host")
    assert rounding < 1e-12
    assert bits == 0


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_inside_of_hosts_learns_the_same(hosts, tmp_path, layout):
    """On one host, the same four ranks take the same programs if they are told to: their weights agree to the bit."""
    bed = hosts(2)
    command = ["microparallel", "train", "--quiet", "--precision", "float64", "--steps", "8"]
    ended(bed.ranks(*command, *LAYOUTS[layout], "--out", "two", on_each=2))
    ended([bed[0].run(*command, "--ranks", "1", "--out", "alone")])
    ranks = LAYOUTS[layout] if layout == "pp" else (*LAYOUTS[layout], "--ranks", "4")
    ended([bed[0].run(*command, *ranks, "--transport", MIXED, "--out", "together")])
    assert difference(tmp_path / "two", tmp_path / "alone") < 1e-12
    assert difference(tmp_path / "two", tmp_path / "together") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2), (2, 3)])
def test_a_run_goes_on_with_another_number_of_hosts(hosts, tmp_path, first, then):
    """Four shares of every batch, on as many hosts as there are: the losses of a run that was never stopped."""
    command = ["microparallel", "train", *EXACT, "--shares", "4", "--schedule-lr", "constant"]
    ended(hosts(first).ranks(*command, "--steps", "4", "--out", "run"))
    ended(hosts(then).ranks("microparallel", "train", "--quiet", "--resume", "run", "--steps", "8"))
    ended([hosts(1)[0].run(*command, "--ranks", "1", "--steps", "8", "--out", "alone")])
    assert difference(tmp_path / "run", tmp_path / "alone") < 1e-12


def test_a_host_that_does_not_see_the_checkpoints_is_named(hosts, tmp_path):
    """Where each host has a disk of its own, neither a new run begins in silence nor is told to."""
    bed = hosts(2, own_files=True)
    command = ["microparallel", "train", *QUIET, "--shares", "2", "--out", "run", "--resume", "auto"]
    ended([bed[0].run(*command)])
    for rank in bed.ranks(*command[:-4], "--steps", "8", *command[-4:]):
        assert rank.wait(40) == 1
        assert f"error: rank 1 on beta cannot find {tmp_path}/run/checkpoints/step-00000004, which rank 0 sees" in (
            rank.errors.replace(" run/", f" {tmp_path}/run/")
        )
        assert "keep the run (--out) on a disk that all of them see" in rank.errors


@pytest.mark.slow
def test_the_commands_of_the_readme(hosts, tmp_path):
    """torchrun on each host, with the first host's name, which stands for 127.0.1.1 there."""
    agents = hosts(2).torchrun("microparallel", "train", "--steps", "4", "--out", "runs/big", on_each=2)
    ended(agents)
    assert "kept in runs/big" in agents[0].output
    assert json.loads((tmp_path / "runs" / "big" / "summary.json").read_text())["ranks"] == 4


# ── the other commands of the README and the docs, between hosts ────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("flags", [(), ("--pipelines",), ("--shard", "parameters")])
def test_compare_between_hosts(hosts, flags):
    """Every strategy on 2 × 2 ranks ends where one process does; rank 0 alone says so."""
    agents = hosts(2).torchrun("microparallel", "compare", "--steps", "4", "--json", *flags, on_each=2)
    ended(agents, 150)
    rows = json.loads(agents[0].output)
    assert len(rows) >= 5 and [row["ranks"] for row in rows] == [1] + [4] * (len(rows) - 1)
    assert all(row["agrees"] for row in rows)
    assert agents[1].output == ""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_selftest_between_hosts(hosts):
    agents = hosts(2).torchrun("microparallel", "doctor", "--selftest", "--json", on_each=2)
    ended(agents, 150)
    findings = json.loads(agents[0].output)["selftest"]
    assert len(findings) == 7 and all(finding["passed"] for finding in findings)
    assert all(finding["setting"]["ranks"] == 4 for finding in findings)
    assert agents[1].output == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("allreduce", "--sizes", "64KiB"),
        ("dp", "--models", "mlp-64"),
        ("shard", "--models", "mlp-64"),
        ("pp", "--schedules", "1f1b", "--depth", "8", "--width", "64"),
        ("compress", "--models", "mlp-64", "--methods", "bf16", "--links", "transport", "--train-steps", "2"),
        ("predict", "--methods", "ddp,1f1b", "--depth", "8", "--width", "64"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.timeout(180)
def test_benchmarks_between_hosts(hosts, words):
    """They run to the end: what they compute is right on every rank."""
    agents = hosts(2).torchrun("microparallel", "bench", *words, "--seconds", "1", "--json", "--quiet", on_each=2)
    ended(agents, 150)
    assert json.loads(agents[0].output)["ranks"] == 4
    assert agents[1].output == ""
