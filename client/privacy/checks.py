"""What a silo refuses, and what its model cards say, because of the privacy of its records."""

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
    """Raise PolicyRefusedError where there is too little to train with, or behind what a run ``sends``.

    ``part``: the training part. What leaves needs patients (``floor``); a batch is of samples (``min-batch-size``).
    """
    fault = too_few(part, policy, "floor") if sends else ""
    if not fault and len(part) < policy.min_batch_size:
        fault = f"its policy has {policy.line('min_batch_size')}, it has {len(part)} training samples"
    if fault:
        raise PolicyRefusedError(f"{name} refuses: {fault}")


def too_few(part: Split, policy: Policy, rule: str) -> str:
    """Why a training part has too few patients for a rule, or samples where it names none; empty: it has enough.

    The text goes to the server, which does not learn how many patients there are.
    """
    if part.people >= getattr(policy, rule):
        return ""
    has = f"it has {len(part)} training samples" if part.patient is None else "its training part has fewer patients"
    return f"its policy has {policy.line(rule)}, {has}"


def check_records(settings: RunSettings, data: SiloData, name: str) -> None:
    """Raise UserError where, with ``dp = true``, something is computed of the records without noise."""
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
    """What a model card says of differential privacy: the personal model has it only where all of it is sent."""
    s = settings.privacy
    if s is None:
        return {}
    method = settings.strategy
    noised = method.info.dp == "gradient" and method.client.personal is SiloClient.personal
    return {"privacy": {**asdict(s), "personal": "trained with noise" if noised else "trained without noise"}}
