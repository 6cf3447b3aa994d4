"""SecureBoost at the active party: gradients, choice of splits, leaf weights.

Source: Cheng et al. 2019, Algorithm 2. Trees grow as XGBoost's do over the joint columns of all
parties; of other parties' columns this one knows only the number of bins.

Departures: the paper encrypts gradient and hessian separately, here both share a ciphertext; only
the smaller child of each pair is summed, the other is the difference to the parent. Rules for ties
and missing values are XGBoost's.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from clients.keys import draw_key
from clients.labels import number_rows
from clients.secureboost.begun import add_leaves, begin_lookup, begin_trees_of, initial_part
from clients.secureboost.coding import code_categories, keep_cuts
from clients.secureboost.constraints import (
    Wanted,
    joint_constraints,
    own_constraints,
    told_constraints,
    wanted_of,
)
from clients.secureboost.phases import (
    BEGUN,
    CHOSEN,
    ENCRYPTING,
    GROWN,
    IDLE,
    SET_UP,
    TO_WALK,
    WALKED,
)
from clients.secureboost.round import (
    Done,
    choose,
    finish_round,
    grow_alone,
    make_splits,
    more_gradients,
    n_blocks_left,
    new_round,
    read_party_sums,
    tell_splits,
)
from clients.secureboost.view import View
from clients.walking import ask_on, begin_trees, take_answers
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, grouped_layouts
from fedapp.data.labels import check_mean, check_weights
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.messages.fields import fields_of
from fedapp.messages.secureboost import (
    BeginReply,
    BeginRequest,
    ColumnBins,
    EncryptRequest,
    PublicKey,
    SetupRequest,
    SplitReply,
    SplitRequest,
    WalkReply,
    WalkRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.site.answer import Site, enter, phase_of
from fedapp.site.mail import Letters, Mail
from fedapp.site.plan import FIRST_ROUND, check_within
from fedapp.trees.model import check_range, stack_trees
from fedapp.trees.objective import (
    LossParameters,
    Objective,
    base_margin,
    base_score,
    check_base_margin,
    check_objective,
    label_sums,
)

BINS_A_COLUMN = 16  # on average, of most-columns: 26 MB of sums in a node with the usual 100,000


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Check the rows' order, bin the columns, code the labels, draw and test the key."""
    store = site.store
    check_order(site, mail)
    settings = fields_of(request, SetupRequest)
    store.facts["boost"] = {
        name: value for name, value in settings.items() if not isinstance(value, np.ndarray | tuple)
    }
    with as_protocol_error(site.name, "SetupRequest", "objective"):
        check_objective(request.objective)
    with as_protocol_error(site.name, "SetupRequest", "eval_metrics"):
        metrics.check_metrics(request.objective, request.eval_metrics)
    store.facts["eval_metrics"] = list(request.eval_metrics)
    width = _code_labels(site, request)
    cuts = keep_cuts(store, request.max_bin, code_categories(store))
    train = np.asarray(store["values"][: store.facts["n_train"]])
    store["codes"], store.facts["missing_code"] = digitise(train, cuts)
    begin_lookup(site)
    wanted_of(site, request)  # raises for malformed texts before anything is sent
    n_train = store.facts["n_train"]
    key = draw_key(
        site, request, "secureboost", lambda public: grouped_layouts(public.bits, n_train, width)
    )
    store["key"] = key.to_array()
    enter(store, TO_WALK if request.init_model else SET_UP)
    letter = PublicKey(key.public.to_array(), width, n_train, PRECISION)
    return SentReply(), [(name, letter) for name in site.others]


def walk(site: Site, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
    """Route the rows down the initial model as far as answers and local splits allow."""
    store, part = site.store, initial_part(site)
    if "nodes" not in store:
        _meet(site, mail)
        for name in site.others:
            part.check(name, mail.one(ColumnBins, name).part)
        begin_trees(store, part, 0, 0)
    else:
        take_answers(site, mail, part)
    letters = ask_on(site, part, 0)
    if not letters:
        add_leaves(store, part)
    enter(store, TO_WALK if letters else WALKED)
    n_trees = len(part.model.trees)
    return WalkReply(not letters, n_rounds=store.facts["n_rounds"], n_trees=n_trees), letters


def begin(site: Site, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
    """Finish the round in progress, grow rounds without passive columns, start another."""
    store, phase = site.store, phase_of(site.store)
    first = store.facts.setdefault(FIRST_ROUND, store.facts["n_rounds"])
    n_rounds = request.n_rounds - first
    check_within(site.config, store, "BeginRequest", "n_rounds", n_rounds, "rounds")
    if phase == SET_UP:
        _meet(site, mail)
    view, done, letters = View.read(site), list[Done](), Letters()
    if phase == GROWN:
        make_splits(view, mail)
        done.append(finish_round(view))
    while store.facts["n_rounds"] < request.n_rounds and not letters:
        letters = new_round(site, view)
        if not letters:
            grow_alone(view)
            done.append(finish_round(view, alone=True))
    n_blocks = n_blocks_left(view) if letters else 0
    enter(store, (ENCRYPTING if n_blocks else BEGUN) if letters else IDLE)
    reply = BeginReply(
        begun=bool(letters),
        n_blocks=n_blocks,
        n_trees=len(store["model.offsets"]) - 1,
        n_leaves=store.facts["n_leaves"],
        score_names=tuple(done[0][0]) if done else (),
        train_scores=_rows([list(train.values()) for train, _, _ in done]),
        valid_scores=_rows([list(valid.values()) for _, valid, _ in done]),
        purities=_rows([views for _, _, views in done]),
    )
    return reply, letters


def send_on(site: Site, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """The next block of the round's gradients."""
    view = View.read(site)
    letters = more_gradients(view)
    enter(site.store, ENCRYPTING if n_blocks_left(view) else BEGUN)
    return SentReply(), letters


def split(site: Site, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
    """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
    view = View.read(site)
    if phase_of(site.store) == CHOSEN:
        make_splits(view, mail)
    growth = view.growth()
    sums = {name: read_party_sums(view, mail, name, growth) for name in view.passive}
    routes, sets = choose(view, growth, sums)
    letters = tell_splits(view, growth, routes, sets)
    if not growth.growing:
        check_range(growth.grown().trees)
    enter(site.store, CHOSEN if growth.growing else GROWN)
    others = {owner for owner, _ in view.owners(routes["column"])} - {site.name}
    return SplitReply(growth.growing, passive_splits=bool(others)), letters


def _code_labels(site: Site, request: SetupRequest) -> int:
    """Code labels, set the initial margins; returns the number of trees per round."""
    objective, parameters = cast(Objective, request.objective), LossParameters.of(request)
    store, n_train = site.store, site.store.facts["n_train"]
    classes, labels = number_rows(site, objective)
    check_weights(store["weights"][:n_train])
    rows = labels[:n_train], store["weights"][:n_train]
    sums = label_sums(objective, *rows, len(classes)), float(rows[1].sum(dtype=np.float64))
    mean = base_score(objective, *sums, parameters)
    check_mean(objective, mean)
    store.facts |= {"n_rounds": 0, "n_leaves": 0}
    store["labels"] = labels
    store["model.nodes"], store["model.offsets"] = stack_trees(())
    store["model.records"] = np.empty(0, dtype=np.int64)
    if request.init_model:
        mean = begin_trees_of(site, request, classes)
    store.facts["classes"], store["base_score"] = list(classes), mean
    if "base_margins" in store:
        try:
            check_base_margin(objective)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        store["margins"] = store["base_margins"][:, None]
    else:
        store["margins"] = np.tile(base_margin(objective, mean), (len(store["labels"]), 1))
    return len(mean)


def _meet(site: Site, mail: Mail) -> None:
    """Check and store the others' numbers of bins, shared names and constraints."""
    store = site.store
    widths = {site.name: np.diff(store["offsets"]).tolist()}
    categorical = {site.name: (store["set_widths"] > 0).tolist()}
    names = {site.name: list(store.facts["columns"]) if site.config.shares_names else []}
    allows, boost, merged = site.config.allows_export, store.facts["boost"], False
    wanted = Wanted.of(boost["monotone_constraints"], boost["interaction_constraints"])
    constraints = {site.name: own_constraints(site, wanted)}
    for name in site.others:
        bins = mail.one(ColumnBins, name)
        if len(bins.names) not in (0, len(bins.widths)):
            rule = f"must be {len(bins.widths)} or none, got {len(bins.names)}"
            raise ProtocolError(name, "ColumnBins", "names", rule)
        n_columns, max_bin = len(bins.widths), boost["max_bin"]
        limit = site.config.limits["most-columns"]
        by_category = np.resize(bins.categorical.astype(bool), n_columns)
        if n_columns > limit or (bins.widths[~by_category] > max_bin).any():
            rule = f"must be <= {max_bin} (max-bin), of {limit} columns at most (most-columns)"
            raise ProtocolError(name, "ColumnBins", "widths", rule)
        if (n_all := int(bins.widths.sum())) > (most_bins := BINS_A_COLUMN * limit):
            rule = f"must add up to <= {most_bins} ({BINS_A_COLUMN} x most-columns of {site.name})"
            raise ProtocolError(name, "ColumnBins", "widths", f"{rule}, got {n_all}; lower max-bin")
        if len(bins.categorical) != n_columns:
            rule = f"must be {n_columns}, got {len(bins.categorical)}"
            raise ProtocolError(name, "ColumnBins", "categorical", rule)
        widths[name], names[name] = bins.widths.tolist(), list(bins.names)
        categorical[name] = by_category.tolist()
        constraints[name] = told_constraints(name, bins, len(wanted.names), n_columns)
        allows, merged = allows and bins.allows_export, merged or bins.merges_bins
    peers = store.facts["peers"]
    store.facts["widths"] = {name: widths[name] for name in peers}
    store.facts["categorical"] = {name: categorical[name] for name in peers}
    joint = joint_constraints(wanted, {name: constraints[name] for name in peers}, categorical)
    store.facts["monotone"], store.facts["interactions"] = joint
    store.facts["shared_names"], store.facts["export"] = names, allows
    store.facts["merged"] = merged


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    width = len(lists[0]) if lists else 0  # all lists have one length
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
