"""Every declared rule of every message is kept on arrival, and at its sender."""

import re
from typing import Any, TypeVar

import numpy as np
import pytest
from typing_extensions import TypeAliasType

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Form, Request, check_sizes, origin_of, request
from fedapp.messages.wire import Content, from_bytes, from_content, to_bytes, to_content
from tests.messages.declared import example, kinds, name_of, violations


def arrived(kind, changes):
    """A message as its receiver reads it."""
    sent = to_content(kind(**example(kind)), "bank")
    scalars = {name: changes.get(name, value) for name, value in sent.scalars.items()}
    arrays = {name: changes.get(name, value) for name, value in sent.arrays.items()}
    return from_content(kind, Content(sent.name, scalars, arrays), "bank")


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_a_message_that_keeps_its_rules_arrives(kind):
    sent = to_content(kind(**example(kind)), "bank")
    found = from_content(kind, from_bytes(to_bytes(sent), "bank"), "bank")
    for name, value in example(kind).items():
        np.testing.assert_array_equal(getattr(found, name), value)


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_what_breaks_a_rule_is_refused_on_arrival(kind):
    for broken in violations(kind):
        pattern = rf"^bank: {kind.__name__}\.\w+ {broken.text}"
        with pytest.raises(ProtocolError, match=pattern) as caught:
            arrived(kind, {broken.field: broken.value})
        error = caught.value
        assert (error.party, error.message) == ("bank", kind.__name__)
        # Where two fields must have one size, either may be named.
        is_size = "size" in error.rule or broken.rule.startswith("size")
        assert error.field == broken.field or is_size, broken


def test_an_ending_that_leads_to_another_folder_is_refused_on_arrival():
    named = [kind for kind in kinds() if "suffix" in kind.forms]
    assert len(named) == 3
    for kind in named:
        with pytest.raises(
            ProtocolError, match=r"suffix must be one of \.csv, \.parquet, got \.\./x$"
        ):
            arrived(kind, {"suffix": "../x"})


@pytest.mark.parametrize("kind", kinds(), ids=name_of)
def test_sizes_that_only_the_receiver_knows_are_checked(kind):
    message = kind(**example(kind))
    arrays = [form for _, form in kind.forms.values() if isinstance(form, Form)]
    for dimension in {one for form in arrays for one in form.shape if isinstance(one, str)}:
        name = dimension.partition("+")[0]
        check_sizes("bank", message, **{name: 2})
        with pytest.raises(ProtocolError, match=re.escape(f"bank: {kind.__name__}.")):
            check_sizes("bank", message, **{name: 3})


@pytest.mark.parametrize(("name", "hint"), [("round_id", int), ("objective", str), ("model", str)])
def test_a_request_is_refused_that_does_not_declare_what_sites_read(name, hint):
    """Else it works in simulations, and every real site misreads it."""
    members = {"__annotations__": {name: hint}, "__module__": __name__}
    rule = rf"^StepRequest\.{name} must be declared RoundId or ReadAs, as sites read it, or have"
    with pytest.raises(TypeError, match=rule):
        request("train.trial_step")(type("StepRequest", (Request,), members))


def test_the_origin_of_an_array_is_its_class_also_behind_an_alias():
    scalar = TypeVar("scalar", bound=np.generic)
    array = np.ndarray[Any, np.dtype[scalar]]
    alias = TypeAliasType("alias", array, type_params=(scalar,))  # NDArray of numpy 2.5
    assert origin_of(alias[np.float64]) is np.ndarray
    assert origin_of(array[np.float64]) is np.ndarray
    assert origin_of(int) is None
