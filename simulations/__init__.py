"""Engines, comparisons, the papers' tables, benchmarks."""
