"""Run every command and every Python block of Markdown pages, and compare what they print with what the page says.

python docs/tools/blocks.py docs/data_parallel/06_all_reduce.md     what differs?
python docs/tools/blocks.py --write docs/pipeline/*.md              put the real outputs into the pages
python docs/tools/blocks.py --fresh README.md                       in new interpreters, as a reader would
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import pages
from commands import Done, Folder
from comparing import difference, lines_of, rewritten
from pages import Block

EXECUTED = (*pages.CONSOLES, "bash", "python")


@dataclass(frozen=True)
class Instead:
    """What is run in place of a command that cannot run here, and why it cannot."""

    why: str
    command: str | None = None
    code: int = 0


@dataclass(frozen=True)
class Step:
    """One thing to run, the output the page promises (None: it promises none), and how it must end."""

    block: Block
    command: str
    expected: tuple[str, ...] | None = None
    fails: bool = False
    answer: Block | None = None  # where the output stands, if that is a block of its own
    file: str | None = None  # a Python block's, written first
    runs: bool = True


@dataclass(frozen=True)
class Result:
    """What came of a step; `trouble` is empty when it did what the page says."""

    step: Step
    done: Done | None
    trouble: str
    ended_right: bool = True


def steps_of(page: Path) -> list[Step]:
    """Everything a page executes, in order."""
    blocks = pages.blocks_of(page)
    steps: list[Step] = []
    for number, block in enumerate(blocks):
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        if block.kind in pages.CONSOLES:
            fails = block.kind == "fails"
            steps += [Step(block, call.command, tuple(call.output), fails) for call in pages.calls_of(block)]
        elif block.kind == "bash":
            steps += [Step(block, command) for command in pages.commands_of(block)]
        elif block.kind == "python":
            steps.append(_python_step(block, following))
    return steps


def _python_step(block: Block, following: Block | None) -> Step:
    """A script of its own, which runs.

    A first line such as `# my_module.py` names its file, for later commands to find. With title="my_script.py" it is
    a file that is only written: a command further down runs it.
    """
    named = re.match(r"# *([\w/]+\.py)\s*$", block.lines[0]) if block.lines else None
    title = re.search(r'title="([\w/]+\.py)"', " ".join(block.options))
    name = title[1] if title else named[1] if named else f"block_{block.line}.py"
    answer = following if following is not None and following.kind == "output" else None
    expected = answer.lines if answer is not None else None
    return Step(block, f"python {name}", expected, answer=answer, file=name, runs=title is None)


def run_page(
    page: Path, *, fork_server: Any = None, instead: Mapping[str, Instead] | None = None, patience: float = 120.0
) -> Iterator[Result]:
    """Run what a page executes, one step after another, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="blocks-", ignore_cleanup_errors=True) as folder:
        place = Folder(Path(folder), fork_server=fork_server)
        steps = steps_of(page)
        for step in steps:  # first all files, since a command may stand above the file that it needs
            if step.file is not None:
                (place.folder / step.file).write_text(step.block.text + "\n", encoding="utf-8")
        for step in steps:
            yield _run(step, place, instead or {}, patience)


def _run(step: Step, place: Folder, instead: Mapping[str, Instead], patience: float) -> Result:
    other = instead.get(re.sub(r"\s+#.*$", "", step.command))  # without its comment
    if other is not None and other.command is None:
        return Result(step, None, "")
    if not step.runs:
        return Result(step, None, "")
    command = step.command if other is None else str(other.command)
    try:
        done = place.run(command, patience)
    except TimeoutError as late:
        return Result(step, None, f"{command}: {late}", ended_right=False)
    if other is not None:
        right, wanted = done.code == other.code, f"must exit with {other.code}"
    else:
        right, wanted = (done.code != 0) == step.fails, "must fail" if step.fails else "must exit with 0"
    if not right:
        return Result(step, done, f"{command}: {wanted}, and exits with {done.code}\n{done.output}", ended_right=False)
    return Result(step, done, "" if other is not None else _trouble(step, done, command))


def _trouble(step: Step, done: Done, command: str) -> str:
    if step.expected is None:
        return ""
    block = step.answer or step.block
    differs = difference(step.expected, done.output.splitlines(), measured=block.measured)
    return f"{command}: prints something else\n{differs}" if differs else ""


def write(page: Path, results: Sequence[Result]) -> int:
    """Put real outputs where the page differs from them; how many were changed.

    What did not end as the page says stays as it is: that is for a person to look at.
    """
    lines = page.read_text(encoding="utf-8").splitlines()
    wrong = [result for result in results if result.trouble and result.ended_right]
    changed = {(result.step.answer or result.step.block).line for result in wrong}
    for line in sorted(changed, reverse=True):
        of_block = [result for result in results if (result.step.answer or result.step.block).line == line]
        block = of_block[0].step.answer or of_block[0].step.block
        new = [block.indent + text if text else "" for text in _new_lines(of_block)]
        lines[block.line : block.end - 1] = new
    if changed:
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(changed)


def _new_lines(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        if result.step.answer is None:
            yield from f"$ {result.step.command}".split("\n")
        expected = result.step.expected or ()
        if result.done is None or not result.trouble or not result.ended_right:
            yield from lines_of("\n".join(expected))
        else:
            yield from rewritten(lines_of("\n".join(expected)), result.done.output.splitlines())
        if result is not results[-1]:
            yield ""


def _report(results: Iterator[Result]) -> list[Result]:
    """Say what happens while it happens."""
    kept = []
    for result in results:
        kept.append(result)
        seconds = f"{result.done.seconds:5.1f} s" if result.done else "   not run"
        mark, first = "✗" if result.trouble else "✓", result.step.command.splitlines()[0]
        print(f"{mark} {seconds}  {result.step.block.place}  {first}", flush=True)
        if result.trouble:
            print(re.sub("^", "    ", result.trouble, flags=re.MULTILINE))
    return kept


def main() -> None:
    """Run pages; exit with 1 when one of them does not say what happens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--write", action="store_true", help="put the real outputs into the pages")
    parser.add_argument("--fresh", action="store_true", help="everything in new interpreters")
    wanted = parser.parse_args()
    failed = False
    with open_fork_server(fresh=wanted.fresh) as fork_server:
        for page in wanted.pages:
            results = _report(run_page(page, fork_server=fork_server))
            if wanted.write:
                print(f"{page}: {write(page, results)} blocks rewritten")
            failed |= any(result.trouble and not (wanted.write and result.ended_right) for result in results)
    sys.exit(failed)


def open_fork_server(*, fresh: bool) -> Any:
    """What forks commands here; nothing, where that cannot be or should not be."""
    from contextlib import nullcontext

    from microparallel.world.fork_server import NEEDED, ForkServer, can_fork

    return nullcontext() if fresh or not can_fork() else ForkServer(["microparallel.train.loop", *NEEDED])


if __name__ == "__main__":
    main()
