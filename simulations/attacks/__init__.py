"""Attacks on transcripts of honest runs: what a coordinator could make of what it receives."""
