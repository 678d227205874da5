"""Write a picture as SVG, or as PNG where something here can turn SVG into it."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
from pathlib import Path

from microparallel.errors import MicroparallelError, UsageError

_SCALE = 2  # PNG pixels for each of the SVG's, so that text is sharp


def require_drawable(path: Path, flag: str) -> None:
    """Refuse a kind of picture that cannot be drawn, before the work that is to fill it has begun."""
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UsageError(f"{flag} {path}: a picture ends in .svg or .png; try {path.with_suffix('.svg')}")
    if kind == ".png" and not (_has_resvg() or shutil.which("rsvg-convert")):
        raise UsageError(
            f"{flag} {path}: PNG needs resvg-py (pip install 'microparallel[plot]') or the program rsvg-convert; "
            f"or try {path.with_suffix('.svg')}"
        )


def write_picture(svg: str, path: Path) -> None:
    """Write a picture in the format that the file's ending names."""
    data = svg.encode() if path.suffix.lower() == ".svg" else _to_png(svg)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise MicroparallelError(f"{path} could not be written: {error.strerror or error}") from error


def _has_resvg() -> bool:
    return importlib.util.find_spec("resvg_py") is not None


def _to_png(svg: str) -> bytes:
    if _has_resvg():
        return bytes(importlib.import_module("resvg_py").svg_to_bytes(svg_string=svg, zoom=_SCALE))
    done = subprocess.run(
        ["rsvg-convert", f"--zoom={_SCALE}", "--format=png"], input=svg.encode(), capture_output=True, check=False
    )
    if done.returncode != 0:
        raise MicroparallelError(f"rsvg-convert could not make a PNG: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
