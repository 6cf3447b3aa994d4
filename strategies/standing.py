"""Activating a divided model: the parties agree on a version, which their standing processes use.

After the alignment three exchanges: all tell each other where they answer; all store the version;
they switch, the passive parties first, so that nobody asks for a version that is not in use yet.
The server learns no address.
"""

from __future__ import annotations

import re
from dataclasses import replace

from fedapp.conversation import Conversation, Saved, ask
from fedapp.data.partition import SUBSETS
from fedapp.errors import check_rules
from fedapp.messages import standing as messages
from fedapp.messages.vertical import INNER, LEFT, VerticalHelloRequest
from fedapp.settings import Section, Settings
from strategies.inference import InferenceStrategy
from strategies.method import Outcome
from strategies.vertical import Hellos, Mailbox

NO_PROCESS = (
    "no row can be scored yet: fedapp serve --site of {active} must answer by the version that "
)
NO_PROCESS += "the sites have switched to, got none that does: start it, or see its GET /health"
AWAY = (
    "no row can be scored live yet: fedapp serve --site of {names} must answer that of {active}, "
)
AWAY += "got nothing: start it, and open its port"
SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class StandingSettings(Section):
    """``[standing]`` of the run config; ``fedapp federation activate`` sets it."""

    table = "standing"

    service: str
    """Name by which callers know the model."""
    refresh: bool
    """Whether only ids that are not matched yet are matched; the other rows stay."""
    none: bool
    """Whether to end: no version answers any more."""


class Standing(InferenceStrategy):
    """Activation: relays addresses, then lets all switch."""

    method = "standing"
    section: StandingSettings

    @classmethod
    def section_settings(cls, settings: Settings) -> StandingSettings:
        """``[standing]``, checked; and there must be a model."""
        super().section_settings(settings)
        section = StandingSettings.of(settings)
        got = section.service or "none"
        rule = "be letters, digits, '_', '.' or '-', and begin with a letter or digit"
        has_all = f"be inner with {cls.method}, which needs rows that all parties have"
        check_rules(
            ("join", settings.join == INNER, has_all, LEFT),
            ("standing.service", SERVICE.fullmatch(section.service) or section.none, rule, got),
            ("standing.refresh", not (section.refresh and section.none), "be false to end", "true"),
        )
        return section

    def greeting(self) -> VerticalHelloRequest:
        """As usual; to refresh, about rows that are not matched yet."""
        return replace(super().greeting(), refreshes=self.section.refresh)

    def conversation(self, parties: Hellos, saved: Saved | None) -> Conversation[Outcome]:
        """Agree, store, switch."""
        mailbox, section = Mailbox.of(parties), self.section
        rows, n_rows = dict.fromkeys(SUBSETS, 0), 0
        if not section.none:
            mailbox, rows = yield from self.align_all(parties)
            yield from mailbox.relay(messages.PrepareRequest, parties, messages.PrepareReply)
            stored = yield from mailbox.relay(
                messages.StoreRequest, parties, messages.StoreReply, service=section.service
            )
            n_rows = stored[mailbox.active].n_rows
        for names in (mailbox.passive, [mailbox.active]):
            asked = dict.fromkeys(names, messages.SwitchRequest())
            switched = yield from ask(asked, messages.SwitchReply)
        unreached = {*switched[mailbox.active].unreached} & {*parties}
        if unreached:
            text = NO_PROCESS if mailbox.active in unreached else AWAY
            self.warn(text.format(active=mailbox.active, names=" and ".join(sorted(unreached))))
        more = {"standing_rows": n_rows, "service": section.service, "unreached": [*unreached]}
        return (yield from self.predicted(mailbox, rows, 0, **more))


STRATEGIES = {Standing.method: Standing}
