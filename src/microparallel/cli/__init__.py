"""The command line: one file per verb.

A verb's module is imported when the verb is called, and torch inside those that need it, so that `--help` and a
mistyped flag are answered at once.
"""

from microparallel.cli.app import main

__all__ = ["main"]
