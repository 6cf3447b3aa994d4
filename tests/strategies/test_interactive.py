"""Interactive inference: predictions of the joined model, and attacks on predictions."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedapp.crypto.packing import Layout
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.errors import PartyError
from fedapp.messages.eini import Structure, Totals
from fedapp.messages.inference import Questions
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from tests.encrypted import EINI, inference, read_scores, scored, written
from tests.federated import model_of, summary_of
from tests.forests import read_part_of
from tests.letters import raw_of
from tests.tables import made_columns, write_rows
from tests.tampering import refuses, rewrite_all_letters, rewrite_letters, set_last_bit
from tests.transcript import listen


@pytest.mark.by_default("multi:softprob-3")
@pytest.mark.parametrize(
    ("objective", "parties"),
    [("binary:logistic", 2), ("multi:softprob", 3), ("reg:squarederror", 2)],
)
def test_predictions_are_those_of_the_joined_model(divided, settings, tmp_path, objective, parties):
    columns = made_columns(objective, 300)
    columns["town"] = np.random.default_rng(0).choice(["Oslo", "Rome", "Bern", ""], 300)
    tens = np.nan_to_num(columns["a"], nan=40.0).astype(int) // 10
    columns["a"] = np.array([*"uvwx", ""])[tens]
    data = str(write_rows(tmp_path / "towns.csv", columns))
    how = {"data": data, "parties": parties, "allow_export": True}
    trained, folder = divided("secureboost", objective, **how)
    assert len(model_of(folder).sets) > 0
    predict_table(folder.path, data, "", tmp_path / "joined.csv")
    due = read_scores(tmp_path / "joined.csv")
    np.testing.assert_allclose(scored(settings, trained), due, rtol=1e-5, atol=1e-6)


def test_no_prediction_leaves_the_active_party(divided, settings):
    trained, _ = divided()
    folder, app = listen(inference(settings, trained, align="psi"))
    scores = written(folder.summary)[:, 0].astype(np.float32)
    sent = [raw_of(message) for _, *messages in app.heard for message in messages]
    assert not any(scores[:3].tobytes() in data for data in sent)
    assert "probability" not in (folder.path / "summary.json").read_text()


def test_trees_at_once_change_exchanges_and_no_prediction(divided, settings):
    trained, _ = divided("federated-forest", columns="random")
    own = {"columns": "random", "align": "ordered"}
    found = [
        run_local(inference(settings, trained, **own, interactive__trees_at_once=n)).summary
        for n in (0, 1, 100)
    ]
    together, one_by_one, more = (summary["exchanges"] for summary in found)
    assert together == more < one_by_one
    for summary in found:
        np.testing.assert_array_equal(written(summary), written(found[0]))


def test_a_table_without_a_column_of_the_model_is_refused(divided, settings):
    trained, _ = divided()
    with pytest.raises(PartyError, match=r"^party-1 \(step 1\): table must have the model's"):
        run_local(inference(settings, trained, data="diabetes"))


def test_bits_of_rows_that_were_not_asked_about_are_refused_by_the_senders_name(
    divided, settings, monkeypatch
):
    trained, _ = divided(data="breast-cancer", label="")
    rewrite_letters(monkeypatch, "Answers", "bits", set_last_bit)
    match = r"^party-2 \(step \d\): Answers\.bits must be 0 past the \d+ rows$"
    with pytest.raises(PartyError, match=match):
        run_local(inference(settings, trained))


@pytest.mark.parametrize("n_rows", [0, 1])
def test_one_row_can_be_predicted_and_none_is_refused(divided, settings, tmp_path, n_rows):
    trained, _ = divided()
    lines = Path(trained.data).read_text().splitlines()
    data = tmp_path / "few.csv"
    data.write_text("\n".join(lines[: 1 + n_rows]) + "\n")
    run = inference(settings, trained, data=str(data))
    if n_rows:
        assert len(written(summary_of(run_local(run)))) == 1
        return
    with pytest.raises(PartyError, match="party-1"):
        run_local(run)


# Attacks from the seat of a party that breaks the rules; all refused


N_ROWS = 160


@pytest.fixture(params=["secureboost", "federated-forest"])
def model(request, divided, settings):
    """Makes settings of a prediction by a divided model; and how party-2's splits are nested."""
    grown = {"num_boost_round": 4, "max_depth": 4}
    grown |= {"federated_forest__trees": 4, "federated_forest__max_depth": 4}
    trained, folder = divided(request.param, n_rows=N_ROWS, **grown)
    predicts = partial(inference, settings, trained, align="ordered", **EINI)
    return predicts, read_part_of("party-2", summary_of(folder)["model_id"]).nesting


def rewrite_first(monkeypatch, kind, *changes):
    """Change the first letters of a class, one by one; a change that returns nothing looks on."""
    left = list(changes)

    def write(sender, letters):
        return [
            (to, (left and isinstance(each, kind) and left.pop(0)(each)) or each)
            for to, each in letters
        ]

    rewrite_all_letters(monkeypatch, write)


# Interactive


def asks(*pairs):
    """Questions about rows at some records."""
    sizes = np.array([len(rows) for _, rows in pairs], dtype=np.int64)
    rows = np.concatenate([rows for _, rows in pairs]).astype(np.int32)
    return Questions(np.array([record for record, _ in pairs], dtype=np.int64), sizes, rows)


def pairs_of(letter):
    rows = np.split(letter.rows, np.cumsum(letter.sizes)[:-1])
    return list(zip(letter.records.tolist(), rows, strict=True))


def all_splits(nesting, letter):
    """Every row at every split."""
    return asks(*((record, np.arange(N_ROWS)) for record in range(len(nesting.trees))))


def a_row_twice(nesting, letter):
    (record, rows), *more = pairs_of(letter)
    return asks((record, rows), *more, (record, rows[:1]))


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (all_splits, 0),
        (a_row_twice, 0),
        (lambda nesting, letter, first: first, 1),  # once more
    ],
)
def test_rows_that_are_not_at_a_split_are_not_answered(model, monkeypatch, change, place):
    predicts, nesting = model
    seen = []

    def changed(letter):
        seen.append(letter)
        return change(nesting, letter, *seen[:place])

    rewrite_first(monkeypatch, Questions, *[lambda letter: seen.append(letter)] * place, changed)
    match = (
        r"^party-1 \(step \d+\): Questions\.rows must be where the answers led them, each once a "
    )
    refuses(match + "letter and tree$", predicts())


# Fed-EINI


def a_tree_a_split(letter):
    """Weights of powers of two in such trees show every side of every row."""
    records = letter.records[letter.records >= 0]
    return replace(
        letter,
        n_terms=len(records),
        ends=3 * np.arange(1, len(records) + 1),
        lefts=np.tile([1, -1, -1], len(records)),
        records=np.stack((records, *np.full((2, len(records)), -1)), axis=1).ravel(),
    )


def test_a_structure_that_was_not_trained_is_refused(model, monkeypatch):
    predicts, _ = model
    rewrite_first(monkeypatch, Structure, a_tree_a_split)
    rule = r"Structure\.records must be those of whole trees, nested as when party-2 trained them$"
    refuses(rf"^party-1 \(step \d+\): {rule}", predicts(strategy="eini"))


def shifted(letter, structure, by):
    """Totals of which every row's sum is larger by so many units of the fixed point."""
    key = PublicKey.from_array(structure.n)
    layout = Layout(key.bits, structure.n_terms, structure.n_outputs, in_pairs=False)
    width, n_squared = letter.ciphertexts.shape[1], key.n**2
    changed, n_left = letter.ciphertexts.copy(), letter.n_rows
    for place, ciphertext in enumerate(changed):
        here = min(n_left, layout.n_slots)
        plain = sum(by << (layout.slot_bits * slot) for slot in range(here))
        number = int.from_bytes(ciphertext.tobytes(), "big") * (1 + key.n * plain) % n_squared
        changed[place] = np.frombuffer(number.to_bytes(width, "big"), np.uint8)
        n_left -= here
    return replace(letter, ciphertexts=changed)


@pytest.mark.by_default("secureboost-0.5", "federated-forest--0.5")
@pytest.mark.parametrize("part", [0.5, -0.5])
def test_sums_that_a_passive_party_has_shifted_beyond_a_rows_leaves_are_refused(
    model, monkeypatch, part
):
    """By half of the largest leaf; before, only sums that no row at all can have were refused."""
    predicts, _ = model
    structures = list[Structure]()

    def changed(letter):
        if isinstance(letter, Structure):
            structures.append(letter)
        is_sum = isinstance(letter, Totals)
        return shifted(letter, structures[0], int(part * 2**53)) if is_sum else letter

    rewrite_all_letters(
        monkeypatch, lambda sender, letters: [(to, changed(each)) for to, each in letters]
    )
    rule = r"Totals\.ciphertexts must be sums of leaves .* got \d+ of 160 rows"
    refuses(rf"^party-2 \(step \d+\): {rule}", predicts(strategy="eini"))
