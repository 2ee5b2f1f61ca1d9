"""In-process engine: a Flower ``Grid`` that calls the ClientApp directly, without serialisation.

Silos compute one after the other.

The ServerApp and the ClientApp are the same functions as in a deployment. Tensors are passed by reference (see
``strategies.base.transport.payload.TensorArray``); on a GPU they stay there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.flower.grid import MessageGrid
from client.flower.messages import flower_identity as flower_identity
from client.flower.messages import name_message
from strategies.base.settings import Value


class InProcessGrid(MessageGrid):
    """Grid of N silos in this process. ``state_path``: the folder of their states (None: memory only).

    ``seconds``: the silos' compute time for the replies to the last pushed messages. ``answered``: called after each
    reply with the number of replies and of messages.
    """

    answered: Callable[[int, int], None] | None = None

    def __init__(
        self,
        app: ClientApp,
        silos: int,
        run_config: Mapping[str, Value],
        state_path: Path | None = None,
    ) -> None:
        self.app = app
        self.contexts: dict[int, Context] = {}
        for index in range(silos):
            node_config: dict[str, Value] = {"partition-id": index, "num-partitions": silos}
            if state_path is not None:
                node_config["state-path"] = str(state_path)
            self.contexts[index + 1] = Context(
                run_id=1,
                node_id=index + 1,
                node_config=node_config,
                state=RecordDict(),
                run_config=dict(run_config),
            )
        self.sent: dict[str, Message] = {}
        self.numbers = itertools.count(1)
        self.seconds = 0.0

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        self.seconds = 0.0
        for message in messages:
            ids.append(name_message(message, f"message-{next(self.numbers)}"))
            self.sent[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Compute and return the replies to these messages."""
        waiting = [
            self.sent.pop(i)
            for i in sorted(message_ids, key=lambda i: int(i.rpartition("-")[2]))
            if i in self.sent
        ]
        started = time.perf_counter()
        replies = []
        for message in waiting:
            replies.append(self.app(message, self.contexts[message.metadata.dst_node_id]))
            if self.answered is not None:
                self.answered(len(replies), len(waiting))
        self.seconds += time.perf_counter() - started
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    # Required by Flower's interface, but not used here.

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        raise NotImplementedError("an in-process federation is no Flower run")
