"""Names of parties."""

from __future__ import annotations

import re

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NAME_RULE = "letters, digits, '.', '_' or '-'"


def party_name(share: int, n_shares: int) -> str:
    """Name of a simulated party; names sort as their numbers do."""
    return f"party-{share + 1:0{len(str(n_shares))}d}"
