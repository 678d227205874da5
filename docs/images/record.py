"""Record the README's pictures: run commands in a terminal of their own, and draw what they showed.

python docs/images/record.py            all of them
python docs/images/record.py learn      some of them
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

import microparallel as mp
from microparallel.learn.catalogue import find_exercise
from microparallel.learn.holes import solved
from microparallel.learn.workspace import Workspace

COLUMNS = 96
PICTURES = {
    "compare": ["compare", "--ranks", "4"],
    "train": ["train", "--ranks", "4", "--out", "runs/digits"],
    "learn": ["learn", "check", "ring-all-reduce"],
}
REFUSED = {"learn"}  # commands that find something wrong


def screen_of(command: list[str], folder: Path) -> str:
    """What a command leaves on a terminal, colours included."""
    chunks: list[bytes] = []

    def read(descriptor: int) -> bytes:
        chunk = os.read(descriptor, 65536)
        chunks.append(chunk)
        return chunk

    os.environ.update(COLUMNS=str(COLUMNS), LINES="40", TERM="xterm-256color")
    os.chdir(folder)
    status = pty.spawn([sys.executable, "-m", "microparallel", *command], read)
    if (status != 0) != (command[0] in REFUSED):
        sys.exit(f"{command} ended with {status}")
    return last_state(b"".join(chunks).decode())


def last_state(output: str) -> str:
    """Drop what a live display overwrote: keep what was written after the last return to each line's start."""
    lines: list[str] = []
    for line in output.replace("\r\n", "\n").split("\n"):
        ups = len(re.findall(r"\x1b\[1A", line))
        del lines[len(lines) - ups :]
        kept = re.sub(r"\x1b\[\d*[AK]|\x1b\[\?25[lh]", "", line).rpartition("\r")[2]
        lines.append(kept)
    return "\n".join(line for line in lines if Text.from_ansi(line).plain.strip())


def put_a_wrong_answer(folder: Path) -> None:
    """A ring all-reduce as one might write it first: every rank waits until its own slice has been received."""
    workspace = Workspace(folder / "my_work")
    workspace.start()
    ring = find_exercise("ring-all-reduce")
    right = solved(ring.solution.read_text("utf-8"))
    wrong = right.replace("request = comms.isend(", "comms.send_tensor(").replace("        request.wait()\n", "")
    if wrong.count("send_tensor(") == right.count("send_tensor("):
        sys.exit("the solution has changed; change this too")
    workspace.path(ring).write_text(wrong, "utf-8")


def main() -> None:
    """Record the pictures that were asked for."""
    here = Path(__file__).resolve().parent
    wanted = sys.argv[1:] or ["1f1b", *PICTURES]
    if "1f1b" in wanted:
        (here / "1f1b.svg").write_text(mp.draw(mp.schedules.build("1f1b", 4, 8), as_="svg"))
    for name, command in PICTURES.items():
        if name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if command[0] == "learn":
                put_a_wrong_answer(Path(folder))
            screen = screen_of(command, Path(folder))
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(f"\x1b[1m$ microparallel {' '.join(command)}\x1b[0m\n{screen}"))
        picture = console.export_svg(title="microparallel")
        # Without the fonts that rich would load from the network: a picture should not call home.
        picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
        (here / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
