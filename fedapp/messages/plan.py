"""The plan of a run: limits on what it may request, fixed by its opening.

Part of ``hello`` and ``vertical``. A site's people approve the plan; secrets of pairs, and so masks
and letters, depend on it; every later request is compared with it (``fedapp.site.plan``).

Reveals: each party learns these settings, and the names and fingerprints of all parties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fedapp.messages.fields import Range, SiteLimit
from fedapp.messages.parameters import MOST_DEPTH


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """Part of a message: what a run may request; 0 where the method has no such setting.

    Fields of later requests with the same name have the same value.
    """

    __slots__ = ()
    aggregation: Annotated[str, Range(0, 16)] = "plain"  # secure: only sums leave; sealed: letters
    threshold: Annotated[int, Range(0, 1000)] = 0  # parties of a sum, if some are lost; 0: all
    epsilon: Annotated[float, Range(0, 1e6)] = 0.0  # 0: no noise
    delta: Annotated[float, Range(0, 1)] = 0.0
    multiplier: Annotated[float, Range(0, 1e9)] = 0.0  # of the noise; see fedapp.crypto.noise
    levels: Annotated[int, Range(0, MOST_DEPTH)] = 0  # of a tree that noised sums split
    rounds: Annotated[int, Range(0, 10**6)] = 0  # of boosting or averaging
    trees: Annotated[int, Range(0, 10**5)] = 0  # of a forest, or that a party grows in a round
    max_depth: Annotated[int, Range(0, 1000)] = 0
    subsample: Annotated[float, Range(0, 1)] = 1.0
    goss: bool = False
    labels: Annotated[str, Range(0, 16)] = ""  # encoded or paillier, in a forest
    max_bin: Annotated[int, Range(0, 65535), SiteLimit("most-bins")] = 0
    parties: Annotated[tuple[str, ...], Range(0, 1000)] = ()  # names, in order
    fingerprints: Annotated[tuple[str, ...], Range(0, 1000)] = ()  # of their keys; "" if simulated
