"""The wrapper of handlers that train or evaluate: opens the client, records progress and releases the result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from torch import Tensor

from client.egress import release
from client.exchange.disclosure import may_measure
from client.progress import OwnProgress
from client.session import ClientSession
from strategies.base.client import SiloClient
from strategies.base.transport.reporting import SECONDS, SPLITS

Result = tuple[Sequence[Tensor], dict[str, Any]]  # the vectors to send, and the metrics
Work = Callable[[ClientSession, SiloClient], Result]


def local_round(work: Work) -> Callable[[Message, ClientSession], RecordDict]:
    """Return a handler that calls ``work(session, client)`` with the client's state loaded and releases the result."""

    @functools.wraps(work)
    def handle(message: Message, session: ClientSession) -> RecordDict:
        progress = OwnProgress(session, message)
        client = session.open_client(message)
        progress.begins()
        vectors, metrics = work(session, client)
        counts = {split: getattr(session.used_data, split).people for split in SPLITS}
        least = session.min_samples
        if least < math.inf and any("." in name for name in metrics.keys() - {*SECONDS}) and not may_measure(session):
            least = math.inf
        sent = release(client, vectors, metrics, counts, min_samples=least, policy=session.policy)
        progress.ends(client.round, metrics, sent)
        return sent

    return handle
