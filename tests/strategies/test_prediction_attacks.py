"""Attacks on predictions, from the seat of a party that breaks the rules; all refused."""

from dataclasses import replace
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
from fedapp.trees.divided import PARTS
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


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (all_splits, 0),
        (a_row_twice, 0),
        (lambda nesting, letter, first: first, 1),  # once more
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


def test_a_structure_that_was_not_trained_is_refused(model, settings, monkeypatch):
    contexts, given, _ = model
    rewrite_first(monkeypatch, Structure, a_tree_a_split)
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
