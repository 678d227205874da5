"""Measure this machine, side by side with torch: one engine for all benchmarks, and what each of them measures.

A benchmark is three short things; `data_parallel.py` and `data_parallel_report.py` are the example to follow:

    settings.py        a settings class: what can be chosen, for the command line and for what measures
    NAME.py            what takes turns, how a result is checked, `bench_NAME(comms, settings, progress) -> Measured`
    NAME_report.py     rows (their fields are the JSON), columns (table and legend), `report_on(measured) -> Report`

`cli/bench.py` hands these to `ranks.run_benchmark`; `engine.py` and `report.py` do the rest.
"""
