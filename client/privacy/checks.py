"""Checks that protect a silo's records, and the privacy entry of its model cards."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from client.local_data import columns_in
from client.site.trust.policy import Policy, PolicyRefusedError
from partitions.common.errors import UserError
from partitions.splits import SiloData, Split
from strategies.base.client import SiloClient
from strategies.base.run_settings import RunSettings


def check_floor(name: str, part: Split, policy: Policy, *, sends: bool) -> None:
    """Raise PolicyRefusedError if there are too few samples to train with, or patients for what a run ``sends``.

    ``part``: the training part. ``floor`` counts patients; ``min-batch-size`` counts samples.
    """
    fault = too_few(part, policy, "floor") if sends else ""
    if not fault and len(part) < policy.min_batch_size:
        fault = f"its policy has {policy.line('min_batch_size')}, it has {len(part)} training samples"
    if fault:
        raise PolicyRefusedError(f"{name} refuses: {fault}")


def too_few(part: Split, policy: Policy, rule: str) -> str:
    """Return why a training part has too few patients for ``rule`` (samples, if it names no patients); empty: enough.

    The text is sent to the server, so it does not contain the number of patients.
    """
    if part.people >= getattr(policy, rule):
        return ""
    has = f"it has {len(part)} training samples" if part.patient is None else "its training part has fewer patients"
    return f"its policy has {policy.line(rule)}, {has}"


def check_records(settings: RunSettings, data: SiloData, name: str) -> None:
    """Raise UserError if, with ``dp = true``, something would be computed from the records without noise."""
    s, normalization = settings.privacy, settings.common.normalization
    if s is None:
        return
    if columns_in(data) is not None and normalization != "none":
        raise UserError(
            f"dp = true: not with normalization = {normalization}, whose means and deviations "
            "are the records' own; scale tables and measurements by fixed ranges, and take normalization = none"
        )
    if data.task == "survival":
        raise UserError("dp = true: not for survival: Cox's loss is no sum over records, each needs the others")
    if s.unit == "patient" and data.train.patient is None:
        raise UserError(
            f"dp.unit = patient: {name}'s training samples name no patients; `silofl import` notes them, or "
            "take dp.unit = record"
        )


def privacy_card(settings: RunSettings) -> dict[str, Any]:
    """Return a model card's entry for differential privacy: the personal model has it only if all of it is sent."""
    s = settings.privacy
    if s is None:
        return {}
    method = settings.strategy
    noised = method.info.dp == "gradient" and method.client.personal is SiloClient.personal
    return {"privacy": {**asdict(s), "personal": "trained with noise" if noised else "trained without noise"}}
