"""The command line: one file per verb.

torch is imported inside the verbs that need it, so that `--help` and a mistyped flag are answered at once.
"""

from microparallel.cli.app import main

__all__ = ["main"]
