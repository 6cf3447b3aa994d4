"""Requests and replies, one module a method. Each opens with **Reveals**: who learns what."""
