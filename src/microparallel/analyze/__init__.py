"""Where a step's time goes, what bounds it, how it scales, and what it would take if something were different."""

from microparallel.analyze.analyzer import DDPPerformanceAnalyzer

__all__ = ["DDPPerformanceAnalyzer"]
