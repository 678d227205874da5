"""Measure this machine, side by side with torch: one engine for all benchmarks, and what each of them measures."""
