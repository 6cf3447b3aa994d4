"""Notebooks in the percent format: Jupyter opens them through jupytext, Python runs them as they
are."""
