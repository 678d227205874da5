"""`microparallel draw`: what it prints, what it writes, and how it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import microparallel as mp
from microparallel.cli import main
from microparallel.cli.programs import costs_of, load
from microparallel.trace import Sizes

SCHEDULE = """
program mine
goal: training step of 2 stages, 2 micro-batches
rank 0: F0.0 F0.1 B0.0 B0.1
rank 1: F1.0 B1.0 F1.1 B1.1
"""


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def draw(tmp_path, monkeypatch, capfd):
    """Call the verb in this process, in an empty folder; returns its exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["microparallel", "draw", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capfd.readouterr()

    return call


def test_a_schedule_is_what_the_library_draws(draw):
    code, output, errors = draw("1f1b", "--ranks", 3, "--microbatches", 4)
    assert (code, errors) == (0, "")
    assert output == mp.draw(mp.schedules.build("1f1b", 3, 4))


def test_defaults_are_4_ranks_and_8_microbatches(draw):
    assert draw("gpipe")[1] == mp.draw(mp.schedules.build("gpipe", 4, 8))
    assert draw("ring")[1] == mp.draw(mp.collectives.build("ring", 4))


def test_views(draw):
    program = mp.schedules.build("zb-h1", 2, 3)
    arguments = ("zb-h1", "--ranks", 2, "--microbatches", 3)
    assert draw(*arguments, "--view", "clock")[1] == mp.draw(program, view="clock")
    assert draw(*arguments, "--width", 44)[1] == mp.draw(program, width=44)
    assert draw("ring", "--view", "timeline")[1] == mp.draw(mp.collectives.build("ring", 4), view="timeline")


def test_a_collective_with_costs_is_drawn_in_time(draw):
    code, output, _ = draw("ring", "--ranks", 3, "--link", "2-0=5")
    assert code == 0
    slow = mp.Costs(latency=1, links={(2, 0): mp.Link(5)})
    assert output == mp.draw(mp.collectives.build("ring", 3), view="timeline", costs=slow)
    assert "send 1 to 5" in output


def test_costs(draw):
    _, output, _ = draw("1f1b", "--ranks", 2, "--microbatches", 2, "--forward", "1,3", "--backward-weight", 2)
    costs = mp.Costs(forward=[1, 3], backward_weight=2)
    assert output == mp.draw(mp.schedules.build("1f1b", 2, 2), costs=costs)
    assert "forward 1 to 3" in output


def test_naive_is_two_programs_and_it_says_which(draw):
    _, output, errors = draw("naive")
    assert output.startswith("naive · all-reduce") and "pipeline:naive" in errors
    _, output, errors = draw("naive", "--microbatches", 2)
    assert "2 micro-batches" in output and "all-reduce:naive" in errors
    _, output, errors = draw("pipeline:naive")
    assert "8 micro-batches" in output and errors == ""
    _, output, errors = draw("all-reduce:naive")
    assert output.startswith("naive · all-reduce") and errors == ""


def test_files_are_written_and_named(draw, tmp_path):
    code, output, _ = draw("1f1b", "--html", "a.html", "--svg", "a.svg", "--chrome", "a.json", "--text", "a.txt")
    assert code == 0
    head, *written = output.splitlines()
    assert head.startswith("1f1b · 4 ranks") and written == [f"wrote a.{end}" for end in ("html", "svg", "json", "txt")]
    program = mp.schedules.build("1f1b", 4, 8)
    assert (tmp_path / "a.html").read_text() == mp.draw(program, as_="html")
    assert (tmp_path / "a.txt").read_text() == mp.draw(program)
    assert ElementTree.parse(tmp_path / "a.svg").getroot().get("role") == "img"
    assert json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    assert names_in(tmp_path) == ["a.html", "a.json", "a.svg", "a.txt"]


def test_a_file_of_compute_only_is_given_its_sends_and_that_is_said(draw, tmp_path):
    (tmp_path / "mine.txt").write_text(SCHEDULE)
    code, output, errors = draw("mine.txt")
    assert code == 0 and "mine · 2 ranks · 2 micro-batches · makespan 9" in output
    assert errors == "note: mine.txt says what to compute and sends nothing: sends, receives and frees were added\n"
    lowered = mp.program.to_text(mp.schedules.build("1f1b", 2, 2)).replace("1f1b", "mine")
    (tmp_path / "lowered.txt").write_text(lowered)
    assert draw("./lowered.txt") == (0, output, "")


def test_memory(draw, tmp_path):
    arguments = ("--ranks", 2, "--microbatches", 2, "--memory", "--parameter-bytes", "1,2", "--activation-bytes", 3)
    sizes = Sizes(parameters=[1, 2], activations=3)
    traces = [mp.simulate(mp.schedules.build(name, 2, 2), mp.Costs(sizes=sizes)) for name in ("gpipe", "1f1b")]
    assert draw("gpipe", "1f1b", *arguments)[1] == mp.draw(traces, memory=True)
    assert draw("gpipe", *arguments)[1] == mp.draw(traces[0], memory=True)
    code, output, _ = draw("gpipe", "1f1b", *arguments, "--svg", "a.svg", "--html", "a.html", "--json")
    assert code == 0 and (tmp_path / "a.svg").read_text() == mp.draw(traces, as_="svg", memory=True)
    assert (tmp_path / "a.html").read_text() == mp.draw(traces, as_="html", memory=True)
    assert [document["peak_memory"] for document in json.loads(output)] == [trace.peak_memory for trace in traces]
    assert json.loads(output)[0]["peak_memory_by_kind"]["parameters"] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["1f1b", "--parameter-bytes", "4"],
            "--parameter-bytes 4: this is about memory, which is not drawn; add --memory",
        ),
        (["1f1b", "--memory", "--gradient-bytes", "1,x"], "--gradient-bytes 1,x: it is a number"),
        (["1f1b", "--memory", "--optimizer-bytes", "-1"], "--optimizer-bytes -1.0: it must be 0 or more, and finite"),
        (["1f1b", "--memory", "--activation-bytes", "1,2"], "activations has 2 numbers, and the program has 4 stages"),
        (["ring", "--memory"], "--memory: ring (all-reduce of 4 slices) is no training step"),
        (["1f1b", "--memory", "--view", "clock"], "--view clock has no time axis"),
        (["ring", "1f1b"], "ring is a collective, which is drawn alone"),
        (["gpipe", "1f1b", "--chrome", "a.json"], "one file holds one program's trace, and 2 were named"),
    ],
)
def test_what_cannot_be_drawn_together_or_with_memory(draw, arguments, words):
    code, output, errors = draw(*arguments)
    assert code == 2 and output == "" and words in errors and errors.count("\n") == 1


def test_json(draw):
    code, output, _ = draw("1f1b", "--json")
    document = json.loads(output)
    assert code == 0 and document["makespan"] == 33 and document["peak_activations"] == [4, 3, 2, 1]
    first = next(event for event in document["events"] if event["op"] == "F1.0")
    assert (first["start"], first["end"], first["lane"]) == (1, 2, "compute")
    assert first["waited"] == "rank 1 waited for A0.0 from rank 0 before F1.0"
    document = json.loads(draw("ring", "--ranks", "3", "--json", "--svg", "r.svg")[1])
    assert document["written"] == ["r.svg"]
    assert {"from": 0, "to": 1, "op": "<+C0@0"} in document["hops"][0]


def test_colour_where_the_terminal_has_it_and_wants_it(draw):
    plain = draw("ring")[1]
    assert "\x1b" not in plain
    coloured = draw("ring", "--width", 200, FORCE_COLOR="1", COLORTERM="truecolor", TERM="xterm-256color")[1]
    assert "\x1b[38;2;0;0;0;48;2;240;212;66m<+C3@3\x1b[0m" in coloured
    unwanted = draw("ring", "--width", 200, FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color")[1]
    assert unwanted == plain


def test_a_terminal_s_width_is_kept(draw):
    output = draw("interleaved", FORCE_COLOR="1", NO_COLOR="1", COLUMNS="70", TERM="xterm")[1]
    assert max(map(len, output.splitlines())) <= 70


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rng"], ["'rng'", "did you mean 'ring'"]),
        (["nothing-like-it"], ["nothing-like-it", "ring", "1f1b", "file"]),
        (["pipeline:ring"], ["pipeline:ring"]),
        (["1f1b", "--ranks", "0"], ["ranks=0", "at least 1"]),
        (["ring", "--ranks", "5000"], ["--ranks 5000", "at most 1024"]),
        (["1f1b", "--microbatches", "-1"], ["microbatches=-1", "at least 1"]),
        (["gather-add", "--ranks", "300"], ["operations", "200,000"]),
        (["ring", "--microbatches", "4"], ["--microbatches 4", "ring"]),
        (["1f1b", "--stages-per-rank", "2"], ["1f1b", "stages_per_rank"]),
        (["ring", "--ranks-per-node", "2"], ["ring", "ranks_per_node"]),
        (["zero-2", "--prefetch", "2"], ["prefetch", "level 3"]),
        (["zero-3", "--prefetch", "-1"], ["prefetch=-1", "0 or more"]),
        (["ddp", "--microbatches", "4"], ["microbatches=4", "ddp"]),
        (["1f1b", "--forward", "fast"], ["--forward fast", "1,2,1,1"]),
        (["1f1b", "--forward", "-1"], ["--forward -1", "0 or more"]),
        (["1f1b", "--forward", "1,2"], ["forward", "2 numbers", "4 stages"]),
        (["1f1b", "--latency", "nan"], ["--latency nan"]),
        (["1f1b", "--bytes", "inf"], ["--bytes inf"]),
        (["ring", "--link", "2>3"], ["--link 2>3", "2-3=5"]),
        (["ring", "--link", "2-9=1"], ["--link 2-9=1", "0 to 3"]),
        (["ring", "--link", "2-3=inf"], ["--link 2-3=inf"]),
        (["ring", "--view", "clock"], ["ring", "no clock view"]),
        (["1f1b", "--view", "hops"], ["1f1b", "no hops"]),
        (["1f1b", "--view", "sideways"], ["--view sideways", "timeline, clock, hops"]),
        (["1f1b", "--view", "clock", "--forward", "2"], ["--view clock", "leave out the costs"]),
        (["1f1b", "--view", "clock", "--svg", "a.svg"], ["--view clock", "--text"]),
        (["1f1b", "--width", "99", "--json"], ["--width 99"]),
        (["1f1b", "--width", "3"], ["3", "--width"]),
        (["1f1b", "--html", "absent/a.html"], ["--html absent/a.html", "no folder absent"]),
        (["1f1b", "--svg", "."], ["--svg .", "folder"]),
        (["1f1b", "--svg", "same", "--text", "./same"], ["--svg and --text", "same file"]),
        (["tree", "--ranks", "65", "--html", "a.html", "--svg", "a.svg"], ["65 ranks", "64"]),
        (["bad.txt"], ["bad.txt", "line 3", "'X0.0'"]),
        (["binary.bin"], ["binary.bin", "not UTF-8"]),
        (["good.txt", "--ranks", "2"], ["--ranks 2", "good.txt"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_calls(draw, tmp_path, arguments, words):
    (tmp_path / "bad.txt").write_text("program p\ngoal: training step of 1 stage, 1 micro-batch\nrank 0: X0.0\n")
    (tmp_path / "binary.bin").write_bytes(bytes(range(128, 256)))
    (tmp_path / "good.txt").write_text(SCHEDULE)
    (tmp_path / "stuck.txt").write_text("program stuck\ngoal: all-reduce of 1 slice\nrank 0: <C0@1\nrank 1:\n")
    before = names_in(tmp_path)
    code, output, errors = draw(*arguments)
    assert code == 2 and output == ""
    assert len(errors.splitlines()) == 1, errors
    for word in words:
        assert word in errors
    assert names_in(tmp_path) == before  # nothing was written, not even a part


def test_a_file_that_cannot_be_written_leaves_the_old_one(draw, tmp_path, monkeypatch):
    (tmp_path / "a.svg").write_text("old")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, _, errors = draw("1f1b", "--svg", "a.svg")
    assert code == 2 and "a.svg cannot be written: No space left on device" in errors
    assert (tmp_path / "a.svg").read_text() == "old" and names_in(tmp_path) == ["a.svg"]


def test_it_needs_no_torch_and_has_examples():
    program = (
        "import sys\n"
        "from microparallel.cli import main\n"
        "for arguments in (['draw', '--help'], ['draw', 'ring']):\n"
        "    sys.argv = ['microparallel', *arguments]\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
        "print('torch imported:', 'torch' in sys.modules or 'numpy' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert "torch imported: False" in result.stdout
    assert "Examples" in result.stdout and "--ranks-per-node" in result.stdout


def test_costs_default_to_what_the_program_is_about():
    assert costs_of(load("ring")).latency == 1
    assert costs_of(load("ring"), {"seconds_per_byte": 2}).latency == 1
    assert costs_of(load("1f1b")) == mp.Costs()
    assert costs_of(load("ddp")).seconds_per_byte == 1
    assert costs_of(load("1f1b"), {"forward": "1,2,3,4"}).forward == [1, 2, 3, 4]


def test_a_deadlock_is_shown_instead_of_a_drawing(draw, tmp_path):
    (tmp_path / "stuck.txt").write_text(
        "program stuck\ngoal: all-reduce of 1 slice\nrank 0: <C0@1 >C0@1\nrank 1: <C0@0 >C0@0\n"
    )
    code, output, errors = draw("stuck.txt")
    assert (code, output) == (1, "")
    assert "stuck.txt cannot be drawn: deadlock under buffered sends: rank 0 waits for C0 from rank 1" in errors


def test_an_operation_that_can_never_begin_is_shown_instead_of_a_drawing(draw, tmp_path):
    (tmp_path / "unmade.txt").write_text("program p\ngoal: training step of 2 stages, 1 micro-batch\nrank 0: F1.0\n")
    code, output, errors = draw("unmade.txt")
    assert (code, output) == (1, "")
    assert "unmade.txt cannot be drawn: rank 0 does F1.0, which needs A0.0, and no rank makes that" in errors


def test_what_is_wrong_is_drawn_and_said(draw, tmp_path):
    (tmp_path / "half.txt").write_text(
        "program half\ngoal: training step of 1 stage, 2 micro-batches\nrank 0: F0.0 F0.1 B0.0\n"
    )
    code, output, errors = draw("half.txt")
    assert code == 1
    assert "F1" in output and "half.txt is wrong: B0.1 never" in errors


def test_a_link_is_followed_and_a_pipe_is_refused(draw, tmp_path):
    (tmp_path / "real.svg").write_text("old")
    (tmp_path / "link.svg").symlink_to("real.svg")
    os.mkfifo(tmp_path / "pipe.svg")
    assert draw("ring", "--svg", "link.svg")[0] == 0
    assert (tmp_path / "link.svg").is_symlink() and "<svg" in (tmp_path / "real.svg").read_text()
    code, _, errors = draw("ring", "--svg", "pipe.svg")
    assert code == 2 and "pipe.svg: this is not an ordinary file" in errors
