"""SecureBoost whose encrypted gradients fill more than one message."""

from dataclasses import replace

import pytest

from clients.secureboost import active as secureboost_active
from clients.secureboost.active import Active
from fedapp.messages import secureboost as messages
from fedapp.runs.local import run_local, simulated_contexts
from tests.contract.methods import METHODS
from tests.federated import lines_of, model_bytes, summary_of
from tests.letters import letters_sent
from tests.network import die, fails_from, resumed, run
from tests.tampering import FALSE, keep_letters_back, refuses
from tests.transcript import Listener, check_declared, check_no_rows

KEY_BITS, N_ROWS = 256, 120
CIPHERTEXT_BYTES = KEY_BITS // 4
BLOCK_ROWS = 41  # of a single receiver; does not divide the rows
TRAIN = "train.secureboost_"


@pytest.fixture
def small_blocks(monkeypatch):
    """Messages that carry few ciphertexts."""
    monkeypatch.setattr(messages, "BLOCK_BYTES", BLOCK_ROWS * CIPHERTEXT_BYTES)


@pytest.fixture
def made(made):
    def make(objective="binary:logistic", **more):
        usual = {"secureboost__key_bits": KEY_BITS, "max_depth": 2, "max_bin": 8}
        return made("secureboost", objective, N_ROWS, **{**usual, **more})

    return make


def steps_of(folder, kind):
    """Exchanges of a run in which somebody is asked this."""
    lines = lines_of(folder.ledger)
    return sorted({line["step"] for line in lines if line["type"] == TRAIN + kind})


@pytest.mark.by_default("multi:*")
@pytest.mark.parametrize(
    ("objective", "parties", "more"),
    [
        ("binary:logistic", 2, {}),
        ("multi:softprob", 3, {}),
        ("reg:squarederror", 3, {"subsample": 0.8, "colsample_bytree": 0.5}),
    ],
)
def test_gradients_in_several_messages_make_the_same_model(
    made, monkeypatch, objective, parties, more
):
    """A block takes one exchange, and shows the server nothing more."""
    whole = run_local(made(objective, parties=parties, **more))
    assert not steps_of(whole, "encrypt")
    monkeypatch.setattr(messages, "BLOCK_BYTES", BLOCK_ROWS * CIPHERTEXT_BYTES)
    app = Listener()
    folder = run(made(objective, parties=parties, **more), app=app)
    assert model_bytes(folder) == model_bytes(whole)
    asked = steps_of(folder, "encrypt")
    assert len(asked) > 2
    assert asked == steps_of(folder, "take")  # one is made as another is kept
    check_declared(app, METHODS["secureboost"].kinds | {f"{TRAIN}encrypt", f"{TRAIN}take"})
    check_no_rows(app, summary_of(folder))
    letters = letters_sent(app)
    got = {one.name for one in letters if one.receiver == "party-2"}
    assert got - {"CommonRows", "OrderDigest", "Partition"} == {
        *("PublicKey", "EncryptedGradients", "MoreGradients", "Splits")
    }


# What goes wrong in between


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["encrypt", "sum"])
def test_a_server_that_dies_between_blocks_goes_on_to_the_same_model(made, small_blocks, kind):
    whole = run(made())
    steps, settings = steps_of(whole, kind), made()
    contexts = simulated_contexts(settings)
    die(settings, contexts, dies_before_reading=steps[1])  # in the first round
    die(resumed(settings), contexts, dies_before_sending=steps[-1])
    assert model_bytes(run(resumed(settings), contexts)) == model_bytes(whole)


# What is false


@pytest.mark.parametrize(
    ("request_class", "first", "match"),
    [
        (messages.TakeRequest, 1, "MoreGradients.start must be 41, the first of round 0 that is"),
        (messages.SumRequest, 0, r"EncryptedGradients.ciphertexts must be \d+, got 82$"),
    ],
)
def test_a_server_that_keeps_a_block_back_stops_the_run(
    made, small_blocks, monkeypatch, request_class, first, match
):
    keep_letters_back(monkeypatch, request_class, "party-2", first=first)
    refuses(f"^party-1.*: {match}", made())


@pytest.mark.by_default("too large", "one too few")
@pytest.mark.parametrize(("change", "rule"), FALSE.values(), ids=FALSE)
def test_false_gradients_of_a_later_block_stop_the_run_by_the_active_partys_name(
    made, small_blocks, monkeypatch, change, rule
):
    honest = secureboost_active.encrypted

    def false(key, layouts, fields, start, stop):
        found = honest(key, layouts, fields, start, stop)
        return change(found) if stop == len(fields) else found

    monkeypatch.setattr(secureboost_active, "encrypted", false)
    refuses(rf"^party-1.*: (More|Encrypted)Gradients.ciphertexts .*{rule}", made())


def test_a_block_of_another_round_stops_the_run(made, small_blocks, monkeypatch):
    honest = Active.send_on

    def of_next(*given):
        reply, letters = honest(*given)
        return reply, [(name, replace(one, round_id=one.round_id + 1)) for name, one in letters]

    monkeypatch.setattr(Active, "send_on", of_next)
    refuses("^party-1.*: MoreGradients.start must be 41, the first of round 0 that is", made())


def test_no_run_goes_on_without_the_active_party(made, monkeypatch):
    monkeypatch.setattr("tests.network.NODE", 2)
    app = fails_from(9, reason="party-1: broke")
    refuses(r"^party-1 \(step \d+\): broke$", made(parties=3, min_parties=2), app=app)
