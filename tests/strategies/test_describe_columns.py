"""Descriptions of columns of the same rows, and what they say about labels that stay encrypted."""

import numpy as np
import pytest

from clients import describe as clients_describe
from fedapp.crypto.packing import PairLayout
from fedapp.crypto.paillier import decrypt, encrypt
from fedapp.crypto.paillier_keys import generate_key
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import Workers
from fedapp.errors import ConfigError, FedappError, PartyError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.site.labels import drawn_labels
from fedapp.site.policy import check_policy
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from strategies.describe import DescribeColumns
from tests.federated import summary_of
from tests.network import fails_from
from tests.network import run as run_on_network
from tests.stored import with_arrays
from tests.strategies.test_describe_rows import OBJECTIVES, document_of
from tests.tables import deal_columns, made_columns, write_rows
from tests.tampering import rewrite_letters
from tests.transcript import ORDERED, check_declared, check_no_rows, listen

SMALL = {"describe_columns__key_bits": 512, "describe_columns__insecure_small_key": True}
N_ROWS = 300


def columns_of(objective):
    columns = made_columns(objective, N_ROWS)
    columns["c"] = np.random.default_rng(1).choice(["oslo", "rome", "bonn"], N_ROWS)
    return columns


@pytest.fixture
def made(made):
    """``made(objective, **overrides)``: a description of columns that are split among parties."""

    def make(objective="binary:logistic", **more):
        usual = {"parties": 3, "align": "ordered", "share_column_names": True, **SMALL}
        columns = columns_of(objective)
        return made("describe-columns", objective, columns=columns, **{**usual, **more})

    return make


def by_name(folder):
    """Columns without their owners; categories in the order of their names, as owners draw it."""
    columns = {}
    for column in document_of(folder)["columns"]:
        one = {name: column[name] for name in column if name not in ("party", "by_party")}
        if one["categories"]:
            pairs = sorted(zip(one["categories"], one["counts"], strict=True))
            one |= {"categories": [], "counts": pairs}
        one.pop("kind", None)  # which parties of different columns do not send
        columns["label" if one.get("is_label") else one["name"]] = {**one, "name": ""}
    return columns


# Figures


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_columns_are_described_as_in_one_place_bit_for_bit(made, settings, objective):
    usual = {"data": made(objective).data, "label": "y", "objective": objective}
    pooled = by_name(run_local(settings(strategy="describe-rows", parties=1, **usual)))
    assert len(pooled) == 7
    for parties in (2, 3, 5):
        assert by_name(run_local(made(objective, parties=parties))) == pooled


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_labels_that_come_in_blocks_give_the_same(made, monkeypatch, objective):
    whole = run_local(made(objective))
    monkeypatch.setattr(clients_describe, "BLOCK_BYTES", 2**14)  # 64 labels for each of two
    blocks = run_local(made(objective))
    assert document_of(blocks) == document_of(whole)
    assert summary_of(blocks)["exchanges"] == summary_of(whole)["exchanges"] + 2 * 3


def test_matched_rows_are_described(settings, tmp_path, made):
    columns = columns_of("binary:logistic")
    ids = [f"c{row}" for row in range(N_ROWS)]
    rng, files = np.random.default_rng(2), []
    for name, mine in (("bank", "aby"), ("shop", "cdef")):
        rows = rng.permutation(N_ROWS)[:250]
        table = {"id": ids, **{one: columns[one] for one in mine}}
        chosen = {key: np.array(values)[rows] for key, values in table.items()}
        files.append(f"{name}={write_rows(tmp_path / f'{name}.csv', chosen)}")
    given = {"align": "psi", "data": ",".join(files), "id": "id", "parties": 2}
    summary = summary_of(folder := run_local(made(**given)))
    n_rows = summary["matched_rows"]["train"]
    assert 100 < n_rows < 210
    columns = document_of(folder)["columns"]
    assert {sum([one["missing"], *one["counts"]]) for one in columns} == {n_rows}
    assert [one["name"] for one in columns if one["party"] == "bank"] == ["a", "b", "label"]


def test_randomised_labels_are_described(made):
    plain = by_name(run_local(made()))["label"]["counts"]
    folder = run_local(made(label_epsilon=1.0))
    counts = by_name(folder)["label"]["counts"]
    config = SiteConfig("party-1", "", simulated=True, label_epsilon=1.0)
    labels = columns_of("binary:logistic")["y"].astype(np.float32)
    drawn = drawn_labels(config, labels, [str(row) for row in range(N_ROWS)])
    assert counts != plain
    assert sum(count for _, count in counts) == sum(count for _, count in plain)
    assert abs(counts[1][1] / sum(c for _, c in counts) - drawn.mean()) < 0.05
    assert any("all labels are randomised" in text for text in summary_of(folder)["warnings"])


# What leaves


def test_names_leave_only_where_their_owner_shares_them(made):
    folder, app = listen(made(share_column_names=False))
    check_no_rows(app, summary_of(folder))
    sums = {f"query.describe_columns_{one}" for one in ("setup", "encrypt", "take")}
    sums |= {f"evaluate.describe_columns_{one}" for one in ("sum", "finish")}
    check_declared(app, ORDERED | sums)


def of_sites(sites, tmp_path, **more):
    columns = {"id": [f"c{row}" for row in range(N_ROWS)], **columns_of("binary:logistic")}
    tables = deal_columns(columns, tmp_path, {"bank": ["id", *"aby"], "shop": ["id", *"cdef"]})
    nodes = [{"name": name, "data": tables[name], "id": "id"} for name in tables]
    labels = [{"label": "y"}, {"label": "", **more}]
    return sites(*(node | own for node, own in zip(nodes, labels, strict=True)))


def at_sites(settings):
    return settings(strategy="describe-columns", parties=2, objective="auto", **SMALL)


@pytest.mark.parametrize(
    ("n_columns", "is_shared", "leaves"),
    [(1, False, False), (1, True, True), (2, True, False)],
    ids=["off", "shared", "too many columns"],
)
def test_figures_over_labels_leave_only_if_shared_rounded_and_few(
    settings, sites, tmp_path, caplog, n_columns, is_shared, leaves
):
    n_rows, rng = 420, np.random.default_rng(3)  # of which 302 train: 30 bits, and a column has 28
    labels, ids = rng.integers(0, 2, n_rows), np.arange(n_rows)
    columns = {f"c{one}": labels + rng.normal(size=n_rows) for one in range(n_columns)}
    every = {"id": ids, "a": rng.random(n_rows), "y": labels, **columns}
    shares = {"bank": ("id", "a", "y"), "shop": ("id", *columns)}
    tables = deal_columns(every, tmp_path, shares)
    bank, shop = ({"name": name, "data": tables[name], "id": "id"} for name in shares)
    bank, shop = {**bank, "share-label-figures": is_shared}, {**shop, "label": ""}
    folder = run_local(at_sites(settings), sites(bank, shop))
    figures = [one["label"] for one in document_of(folder)["columns"] if not one.get("is_label")]
    says = [
        text for text in summary_of(folder)["warnings"] if "figures over labels are not" in text
    ]
    assert [bool(one) for one in figures] == [leaves] * (1 + n_columns)
    assert len(says) == (not leaves)
    if leaves:
        assert set(figures[1]) == {"explained", "iv", "auc", "correlation"}
        assert all(figure == round(figure, 2) for one in figures for figure in one.values())
        assert figures[1]["auc"] > 0.6
    is_logged = "those of 2 columns of other parties have 56 bits, for 302 rows at most 30"
    assert (is_logged in caplog.text) == (n_columns == 2)


def test_sites_share_no_names_unless_they_say_so(settings, sites, tmp_path):
    columns = document_of(run_local(at_sites(settings), of_sites(sites, tmp_path)))["columns"]
    assert [one["name"] for one in columns] == [
        *("column 1", "column 2", "column 3"),
        *("column 1", "column 2", "column 3", "column 4"),
    ]
    assert all(one["categories"] == [] for one in columns)
    assert columns[2]["is_label"]
    more = {"share-column-names": True, "share-categories": 60}
    folder = run_local(at_sites(settings), of_sites(sites, tmp_path, **more))
    columns = document_of(folder)["columns"]
    assert [one["name"] for one in columns[3:]] == ["c", "d", "e", "f"]
    counts = dict(zip(columns[3]["categories"], columns[3]["counts"], strict=False))
    assert {name for name, count in counts.items() if name != " (rare)"} <= {"oslo", "rome", "bonn"}
    assert all(count >= 60 for name, count in counts.items() if name != " (rare)")


def test_no_cell_has_fewer_rows_than_the_site_allows(settings, sites, tmp_path):
    contexts = of_sites(sites, tmp_path, **{"min-rows": 20})
    for column in document_of(run_local(at_sites(settings), contexts))["columns"]:
        counts = np.array([column["missing"], *column["counts"]])
        if column["party"] == "shop":
            assert not ((counts > 0) & (counts < 20)).any()


def test_a_site_that_merges_bins_refuses(settings, sites, tmp_path):
    more = {"least-bin-rows": 5}
    with pytest.raises(FedappError, match=r"least-bin-rows must be 0 in the node config, or"):
        run_local(at_sites(settings), of_sites(sites, tmp_path, **more))
    config = SiteConfig("bank", "rows.csv", allowed=frozenset({"describe-columns"}))
    check_policy(config, "query.describe_columns_setup", "describe-columns")


def test_a_small_key_is_for_trials_only(made):
    with pytest.raises(ConfigError, match=r"describe-columns.key-bits must be >= 2048 without"):
        DescribeColumns.check_settings(made(describe_columns__insecure_small_key=False))


def test_sites_forget_their_rows_and_a_failing_party_ends_the_run(made):
    folder = run_local(made())
    for party in ("party-1", "party-2", "party-3"):
        store = Store.open(home() / "sites" / party / summary_of(folder)["model_id"])
        assert store.finished
        assert with_arrays(store) <= {"reply", "ended"}
    with pytest.raises(PartyError, match=r"^party-2 \(step [4-9]\): broke$"):
        run_on_network(made(), app=fails_from(4))


# Parties that break the rules


def test_labels_of_powers_of_two_show_the_cells_of_as_many_rows_as_a_slot_has_bits():
    """As Reveals says: what an active party can read in a description, whatever the minima."""
    rng, n_rows, n_cells = np.random.default_rng(0), 200, 16
    cells = rng.integers(0, n_cells, (n_rows, 3)).astype(np.uint16)
    key, layout = generate_key(512, insecure_small_key=True), PairLayout(512, n_rows, 1, 1)
    n_read = layout.slot_bits - 1  # of the highest bit the sign would change
    assert n_read == 2 * (1 + (200).bit_length() + 1) - 1 == 19
    chosen = rng.permutation(n_rows)[:n_read]
    plaintexts = np.zeros(n_rows, dtype=object)
    plaintexts[chosen] = [1 << bit for bit in range(n_read)]
    workers, offsets = Workers(1), np.arange(4) * n_cells
    rows = encrypt(key, plaintexts.tolist(), workers)
    nodes = np.zeros(n_rows, dtype=np.int32)
    sums = sum_rows(key.public, rows, cells, offsets, nodes, 1, workers)
    packed = decrypt(key, pack_sums(key.public, sums, layout, workers), workers)
    shown = -np.ones((n_read, 3), dtype=int)
    for number, plaintext in enumerate(packed):
        for slot in range(layout.n_slots):
            cell = number * layout.n_slots + slot
            bits = (plaintext >> (slot * layout.slot_bits)) & ((1 << layout.slot_bits) - 1)
            for bit in range(n_read if cell < offsets[-1] else 0):
                if bits >> bit & 1:
                    shown[bit, cell // n_cells] = cell % n_cells
    np.testing.assert_array_equal(shown, cells[chosen])


@pytest.mark.parametrize(
    ("letter", "change", "refused"),
    [
        (
            "CellSums",
            ("counts", lambda counts: counts + 1),
            r"party-2 .step \d+.: CellSums\.counts must be of the \d+ rows in every column",
        ),
        (
            "CellSums",
            ("ciphertexts", lambda rows: rows[:-1]),
            r"party-2 .step \d+.: CellSums\.ciphertexts.* must be \d+, got \d+",
        ),
        (
            "LabelKey",
            ("n_pairs", lambda n: n + 1),
            r"party-1 .step \d+.: LabelKey\.n_pairs must be 1 for binary:logistic, got 2",
        ),
    ],
)
def test_letters_that_do_not_fit_are_refused_by_name(made, monkeypatch, letter, change, refused):
    rewrite_letters(monkeypatch, letter, *change)
    with pytest.raises(FedappError, match=refused):
        run_local(made(parties=2))


def test_sums_that_leave_out_a_row_are_refused(made, monkeypatch):
    honest = clients_describe.sum_rows

    def without_first(key, rows, cells, starts, nodes, *rest):
        return honest(key, rows, cells, starts, np.where(np.arange(len(nodes)), nodes, -1), *rest)

    monkeypatch.setattr(clients_describe, "sum_rows", without_first)
    refused = r"^party-2 .*CellSums.ciphertexts sums must add up to all labels in every column"
    with pytest.raises(FedappError, match=refused):
        run_local(made(parties=2))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("counts", lambda counts: counts + 1),
        ("names", lambda names: names[:-1]),
        ("categories", lambda names: (*names, "more")),
        ("points", lambda points: points[:, :3]),
        ("n_categories", lambda numbers: numbers + 1),
    ],
)
def test_columns_that_do_not_fit_their_counts_are_refused_by_name(made, monkeypatch, field, change):
    described = clients_describe.Described.described

    def falsified(self, counts):
        fields = described(self, counts)
        return {**fields, field: change(fields[field])} if self.name == "party-2" else fields

    monkeypatch.setattr(clients_describe.Described, "described", falsified)
    with pytest.raises(FedappError, match=rf"^party-2.*ColumnsReply\.{field} must be of \d+ col"):
        run_local(made())
