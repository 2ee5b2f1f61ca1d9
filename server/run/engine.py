"""The in-process engine: a Flower ``Grid`` that calls the ClientApp directly, without serialisation.

Silos compute one after the other, or with ``vectorize = true`` together (see ``lockstep.py``); with ``auto`` whichever
way is found to be faster (``choice.py``).

The ServerApp and the ClientApp are the same functions as in a deployment; tensors travel as they are (see
``strategies.payload.TensorArray``), on a GPU they stay there.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from client.site.flower import internal
from server.run.choice import Choice, clock
from server.run.lockstep import Lockstep
from strategies.base.settings import Value


class InProcessGrid(Grid):
    """N silos in this process. ``state_path``: where their states go as files (None: memory only).

    ``seconds``: how long the silos took to compute the replies to what was pushed last.
    """

    def __init__(
        self, app: ClientApp, silos: int, run_config: Mapping[str, Value], state_path: Path | None = None
    ) -> None:
        self.app = app
        self.contexts: dict[int, Context] = {}
        for index in range(silos):
            node_config: dict[str, Value] = {"partition-id": index, "num-partitions": silos}
            if state_path is not None:
                node_config["state-path"] = str(state_path)
            self.contexts[index + 1] = Context(
                run_id=1, node_id=index + 1, node_config=node_config, state=RecordDict(), run_config=dict(run_config)
            )
        self.sent: dict[str, Message] = {}
        self.numbers = itertools.count(1)
        self.seconds = 0.0
        asked = run_config.get("vectorize")
        file = state_path.parent / "vectorize.json" if state_path is not None else None
        self.choice = Choice(run_config, file) if asked == "auto" else None
        tried = self.choice is not None and self.choice.tries()
        self.lockstep = Lockstep(quiet=asked == "auto", tried=tried) if asked else None

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        self.seconds = 0.0
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{next(self.numbers)}"
            self.sent[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to all these messages: the silos compute now."""
        asked = [
            self.sent.pop(i) for i in sorted(message_ids, key=lambda i: int(i.rpartition("-")[2])) if i in self.sent
        ]
        started, begun = time.perf_counter(), clock()
        calls, joined, trained, server_round = {}, set(), False, 0
        for message in asked:
            node, kind = message.metadata.dst_node_id, message.metadata.message_type
            calls[node] = partial(self.app, message, self.contexts[node])
            if kind in (MessageType.TRAIN, MessageType.EVALUATE):
                joined.add(node)
                server_round = number_in(message, "round")
                trained |= kind == MessageType.TRAIN
        replies: dict[int, Message] = {}
        if joined and self.lockstep is not None and (self.choice is None or self.choice.together(server_round)):
            replies = self.lockstep.run({node: call for node, call in calls.items() if node in joined})
        replies |= {node: call() for node, call in calls.items() if node not in replies}
        if trained and self.lockstep is not None and self.choice is not None:
            samples = sum(number_in(reply, "samples") for reply in replies.values())
            self.choice.took(server_round, clock() - begun, samples, self.lockstep.takes_turns)
        self.seconds += time.perf_counter() - started
        return [replies[node] for node in calls]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    # Flower's interface asks for these; nothing here needs them.

    def set_run(self, run: Any) -> None:
        pass

    @property
    def run(self) -> Any:
        raise RuntimeError("an in-process federation is no Flower run")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, group_id=group_id, ttl=ttl)


def number_in(message: Message, name: str) -> int:
    """A whole number of a message's config; 0 where there is none, as in an error's."""
    config: Any = message.content.get("config", {}) if message.has_content() else {}
    return int(config.get(name, 0))


@contextmanager
def flower_identity() -> Any:
    """Flower's ``Message`` asks the process who it is; a process outside of any run must answer for a while."""
    identity = internal("TaskIdentity")
    before = identity._task_id, identity._run_id, identity._node_id
    identity._task_id, identity._run_id, identity._node_id = 1, 1, 1
    try:
        yield
    finally:
        identity._task_id, identity._run_id, identity._node_id = before
