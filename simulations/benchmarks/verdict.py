"""What a benchmark recommends: the method with the best score, and the cheapest good one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedapp.report.summary import human_bytes
from simulations.papers.tables import Row, grouped, mean_of

POOLED, ALONE = "pooled", "alone"
GOOD = 0.005  # of AUC below the best; the seed changes a score by as much


@dataclass(frozen=True, slots=True)
class Verdict:
    """The recommendation for one scenario."""

    data: str
    name: str
    parties: int
    best: str
    score: float  # mean of the best method
    pooled: float
    alone: float
    good: tuple[str, ...]  # methods within 0.005 of the best, including the best
    fewest_exchanges: str  # the cheapest of these
    exchanges: float
    fewest_bytes: str
    n_bytes: float

    @property
    def text(self) -> str:
        """The verdict in one line."""
        return (
            f"{self.data}, {self.name}, {self.parties} parties: {self.best} {self.score:.4f} "
            f"(pooled {self.pooled:.4f}, alone {self.alone:.4f}); within {GOOD:g}: "
            f"{', '.join(self.good)}; of these fewest exchanges {self.fewest_exchanges} "
            f"({self.exchanges:g}), fewest bytes {self.fewest_bytes} ({human_bytes(self.n_bytes)})"
        )


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """One verdict for each scenario, in order of appearance.

    ``rows`` have data, name, parties, method and score; those of federated methods also exchanges
    and bytes. Seeds are averaged.
    """
    return [
        _verdict(str(data), str(name), int(parties), group)
        for (data, name, parties), group in grouped(rows, "data", "name", "parties").items()
    ]


def _verdict(data: str, name: str, parties: int, rows: Sequence[Row]) -> Verdict:
    groups = {str(method): group for (method,), group in grouped(rows, "method").items()}
    scores = {method: mean_of(group, "score") for method, group in groups.items()}
    pooled, alone = scores.pop(POOLED), scores.pop(ALONE)
    best = max(scores, key=lambda method: scores[method])
    good = [method for method in scores if scores[method] >= scores[best] - GOOD]
    exchanges = {method: mean_of(groups[method], "exchanges") for method in good}
    n_bytes = {method: mean_of(groups[method], "bytes") for method in good}
    fewest = min(exchanges, key=lambda method: exchanges[method])
    smallest = min(n_bytes, key=lambda method: n_bytes[method])
    costs = (fewest, exchanges[fewest], smallest, n_bytes[smallest])
    return Verdict(data, name, parties, best, scores[best], pooled, alone, tuple(good), *costs)
