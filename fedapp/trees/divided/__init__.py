"""Divided models: each party holds the thresholds of its own columns."""
