"""What a silo refuses, and what its model cards say, because of the privacy of its records."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from client.local_data import columns_in
from client.site.trust.policy import Policy, PolicyRefusedError
from partitions.common.errors import UserError
from partitions.splits import SiloData
from strategies.base.client import SiloClient
from strategies.base.run_settings import RunSettings


def check_floor(name: str, samples: int, policy: Policy, *, sends: bool) -> None:
    """Raise PolicyRefusedError where there are too few samples to train with, or behind what a run ``sends``."""
    for rule, holds in (("floor", sends), ("min_batch_size", True)):
        if holds and samples < getattr(policy, rule):
            raise PolicyRefusedError(
                f"{name} refuses: its policy has {policy.says(rule)}, it has {samples} training samples"
            )


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
    s, method = settings.privacy, settings.strategy
    if s is None:
        return {}
    noised = method.info.dp == "gradient" and method.client.personal is SiloClient.personal
    return {"privacy": {**asdict(s), "personal": "trained with noise" if noised else "trained without noise"}}
