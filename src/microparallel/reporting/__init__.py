"""The run report: one page, in one file, about what a run did."""

from microparallel.reporting.folder import Run, read_run
from microparallel.reporting.page import report_page

__all__ = ["Run", "read_run", "report_page"]
