"""Evidence for the reported models, requested from every silo once after the closing exchange.

A second message sends the silos their common conformal threshold: the mean of their own thresholds, weighted by
calibration samples. (The quantile of the pooled scores would need the scores, which stay in the hospitals.) A silo that
refuses or sends nothing has no evidence in the summary; the run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import Message, MessageType

from client.evidence import COMMON
from models.evidence.measure import MEASUREMENT, Evidence, measurements
from partitions.schema import read_schema
from strategies.base.evidence import ACTION, read_evidence
from strategies.base.info import OFFLINE
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Number, Payload, encode
from strategies.base.transport.reporting import SCHEMA, read_replies

# Sends messages, and returns the replies
Exchanges = Callable[[Sequence[Message]], Sequence[Message]]
# The silos' thresholds that are averaged; a task has one of the two
OWN = ("conformal", "conformal_width")
HOSPITALS = 2  # minimum number of hospitals with a threshold for a common one


def wants_evidence(strategy: PersonalizedStrategy, simulated: bool) -> bool:
    """Return whether the run requests evidence; ``auto`` does so if all data are simulated.

    Never with differential privacy: evidence has no mechanism and no share of the budget.
    """
    asked = "off" if strategy.common.dp else strategy.common.evidence
    return strategy.common.evaluate_every > 0 and (
        asked == "on" or (asked == "auto" and simulated)
    )


def collect_evidence(
    strategy: PersonalizedStrategy, exchange: Exchanges, note: Callable[[str], object]
) -> dict[str, Evidence]:
    """Return by silo the evidence for its reported model (rounds in ``strategy.plan.shown``)."""
    found = _ask_silos(strategy, strategy.plan.shown, exchange, note, {})
    names = measurement_names(strategy)
    keys: list[Sequence[str]] = [
        [f"{MEASUREMENT}{name}.conformal_width"] for name in names
    ] or [OWN]
    common = [threshold for own in keys if (threshold := _common(found, own)) is not None]
    if len(common) == len(keys):
        asked: Number = common if names else common[0]
        for silo, values in _ask_silos(
            strategy, found, exchange, note, {COMMON: asked}
        ).items():
            found[silo].update(values)
    return found


def measurement_names(strategy: PersonalizedStrategy) -> list[str]:
    """Return the names of the predicted measurements if there are several; empty for one, or for another task."""
    if strategy.plan.numbers["task"] != "regression":
        return []
    return measurements(
        read_schema(str(strategy.plan.numbers.get(SCHEMA, ""))).labels,
        int(str(strategy.plan.numbers["classes"])),
    )


def _common(found: Mapping[str, Evidence], own: Sequence[str]) -> float | None:
    """Return the weighted mean of the silos' thresholds under these names; None if too few silos have one."""
    values = [v[name] for v in found.values() for name in own if name in v]
    pairs = [(n[0], n[1]) for n in values if isinstance(n, list)]
    if len(pairs) < HOSPITALS:
        return None
    common = sum(n * threshold for n, threshold in pairs) / sum(n for n, _ in pairs)
    # Rounding may exceed the maximum
    return min(common, max(threshold for _, threshold in pairs))


def _ask_silos(
    strategy: PersonalizedStrategy,
    silos: Iterable[str],
    exchange: Exchanges,
    note: Callable[[str], object],
    numbers: Mapping[str, Number],
) -> dict[str, Evidence]:
    names = {strategy.silos[silo].node_id: silo for silo in silos}
    messages = [_message(strategy, silo, numbers) for silo in names.values()]
    replies = exchange([m for m in messages if m.metadata.dst_node_id != OFFLINE])
    labels = measurement_names(strategy)
    found, faults = read_replies(
        replies, names, lambda r, _: read_evidence(r.content.get("metrics"), labels)
    )
    for silo, reason in faults.items():
        note(f"no evidence of {silo}: {reason}")
    return dict(sorted(found.items()))


def _message(
    strategy: PersonalizedStrategy, silo: str, numbers: Mapping[str, Number]
) -> Message:
    config = {
        **strategy.plan.numbers,
        "round": strategy.round,
        "reported": strategy.plan.shown[silo],
    }
    content = encode(Payload({}, numbers), config)
    node = strategy.silos[silo].node_id
    ttl = strategy.common.round_timeout
    return Message(
        content, dst_node_id=node, message_type=f"{MessageType.EVALUATE}.{ACTION}", ttl=ttl
    )
