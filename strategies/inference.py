"""Predict with a divided model: interactively, or in one round; for Fed-EINI see ``eini``.

Interactive: the active party walks the trees and asks the others for sides of rows, level by level.
One round: every party sends the leaves that its splits leave open to each row (Federated Forest,
Algorithm 4), and the active party intersects them. The server only relays.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from fedapp.conversation import Conversation, Saved, SavedModel, ask
from fedapp.data.datasets import party_sources
from fedapp.data.partition import Holdout
from fedapp.errors import check_rules
from fedapp.messages import inference as messages
from fedapp.records.document import name_of_model
from fedapp.sections import setting_names
from fedapp.settings import InferenceSettings, Section, Settings
from strategies.method import Outcome
from strategies.vertical import Hellos, Mailbox, VerticalStrategy, align

log = logging.getLogger("fedapp")


class InferenceStrategy(VerticalStrategy):
    """A strategy that predicts with a divided model."""

    reads = setting_names(InferenceSettings)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.tables: dict[str, dict[str, Any]] = {}

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Nothing is trained."""
        return {"aggregation": "sealed"}

    @classmethod
    def section_settings(cls, settings: Settings) -> Any:
        """As usual; and there must be a model, and ids of the rows to be explained."""
        ids = _explained_rows(settings)
        rule = f"be ids of up to {messages.MOST_ROWS} rows, separated by commas"
        got = f"{len(ids)}, {ids.count('')} of them empty"
        check_rules(
            ("model", settings.model, "be the id of a trained model", "''"),
            ("explain", all(ids) and len(ids) <= messages.MOST_ROWS, rule, got),
        )
        return super().section_settings(settings)

    def align_all(self, parties: Hellos) -> Conversation[tuple[Mailbox, dict[str, int]]]:
        """Match the rows, all to be predicted; name those to be explained."""
        mailbox = Mailbox.of(parties)
        sources = party_sources(self.settings.data, self.settings.parties) if self.simulated else {}
        for name, hello in parties.items():
            source = f"{sources[name]} " if name in sources else ""
            n_rows, n_columns = hello.n_table, hello.n_columns
            self.tables[name] = {"rows": n_rows, "columns": n_columns, "source": sources.get(name)}
            log.info("%s read %s(%d rows, %d columns)", name, source, n_rows, n_columns)
            if hello.n_unlike:
                self.warn(
                    f"{name} read {source}with values unlike those that the model was trained on "
                    f"in {hello.n_unlike} of {n_columns} columns: is it the right table, in the "
                    "same units?"
                )
        settings = self.settings
        none_held_back = Holdout(0.0, 0.0, settings.seed, score_test=settings.score_test)
        rows = yield from align(parties, mailbox, settings, none_held_back)
        if ids := _explained_rows(settings):
            yield from ask(parties.all(messages.ExplainRequest(ids)), messages.ExplainReply)
        return mailbox, rows

    def predicted(
        self, mailbox: Mailbox, rows: Mapping[str, int], n_trees: int, **more: Any
    ) -> Conversation[Outcome]:
        """The run folder's part: which model, of which rows; the predictions are elsewhere."""
        yield SavedModel({"model.json": name_of_model(self.settings.model)})
        return {
            "metrics": {},
            "active": mailbox.active,
            "matching": mailbox.matching,
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


# Source: Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), Figure 3. All rows walk at once, down
# ``interactive.trees-at-once`` trees at a time (0: all; 1: tree after tree, as in the papers). Each
# lot of trees asks the passive parties until its last row is at a leaf, at most ``max_depth``
# times. With the active party's steps between the questions, and a last one in which the others
# forget the rows, the exchanges after the alignment are ::
#
#     2 + 2 * sum over the lots of the questions of the lot  <=  2 + 2 * max_depth * n_lots,
#
# where ``n_lots = ceil(n_trees / trees_at_once)``, and 1 for all at once. The predictions do not
# depend on it. Only the active party writes them.
class InteractiveSettings(Section):
    """``[interactive]`` of the run config."""

    table = "interactive"

    trees_at_once: Annotated[int, Field(ge=0, lt=2**31)]
    """Trees that the rows walk at the same time; 0: all."""


class Interactive(InferenceStrategy):
    """Interactive inference: relays questions and answers until every row is at a leaf."""

    method = "interactive"
    section_class = InteractiveSettings
    section: InteractiveSettings

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        mailbox, rows = yield from self.align_all(parties)
        fields = {**self.section.model_dump(), "suffix": self.settings.output}
        is_last = False
        while not is_last:
            walked = yield from mailbox.ask_active(
                messages.WalkRequest, messages.WalkReply, **fields
            )
            is_last = walked.finished
            yield from mailbox.relay(
                messages.AnswerRequest, mailbox.passive, messages.AnswerReply, last=is_last
            )
        return (yield from self.predicted(mailbox, rows, walked.n_trees))


# Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 3 and 4. After the
# alignment the passive parties are asked once, whatever the number and the depth of the trees.
class OneRound(InferenceStrategy):
    """One-round prediction: relays cells."""

    method = "one-round"

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Algorithm 4."""
        mailbox, rows = yield from self.align_all(parties)
        yield from mailbox.relay(messages.CellsRequest, mailbox.passive, messages.CellsReply)
        reply = yield from mailbox.ask_active(
            messages.IntersectRequest, messages.IntersectReply, suffix=self.settings.output
        )
        return (yield from self.predicted(mailbox, rows, reply.n_trees))


STRATEGIES = {Interactive.method: Interactive, OneRound.method: OneRound}
