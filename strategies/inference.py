"""Opening and ending of runs that predict with a vertical model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fedapp.conversation import Conversation, ModelFiles, Parties, ask
from fedapp.data.datasets import party_sources
from fedapp.errors import ConfigError
from fedapp.messages.inference import MOST_ROWS, ExplainReply, ExplainRequest
from fedapp.messages.vertical import VerticalHelloReply
from fedapp.settings import Settings
from strategies.alignment import align
from strategies.base import Summary
from strategies.vertical import Mailbox, VerticalStrategy

log = logging.getLogger("fedapp")


class InferenceStrategy(VerticalStrategy):
    """A strategy that predicts with a divided model."""

    reads = frozenset(("model", "output", "explain"))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.tables: dict[str, dict[str, Any]] = {}

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Nothing is trained."""
        return {"aggregation": "sealed"}

    @classmethod
    def own_settings(cls, settings: Settings) -> Any:
        """Check that there is a model, and that rows to be explained have ids."""
        if not settings.model:
            raise ConfigError("model must be the id of a trained model, got ''")
        if not all(ids := _explained_rows(settings)) or len(ids) > MOST_ROWS:
            rule = f"must be ids of up to {MOST_ROWS} rows, separated by commas"
            raise ConfigError(f"explain {rule}, got {len(ids)}, {ids.count('')} of them empty")

    def align_all(
        self, parties: Parties[VerticalHelloReply], mailbox: Mailbox
    ) -> Conversation[dict[str, int]]:
        """Match the rows, all to be predicted; name those to be explained."""
        sources = party_sources(self.settings.data, self.settings.parties) if self.simulated else {}
        for name, hello in parties.items():
            place = f"{sources[name]} " if name in sources else ""
            n_rows, n_columns = hello.n_table, hello.n_columns
            self.tables[name] = {"rows": n_rows, "columns": n_columns, "source": sources.get(name)}
            log.info("%s read %s(%d rows, %d columns)", name, place, n_rows, n_columns)
            if hello.n_unlike:
                self.warn(
                    f"{name} read {place}with values unlike those that the model was trained on in "
                    f"{hello.n_unlike} of {n_columns} columns: is it the right table, in the same "
                    "units?"
                )
        everything = {"test_fraction": 0.0, "valid_fraction": 0.0, "fold": 0, "folds": 0}
        whole = self.settings.model_copy(update=everything)
        rows = yield from align(parties, mailbox, whole)
        if ids := _explained_rows(self.settings):
            yield from ask(parties.all(ExplainRequest(ids)), ExplainReply)
        return rows

    def predicted(
        self, active: str, rows: Mapping[str, int], n_trees: int, **more: Any
    ) -> Conversation[Summary]:
        """The run folder's part: which model, of which rows; the predictions are elsewhere."""
        model = f'{{"format":1,"kind":"model","id":"{self.settings.model}"}}\n'
        yield ModelFiles({"model.json": model})
        return {
            "metrics": {},
            "active": active,
            "tables": self.tables,
            "matched_rows": {"predicted": rows["train"]},
            "trees": n_trees,
            **more,
            "best_round": None,
            "importance": {},
        }


def _explained_rows(settings: Settings) -> tuple[str, ...]:
    if not settings.explain:
        return ()
    return tuple(row_id.strip() for row_id in settings.explain.split(","))
