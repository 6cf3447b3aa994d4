"""Notebooks in the percent format, for Jupyter with jupytext; Python runs them as scripts."""
