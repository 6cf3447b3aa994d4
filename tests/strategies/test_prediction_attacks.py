"""Attacks on predictions, from the seat of a party that breaks the rules; all refused."""

from dataclasses import replace
from functools import partial
from shutil import copytree

import numpy as np
import pytest

from fedapp.crypto.packing import SumLayout
from fedapp.crypto.paillier_keys import PublicKey
from fedapp.home import home
from fedapp.messages.eini import Structure, Totals
from fedapp.messages.inference import Questions
from fedapp.run_folder import RunFolder
from fedapp.site.store import read_part
from fedapp.trees.divided import NONE, PARTS
from tests.federated import summary_of
from tests.network import run
from tests.tables import write_rows
from tests.tampering import refuses, rewrite_all_letters

N_ROWS = 160
SMALL = {"key_bits": 512, "insecure_small_key": True}
KEYS = {f"{method}__{key}": one for method in ("eini", "secureboost") for key, one in SMALL.items()}


@pytest.fixture(params=["secureboost", "federated-forest"])
def model(request, settings, sites, tmp_path_factory):
    """Two sites with a divided model, settings of a run on their rows, and how the shop's splits
    are nested; the model is trained for the first test that asks."""
    folder = tmp_path_factory.getbasetemp() / f"attacked-{request.param}"
    (folder / "home").mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(6)
    columns = rng.normal(size=(5, N_ROWS)).round(2)
    label = {"y": (columns.sum(axis=0) + rng.normal(size=N_ROWS) > 0).astype(int)}
    tables = {"bank": dict(zip("ab", columns, strict=False)) | label}
    tables["shop"] = dict(zip("cde", columns[2:], strict=True))
    contexts = sites(
        *(
            {"name": name, "data": write_rows(folder / f"{name}.csv", table), "min-rows": 20}
            | {"label": "y" if name == "bank" else ""}
            for name, table in tables.items()
        )
    )
    forest = {"federated_forest__trees": 4, "federated_forest__max_depth": 4}
    grown = {"num_boost_round": 4, "max_depth": 4, **forest, **KEYS}
    given = {"parties": 2, "align": "ordered", "valid_fraction": 0.0, "test_fraction": 0.0}
    trained = RunFolder(folder / "run")
    if not trained.path.exists():
        run_dir = str(trained.path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("FEDAPP_HOME", str(folder / "home"))
            run(settings(strategy=request.param, run_dir=run_dir, **given, **grown), contexts)
    copytree(folder / "home", home())
    given |= {"model": summary_of(trained)["model_id"], "eini__unguarded": True, **KEYS}
    part = read_part(home() / "sites" / "shop" / given["model"], *PARTS)
    return contexts, given, part.nesting


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


def second_branch(nesting, letter):
    """Rows at a split of their tree that is in another branch of the active party's split."""
    pairs = pairs_of(letter)
    for record, rows in pairs:
        others = (nesting.trees == nesting.trees[record]) & (nesting.under == NONE)
        others[[one for one, _ in pairs]] = False
        if others.any():
            return asks(*pairs, (int(np.flatnonzero(others)[0]), rows))
    other = next(
        (a, rows)
        for a, _ in pairs
        for b, rows in pairs
        if a != b and nesting.trees[a] == nesting.trees[b]
    )
    return asks(*pairs, other)


def the_first_again(nesting, letter, first):
    return first


def against_the_answers(nesting, letter, first):
    """Rows at splits below one that, as was answered, sends them the other way."""
    first = dict(pairs_of(first))
    for record, rows in pairs_of(letter):
        above = int(nesting.under[record]) // 2
        wrong = np.setdiff1d(first.get(above, rows), rows)
        if nesting.under[record] != NONE and len(wrong):
            return asks((record, wrong))
    raise AssertionError


@pytest.mark.parametrize(
    ("change", "place"),
    [
        *((change, 0) for change in (all_splits, a_row_twice, second_branch)),
        *((change, 1) for change in (the_first_again, against_the_answers)),
    ],
)
def test_rows_that_are_not_at_a_split_are_not_answered(model, settings, monkeypatch, change, place):
    contexts, given, nesting = model
    seen = []

    def changed(letter):
        seen.append(letter)
        return change(nesting, letter, *seen[:place])

    rewrite_first(monkeypatch, Questions, *[lambda letter: seen.append(letter)] * place, changed)
    match = r"^bank \(step \d+\): Questions\.rows must be where the answers led them, each once a "
    refuses(match + "letter and tree$", settings(strategy="interactive", **given), contexts)


# Fed-EINI


def a_tree_a_split(nesting, letter):
    """Weights of powers of two in such trees show every side of every row."""
    records = letter.records[letter.records >= 0]
    return replace(
        letter,
        n_terms=len(records),
        ends=3 * np.arange(1, len(records) + 1),
        lefts=np.tile([1, -1, -1], len(records)),
        records=np.stack((records, *np.full((2, len(records)), -1)), axis=1).ravel(),
    )


def without_a_split(nesting, letter):
    records = letter.records.copy()
    records[np.argmax(records >= 0)] = -1
    return replace(letter, records=records)


def upside_down(nesting, letter):
    """A split changes places with the one above."""
    below = int(next(r for r in letter.records if r >= 0 and nesting.under[r] != NONE))
    above = int(nesting.under[below]) // 2
    records = letter.records.copy()
    records[letter.records == below], records[letter.records == above] = above, below
    return replace(letter, records=records)


@pytest.mark.parametrize("change", [a_tree_a_split, without_a_split, upside_down])
def test_a_structure_that_was_not_trained_is_refused(model, settings, monkeypatch, change):
    contexts, given, nesting = model
    rewrite_first(monkeypatch, Structure, partial(change, nesting))
    match = r"^bank \(step \d+\): Structure\.records must be those of whole trees, nested as when "
    refuses(match + "shop trained them$", settings(strategy="eini", **given), contexts)


def shifted(letter, structure, by):
    """Totals of which every row's sum is larger by so many units of the fixed point."""
    key = PublicKey.from_array(structure.n)
    layout = SumLayout(key.bits, structure.n_terms, structure.n_outputs)
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
    model, settings, monkeypatch, part
):
    """By half of the largest leaf; before, only sums that no row at all can have were refused."""
    contexts, given, _ = model
    structures = list[Structure]()

    def changed(letter):
        if isinstance(letter, Structure):
            structures.append(letter)
        is_sum = isinstance(letter, Totals)
        return shifted(letter, structures[0], int(part * 2**53)) if is_sum else letter

    rewrite_all_letters(
        monkeypatch, lambda sender, letters: [(to, changed(each)) for to, each in letters]
    )
    match = r"^shop \(step \d+\): Totals\.ciphertexts must be sums of leaves .* got \d+ of 160 rows"
    refuses(match, settings(strategy="eini", **given), contexts)
