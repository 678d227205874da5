"""Record the README's pictures: run commands in a terminal of their own, and draw what they showed.

python docs/images/record.py
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

COLUMNS = 96
PICTURES = {
    "compare": ["compare", "--ranks", "4"],
    "train": ["train", "--ranks", "4", "--out", "runs/digits"],
}


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
    if status != 0:
        sys.exit(f"{command} failed")
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


def main() -> None:
    """Record all pictures."""
    here = Path(__file__).resolve().parent
    (here / "1f1b.svg").write_text(mp.draw(mp.schedules.build("1f1b", 4, 8), as_="svg"))
    for name, command in PICTURES.items():
        with tempfile.TemporaryDirectory() as folder:
            screen = screen_of(command, Path(folder))
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(f"\x1b[1m$ microparallel {' '.join(command)}\x1b[0m\n{screen}"))
        picture = console.export_svg(title="microparallel")
        # Without the fonts that rich would load from the network: a picture should not call home.
        picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)
        (here / f"{name}.svg").write_text(picture)


if __name__ == "__main__":
    main()
