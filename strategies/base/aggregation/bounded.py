"""Bounds on the influence of one silo in a round: the setting ``robust`` and its two companions.

``robust.py`` beside this file defines the rules. A step is measured from what the silo was sent,
unless a method overrides :meth:`PersonalizedStrategy.centre`; its means are :meth:`PersonalizedStrategy.mean`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from logging import WARNING
from typing import Any

import torch
from flwr.common import log
from torch import Tensor
from torch.linalg import vector_norm

from partitions.common.errors import UserError
from partitions.common.memory import clear_pages
from strategies.base.info import MethodInfo
from strategies.base.robust import (
    breakdown_point,
    clip_step,
    estimate,
    excess,
    find_diverging,
    find_opposing,
    gram_of,
    krum_choice,
    length_limits,
    opposable,
    outliers,
    plausible_counts,
    tolerated_faults,
    units,
)
from strategies.base.settings import ATTACKER_RULES, KRUM, RULES, Common
from strategies.base.state import GLOBAL
from strategies.base.transport.data_summary import read_agreed
from strategies.base.transport.payload import Model, Update, silos_of

PART = 1 << 23  # numbers of a step that are in float64 at a time
# Of them, so many are subtracted at a time. More are divided over threads, which wait for each other: on a busy machine
# this took 13 times the CPU.
PIECE = 1 << 15


def check_robust(info: MethodInfo, common: Common) -> None:
    """Raise UserError if the method has no mean for the rule, or has too few silos for the number of attackers."""
    rule, f, n = common.robust, common.robust_attackers, common.silos
    if common.secure_robust == "groups":
        n = (n - len(common.held_out)) // common.secure_group
    whole = not any(kind.bounded for kind in info.uploads.values())  # nothing has a length
    if info.receives == "nothing" or (rule not in RULES and not (whole and rule == "clip")):
        return
    if rule not in info.aggregation.robust:
        known = ", ".join(
            ("none", *(() if whole else ("clip",)), "screen", *info.aggregation.robust)
        )
        raise UserError(
            f"robust = {rule}: {info.name} takes no mean for which it could stand, or declares none: {known} are for it"
        )
    if rule in ATTACKER_RULES and breakdown_point(rule, n, f) < f:
        least = 2 * f + (3 if rule in KRUM else 1)
        what = "silos" if common.secure_robust == "none" else "groups of silos"
        raise UserError(
            f"robust-attackers = {f}: {rule} needs at least {least} {what} for that, here are {n}"
        )


def steps_are_comparable(info: MethodInfo) -> bool:
    """Return whether honest steps have a common direction and length; if not, ``screen`` acts as ``clip``.

    Layers of different silos and duals have none. Such layers have no Krum either.
    """
    return (
        info.receives == "mean"
        and set(KRUM) <= set(info.aggregation.robust)
        and not info.aggregation.sends_duals
    )


def replacement(common: Common) -> Callable[[Sequence[Tensor]], Tensor] | None:
    """Return the function that replaces a mean of vectors (Σ,); None: the mean (with Krum, of the chosen silos)."""
    rule, f = common.robust, common.robust_attackers
    if rule not in RULES or rule in KRUM or (rule in ATTACKER_RULES and not f):
        return None
    return lambda vectors: estimate(rule, vectors, f)


class UpdateBounds:
    """One round's bounds on the replies to a strategy; silos that were bounded are in its ``bounded``."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.info: MethodInfo = strategy.info
        self.common: Common = strategy.common
        self.centre: Callable[[str, Update], Tensor | None] = strategy.centre
        # What each silo of the round trains from
        self.sent: Mapping[str, Mapping[str, Model]] = strategy.sent

    def within(self, updates: list[Update]) -> list[Update]:
        """Return the updates to aggregate: without diverging silos, and within the bounds of the setting ``robust``."""
        if not updates or not (
            names := [n for n in updates[0].vectors if self.info.kinds[n].bounded]
        ):
            return updates
        rule = self.common.robust
        screens = rule == "screen" and steps_are_comparable(self.info)
        amount = len(updates), len(silos_of(updates))
        gram = self._gram(names[0], updates) if screens and opposable(*amount) else None
        norms = self._norms(names, updates, gram)
        agreed = read_agreed(self.common.agreed).get("samples", {})
        # A lie must not widen the bound
        counts = plausible_counts({u.silo: u.samples for u in updates}, agreed)
        batches = {
            silo: math.ceil(count / self.common.batch_size) for silo, count in counts.items()
        }
        measures = units(norms, self._lengths(names, updates), batches)
        beyond = find_diverging(norms, measures)
        for silo, reason in beyond.items():
            self.strategy.reject(silo, reason)
        kept = [i for i, update in enumerate(updates) if update.silo not in beyond]
        updates = [updates[i] for i in kept]
        if screens and (f := tolerated_faults(len(updates), len(silos_of(updates)))):
            ratios = outliers(
                norms, measures, length_limits(norms, measures, self.common.robust_clip, f)
            )
            if gram is not None:
                updates = self._bound_opposing(names, updates, gram[kept][:, kept], ratios)
            return self._clip(updates, ratios, to=1.0)
        if rule in ("clip", "screen"):
            return self._clip(updates, outliers(norms, measures, self.common.robust_clip))
        if rule in KRUM and updates:
            updates = self._choose(names, updates)
        return [replace(u, samples=1) for u in updates] if rule in RULES else updates

    def _step(self, name: str, update: Update) -> Tensor:
        vector, centre = update.vectors[name], self.centre(name, update)
        return vector if centre is None else vector - centre.to(vector.device)

    def _gram(self, name: str, updates: Sequence[Update]) -> Tensor:
        """Return the inner products (n, n) of these silos' steps."""
        return gram_of(
            [u.vectors[name] for u in updates], [self.centre(name, u) for u in updates]
        )

    def _norms(
        self, names: Sequence[str], updates: Sequence[Update], gram: Tensor | None
    ) -> dict[str, dict[str, float]]:
        """Return the length of each silo's step, per vector; for the first vector from ``gram`` if it is given."""
        norms = {}
        for name in names:
            if gram is not None and name == names[0]:
                lengths = gram.diagonal().sqrt().tolist()
            else:
                vectors = [update.vectors[name] for update in updates]
                size = min(max(map(len, vectors)), PART)
                # One for all: fresh memory costs more than the sum
                buffer = vectors[0].new_empty(size, dtype=torch.float64)
                lengths = [self._length(name, update, buffer) for update in updates]
                # Beside the mean it would be a part of a model more
                if buffer.device.type == "cpu":
                    clear_pages(buffer.data_ptr(), buffer.nbytes)
            norms[name] = dict(zip((u.silo for u in updates), lengths, strict=True))
        return norms

    def _length(self, name: str, update: Update, buffer: Tensor) -> float:
        """Return the length of a silo's step, part by part in ``buffer``: the whole would be two models more."""
        vector, centre, lengths = update.vectors[name], self.centre(name, update), []
        for at in range(0, max(len(vector), 1), PART):
            part = vector[at : at + PART]
            step = buffer[: len(part)]
            if centre is None:
                step.copy_(part)
            else:
                # In pieces: the difference is float32 first
                whole = (part, centre[at : at + PART].to(part.device), step)
                pieces = (torch.split(tensor, PIECE) for tensor in whole)
                for ours, theirs, result in zip(*pieces, strict=True):
                    torch.sub(ours, theirs, out=result)
            lengths.append(vector_norm(step))
        return math.hypot(*torch.stack(lengths).tolist())

    def _lengths(self, names: Sequence[str], updates: Sequence[Update]) -> dict[str, float]:
        """Return, per vector, the (lower) median over silos of the length of the vector they were sent."""
        # By the id of a vector that was sent: most silos were sent the same
        known: dict[int, float] = {}
        sizes: dict[str, list[float]] = {}
        for name, update in itertools.product(names, updates):
            sent = self.sent.get(update.silo, {})
            if model := sent.get(name, sent.get(GLOBAL)):
                key = id(model.vector)
                known[key] = known[key] if key in known else float(model.vector.norm())
                sizes.setdefault(name, []).append(known[key])
            elif (
                centre := self.centre(name, update)
            ) is not None:  # may be temporary: its id may be reused
                sizes.setdefault(name, []).append(float(centre.norm()))
        return {name: statistics.median_low(lengths) for name, lengths in sizes.items()}

    def _bound_opposing(
        self,
        names: Sequence[str],
        updates: list[Update],
        gram: Tensor,
        ratios: Mapping[str, Mapping[str, float]],
    ) -> list[Update]:
        """Return the updates with steps against the others' shortened, and without those that are too long as well.

        ``gram`` (n, n): the inner products. ``ratios``: of the steps that are too long.
        """
        amount = len(updates), len(silos_of(updates))
        against, result = find_opposing(gram, opposable(*amount)), []
        for i, update in enumerate(updates):
            if i in against:
                (cosine, share), long = against[i], update.silo in ratios
                how = f"its step opposes the others' (cosine {cosine:.2f})"
                kind = "excluded" if long else "cut"
                self._bound(update.silo, 0.0 if long else share, f"{kind}: {how}")
                if long:
                    continue
                cut = self._cut(update, dict.fromkeys(names, 1.0), share)
                update = replace(update, vectors={**update.vectors, **cut})
            result.append(update)
        return result

    def _clip(
        self,
        updates: list[Update],
        ratios: Mapping[str, Mapping[str, float]],
        to: float | None = None,
    ) -> list[Update]:
        """Cut steps beyond the bound to ``to``, by default ``robust-clip``, times their measure.

        If the method takes no mean, which would dilute them, the silo is left out instead.
        """
        factor, result = self.common.robust_clip if to is None else to, []
        bound = f"robust-clip = {factor:g}" if to is None else "robust = screen"
        for update in updates:
            of = ratios.get(update.silo, {})
            if of and self.info.receives != "mean":
                self.strategy.reject(update.silo, excess(of, bound))
                continue
            if of:
                self._bound(update.silo, factor / max(of.values()), f"cut: {excess(of, bound)}")
                update = replace(
                    update, vectors={**update.vectors, **self._cut(update, of, factor)}
                )
            result.append(update)
        return result

    def _cut(
        self, update: Update, ratios: Mapping[str, float], factor: float
    ) -> dict[str, Tensor]:
        cut = {}
        for name, ratio in ratios.items():
            vector, centre = update.vectors[name], self.centre(name, update)
            centre = None if centre is None else centre.to(vector.device)
            cut[name] = clip_step(vector, centre, factor / ratio)
        return cut

    def _choose(self, names: Sequence[str], updates: list[Update]) -> list[Update]:
        """Return the updates that Krum or Multi-Krum chooses."""
        rule = self.common.robust
        f = breakdown_point(rule, len(updates), self.common.robust_attackers)
        taken = krum_choice(
            rule, [torch.cat([self._step(name, u) for name in names]) for u in updates], f
        )
        for i, update in enumerate(updates):
            if i not in taken:
                self._bound(update.silo, 0.0, f"not taken by {rule}")
        return [updates[i] for i in taken]

    def _bound(self, silo: str, share: float, reason: str) -> None:
        log(WARNING, "round %d bounds %s: %s", self.strategy.round, silo, reason)
        self.strategy.bounded[silo] = share, reason
