"""Sums of integers in place of single updates: the setting ``secure-aggregation``.

A silo uploads its step d_i from what all silos received, cut to the length C, times its share w_i, in fixed point:

    q_i = round(s w_i min(1, C / ||d_i||) d_i)  mod 2^32,   s = (2^31 - N) / C,   w_i = n_i / (n_1 + ... + n_N)

The server adds the q_i mod 2^32 and divides by s and by the shares of the silos that answered. No sum wraps: it is at
most 2^31 - N + N/2. Its largest error is N C 2^-32, from rounding. The method aggregates one update, the mean. All
vectors of a silo, BatchNorm statistics too, travel as one and have the same share. n_i is 1, or the silo's number of
samples, at most ``weight-cap`` times the median and half of all: each hospital computes it too, so that a server cannot
choose weights that show single updates. What a federation file agrees on is not used. With ``secure-group`` a sum has
all silos of a group or none, and they weigh the same (``partitions/common/sum_weights.py``).

C is ``secure-clip``, or a power of two by the length of what was received. A longer step is cut at the silo, which
bounds a silo as ``robust = clip`` does. A mean step longer than C is impossible: a silo sent nonsense, and nothing
shows which one. That round changes no model, and the third in a row ends the run.

Cutting: norm bounding (Sun et al. 2019, arXiv 1911.07963). Fixed point and masks: Bonawitz et al., CCS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from logging import WARNING
from typing import Any

import torch
from flwr.app import Message
from flwr.common import log
from torch import Tensor
from torch.linalg import vector_norm

from models.flat import gather, scatter
from models.layout import Layout, size_of
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.common.messages import INTEGERS, MASKED, SHARE
from partitions.common.sum_weights import (
    FEWEST,
    comparison_fault,
    groups_of,
    labels_of,
    weights_in_sum,
    whole,
)
from strategies.base.aggregation.bounded import UpdateBounds
from strategies.base.aggregation.spread import gather_sums, spread
from strategies.base.info import MethodInfo, Sums
from strategies.base.settings import RULES, Common
from strategies.base.state import BUFFERS, GLOBAL
from strategies.base.transport.error_feedback import base_of
from strategies.base.transport.payload import Model, Update, silos_of, tensor_of

STRIP = 1 << 14  # numbers that stay in a processor's cache
TIMES = 4.0  # C, in lengths of what was received, before it becomes a power of two
IMPOSSIBLE = 3  # rounds in a row whose sum is impossible
# The values that other settings need with secure sums, and why.
NEEDED: Mapping[str, tuple[object, str]] = {
    "wire-dtype": ("float32", "a step travels as integers"),
    "wire-sparse": (False, "it shows which numbers a silo changed"),
    "participation": (1.0, "sums of other silos in each round show single silos"),
    "late-joiners": ("", "the sums before and after a silo joins show its update"),
    "keep-models": ("none", "the server would receive single models"),
    "checkpoint-every": (1, "a repeated round over other silos shows single updates"),
}


def check_secure(info: MethodInfo, common: Common, settings: Any) -> None:
    """Raise UserError if the method or a setting does not fit secure sums. ``own``: the method's settings."""
    if not common.secure_aggregation:
        for key, default in (("clip", 0), ("group", 1), ("robust", "none")):
            if (value := getattr(common, f"secure_{key}")) != default:
                shown = value if isinstance(value, str) else f"{value:g}"
                raise UserError(f"secure-{key} = {shown}: it needs secure-aggregation = true")
        return
    name = "secure-aggregation = true"
    sums = info.aggregation.sums
    if not isinstance(sums, Sums):
        raise UserError(f"{name}: not with {info.name}: {sums}")
    for key, values in sums.at.items():
        if (value := getattr(settings, key)) not in values:
            raise UserError(
                f"{info.name}.{key} = {value}: with {name} it must be {values[0]}: {sums.otherwise}"
            )
    for key, (needed, reason) in NEEDED.items():
        if (value := getattr(common, key.replace("-", "_"))) != needed:
            shown, text = str(value).lower(), str(needed).lower() or "empty"
            raise UserError(f"{key} = {shown}: with {name} it must be {text}: {reason}")
    training, grouped = common.silos - len(common.held_out), common.secure_robust == "groups"
    if grouped and (fault := comparison_fault(training, common.secure_group)):
        raise UserError(fault)
    if grouped and common.robust == "none":
        raise UserError(
            "secure-robust = groups: with robust = none the server would open each group's sum, and compare nothing"
        )
    if common.robust in RULES and not grouped:
        raise UserError(
            f"robust = {common.robust}: with {name} no silo can be compared with others; use screen, clip or none: "
            "each silo cuts its own step (secure-clip); or secure-robust = groups"
        )
    if training < FEWEST:
        raise UserError(
            f"silos = {common.silos}: {name} needs at least {FEWEST} that train, here are {training}"
        )


# ---- Shares and lengths, the same at both ends ---------------------------------------------------------------------


def weights_of(strategy: Any, silos: Collection[str]) -> dict[str, int]:
    """Return n_i of the silos of a round, sorted by name: samples, or 1 where the method weights silos equally.

    A round that is repeated after its masks were asked for has the weights of then.
    """
    if before := strategy.plan.weights:
        return {silo: before[silo] for silo in sorted(silos)}
    setting = sums_setting(type(strategy))
    weights = strategy.info.aggregation.sums.weights
    by = getattr(strategy.settings, setting) if setting else weights
    samples = {silo: max(strategy.silos[silo].n_train, 1) for silo in sorted(silos)}
    return weights_in_sum(by, samples, strategy.common.weight_cap, labels_in(strategy))


def sums_setting(method: Any) -> str:
    """Return the method's own setting that tells how its sums weigh silos; empty: :class:`Sums` tells it."""
    sums, names = method.info.aggregation.sums, {f.name for f in fields(method.Settings)}
    known = ("average", sums.weights) if isinstance(sums, Sums) else ()
    return next((name for name in known if name in names), "")


def labels_in(strategy: Any) -> Mapping[str, str]:
    """Return each silo's group. Raises UserError if there are too few for one."""
    size, silos = strategy.common.secure_group, strategy.silos
    if not (labels := strategy.plan.groups or labels_of(groups_of(silos, size))):
        raise UserError(
            f"secure-group = {size}: needs at least so many silos that train, here are {len(silos)}"
        )
    return labels


def sums_of(strategy: Any, silos: Collection[str]) -> list[list[str]]:
    """Return the silos of each sum that is opened: all of these, or with ``secure-robust = groups`` each group."""
    if strategy.common.secure_robust == "none":
        return [[*silos]]
    return [label.split("\n") for label in dict.fromkeys(labels_in(strategy)[s] for s in silos)]


def scale(silos: int, clip: float) -> float:
    """Return s, the integers per unit."""
    return (2**31 - silos) / clip


def bounds(
    info: MethodInfo,
    common: Common,
    received: Mapping[str, Model],
    name: str,
    size: int,
    parts: Sequence[slice] = (),
) -> tuple[Tensor | None, float]:
    """Return the point that a vector is a step from (None: from 0), and C, at both ends from what all received.

    ``parts``: the layers that the method shares. C is a power of two, so that both compute the same number.
    """
    whole, centre = received.get(GLOBAL) if name != BUFFERS else None, None
    if not info.kinds[name].step:
        centre = base_of(received, name, size)
        fits = parts and size_of(parts) == size
        if centre is None and whole and fits and parts[-1].stop <= len(whole.vector):
            centre = gather(whole.vector, parts)
    if common.secure_clip:
        return centre, common.secure_clip
    of = whole.vector if centre is None and whole else centre
    length = 0.0 if of is None else float(vector_norm(of, dtype=torch.float64))
    # A variance starts at 1; and nothing is known of numbers that are no step
    least = math.sqrt(size) if name == BUFFERS or of is None else 1.0
    return centre, 2.0 ** math.ceil(math.log2(TIMES * max(length, least, 1.0)))


# ---- The silo's half -----------------------------------------------------------------------------------------------


def integers_of(
    info: MethodInfo,
    common: Common,
    vectors: Mapping[str, Tensor],
    received: Mapping[str, Model],
    config: Mapping[str, Any],
    parts: Sequence[slice] = (),
) -> tuple[Tensor, dict[str, float]]:
    """Return a silo's vectors as one vector of integers, int32, and by how much each step was cut, at most 1.

    ``config``: of its message, with its share and N. Raises UserError for a share with which a sum could wrap.
    """
    share, silos = config.get(SHARE), config.get("participants")
    if not (
        isinstance(share, float)
        and isinstance(silos, int)
        and 0 < share < 1
        and silos >= FEWEST
    ):
        raise UserError(
            f"the message's share {share!r:.40} of {silos!r:.40} silos is not between 0 and 1, of {FEWEST} or more"
        )
    result, cuts = [], dict[str, float]()
    for name, vector in vectors.items():
        if name in info.summed_also:
            weight = 1 / silos if info.summed_also[name] else share
            result.append(spread(vector.double() * weight))
            continue
        centre, clip = bounds(info, common, received, name, len(vector), parts)
        step = vector.to(torch.float64, copy=True)
        if centre is not None:
            # The whole centre in float64 would be new memory
            for at in range(0, len(step), STRIP):
                step[at : at + STRIP] -= centre[at : at + STRIP]
        cuts[name] = cut = clip / max(float(vector_norm(step)), clip)
        result.append(step.mul_(scale(silos, clip) * cut * share).round_().int())
    return torch.cat(result) if len(result) > 1 else result[0], cuts


# ---- The server's half ---------------------------------------------------------------------------------------------


def with_sum(reply: Message, update: Update, size: int) -> Update:
    """Return an update with the integers of its reply, int32; raise DataError if they are not ``size`` numbers."""
    try:
        record: Any = reply.content[MASKED]
        integers = tensor_of(record[INTEGERS])
        if len(record) > 1 or integers.dtype != torch.uint32 or integers.shape != (size,):
            raise DataError(f"{integers.dtype} of shape {tuple(integers.shape)}")
    except Exception as error:
        reason = error if isinstance(error, DataError) else type(error).__name__
        raise DataError(f"its reply has no '{MASKED}' of {size} integers ({reason})") from error
    return replace(update, vectors={INTEGERS: integers.view(torch.int32)}, bytes=4 * size)


def add_integers(vectors: Sequence[Tensor]) -> Tensor:
    """Return the sum of integers mod 2^32, int32, whose sums wrap."""
    total = vectors[0].clone()
    for vector in vectors[1:]:
        total += vector
    return total


def mean_of(strategy: Any, updates: Sequence[Update], names: Sequence[str]) -> list[Update]:
    """Return the mean of updates of integers, as one update of these vectors; empty if the sum is impossible.

    With ``secure-robust = groups`` it is that of the groups' means, which ``robust`` has compared.
    """
    if names:
        updates = _of_whole_groups(strategy, updates)
    silos = silos_of(updates)
    sums = sums_of(strategy, silos) if names else [silos]
    grouped = bool(names) and strategy.common.secure_robust != "none"
    if not silos or (grouped and len(sums) < FEWEST):
        strategy.unmask(torch.empty(0), ())
        why = (
            f"of {FEWEST} groups to compare, {len(sums)} are"
            if grouped
            else "no group of silos is"
        )
        log(WARNING, "round %d: %s whole; it changes no model", strategy.round, why)
        return []
    totals = _totals(strategy, updates, sums) if names else [torch.empty(0)]
    means, line = list[Update](), ""
    for of, total in zip(sums, totals, strict=True):
        try:
            means.append(_mean_of_sum(strategy, of, names, total))
        except DataError as error:
            line = str(error)
            for silo in of if grouped else ():
                strategy.reject(silo, line)
    if not means:
        return _impossible(strategy, line)
    strategy.state.numbers.pop("impossible", None)
    if grouped:
        # A hospital knows that it is in a sum, and not what `robust` made of it: its state goes on from there
        strategy.state.counted = strategy.state.counted | dict.fromkeys(silos, strategy.round)
        if not (means := _compared(strategy, means)):
            return []
    kept = silos_of(means)
    samples = sum(u.samples for u in updates if u.silo in kept)
    [first, *others] = means
    vectors = dict(first.vectors)
    for name in vectors if others else ():
        weights = [u.samples * len(u.silos) for u in means]
        vectors[name] = strategy.mean([u.vectors[name] for u in means], weights)
    if BUFFERS in vectors:
        vectors[BUFFERS] = _without_negative(
            vectors[BUFFERS], strategy.layout, strategy.shared_buffers()
        )
    return [Update("", samples, vectors, {}, {}, silos=tuple(kept))]


def _of_whole_groups(strategy: Any, updates: Sequence[Update]) -> list[Update]:
    kept = whole(silos_of(updates), labels_in(strategy))
    for silo in silos_of(updates):
        if silo not in kept:
            strategy.reject(silo, "a silo of its group is missing (secure-group)")
    return [update for update in updates if update.silo in kept]


def _totals(
    strategy: Any, updates: Sequence[Update], sums: Sequence[Sequence[str]]
) -> list[Tensor]:
    """Return the sums of integers, without masks, of these silos each."""
    sent = {update.silo: update.vectors[INTEGERS] for update in updates}
    first, *others = [add_integers([sent[silo] for silo in of]) for of in sums]
    # One sum is not copied
    added = torch.stack([first, *others]) if others else first[None]
    return [*strategy.unmask(added, silos_of(updates))]


def _mean_of_sum(
    strategy: Any, silos: Sequence[str], names: Sequence[str], total: Tensor
) -> Update:
    """Return the mean of these silos' vectors, by the sum of their integers. Raises DataError if it is impossible."""
    common, info = strategy.common, strategy.info
    weights, received = weights_of(strategy, strategy.sent), strategy.sent[silos[0]]
    share = sum(weights[silo] for silo in silos) / sum(weights.values())
    parts = strategy.shared_parts() if hasattr(strategy, "shared_parts") else ()
    sizes, vectors = [strategy.upload_size(name, silos[0]) for name in names], {}
    for name, integers in zip(names, torch.split(total, sizes), strict=True):
        if name in info.summed_also:
            part = len(silos) / len(weights) if info.summed_also[name] else share
            vectors[name] = (gather_sums(integers) / part).float()
            continue
        centre, clip = bounds(info, common, received, name, len(integers), parts)
        step = integers / (scale(len(weights), clip) * share)
        if (length := float(vector_norm(step))) > 1.001 * clip:
            raise DataError(
                f"the mean step of '{name}' has the length {length:.3g}, over C = {clip:.3g}: "
                "a silo sent no step, and a sum does not show which one"
            )
        mean = step if centre is None else centre.to(step.device).double() + step
        vectors[name] = mean.float()
    return Update(", ".join(silos), weights[silos[0]], vectors, {}, {}, silos=tuple(silos))


def _compared(strategy: Any, means: list[Update]) -> list[Update]:
    """Return the groups' means within the bounds of ``robust``, as if each were a silo's; note it at each silo."""
    bounds_of_groups, received = UpdateBounds(strategy), strategy.sent[means[0].silos[0]]
    parts = strategy.shared_parts() if hasattr(strategy, "shared_parts") else ()
    bounds_of_groups.sent = {u.silo: received for u in means}
    bounds_of_groups.centre = lambda name, u: (
        None
        if name in strategy.info.summed_also
        else bounds(
            strategy.info, strategy.common, received, name, len(u.vectors[name]), parts
        )[0]
    )
    kept = bounds_of_groups.within(means)
    for u in means:
        for noted in (strategy.bounded, strategy.rejected):
            if about := noted.pop(u.silo, None):
                noted |= dict.fromkeys(u.silos, about)
    return kept


def _impossible(strategy: Any, line: str) -> list[Update]:
    count = strategy.state.numbers.get("impossible", 0) + 1
    line = f"round {strategy.round}: {line}"
    if count == IMPOSSIBLE:
        raise RunFailedError(f"{line}; this is the round number {count} in a row")
    log(WARNING, "%s; the round changes no model", line)
    strategy.state.numbers["impossible"] = count
    return []


def _without_negative(vector: Tensor, layout: Layout, parts: Sequence[slice]) -> Tensor:
    """Return BatchNorm statistics of these parts with variances of at least 0, below which rounding may move them."""
    whole = scatter(vector.new_zeros(layout.buffer_size), tuple(parts), vector)
    for entry in layout.buffers:
        if entry.name.endswith("running_var"):
            whole[entry.start : entry.stop].clamp_(min=0)
    return gather(whole, parts)
