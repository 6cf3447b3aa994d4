"""Attacks on transcripts of honest runs, and whether what stops other attacks is tested."""
