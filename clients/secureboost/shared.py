"""SecureBoost at any party: an initial model, cuts, constraints, splits, the order of requests.

The owner of a column makes its splits and sends all parties the rows that go left; after the last
level, only the active party.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.handshake import store_categories, stored_categories
from clients.inference import (
    ActivePart,
    active_part,
    leaves_reached,
    part_digest_array,
    read_party_part,
)
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import Cuts, with_categories, without_categories
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import (
    AnswerRequest,
    BeginRequest,
    EncryptRequest,
    FinishRequest,
    HandOverRequest,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
    TakeRequest,
    WalkRequest,
)
from fedapp.site.answer import ALIGNED, FINISHED, MODEL_ID, Site, Table, is_active
from fedapp.site.store import Store, sent_bits
from fedapp.trees.categories import recoded, trained_first
from fedapp.trees.constraints import (
    check_without_categories,
    constraints_of,
    parse_interactions,
    parse_monotone,
)
from fedapp.trees.divided import Lookup, categories_of
from fedapp.trees.model import Ensemble, stack_trees
from fedapp.trees.objective import LossParameters, n_outputs
from fedapp.trees.predict import Bits, Nodes, Places, move_rows, sides_of, slots_of
from fedapp.trees.rounds import n_leaves
from fedapp.trees.sets import CategorySets, category_counts, set_numbers

Ints = npt.NDArray[np.int64]
Groups = tuple[frozenset[int], ...]
Sent = tuple[str, Ints, npt.NDArray[np.uint8]]  # sender, indices of the splits, their bits

INIT_MODEL = "init_model"  # a fact: id of the divided model that the run continues
NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))
BOTH = "monotone-constraints and interaction-constraints"


# Each party starts with its splits of that model, the active one with its trees too. Rows traverse
# it as in interactive inference, and their leaf values are the initial margins. Record and round
# numbers continue.
def note_init_model(site: Site, request: SetupRequest) -> None:
    """Store the id of the initial model."""
    if request.init_model and not MODEL_ID.fullmatch(request.init_model):
        raise ProtocolError(site.name, "SetupRequest", INIT_MODEL, "must be 16 hex digits")
    site.store.facts[INIT_MODEL] = request.init_model


def load_initial_lookup(site: Site) -> npt.NDArray[np.uint8]:
    """Start with the party's splits of the initial model, if any; returns their digest."""
    store, model = site.store, site.store.facts[INIT_MODEL]
    if not model:
        store.put("lookup", Lookup.empty())
        return np.empty(0, dtype=np.uint8)
    part = read_party_part(site, model)
    if part.document["columns"] != list(store.facts["columns"]):
        n_columns, n_expected = len(store.facts["columns"]), len(part.document["columns"])
        rule = f"columns of init-model must be the table's {n_columns}, in their order"
        raise DataError(f"{rule}, got {n_expected}, or others", site.name)
    if categories_of(part.document) != stored_categories(store):
        rule = "categories of init-model must be those of the training rows, in the order that the "
        raise DataError(f"{rule}run draws: it takes the same table and seed", site.name)
    store.put("lookup", part.lookup)
    return part_digest_array(site, model)


def load_initial_trees(site: Site, request: SetupRequest, classes: tuple[str, ...]) -> Array:
    """Start with the trees of the initial model, checked to fit the run; returns its base score."""
    store, part = site.store, active_part(site, site.store.facts[INIT_MODEL])
    model = part.model
    if not isinstance(model, Ensemble):
        raise ConfigError("init-model must be a boosted model, got a forest")
    parties = sorted(part.document["n_columns"])
    if parties != sorted(store.facts["peers"]):
        raise DataError(f"parties must be those of init-model ({', '.join(parties)})")
    margins = site.config.base_margin if "base_margins" in store else ""
    settings = {
        "objective": (request.objective, model.objective),
        "classes": (classes, model.classes),
        "parameters": (LossParameters.of(request), model.parameters),
        "base-margin": (margins, model.margin_column),
    }
    for field, (wanted, of_model) in settings.items():
        if wanted != of_model:
            # Without the values: class and column names stay at the party.
            raise ConfigError(f"{field} of init-model must be the run's at {site.name}")
    store["model.nodes"], store["model.offsets"] = stack_trees(model.trees)
    store["model.records"] = np.concatenate(part.records)
    width = n_outputs(model.objective, len(classes))
    store.facts["n_rounds"] = len(model.trees) // width
    store.facts["n_leaves"] = n_leaves(model.trees[-width:])
    return model.base_score


def add_leaves(store: Store, part: ActivePart) -> None:
    """Add the initial model's leaf values to the margins; drop the traversal's state."""
    leaves, margins = leaves_reached(store), np.array(store["margins"])
    for number, (tree, tree_leaves) in enumerate(zip(part.model.trees, leaves, strict=True)):
        margins[:, number % margins.shape[1]] += tree["value"][tree_leaves]
    store["margins"] = margins
    store.drop("nodes", "leaves")
    for name in ("asked", "done", "first_tree"):
        store.facts.pop(name, None)


# The order of a table's codes is independent of the names, so bins reveal nothing of these. A
# category in no training row has a code above all others and no bin; splits send it left, as
# XGBoost's do. A category that first occurs in a table to predict is missing.
def code_categories(store: Store) -> Ints:
    """Give training categories the lowest codes; returns their number per column, 0 if numeric."""
    local, values = stored_categories(store), np.asarray(store["values"])
    joint, counts = trained_first(local, values[: store.facts["n_train"]])
    if joint != local:
        store["values"] = recoded(values, local, joint)[0]
        store_categories(store, joint)
    return counts


def keep_cuts(store: Store, max_bin: int, categories: Ints) -> Cuts:
    """Compute and store the cuts of the training rows; ``categories`` as above."""
    train = np.asarray(store["values"][: store.facts["n_train"]])
    values = without_categories(train, categories)
    # Unweighted: only the active party knows the weights.
    cuts = quantile_cuts(values, None, max_bin) if train.shape[1] else NO_CUTS
    cuts = with_categories(cuts, categories, categories)
    store["edges"], store["offsets"], store["minima"] = cuts.edges, cuts.offsets, cuts.minima
    store["set_widths"] = categories
    store["n_categories"] = category_counts(stored_categories(store), train.shape[1])
    return cuts


# The run config names columns; a party that shares its column names sends which of them are its. A
# party that does not share them sets constraints among its columns in its node config.
@dataclass(frozen=True, slots=True, eq=False)
class ConfiguredConstraints:
    """Constraints of the run config, by column name."""

    directions: Mapping[str, int]  # as in ``parse_monotone``
    groups: tuple[tuple[str, ...], ...]  # as in ``parse_interactions``

    @classmethod
    def of(cls, monotone: str, interactions: str) -> ConfiguredConstraints:
        """Parse the settings; raises a ValueError."""
        return cls(parse_monotone(monotone), parse_interactions(interactions))

    @property
    def names(self) -> tuple[str, ...]:
        """All names, each once."""
        in_groups = (name for group in self.groups for name in group)
        return tuple(dict.fromkeys((*self.directions, *in_groups)))


@dataclass(frozen=True, slots=True, eq=False)
class PartyConstraints:
    """Constraints of one party's columns, by its column numbers."""

    named: Ints  # (n_names,): its column of each name in the run config, -1 for none
    directions: npt.NDArray[np.int8]  # (n_columns,), of its node config; or empty
    groups: Groups  # columns that may occur together on a path, of its node config

    def fields(self) -> dict[str, Array]:
        """Fields of a ``ColumnBins``."""
        members = [sorted(group) for group in self.groups]
        return {
            "named": self.named,
            "directions": self.directions,
            "group_columns": np.array(
                [column for group in members for column in group], dtype=np.int64
            ),
            "group_sizes": np.array([len(group) for group in members], dtype=np.int64),
        }


def parse_constraints(site: Site, request: SetupRequest) -> ConfiguredConstraints:
    """Constraints of the run config; raises a ProtocolError."""
    with as_protocol_error(
        site.name, "SetupRequest", "monotone_constraints, interaction_constraints"
    ):
        return ConfiguredConstraints.of(
            request.monotone_constraints, request.interaction_constraints
        )


def local_constraints(site: Site, wanted: ConfiguredConstraints) -> PartyConstraints:
    """Constraints of a site's columns; raises a DataError for a name it does not have."""
    config, columns = site.config, site.store.facts["columns"]
    # In a simulation, whoever writes the run config has all tables.
    is_shared = config.shares_names or config.simulated
    column_ids = {name: column for column, name in enumerate(columns)} if is_shared else {}
    named = [column_ids.get(name, -1) for name in wanted.names]
    try:
        directions, groups = constraints_of(
            config.monotone_constraints, config.interaction_constraints, columns
        )
    except ValueError as error:
        rule = f"{BOTH} in the node config must name columns of the site's table"
        raise DataError(rule, here=f"{error} in the node config") from None
    return PartyConstraints(np.array(named, dtype=np.int64), directions, groups)


def read_constraints(party: str, letter: Any, n_names: int, n_columns: int) -> PartyConstraints:
    """Constraints that another party has sent; raises a ProtocolError if they do not fit."""
    sizes, members = letter.group_sizes, letter.group_columns
    named = letter.named[letter.named >= 0]
    rules = {
        "named": (
            len(letter.named) == n_names
            and bool((named < n_columns).all())
            and len(np.unique(named)) == len(named),
            f"must be {n_names} columns below {n_columns}, each once",
        ),
        "directions": (
            len(letter.directions) in (0, n_columns),
            f"must be one a column of {n_columns}, or none",
        ),
        "group_columns": (bool((members < n_columns).all()), f"must be < {n_columns}"),
        "group_sizes": (
            int(sizes.sum()) == len(members),
            f"must divide {len(members)} columns among the groups",
        ),
    }
    for field, (holds, rule) in rules.items():
        if not holds:
            raise ProtocolError(party, "ColumnBins", field, rule)
    ends = np.cumsum(sizes)[:-1]
    groups = tuple(frozenset(group.tolist()) for group in np.split(members, ends) if len(group))
    return PartyConstraints(letter.named, letter.directions, groups)


def joint_constraints(
    wanted: ConfiguredConstraints,
    constraints: Mapping[str, PartyConstraints],
    categorical: Mapping[str, list[bool]],
) -> tuple[list[int], list[list[int]]]:
    """Constraints of the joint columns, in the parties' order: directions, or none; groups."""
    counts = [len(categorical[party]) for party in constraints]
    firsts = dict(zip(constraints, np.cumsum([0, *counts[:-1]]).tolist(), strict=True))
    joint_ids = dict[str, int]()  # by the names in the run config
    for number, name in enumerate(wanted.names):
        columns = {party: int(each.named[number]) for party, each in constraints.items()}
        owners = [party for party, column in columns.items() if column >= 0]
        if len(owners) != 1:
            got = ", ".join(owners) if owners else "no party that shares its names"
            raise ConfigError(
                f"{BOTH} must name columns of one party that shares its names "
                f"(share-column-names), got {name} of {got}; an owner that does not can "
                "constrain its columns in its node config"
            )
        joint_ids[name] = firsts[owners[0]] + columns[owners[0]]
    directions, groups = [0] * sum(counts), list[list[int]]()
    for party, of_party in constraints.items():
        first = firsts[party]
        directions[first : first + len(of_party.directions)] = of_party.directions.tolist()
        groups += [sorted(first + column for column in group) for group in of_party.groups]
    for name, direction in wanted.directions.items():
        if directions[joint_ids[name]] not in (0, direction):
            rule = "must match the node config of its owner"
            raise ConfigError(f"monotone-constraints of {name} {rule}, got {direction}")
        directions[joint_ids[name]] = direction
    groups += [sorted({joint_ids[name] for name in group}) for group in wanted.groups]
    set_directions = directions if any(directions) else []
    has_categories = any(any(flags) for flags in categorical.values())
    try:
        check_without_categories(set_directions, has_categories)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return set_directions, groups


def apply_local_splits(
    store: Store,
    trees: Places,
    nodes: Places,
    columns: Ints,
    first_rights: Ints,  # lowest bin that goes right; 0 sends only missing values left
    defaults: npt.NDArray[np.uint8],  # 1 where missing values go left
    sets: CategorySets,  # one per split by categories, in order
) -> tuple[list[Bits], Ints]:
    """Store splits of local columns; returns the rows they send left, and their record ids."""
    is_categorical = np.asarray(store["set_widths"])[columns] > 0
    # The active party knows the categories of training rows only; all others go left.
    widths = np.where(is_categorical, np.asarray(store["n_categories"])[columns], 0)
    sets = sets.widened(widths[is_categorical])
    edges, offsets = store["edges"], store["offsets"]
    thresholds = np.array(
        [
            edges[offsets[column] + n_left - 1] if n_left else store["minima"][column]
            for column, n_left in zip(columns, np.where(widths, 0, first_rights), strict=True)
        ],
        dtype=np.float32,
    )
    slots, sizes = slots_of(store["nodes"], trees, nodes)
    sides = sides_of(
        store["values"], columns, thresholds, defaults, slots, sizes, set_numbers(widths), sets
    )
    lookup = store.record(Lookup, "lookup")
    store.put("lookup", lookup.plus(Lookup.of(columns, thresholds, defaults, widths, sets)))
    first = len(lookup.columns)
    return np.split(sides, np.cumsum(sizes)[:-1]), np.arange(first, first + len(columns))


def nodes_after(
    nodes: Nodes, trees: Places, split: Places, lefts: Places, sent: Sequence[Sent]
) -> Nodes:
    """Rows at the children of a level's splits; ``nodes`` is int32, shape (n_trees, n_rows)."""
    slots, sizes = slots_of(nodes, trees, split)
    sides: dict[int, Bits] = {}
    for sender, places, bits in sent:
        indices = places.tolist()
        if any(not 0 <= index < len(sizes) or index in sides for index in indices):
            raise ProtocolError(sender, "Partition", "bits_of", "must be its splits, each once")
        sent_sides = sent_bits(sender, "Partition", "bits", bits, sizes[places].tolist())
        sides |= dict(zip(indices, sent_sides, strict=True))
    if len(sides) != len(sizes):
        raise ProtocolError(sent[0][0], "Partition", "bits_of", "must leave no split out")
    went_left = np.concatenate([np.empty(0, dtype=bool), *(sides[n] for n in range(len(sizes)))])
    return move_rows(nodes, lefts, slots, np.cumsum(sizes) - sizes, went_left)


# The order of requests at each role: phase -> request -> the phases that may follow it.
SET_UP = "set up"  # columns are binned; the others' bins are to come
TO_WALK = "to walk"  # the same, and rows are traversing the initial model
WALKED = "walked"  # all rows are at its leaves
ENCRYPTING = "encrypting"  # some of a round's gradients are sent
BEGUN = "begun"  # all of them are sent
CHOSEN = "chosen"  # a level's splits are chosen; their owners send sides with the next sums
GROWN = "grown"  # so are those of the last level
IDLE = "idle"  # no round is in progress, and none follows
TAKING = "taking"  # receiving a round's gradients, block by block
SUMMED = "summed"  # a level's sums are sent
SPLIT = "told"  # (a name on disk) a level's splits are received, and the local ones made

ACTIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP, TO_WALK)},
    TO_WALK: {WalkRequest: (TO_WALK, WALKED)},
    WALKED: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    SET_UP: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    ENCRYPTING: {EncryptRequest: (ENCRYPTING, BEGUN), FinishRequest: (FINISHED,)},
    BEGUN: {SplitRequest: (CHOSEN, GROWN), FinishRequest: (FINISHED,)},
    CHOSEN: {SplitRequest: (CHOSEN, GROWN)},
    GROWN: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    IDLE: {FinishRequest: (FINISHED,)},
}
PASSIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP,)},
    SET_UP: {
        AnswerRequest: (SET_UP,),
        TakeRequest: (TAKING,),
        SumRequest: (SUMMED,),
        HandOverRequest: (FINISHED,),
    },
    TAKING: {TakeRequest: (TAKING,), SumRequest: (SUMMED,)},
    SUMMED: {
        TakeRequest: (TAKING,),
        SumRequest: (SUMMED,),
        PartitionRequest: (SPLIT, SUMMED),
        HandOverRequest: (FINISHED,),
    },
    SPLIT: {TakeRequest: (TAKING,), SumRequest: (SUMMED,), HandOverRequest: (FINISHED,)},
}


def role_of(site: Site) -> tuple[str, Table]:
    """A site's role and its table."""
    return ("the active party", ACTIVE) if is_active(site) else ("a passive party", PASSIVE)
