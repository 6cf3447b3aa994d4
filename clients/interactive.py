"""Interactive inference at a party: traverse the trees and ask, or answer for local splits.

Source: Cheng et al. 2019, Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping

from clients.alignment import check_order
from clients.explain import explain_asked, explain_scores
from clients.inference import active_part, own_digest, own_part, predictions_by_leaves, write_rows
from clients.walking import answers, ask_on, begin_trees, leaves_reached, take_answers
from fedapp.messages.fields import Request
from fedapp.messages.inference import (
    AnswerReply,
    AnswerRequest,
    Answers,
    Questions,
    WalkReply,
    WalkRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail


def walk(site: Site, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
    """At the active party: route rows of ``trees_at_once`` trees as far as answers allow."""
    store, part = site.store, active_part(site)
    if "nodes" not in store:
        check_order(site, mail)
        begin_trees(store, part, 0, request.trees_at_once)
    else:
        take_answers(site, mail, part)
    letters = ask_on(site, part, request.trees_at_once)
    if not letters:
        leaves = leaves_reached(store)
        predictions = predictions_by_leaves(site, part, leaves)
        explain_scores(site, part, predictions, leaves)
        write_rows(site, part, predictions, request.suffix)
    return WalkReply(finished=not letters, n_trees=len(part.model.trees)), letters


def answer(site: Site, request: AnswerRequest, mail: Mail) -> tuple[AnswerReply, Letters]:
    """At a passive party: sides of the rows asked about; after the last, drop the rows."""
    store, active = site.store, site.store.facts["active"]
    if request.last:
        store.forget()
    questions = mail.all(Questions).get(active)
    if questions is None:
        return AnswerReply(), []
    part = own_part(site)
    bits, rows = answers(site, part, questions)
    explain_asked(site, part, questions.records, rows)
    return AnswerReply(), [(active, Answers(own_digest(site), bits))]


HANDLERS: Mapping[type[Request], Handler] = {WalkRequest: walk, AnswerRequest: answer}
