"""Every command and every block of Python in the course and in the README does what the page says."""

import re
from pathlib import Path

import blocks
import comparing
import pages
import pytest
import torch
from blocks import Instead

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
# Pages that list commands without their output: some of these take long, or cannot run here.
GUIDES = [
    ROOT / "README.md",
    *(REFERENCE / f"{name}.md" for name in ("train", "your_program", "machines", "measured", "where_compression_pays")),
    REFERENCE / "leaving_one_machine.md",
]
ELSEWHERE = [REFERENCE / "frameworks.md"]  # run by test_frameworks.py, with the frameworks imported once
WITH_STEPS = {path for path in (ROOT / "docs").rglob("*.md") if blocks.steps_of(path)}
PAGES = sorted(WITH_STEPS.difference(GUIDES, ELSEWHERE))
MORE_TIME = 240  # seconds for a page: a fresh interpreter for each command and rank takes its time

# What of the guides cannot run here, why, and the nearest thing that can.
TORCHRUN = (
    "torchrun --nnodes=2 --node-rank={} --nproc-per-node=4 --master-addr=HOST1 -m microparallel train --out runs/big"
)
ELASTIC = (
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:3 --nproc-per-node=2 --max-restarts=100 "
    "--rdzv-backend=c10d --rdzv-endpoint=alpha:29400 -m microparallel train --shares 6 --timeout 60 --out runs/big"
)
ONE_HOST = "torchrun --nnodes=1 --nproc-per-node=2 -m microparallel train --out runs/big --steps 2"
CANNOT = {
    "make train": Instead("make would install again", "microparallel train --ranks 4 --steps 5"),
    "make test": Instead("it is what runs now"),
    "make docs": Instead("make would install again; test_site.py builds the site"),
    "microparallel verify 1f1b --sends blocking": Instead(
        "it must fail: there is a deadlock", "microparallel verify 1f1b --sends blocking", 1
    ),
    "python examples/pipeline_deadlock.py": Instead(
        "it must fail: it hangs, and says why", "python examples/pipeline_deadlock.py --limit 1", 1
    ),
    "microparallel studio": Instead("it serves until it is interrupted; tests/cli/test_studio.py runs it"),
    "microparallel why": Instead("it looks at every world of this machine, and exits with 1 if all is well"),
    "microparallel train --model gpt --data notes/ --steps 500": Instead(
        "a folder of the reader's own", "microparallel train --model gpt --data examples --steps 2"
    ),
    "microparallel train --resume runs/20260131-093000-mlp": Instead(
        "a run of the reader's own", "microparallel train --resume runs/mine --steps 10"
    ),
    TORCHRUN.format(0): Instead("two hosts", ONE_HOST),
    TORCHRUN.format(1): Instead("two hosts"),
    "microparallel doctor --between HOST1,HOST2,HOST3": Instead("three hosts; tests/hosts runs it"),
    ELASTIC: Instead("tests/hosts/test_elastic.py runs it between hosts"),
    "srun --ntasks=4 microparallel train --steps 200": Instead("tests/slurm runs it"),
    "sbatch examples/slurm.sh --steps 100000": Instead("tests/slurm runs it"),
}
LONG = "too long for every run of the tests; `make test-full` runs it as it stands"
TOO_LONG = {
    TORCHRUN.format(0): Instead("two hosts; a lesson starts torchrun on one"),
    "microparallel bench allreduce --ranks 2": Instead(
        LONG, "microparallel bench allreduce --sizes 4KB,1MB --repeats 3"
    ),
    "microparallel bench dp": Instead("tests/cli/test_bench.py runs it"),
    "microparallel bench shard": Instead("tests/cli/test_bench.py runs it"),
    "microparallel bench compress --quick": Instead("tests/cli/test_bench.py runs it"),
    "microparallel bench compress": Instead("the same command in short stands above it"),
    "microparallel bench pp": Instead("tests/cli/test_bench.py runs it"),
    "microparallel compare --in-process --ranks 3": Instead(
        LONG, "microparallel compare --in-process --ranks 3 --steps 3"
    ),
    "microparallel compare --shortcuts --every 8": Instead("a lesson runs it"),
    "microparallel compare --compress topk:0.01": Instead("a lesson runs it"),
    "microparallel train --ranks 2 --shard parameters --clip 1": Instead(
        LONG, "microparallel train --ranks 2 --shard parameters --clip 1 --steps 3"
    ),
    "microparallel chaos --faults 1 --kinds kill-rank -- train --ranks 2 --steps 100": Instead(
        "tests/train/test_chaos.py runs it"
    ),
    "microparallel train --ranks 2 --compress topk:0.01": Instead(
        LONG, "microparallel train --ranks 2 --compress topk:0.01 --steps 3"
    ),
    "microparallel compare --pipelines --ranks 4": Instead("tests/cli/test_compare.py runs it"),
    "microparallel compare --shard parameters --ranks 4": Instead("tests/cli/test_compare.py runs it"),
    "microparallel compare --ranks 4": Instead("a lesson runs it"),
    "microparallel doctor --selftest": Instead(LONG, "microparallel doctor"),
    "microparallel analyze --ranks 2": Instead("tests/cli/test_analyze.py runs it"),
    "python examples/monolith.py": Instead("a lesson runs it"),
    "python examples/manual_data_parallel.py": Instead("a lesson runs it"),
    "python examples/hooks_demo.py": Instead("a lesson runs it"),
    "python examples/ping_pong.py": Instead("a lesson runs it"),
    "python examples/manual_pipeline.py": Instead("a lesson runs it"),
    "python examples/train_pipeline.py": Instead("a lesson runs it"),
    "python examples/pipeline_utilisation.py": Instead("tests/examples runs it"),
    "python examples/pipeline_deadlock.py": Instead("tests/examples runs it"),
    "microparallel train --ranks 2 --shard gradients --clip 1": Instead(
        LONG, "microparallel train --ranks 2 --shard gradients --clip 1 --steps 3"
    ),
    "microparallel train --ranks 2 --precision bf16": Instead(
        LONG, "microparallel train --ranks 2 --precision bf16 --steps 3"
    ),
    "microparallel train --ranks 2 --precision fp16 --shard gradients": Instead(
        LONG, "microparallel train --ranks 2 --precision fp16 --shard gradients --steps 3"
    ),
    "microparallel train --dp 2 --pp 2 --schedule 1f1b --microbatches 8": Instead(
        LONG, "microparallel train --dp 2 --pp 2 --schedule 1f1b --microbatches 8 --steps 3"
    ),
    "microparallel train --ranks 4 --trace --out runs/mine": Instead(
        LONG, "microparallel train --ranks 4 --trace --out runs/mine --steps 8"
    ),
    "microparallel train --ranks 2 --slow-rank 1=3x --trace": Instead(
        LONG, "microparallel train --ranks 2 --slow-rank 1=3x --trace --steps 5"
    ),
}

CHAOS = "microparallel chaos --faults 2 --kinds kill-rank,kill-launcher --seed 29 -- train --ranks 2 --steps 150"
DP = "microparallel bench dp --models mlp-128 --methods naive,hooks,buckets,ddp --buckets 0.1,1"
ALGORITHMS = "microparallel bench allreduce --ranks 2 --algorithms ring,recursive-doubling --sizes 4KB,4MB"
TOO_LONG_IN_LESSONS = {
    f"{DP} --steps 20 --quiet": Instead(LONG, f"{DP} --steps 3 --quiet"),
    f"{ALGORITHMS} --seconds 2 --quiet": Instead(LONG, f"{ALGORITHMS} --seconds 0.2 --quiet"),
    "microparallel compare --shortcuts --optimizer adam --lr 0.001": Instead(
        LONG, "microparallel compare --shortcuts --optimizer adam --lr 0.001 --steps 8 --every 4"
    ),
    "microparallel compare --shortcuts": Instead(LONG, "microparallel compare --shortcuts --steps 8 --every 4"),
    "microparallel analyze --ranks 2 --quiet": Instead(
        LONG, "microparallel analyze --ranks 2 --quiet --steps 3 --scaling none"
    ),
    CHAOS: Instead("it trains twice, in processes of its own; `make test-full` runs it as it stands, a guide in short"),
    "microparallel compare --compress topk:0.01 --ranks 2 --steps 100 --seeds 1": Instead(
        LONG, "microparallel compare --compress topk:0.01 --ranks 2 --steps 4 --seeds 1"
    ),
    "microparallel train --ranks 2 --epochs 4 --metric mine:recall_of_seven --quiet": Instead(
        LONG, "microparallel train --ranks 2 --epochs 1 --metric mine:recall_of_seven --quiet"
    ),
}
NEEDS_A_GPU = {"python examples/one_gpu.py": Instead("ranks that share a GPU need one")}
LESSONS_ON_A_GPU = [page for page in PAGES if any(command in page.read_text() for command in NEEDS_A_GPU)]
IN_LESSONS = TOO_LONG_IN_LESSONS | ({} if torch.cuda.is_available() else NEEDS_A_GPU)
WITH_LONG_ONES = [page for page in PAGES if any(command in page.read_text() for command in TOO_LONG_IN_LESSONS)]


def troubles(page, forks, **options):
    return "\n\n".join(
        f"{result.step.block.place}: {result.trouble}"
        for result in blocks.run_page(page, fork_server=forks, **options)
        if result.trouble
    )


@pytest.mark.timeout(MORE_TIME)
@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs").with_suffix("")))
def test_the_page_says_what_happens(page, forks):
    found = troubles(page, forks, instead=IN_LESSONS)
    assert not found, f"{found}\n\nto write what it prints now: python docs/tools/blocks.py --write {page}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="commands of lessons that need a GPU; run these tests on one")
@pytest.mark.timeout(MORE_TIME)
@pytest.mark.parametrize("page", LESSONS_ON_A_GPU, ids=lambda path: path.stem)
def test_the_page_says_what_happens_on_a_gpu(page, forks):
    assert not troubles(page, forks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WITH_LONG_ONES, ids=lambda path: path.stem)
def test_the_page_says_what_happens_as_it_stands(page, forks):
    assert not troubles(page, forks, patience=600)


@pytest.mark.timeout(2 * MORE_TIME)
@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.stem.lower())
def test_the_guide_works(page, forks):
    assert not troubles(page, forks, instead=CANNOT | TOO_LONG)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.stem.lower())
def test_the_guide_works_as_it_stands(page, forks):
    assert not troubles(page, forks, instead=CANNOT, patience=600)


def test_what_is_replaced_is_in_a_guide():
    for group, replaced in ((GUIDES, CANNOT | TOO_LONG), (PAGES, TOO_LONG_IN_LESSONS | NEEDS_A_GPU)):
        commands = {re.sub(r"\s+#.*$", "", step.command) for page in group for step in blocks.steps_of(page)}
        assert set(replaced) <= commands


def test_files_that_are_only_shown_are_run_by_a_command():
    for page in PAGES:
        steps = blocks.steps_of(page)
        for step in steps:
            if not step.runs:
                assert any(other.runs and step.file in other.command for other in steps), f"{page}: {step.file}"


PAGE = """\
# A page

```run
$ echo one
one
$ echo two \\
  three
two three
```

!!! note
    ```python
    print(6 * 7)
    ```

    ```output
    43
    ```

```fails measured
$ echo took 5 ms; exit 3
took 800 µs
```

```bash
cd examples  # these lines need each other
ls ping_pong.py
```

```text
not run
```
"""


@pytest.fixture
def page(tmp_path):
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    return file


def test_a_page_is_run_in_order(page):
    steps = blocks.steps_of(page)
    assert [step.command for step in steps[:3]] == ["echo one", "echo two \\\n  three", "python block_12.py"]
    results = list(blocks.run_page(page))
    assert [bool(result.trouble) for result in results] == [False, False, True, False, False]
    assert "-43\n+42" in results[2].trouble


def test_real_outputs_are_written_where_they_differ(page):
    assert blocks.write(page, list(blocks.run_page(page))) == 1
    assert page.read_text() == PAGE.replace("43", "42")


def test_what_ends_otherwise_than_it_should_is_left_to_people(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```run\n$ ls nowhere\n```\n")
    (result,) = blocks.run_page(page)
    assert "must exit with 0, and exits with 2" in result.trouble
    assert blocks.write(page, [result]) == 0


def test_a_command_that_takes_too_long_is_ended(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\nsleep 50\n```\n")
    (result,) = blocks.run_page(page, patience=0.2)
    assert "had not ended after 0 seconds" in result.trouble


@pytest.mark.parametrize(
    ("told", "real"),
    [
        ("1.5 ms  0.3 GB/s", "800 µs    12 MB/s"),
        ("rank 0  ▓▓██··", "rank 0  ▓█░░░··▒"),
        ("┼──┼──┼\n0 1 2", "┼───┼\n0  10"),
        ("first\n…\nlast 3", "first\nsecond\nthird\nlast 4"),
        ("…\nmiddle\n…", "a\nmiddle\nb\nc"),
        ("loss 2.31e-05", "loss 0.1"),
        ("step 40/40  loss 1.2", "step 21/40  loss 1.4\nstep 40/40  loss 1.2"),  # as many as the clock allows
        ("off by 2", "off by 3\n! at 4 MB ring, tree were called 2×, so chance speaks loudly"),
    ],
)
def test_measured_outputs_match(told, real):
    assert comparing.difference(told.splitlines(), real.splitlines(), measured=True) == ""


@pytest.mark.parametrize(
    ("told", "real"),
    [
        ("float32[4]", "float64[4]"),
        ("rank 0 waits", "rank 0 computes"),
        ("first\n…\nlast", "first\nsecond"),
        ("one", "one\ntwo"),
        ("off by 2", "off by 3\n! ring and tree disagree"),
        ("rank 0  1 s", "rank 0  1 s\nrank 1  1 s"),
    ],
)
def test_measured_outputs_that_differ(told, real):
    assert comparing.difference(told.splitlines(), real.splitlines(), measured=True)


def test_exact_outputs_differ_by_one_digit():
    assert comparing.difference(["loss 0.31"], ["loss 0.32"], measured=False)
    assert not comparing.difference(["loss 0.31  ", ""], ["loss 0.31"], measured=False)


def test_written_outputs_are_cut_where_the_page_cut_them():
    real = [str(number) * 3 for number in range(9)] + ["end"]
    assert comparing.rewritten(["x", "…", "end"], real) == ["000", "…", "end"]
    assert comparing.rewritten([], real) == real


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("microparallel draw ring --ranks 4  # a ring", ["microparallel", "draw", "ring", "--ranks", "4"]),
        ("python a.py 'b c'", ["python", "a.py", "b c"]),
        ("python a.py | head", None),
        ("python a.py > out.txt", None),
        ("echo $HOME", None),
        ("a && b", None),
    ],
)
def test_commands_that_need_a_shell(command, words):
    assert pages.words_of(command) == words
