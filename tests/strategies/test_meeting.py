"""What a party says of itself is fit for the coordinator's terminal, or refused by its name."""

from dataclasses import replace

import numpy as np
import pytest

from fedapp.data.notes import Note
from fedapp.errors import LONGEST, ProtocolError
from fedapp.messages.handshake import HelloReply
from strategies.handshake import check_texts

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


def test_a_site_tells_names_of_columns_so_that_they_can_be_printed():
    told = Note("columns {} are odd", "'\x1b[2J', " + ", ".join(["'long'"] * 99)).text(True)
    assert told.startswith("columns '?[2J', 'long'")
    assert len(told) == LONGEST
    assert told.isprintable()
