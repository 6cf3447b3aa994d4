"""SecureBoost at the active party: gradients, choice of splits, leaf weights.

Source: Cheng et al. 2019, Algorithm 2. The trees grow as XGBoost's do over the joined columns of
all parties, of which this party knows its own alone; of another's it knows how many bins there are.

Departures: the paper encrypts gradient and hessian apart, here both travel in one ciphertext; the
smaller child of each pair is summed alone, the other is the difference to the parent. Rules for
ties and for missing values are XGBoost's.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from clients.secureboost.kept import Kept
from clients.secureboost.round import (
    Done,
    choose,
    finish_round,
    grow_alone,
    make_splits,
    new_round,
    read_party_sums,
    tell_splits,
)
from fedapp.crypto.keys import PrivateKey, generate_key
from fedapp.crypto.packing import PRECISION, grouped_layouts
from fedapp.crypto.sums import self_test
from fedapp.data.labels import check_weights, number_labels
from fedapp.errors import ConfigError, ProtocolError
from fedapp.histograms.bins import Cuts, digitise
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.parcels import SentReply
from fedapp.messages.secureboost import (
    BeginReply,
    BeginRequest,
    ColumnBins,
    FinishReply,
    FinishRequest,
    PartKept,
    PublicKey,
    Records,
    SetupRequest,
    SplitReply,
    SplitRequest,
)
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.part_file import write_part
from fedapp.site.store import Store
from fedapp.trees.divided.lookup import Lookup
from fedapp.trees.model import Ensemble, importance, stack_trees, to_json
from fedapp.trees.objective import base_margin, base_score

Ints = npt.NDArray[np.int64]
NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Check the rows' order, bin the columns, code the labels, draw the key and try it."""
    store, kept = site.store, Kept(site)
    check_order(site, mail)
    told = {field.name: getattr(request, field.name) for field in fields(SetupRequest)}
    store.facts["boost"] = {
        name: value for name, value in told.items() if not isinstance(value, np.ndarray | tuple)
    }
    _code_labels(kept)
    _bin_columns(kept, request.max_bin)
    key = _draw_key(kept, request)
    store["key"] = key.to_array()
    letter = PublicKey(key.public.to_array(), kept.width, kept.n_train, PRECISION)
    return SentReply(), [(name, letter) for name in kept.passive]


def begin(site: Site, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
    """Finish the round that is under way; grow alone what is grown alone; begin another."""
    kept = Kept(site)
    if "widths" not in kept.store.facts:
        _meet(kept, mail)
    done: list[Done] = []
    if "growth.level" in kept.store:
        make_splits(kept, mail)
        done.append(finish_round(kept))
    letters: Letters = []
    while kept.n_rounds < request.n_rounds and not letters:
        letters = new_round(kept)
        if not letters:
            grow_alone(kept)
            done.append(finish_round(kept, alone=True))
    reply = BeginReply(
        begun=bool(letters),
        n_trees=len(kept.trees),
        n_leaves=kept.store.facts["n_leaves"],
        score_names=tuple(done[0][0]) if done else (),
        train_scores=_rows([list(train.values()) for train, _, _ in done]),
        valid_scores=_rows([list(valid.values()) for _, valid, _ in done]),
        purities=_rows([views for _, _, views in done]),
    )
    return reply, letters


def split(site: Site, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
    """Algorithm 2: decrypt the others' sums, add the own ones, choose."""
    kept = Kept(site)
    make_splits(kept, mail)
    growth = kept.growth()
    sums = {name: read_party_sums(kept, mail, name, growth) for name in kept.passive}
    routes = choose(kept, growth, sums)
    letters = tell_splits(kept, growth, routes)
    owners = {kept.joint.owner(int(column))[0] for column in routes["column"]}
    return SplitReply(growth.growing, passive_splits=bool(owners - {site.name})), letters


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Cut the model back to its best round, score and keep it; join the parts if all allow it."""
    kept, store = Kept(site), site.store
    model, records = kept.model(request.best_round)
    parts = {name: mail.one(PartKept, name).digest.tobytes().hex() for name in kept.passive}
    scores = kept.scores(kept.margins(request.best_round))
    threshold = scores["train"].get("threshold")
    write_part(store.folder, kept.part(model, records, parts, threshold))
    columns, gains, counts = _importance(store, model)
    reply = FinishReply(
        n_trees=len(model.trees),
        score_names=tuple(scores["train"]),
        train_scores=np.array(list(scores["train"].values())),
        valid_scores=np.array(list(scores["valid"].values())),
        test_scores=np.array(list(scores["test"].values())),
        column_names=columns,
        column_gains=gains,
        column_counts=counts,
        model=_joined(kept, mail, model, records),
    )
    store.forget()
    return reply, []


# Setting up


def _code_labels(kept: Kept) -> None:
    """Labels as numbers, and the margin that everything begins with."""
    store, objective, n_train = kept.store, kept.objective, kept.n_train
    classes, labels = number_labels(store["labels"], objective, n_train)
    check_weights(store["weights"][:n_train])
    weights = store["weights"][:n_train].astype(np.float64)
    mean = base_score(objective, float(labels[:n_train] @ weights), float(weights.sum()))
    store.facts |= {"classes": list(classes), "base_score": float(mean)}
    store.facts |= {"n_rounds": 0, "n_leaves": 0}
    store["labels"] = labels
    margin = base_margin(objective, mean)
    store["margins"] = np.full((len(labels), kept.width), margin, dtype=np.float32)
    store["model.nodes"], store["model.offsets"] = stack_trees(())
    store["model.records"] = np.empty(0, dtype=np.int64)
    Lookup.empty().keep(store)


def _bin_columns(kept: Kept, max_bin: int) -> None:
    """Cuts of the training rows, and the bin of each value."""
    store, n_train = kept.store, kept.n_train
    train = np.asarray(store["values"][:n_train])
    # Without weights, because no other party knows them.
    cuts = quantile_cuts(train, None, max_bin) if train.shape[1] else NO_CUTS
    store["edges"], store["offsets"], store["minima"] = cuts.edges, cuts.offsets, cuts.minima
    store["codes"], store.facts["missing_code"] = digitise(train, cuts)


def _draw_key(kept: Kept, request: SetupRequest) -> PrivateKey:
    """A key that holds a row's gradients, tried out."""
    try:
        key = generate_key(
            request.key_bits,
            insecure_small_key=request.insecure_small_key,
            full_masks=kept.site.config.full_masks,
        )
        grouped_layouts(key.public.bits, kept.n_train, kept.width)
    except ValueError as error:
        raise ConfigError(f"secureboost.{error}") from error
    self_test(key)
    return key


def _meet(kept: Kept, mail: Mail) -> None:
    """Note how many bins the others' columns have, and what they allow."""
    site, store = kept.site, kept.store
    widths = {site.name: np.diff(store["offsets"]).tolist()}
    names = {site.name: list(store.facts["columns"]) if site.config.shares_names else []}
    allows = site.config.allows_export
    for name in kept.passive:
        bins = mail.one(ColumnBins, name)
        if len(bins.names) not in (0, len(bins.widths)):
            rule = f"must be {len(bins.widths)} or none, got {len(bins.names)}"
            raise ProtocolError(name, "ColumnBins", "names", rule)
        widths[name], names[name] = bins.widths.tolist(), list(bins.names)
        allows = allows and bins.allows_export
    order = list(store.facts["peers"])
    store.facts["widths"] = {name: widths[name] for name in order}
    store.facts["shared_names"], store.facts["export"] = names, allows


# The end


def _importance(
    store: Store, model: Ensemble
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], Ints]:
    """Gain and splits of the columns, where all parties share names."""
    if not all(store.facts["shared_names"].values()):
        return (), np.empty(0), np.empty(0, dtype=np.int64)
    found = importance(model)
    gains, counts = found["gain"], found["count"]
    return (
        tuple(gains),
        np.array(list(gains.values()), dtype=np.float64),
        np.array(list(counts.values()), dtype=np.int64),
    )


def _joined(kept: Kept, mail: Mail, model: Ensemble, records: list[Ints]) -> npt.NDArray[np.uint8]:
    """The whole model as JSON, where every party allows it; else nothing."""
    store = kept.store
    if not store.facts["export"]:
        return np.empty(0, dtype=np.uint8)
    lookups = {kept.site.name: Lookup.kept(store)}
    names = {kept.site.name: list(store.facts["columns"])}
    for party in kept.passive:
        letter, n_columns = mail.one(Records, party), len(kept.joint.widths[party])
        if len(letter.names) != n_columns:
            rule = f"must be {n_columns}, got {len(letter.names)}"
            raise ProtocolError(party, "Records", "names", rule)
        defaults = np.zeros(len(letter.columns), dtype=np.uint8)  # the structure has them
        lookups[party] = Lookup(letter.columns, letter.thresholds, defaults)
        names[party] = list(letter.names)
    text = to_json(kept.joined(model, records, lookups, names))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    """One row a list; all are of one length."""
    width = len(lists[0]) if lists else 0
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
