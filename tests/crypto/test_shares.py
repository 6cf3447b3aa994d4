"""Sums without a lost party: what a coordinator gets that does not unmask them as it should."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from fedapp.crypto.masking import expand, new_secret, recover_secret, share_secret, unmasked_sum
from fedapp.errors import ConfigError, ProtocolError
from fedapp.home import home
from fedapp.messages.secagg import LeftRequest, UnmaskRequest
from fedapp.site.account import Account
from fedapp.site.settings import site_config
from fedapp.site.store import Store
from strategies.secagg import _row_of
from tests.crypto.test_masks import MODEL, Coordinator, counting, scoring
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared

ALL = ("bank", "insurer", "shop", "zoo")
REST = ALL[:3]
N_WORDS = 2 + 2 * 256  # sums of labels and weights; counts by the first digit of two columns


@pytest.fixture
def coordinator(write_table):
    """Of four sites, three of which must be left."""
    return Coordinator(_configs(write_table, {"least-parties": 2}), threshold=3)


def _configs(write_table, more):
    return {
        name: site_config(
            {
                "name": name,
                "data": str(write_table(name, seed=seed)),
                "label": "y",
                "allow": "pax,fedavg-linear",
                **more,
            },
            {},
        )
        for seed, name in enumerate(ALL)
    }


def unmasking(answers, names, holder, among=ALL):
    """What an honest coordinator asks of a holder."""
    rows = [
        answers[name].arrays["sealed"][_row_of(tuple(among), name, holder)]
        for name in names
        if name != holder
    ]
    return UnmaskRequest(tuple(names), np.array(rows, np.uint8))


def opened(answers, replies, names):
    """Seeds of the named parties' own masks by as many shares as there are, and those of pairs."""
    shares = {ALL.index(holder) + 1: replies[holder].arrays["shares"] for holder in replies}
    own = {
        name: recover_secret({holder: rows[place].tobytes() for holder, rows in shares.items()})
        for place, name in enumerate(names)
    }
    lost = [name for name in ALL if name not in names]
    of_pairs = {
        (holder, gone): replies[holder].arrays["seeds"][place].tobytes()
        for holder in replies
        for place, gone in enumerate(lost)
    }
    return own, of_pairs


def sum_of(answers, names, own, of_pairs):
    added = [own[name] for name in names] + [s for (one, gone), s in of_pairs.items() if one < gone]
    subtracted = [seed for (one, gone), seed in of_pairs.items() if one > gone]
    masked = [answers[name].arrays["masked"] for name in names]
    return unmasked_sum(masked, N_WORDS, 8, added, subtracted)


# Shares


def test_so_many_shares_give_a_secret_back_and_fewer_any():
    secret = new_secret()
    shares = dict(enumerate(share_secret(secret, 3, 5), start=1))
    for some in combinations(shares, 3):
        assert recover_secret({holder: shares[holder] for holder in some}) == secret
    assert recover_secret(shares) == secret
    # To two of three, each third share gives another secret.
    two = {1: shares[1], 2: shares[2]}
    found = {recover_secret({**two, 3: place.to_bytes(32, "little")}) for place in range(100)}
    assert len(found) == 100
    lows = b"".join(share[:31] for _ in range(300) for share in share_secret(secret, 2, 2)[:1])
    assert chi_squared(np.frombuffer(lows, np.uint8)) < MOST_CHI2
    for threshold, of in ((0, bytes(32)), (4, bytes(32)), (2, b"\xff" * 32)):
        with pytest.raises(ValueError, match="must be"):
            share_secret(of, threshold, 3)


# Why there are two masks


def test_a_late_answer_of_a_lost_party_tells_nothing(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    replies = coordinator.ask({one: unmasking(answers, REST, one) for one in REST}, 4)
    own, of_pairs = opened(answers, replies, REST)
    sums = sum_of(answers, REST, own, of_pairs)
    assert sums[1] == 3 * 26 << 62 - 8
    assert (sums >= 0).all()
    # All masks of its pairs can be taken off now, and its own not.
    late = answers["zoo"].arrays["masked"].copy()
    for (one, gone), seed in of_pairs.items():
        late += expand(seed, N_WORDS) * (np.uint64(1) if one < gone else -np.uint64(1))
    assert chi_squared(late) < MOST_CHI2
    assert chi_squared(late - expand(new_secret(), N_WORDS)) < MOST_CHI2


def test_parties_that_are_told_of_different_losses_give_noise(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    named = {"bank": ALL, "insurer": REST, "shop": REST, "zoo": ALL}
    replies = coordinator.ask({one: unmasking(answers, named[one], one) for one in ALL}, 4)
    for names in (ALL, REST):
        those = {one: replies[one] for one in ALL if named[one] == names}
        own, of_pairs = opened(answers, those, names)
        assert chi_squared(sum_of(answers, names, own, of_pairs)) < MOST_CHI2
    # What was told is the site's from there on.
    with pytest.raises(ProtocolError, match=r"^shop: sum\.names must be of those that are left"):
        coordinator.ask(replace(scoring(), among=ALL), 5, ["shop"])


# What a server does that goes back to before the opening


def test_a_run_that_was_opened_is_not_opened_otherwise(coordinator):
    """Else a sum of one opening, less that of another without a party, would be the party's own."""
    coordinator.ask(coordinator.opening, 3, ALL, checkpoint=2)
    other, back = (
        replace(coordinator.opening, max_delta_step=0.001),
        {"attempt": 1, "checkpoint": 2},
    )
    rule = r"^bank: OpenRequest\.content must be what it was before the run was resumed"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(other, 3, ALL, **back)
    coordinator.ask(coordinator.opening, 3, ALL, **back)


def test_a_party_that_was_lost_stays_so_when_the_run_is_opened_again(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL, checkpoint=2)
    coordinator.ask({one: unmasking(answers, REST, one) for one in REST}, 4, checkpoint=2)
    back = {"attempt": 1, "checkpoint": 2}
    again = coordinator.ask(coordinator.opening, 3, REST, **back)
    assert [len(answer.arrays["sealed"]) for answer in again.values()] == [2, 2, 2]
    with pytest.raises(ProtocolError, match="must be of those that are left: bank, insurer, shop"):
        coordinator.ask({"bank": UnmaskRequest(ALL, np.zeros((3, 60), np.uint8))}, 4, **back)
    replies = coordinator.ask({one: unmasking(again, REST, one, REST) for one in REST}, 4, **back)
    assert not any(answer.arrays["seeds"].size for answer in replies.values())


@pytest.mark.parametrize("gap", [0, 98], ids=["none known", "a long one"])
def test_a_sum_is_not_asked_for_again_without_a_party_by_a_server_that_skips_steps(
    coordinator, gap
):
    answers = coordinator.ask(coordinator.opening, 3, ALL, checkpoint=2)
    coordinator.ask({one: unmasking(answers, ALL, one) for one in ALL}, 4, checkpoint=2)
    # The state of step 2 is kept as one of step 100, after the sum.
    coordinator.ask(LeftRequest(), 100, ALL, attempt=1, checkpoint=2, gap=gap)
    back = {"attempt": 1, "checkpoint": 100}
    again = coordinator.ask(coordinator.opening, 101, ALL, **back)
    with pytest.raises(ProtocolError, match="must have zoo, with whom this was summed before"):
        coordinator.ask({"bank": unmasking(again, REST, "bank")}, 102, **back)
    replies = coordinator.ask({one: unmasking(again, ALL, one) for one in ALL}, 102, **back)
    own, of_pairs = opened(again, replies, ALL)
    assert sum_of(again, ALL, own, of_pairs)[1] == 4 * 26 << 62 - 8


def test_sums_that_a_checkpoint_follows_from_are_forgotten(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    for step, more in ((4, {}), (6, {"checkpoint": 4})):
        coordinator.ask({one: unmasking(answers, ALL, one) for one in ALL}, step, **more)
        answers = coordinator.ask(counting(digit=step // 2 - 1), step + 1, ALL, checkpoint=4)
    account = Store.open(home() / "sites" / "bank" / MODEL).get(Account)
    assert [each.number for each in account.summed] == [2]


# What sites refuse


def test_a_sum_is_unmasked_once(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    coordinator.ask({"bank": unmasking(answers, ALL, "bank")}, 4)
    again = {"bank": unmasking(answers, REST, "bank")}
    # The same step again gets the same bytes.
    assert not coordinator.ask(again, 4)["bank"].arrays["seeds"].size
    with pytest.raises(ProtocolError, match=r"^bank: UnmaskRequest\.step must follow a sum, and"):
        coordinator.ask(again, 5)


def test_too_few_others_or_none_of_the_run_are_refused(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    for names, rule in (
        (("bank", "insurer"), "must be 3 or more"),
        (("insurer", "shop", "zoo"), "must have bank"),
        ((*REST, "mallory"), "must be of those that are left"),
        ((*REST, "bank"), "must differ"),
    ):
        request = UnmaskRequest(names, np.zeros((len(names) - 1, 60), np.uint8))
        with pytest.raises(ProtocolError, match=rf"^bank: sum\.names {rule}"):
            coordinator.ask({"bank": request}, 4)
    short = unmasking(answers, ALL, "bank")
    with pytest.raises(ProtocolError, match=r"UnmaskRequest\.sealed must be 3 shares"):
        coordinator.ask({"bank": replace(short, sealed=short.sealed[:2])}, 4)


def test_parts_of_a_sum_are_those_of_the_same_parties(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    coordinator.ask({one: unmasking(answers, ALL, one) for one in ALL}, 4)
    answers = coordinator.ask(counting(), 5, ALL)
    with pytest.raises(ProtocolError, match="must be those of the sums that this one is part of"):
        coordinator.ask({"bank": unmasking(answers, REST, "bank")}, 6)


def test_a_share_that_is_changed_or_of_another_sum_is_refused_by_its_senders_name(coordinator):
    answers = coordinator.ask(coordinator.opening, 3, ALL)
    honest = unmasking(answers, ALL, "bank")
    changed = honest.sealed.copy()
    changed[1, 20] ^= 1
    rule = r"^shop: UnmaskRequest\.sealed must be sealed by shop for bank with this answer"
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask({"bank": replace(honest, sealed=changed)}, 4)
    coordinator.ask({one: unmasking(answers, ALL, one) for one in ALL}, 4)
    later = unmasking(coordinator.ask(counting(), 5, ALL), ALL, "bank").sealed.copy()
    later[1] = honest.sealed[1]
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask({"bank": replace(honest, sealed=later)}, 6)


def test_a_site_says_how_many_must_be_left(write_table):
    for least, threshold, rule in (
        (None, 3, r"0 with aggregation=secure, or least-parties set by bank"),
        (3, 3, r"4 to 4 of 4 parties, or 0, for bank with"),
        (2, 2, r"3 to 4 of 4 parties, or 0, for bank with"),
        (2, 5, r"3 to 4 of 4 parties, or 0, for bank with"),
    ):
        more = {"least-parties": least} if least else {}
        model = f"{threshold}{least or 0}".zfill(16)
        coordinator = Coordinator(_configs(write_table, more), threshold, model=model)
        with pytest.raises(ConfigError, match=f"min-parties must be {rule}"):
            coordinator.ask(coordinator.opening, 3, ["bank"])
