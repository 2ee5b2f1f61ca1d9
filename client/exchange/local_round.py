"""The wrapper of handlers that train or evaluate: opens the client, records progress and releases the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from torch import Tensor

from client.egress import release
from client.progress import OwnProgress
from client.session import ClientSession
from strategies.base.client import SiloClient
from strategies.base.schema.reporting import SPLITS

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
        sent = release(client, vectors, metrics, counts, min_samples=session.min_samples, policy=session.policy)
        progress.ends(client.round, metrics, sent)
        return sent

    return handle
