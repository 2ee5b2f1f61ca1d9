"""Checks of the settings ``hold-out`` and ``late-joiners`` against a run.

The silo's half: a newcomer's model before training, and after training its own part.

A newcomer has no state. It sends only metrics: of the model that it starts from (``received``: zero-shot), and of its
own model after E epochs with the shared part fixed (``personal``). ``MethodInfo.newcomer`` declares the kind of model.
A method that needs more overrides :meth:`SiloClient.newcomer` or :meth:`SiloClient.personalise` in its file.

The server's half: the payload of a silo in its first round.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from partitions.common.errors import UserError
from strategies.base.client import SiloClient
from strategies.base.info import MethodInfo
from strategies.base.plan import SiloInfo
from strategies.base.settings import Common
from strategies.base.state import ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload

ANY = "any"
EVALUATES = "it only evaluates"
ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=([0-9]{1,7})")


def check_hold_out(common: Common, info: MethodInfo) -> None:
    """Raise UserError if ``hold-out`` names no hospital, one twice or all, or does not fit the run or the method."""
    held = common.held_out
    if common.hold_out and not held:
        raise UserError(
            f"hold-out = {common.hold_out!r}: names of hospitals are needed here, with commas"
        )
    if len(set(held)) < len(held):
        raise UserError(f"hold-out = {common.hold_out} names one of them twice")
    for refused, reason in (
        (len(held) >= common.silos, f"of {common.silos} silos none would be left to train"),
        (not common.evaluate_every, "evaluate-every = 0 leaves no round to choose"),
        (common.dp, "not with dp = true, which does not cover what it trains"),
        (not info.newcomer, f"{info.name} does not declare it (MethodInfo.newcomer)"),
    ):
        if held and refused:
            raise UserError(f"hold-out = {common.hold_out}: {reason}")


def check_late(common: Common, info: MethodInfo) -> None:
    """Raise UserError if the setting ``late-joiners`` is invalid, or does not fit the method."""
    text = common.late_joiners
    if not text:
        return
    if not info.trains or not info.late:
        raise UserError(
            f"late-joiners = {text[:80]}: not with {info.name}: {info.late if info.trains else EVALUATES}"
        )
    if text == ANY:
        return
    entries = [ENTRY.fullmatch(entry.strip()) for entry in text.split(",")]
    names = [match[1] for match in entries if match]
    if None in entries or len(set(names)) < len(names):
        raise UserError(
            f"late-joiners = {text[:80]!r}: any, or NAME=ROUND with commas, each name once, is needed here"
        )
    for name, number in common.late.items():
        if not 2 <= number <= common.rounds:
            raise UserError(
                f"late-joiners = {text[:80]}: {name} joins in round {number}, of 2 to {common.rounds}"
            )
        if name in common.held_out:
            raise UserError(
                f"late-joiners = {text[:80]}: hold-out = {common.hold_out} has {name} too"
            )
    if len(names) + len(common.held_out) >= common.silos:
        raise UserError(
            f"late-joiners = {text[:80]}: of {common.silos} silos none would be left to begin"
        )


NEWCOMER = "newcomer"  # in a message's config: the silo is to be evaluated as one


def evaluate_newcomer(client: SiloClient, config: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics of both models; the caller discards the client's state. Raises UserError if training diverges."""
    client.begin(config)
    start = client.received = client.newcomer().clone()
    metrics = client.measure("received", start)
    client.model.load(start, client.received_buffers, client.received_integers)
    personalised = client.personalise().clone()
    client.check_finite(start, personalised)
    client.replies.clear()  # the numbers that a method sends in a round
    return metrics | client.measure("personal", personalised)


def newcomer_payload(
    strategy: PersonalizedStrategy, info: SiloInfo, state: ServerState
) -> Payload:
    """Return the payload of a silo that joins in the strategy's round, from the server's ``state`` before it.

    ``strategy`` is not changed.
    """
    guest = copy.copy(strategy)
    # It takes no part in the draw of participants
    guest.common = replace(strategy.common, participation=1.0)
    guest.state = state.copy()
    guest.admit(info, trains=False)
    guest.begin_round()
    return guest.full_payload(info.name)
