"""What a site's node config lets leave: checks of requests, replies and numbers of rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.scratch import is_large
from fedapp.errors import ConfigError, DataError, check_rules
from fedapp.messages.fields import OWN_OR_SUMS, Message, Request
from fedapp.messages.handshake import Plan
from fedapp.messages.methods import Memory, all_methods, method_of, senders_of
from fedapp.process import free_memory
from fedapp.site.settings import BOOSTED, FEWEST_IN_SUMS, NODE_KEYS, SUBSET_NAMES, SiteConfig, log
from fedapp.trees.objective import (
    OF_TIMES,
    counted_equally,
    has_quantile_leaves,
    is_of_rows,
    is_ranking,
    is_survival,
)


def group_of(kind: str) -> str:
    """The group of a message kind, ``<category>.<group>[_<name>]``."""
    action = kind.partition(".")[2]
    return action.rpartition("_")[0] or action


def check_policy(config: SiteConfig, kind: str, method: str) -> None:
    """Check that the site allows the run's method, and that the method sends such messages.

    A server that declares one method and runs another can use only the messages both share. A
    method must not ignore a setting of the node config that protects the site.
    """
    shared_by = senders_of(group_of(kind))
    owner = group_of(kind).replace("_", "-")
    wanted = {method} if shared_by else {method, owner}
    if not config.simulated and (refused := wanted - config.allowed):
        way = f"set allow in the node config of {config.name}, or see fedapp site init --policy"
        allowed = ", ".join(sorted(config.allowed)) or f"none: {way}"
        got = ", ".join(sorted(refused))
        raise ConfigError(f"strategy must be one that the site allows ({allowed}), got {got}")
    declared = method_of(method)
    sends = declared and declared.family in shared_by if shared_by else method == owner
    if not sends:
        senders = " or ".join(sorted(shared_by)) if shared_by else owner
        raise ConfigError(f"strategy must be {senders} to send {kind}, got {method}")
    if shared_by and declared and declared.describes and not kind.startswith("query."):
        # What trains shares these: a server must not have a model of its own scored.
        raise ConfigError(f"strategy must be one that trains to send {kind}, got {method}")
    if declared and declared.uses_model:
        return
    if (config.monotone_constraints or config.interaction_constraints) and not (
        declared and declared.holds_columns
    ):
        rule = "must be empty in the node config, or strategy one that reads them there"
        raise ConfigError(
            f"monotone-constraints and interaction-constraints {rule} (secureboost), got {method}"
        )
    if config.least_bin_rows and not (declared and declared.merges_bins):
        rule = "must be 0 in the node config, or strategy one that merges bins (pax)"
        raise ConfigError(f"least-bin-rows {rule}, got {method}")
    if config.label_epsilon and not (declared and declared.hides_labels):
        rule = "must be 0 in the node config, or strategy one that randomises labels"
        raise ConfigError(f"label-epsilon {rule} (secureboost, federated-forest), got {method}")
    if config.base_margin and not (declared and declared.takes_margins):
        rule = "must be empty in the node config, or strategy one that reads it there"
        way = "the column may be a feature, or excluded with drop-columns"
        raise ConfigError(f"base-margin {rule} ({BOOSTED}), got {method}; {way}")


def check_message(config: SiteConfig, message: Message, sender: str, method: str = "") -> None:
    """Check that a request or a letter does not go beyond the limits of the site.

    `sender` is the site itself for what comes from the coordinator; `method` is that of the run.
    """
    objective = message.read("objective")
    check_event(config, objective)
    if has_quantile_leaves(objective):
        _check_quantiles(config, objective, method)
    if config.simulated:
        return
    of = "" if sender == config.name else f" of {sender}"
    for name, trials in message.for_trials.items():
        value, rule = getattr(message, name), f"be {trials.safe}, or allow-insecure true in the"
        fits = config.allows_insecure or not trials.covers(value)
        setting = f"{name.replace('_', '-')}{of}"
        check_rules((setting, fits, f"{rule} node config", str(value).lower()))
    for name, limit in message.limits.items():
        value, most = getattr(message, name), getattr(config, NODE_KEYS[limit.setting])
        rule = f"be <= {most} ({limit.setting} in the node config of {config.name})"
        check_rules((f"{name.replace('_', '-')}{of}", value <= most, rule, value))


def _check_quantiles(config: SiteConfig, objective: str, method: str) -> None:
    """Check that a method computes leaves that are quantiles, and that the site allows it."""
    declared = method_of(method)
    if declared is None or not declared.fits_leaves:
        way = f"whose leaves are sums at {config.name}, or strategy pax or secureboost"
        raise ConfigError(f"objective must be one {way}, got {objective}")
    of_rows = declared.family == "horizontal"
    if of_rows and config.weight:
        rule = f"must be empty at {config.name} for {objective} with {method}"
        way = "weighted rows have quantiles in secureboost, or drop-columns excludes the column"
        raise ConfigError(f"weight {rule}: {way}; got {config.weight!r}")
    if of_rows and config.least_bin_rows:
        rule = f"must be 0 at {config.name} for {objective}, whose leaves are one row's residual"
        way = "reg:pseudohubererror has leaves that are sums"
        raise ConfigError(f"least-bin-rows {rule}: {way}; got {config.least_bin_rows}")


def check_event(config: SiteConfig, objective: str) -> None:
    """Check the objective of a message, if it names one, against labels that are times or ranks."""
    if not objective:
        return
    if config.event and not is_survival(objective):
        rule = f"must be {OF_TIMES} for {config.name}, whose label is a time with an event column"
        raise ConfigError(f"objective {rule} (event), got {objective}")
    if config.qid and not is_ranking(objective):
        rule = f"must be rank:ndcg or rank:pairwise for {config.name}, whose rows are of queries"
        raise ConfigError(f"objective {rule} (qid), got {objective}")
    if config.label and config.weight and (counted := counted_equally(objective)):
        rule = f"must be empty at {config.name} for {objective}"
        raise ConfigError(f"weight {rule}, in which all {counted} count alike")
    if is_ranking(objective) and config.label and not config.qid:
        rule = f"must name the column of queries at {config.name}"
        raise ConfigError(f"qid {rule} for {objective}, got none")
    if config.label_epsilon and (has_quantile_leaves(objective) or not is_of_rows(objective)):
        rule = f"must be 0 in the node config of {config.name}"
        raise ConfigError(f"label-epsilon {rule} for {objective}: drawn labels do not fit it")


def check_leaving(config: SiteConfig, method: str, request: Request, leaves: str = "") -> None:
    """Check that a site that discloses only (noised) sums takes part in no other run.

    `leaves` is what the request discloses by the plan of its run, once that is known.
    """
    leaves, declared = leaves or request.leaves, method_of(method)
    if declared is None or declared.family != "horizontal":
        return
    plain = isinstance(request, Plan) and request.aggregation != "secure"
    if config.least_parties and (plain or leaves == "own"):
        raise ConfigError(
            f"aggregation must be secure for {config.name}, whose node config has least-parties "
            f"({config.least_parties}): its sums may leave it only added to those of others; "
            f"got {method} without"
        )
    if config.least_parties and isinstance(request, Plan):
        check_parties(config, request.parties)
    most = f"{config.run_epsilon:g}"
    got = f"{method} without"
    fits = leaves not in ("own", "sums", OWN_OR_SUMS)
    if isinstance(request, Plan):
        fits = 0 < request.epsilon <= config.run_epsilon
        got = f"{request.epsilon:g}"
    if config.run_epsilon and not fits:
        raise ConfigError(
            f"privacy.epsilon must be > 0 and <= {most} for {config.name}, whose node config has "
            f"run-epsilon ({most}): what it discloses of its rows has noise; got {got}"
        )


def check_parties(config: SiteConfig, names: Sequence[str]) -> None:
    """Check that a sum over these parties hides the site's part; raises ConfigError."""
    fewest = config.fewest_parties
    if len(set(names)) < fewest:
        rule = f"must be >= {fewest} (least-parties of {config.name})"
        way = "; least-parties=2 lets two sum, where whoever sees the sum and one of them sees both"
        raise ConfigError(f"parties {rule}, got {len(set(names))}{way if fewest > 2 else ''}")
    if len(set(names)) == FEWEST_IN_SUMS and not config.simulated:
        log.warning(
            "sums over two parties: together, the coordinator and the other party know this site's"
        )


def check_threshold(config: SiteConfig, n_parties: int, threshold: int) -> None:
    """Check that sums over the remaining parties hide the site's part when a party is lost.

    A coordinator that reports different losses to different parties gets sums over at least
    2 ``threshold`` - ``n_parties`` of them (see ``fedapp.site.sums``). 0: no party may be lost.
    """
    if not threshold:
        return
    if not config.simulated and not config.least_parties:
        rule = f"must be 0 with aggregation=secure, or least-parties set by {config.name}"
        raise ConfigError(f"min-parties {rule} in its node config, got {threshold}")
    fewest = -(-(n_parties + config.fewest_parties) // 2)
    if not fewest <= threshold <= n_parties:
        rule = f"must be {fewest} to {n_parties} of {n_parties} parties, or 0, for {config.name}"
        least = f"least-parties is {config.fewest_parties} there"
        raise ConfigError(f"min-parties {rule} with aggregation=secure ({least}), got {threshold}")


def check_subsets(fewest: int, n_rows: Mapping[str, int], rule: str) -> None:
    """Check that no subset has so few rows that its sums reveal single rows.

    Validation and test rows may also be none. `rule`, the text of the DataError, has places for the
    fewest rows, the subset and its rows.
    """
    for subset, count in n_rows.items():
        if count < fewest and (count or subset == "train"):
            way = "" if subset == "train" else f"; {subset}-fraction=0 holds none back"
            raise DataError(rule.format(fewest, SUBSET_NAMES[subset], count) + way)


def lacking_memory(needed: Memory | None, n_rows: int, n_columns: int, n_trees: int = 0) -> str:
    """Rule that free memory breaks where a table that is larger than memory is copied; else ""."""
    n_bytes = needed.of(n_rows, n_columns, n_trees) if needed else 0
    if not is_large(n_rows, n_columns) or n_bytes <= (free := free_memory()):
        return ""
    gib, of_free = (f"{size / 2**30:.1f} GiB" for size in (n_bytes, free))
    return f"must have {gib} free for {n_rows:,} rows x {n_columns:,} columns, got {of_free}"


def check_memory(config: SiteConfig, method: str, plan: Plan, n_rows: int, n_columns: int) -> None:
    """Check that the method reads tables by parts, or memory has room for a copy of this one."""
    declared, n_trees = method_of(method), plan.trees * len(plan.parties)
    if declared and (rule := lacking_memory(declared.memory, n_rows, n_columns, n_trees)):
        others = [
            name
            for name, other in all_methods().items()
            if other.trains and other.family == declared.family and not other.memory
        ]
        way = f": {', '.join(others)} read a table by parts" if others else ""
        raise ConfigError(f"memory of {config.name} {rule}, as {method} copies them{way}")


def check_delta(config: SiteConfig, delta: float, n_train: int) -> None:
    """Check that a run's delta promises something to each of the site's training rows."""
    if delta * n_train >= 1:
        rule = f"must be below 1 / {n_train}, the training rows of {config.name}"
        raise ConfigError(f"privacy.delta {rule}, got {delta:g}")


def check_sample_size(config: SiteConfig, n_rows: int, n_drawn: int) -> int:
    """Number of training rows that a round draws: all, if it would leave out too few.

    Sums over few rows reveal them, and so does the difference of sums with and without a few.
    `n_rows` have a weight, the run's settings draw `n_drawn` of them. Raises ConfigError if that is
    below ``min_rows``.
    """
    if n_drawn < config.min_rows:
        raise ConfigError(
            f"subsample (or secureboost.goss) must draw at least {config.min_rows} training rows a "
            f"round (min-rows of {config.name}), got {n_drawn}; a larger share draws more"
        )
    return n_rows if _leaves_few(config, n_rows - n_drawn) else n_drawn


def check_draws(config: SiteConfig, method: str, counts: npt.NDArray[np.uint8]) -> None:
    """Check that no tree of a forest draws or leaves out too few rows; ``counts`` are by tree."""
    drawn = np.count_nonzero(counts, axis=1)
    fewest = min(drawn.min(), counts.shape[1] - drawn.max())
    if fewest < config.min_rows:
        rule = f"must be false where a tree draws or leaves out fewer than {config.min_rows} "
        rule += f"training rows (min-rows of {config.name}), got true and {fewest}"
        raise ConfigError(f"{method}.bootstrap {rule}")


def check_share(config: SiteConfig, weights: npt.NDArray[Any], share: float) -> float:
    """Share of the rows that XGBoost draws: 1 if a round may leave out too few.

    XGBoost draws each row with this probability. The bound, four standard deviations above the
    mean, is exceeded in 1 of 30,000 rounds. Raises ConfigError as ``check_sample_size``.
    """
    n_rows = int(np.count_nonzero(weights))
    n_drawn = int(share * n_rows)
    check_sample_size(config, n_rows, n_drawn)
    most = n_drawn + 4 * math.sqrt(n_drawn * (1 - share))
    return 1.0 if _leaves_few(config, n_rows - most) else share


def _leaves_few(config: SiteConfig, n_left: float) -> bool:
    """Whether the rows left out of a round are so few that sums would reveal them."""
    return n_left < (config.fewest_counted or -math.inf)
