"""Request each silo's own reported model at the end of a run (``keep-models``), and keep it.

A silo that refuses, or whose model cannot be used, is reported in one line; the run's results do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from flwr.app import Message

from partitions.common.errors import DataError
from server.results.own_models import keep_model
from strategies.base.evaluation.own_model import KIND
from strategies.base.strategy import OFFLINE, PersonalizedStrategy
from strategies.base.transport.payload import Payload, encode
from strategies.base.transport.replies import read_reply

Exchanges = Callable[[Sequence[Message]], Sequence[Message]]  # sends messages, and returns the replies


def collect_models(
    strategy: PersonalizedStrategy, exchange: Exchanges, checkpoint: Path, note: Callable[[str], object]
) -> list[str]:
    """Keep the silos' models of the rounds in ``strategy.shown``; return the silos whose model was kept."""
    own = cast(Sequence[str], strategy.extra.get("own_statistics", ()))
    names, kept, missing = dict[int, str](), list[str](), dict[str, str]()
    for silo in strategy.shown:
        if silo in own:
            missing[silo] = "it is used with the statistics of this silo, which stay there"
        elif strategy.silos[silo].node_id == OFFLINE:
            missing[silo] = "it was offline when the run was resumed"
        else:
            names[strategy.silos[silo].node_id], missing[silo] = silo, "no reply in time"
    for reply in exchange([_message(strategy, silo) for silo in names.values()]):
        silo = names[reply.metadata.src_node_id]
        try:
            payload, config = read_reply(reply, silo)
            if config.get("silo") != silo or config.get("round") != strategy.round:
                raise DataError(f"a reply of {config.get('silo')!r:.80} for round {config.get('round')!r:.80}")
            keep_model(checkpoint, silo, strategy.shown[silo], payload, strategy.layout)
            del missing[silo]
            kept.append(silo)
        except DataError as error:
            missing[silo] = str(error)
    for silo, reason in sorted(missing.items()):
        note(f"no model of {silo}: {reason}")
    return sorted(kept)


def _message(strategy: PersonalizedStrategy, silo: str) -> Message:
    content = encode(Payload(), {**strategy.extra, "round": strategy.round, "reported": strategy.shown[silo]})
    node, ttl = strategy.silos[silo].node_id, strategy.common.round_timeout
    return Message(content, dst_node_id=node, message_type=KIND, ttl=ttl)
