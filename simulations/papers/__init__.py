"""The tables of the papers, computed again: one module a paper."""
