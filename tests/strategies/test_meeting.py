"""What a party says of itself is fit for the coordinator's terminal, or refused by its name."""

from dataclasses import replace

import numpy as np
import pytest

from fedapp.data.notes import Note
from fedapp.errors import LONGEST, ProtocolError
from fedapp.messages.handshake import GreetReply, HelloReply
from fedapp.messages.wire import to_content
from fedapp.process import FALL_BACKS
from fedapp.run_folder import Stage
from strategies.handshake import LONGEST_LINE, check_texts
from strategies.run import FolderCallbacks
from tests.network import run

REPLY = HelloReply(
    *(9, 0, 3, ("a",), ("0", "1"), "", "", 0.0, 0.0),
    *(np.empty(0, np.int32), (), (), ()),
    versions=("fedapp 0.2.0",),
    name="bank",
    simulated=False,
    fingerprint="0" * 32,
    notes=(),
)


@pytest.mark.parametrize("field", ["notes", "facts"])
@pytest.mark.parametrize("note", ["\x1b[2Jgone", "two\nlines", "x" * (LONGEST + 1)])
def test_a_note_that_is_not_fit_to_print_is_refused_by_the_partys_name(note, field):
    check_texts([replace(REPLY, **{field: ("odd: \u00fc",)})])
    with pytest.raises(
        ProtocolError, match=rf"^bank: HelloReply\.{field} must be printable, each 400"
    ):
        check_texts([replace(REPLY, **{field: ("fine", note)})])


@pytest.mark.parametrize("name", ["\x1b[31mbank", "a b", "../bank"])
def test_a_name_that_is_none_is_refused_and_quoted(name):
    with pytest.raises(ProtocolError, match=r"HelloReply\.name must be letters, digits") as caught:
        check_texts([replace(REPLY, name=name)])
    assert str(caught.value).isprintable()


LONG = "z" * (LONGEST_LINE - 10)
SAID = {  # by the parties' processes of what is off, and by the run
    "one is off: 4 times slower\nand two": "one is off: 4 times slower; and two",
    "\t\u061c!": "??!",
    f"{LONG}\n{LONG}": f"{LONG}; zzzzz...",
    "": None,
}


@pytest.mark.parametrize("texts", SAID)
def test_a_party_whose_flower_lacks_patches_is_named_by_its_run_from_the_meeting_on(
    texts, settings, sites, write_table, monkeypatch, caplog
):
    monkeypatch.setenv(FALL_BACKS, texts)
    stages = list[Stage]()
    monkeypatch.setattr(FolderCallbacks, "stage", lambda _, stage: stages.append(stage))
    contexts = sites({"name": "bank", "data": write_table("bank")})
    folder = run(settings(parties=1, num_boost_round=1), contexts)
    expected = [f"bank: {SAID[texts]}"] if texts else []
    assert [text for text in folder.summary["warnings"] if "bank" in text] == expected
    assert [text for text in caplog.messages if text.startswith("bank: ")] == expected
    assert [stage.doing for stage in stages if not stage.warnings and texts] == [
        *("waiting for 1 party", "meeting the parties")
    ] * bool(texts)
    assert {text for stage in stages for text in stage.warnings} == {*expected}


def test_a_text_of_what_is_off_that_controls_a_terminal_is_refused():
    with pytest.raises(ProtocolError, match=r"^bank: GreetReply.fall_backs must have no control"):
        to_content(GreetReply("bank", "", ("\x1b[2J",)), "bank")


def test_a_site_tells_names_of_columns_so_that_they_can_be_printed():
    told = Note("columns {} are odd", "'\x1b[2J', " + ", ".join(["'long'"] * 99)).text(True)
    assert told.startswith("columns '?[2J', 'long'")
    assert len(told) == LONGEST
    assert told.isprintable()
