"""`microparallel train` between hosts."""

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
