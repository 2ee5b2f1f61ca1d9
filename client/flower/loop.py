"""A silo's loop: takes one message after the other from the server, has it answered, and sends the reply.

A SuperLink of ours holds an answer back until there is a message (`service.py`), and the loop asks again at once.
Another one answers at once: then the loop asks every quarter of a second for a minute after a message, for a silo that
replies last finds no message yet, and after that every 3 s, as Flower's own SuperNode.

A reply is sent up to four times, for the silo has trained for it. If a run is stopped while a message's parts arrive,
or its reply is sent, both are dropped.
"""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

from ..protocol.private import return_memory
from .fleet import Fleet, RunIsOverError, be_patient
from .internals import internal
from .messages import name_message, with_content
from .transfers import (
    LostPartError,
    Transfer,
    echo,
    keep_pieces,
    receive_parts,
    size_of,
    tree_of,
)

POLL_SECONDS = 0.25  # before the next question, while a run is on
BUSY_SECONDS = 60.0  # how long after a silo's last message a run counts as on
IDLE_SECONDS = 3.0  # before the next question otherwise
# For an answer: a server that held an answer back for so long will do so again
WAITED_SECONDS = 1.0
PAUSES = (1.0, 5.0, 20.0)  # before a reply's second, third and fourth try
MOVERS = 2  # parts that move at a time
MOST_RUNS = 4  # whose app is kept; another is asked for again


class Received(NamedTuple):
    """A message, and what its answer needs: its run, the run's app, and the context, whose state it may change."""

    message: Any
    run: Any
    fab: Any
    context: Any


class MessageLoop:
    """What a SuperNode keeps between two messages. ``contexts``: by Flower's series of runs.

    ``answer`` returns the reply to a message, which it gets without content, and with a function that returns its
    :class:`Received`. ``rest`` is called between messages, with whether a run is on.
    """

    def __init__(
        self,
        fleet: Fleet,
        node_config: dict[str, Any],
        answer: Callable[[Any, Callable[[], Received]], Any],
        rest: Callable[[bool], object],
    ) -> None:
        self.fleet, self.node_config = fleet, node_config
        self.answer, self.rest = answer, rest
        self.runs: dict[int, tuple[Any, Any]] = {}
        self.contexts: dict[int, Any] = {}
        self.movers = ThreadPoolExecutor(MOVERS)

    def serve(self) -> NoReturn:
        """Answer messages until the process ends."""
        last = -BUSY_SECONDS
        while True:
            began = time.monotonic()
            try:
                if self.serve_one():
                    last = time.monotonic()
                    continue
            except RunIsOverError:
                print("the run of a message is over; the message is dropped", flush=True)
            except (self.fleet.grpc.RpcError, LostPartError) as error:
                print(f"a message did not arrive, and is dropped: {error}", flush=True)
            busy = time.monotonic() - last < BUSY_SECONDS
            self.rest(busy)
            if time.monotonic() - began < WAITED_SECONDS:
                time.sleep(POLL_SECONDS if busy else IDLE_SECONDS)

    def serve_one(self) -> bool:
        """Take a message and answer it; return whether there was one.

        Raises gRPC's RpcError, RunIsOverError and LostPartError for a message that did not arrive.
        """
        answer = self.fleet.ask("PullMessages")
        if not answer.messages_list:
            return False
        bare = internal("serde").message_from_proto(answer.messages_list[0])
        run_id, name = bare.metadata.run_id, bare.metadata.message_id
        run, fab = self._run(run_id)
        parts = receive_parts(
            answer.message_object_trees[0],
            lambda part: self.fleet.ask("PullObject", run_id=run_id, object_id=part),
            *(self.movers, "receiving a message", echo, be_patient),
        )
        self.fleet.ask("ConfirmMessageReceived", run_id=run_id, message_object_id=name)
        began = time.monotonic()

        def task() -> Received:
            message = internal("inflatable_utils").inflate_object_from_contents(name, parts)
            name_message(message, name)  # which its parts do not have
            parts.clear()
            return Received(message, run, fab, self._context(run, fab))

        reply = self.answer(bare, task)
        self._send(reply, time.monotonic() - began)
        return True

    def _run(self, run_id: int) -> tuple[Any, Any]:
        """Return a run and its app."""
        if run_id not in self.runs:
            keep_pieces()
            run = self.fleet.ask("GetRun", run_id=run_id).run
            fab = self.fleet.ask("GetFab", hash_str=run.fab_hash, run_id=run_id).fab
            while len(self.runs) >= MOST_RUNS:
                del self.runs[next(iter(self.runs))]
            self.runs[run_id] = internal("serde").run_from_proto(run), fab
        return self.runs[run_id]

    def _context(self, run: Any, fab: Any) -> Any:
        """Return the context of a run, with the state that an earlier run of its series left."""
        from flwr.app import Context, RecordDict

        before = self.contexts.get(run.series_id)
        if before is None or before.run_id != run.run_id:
            self.contexts[run.series_id] = Context(
                run_id=run.run_id,
                node_id=self.fleet.node,
                node_config=dict(self.node_config),
                state=RecordDict() if before is None else before.state,
                run_config=internal("get_fused_config_from_fab")(fab.content, run),
                series_id=run.series_id,
            )
        return self.contexts[run.series_id]

    def _send(self, reply: Any, seconds: float) -> None:
        """Send a reply, and repeat it after a failure while its run is on. ``seconds``: how long it took."""
        with internal("inflatable_object").no_object_id_recompute():
            name_message(reply)
            parts = internal("inflatable_object").get_all_nested_objects(reply)
            tree = tree_of(reply, parts)
        bare = with_content(reply) if reply.has_content() else reply
        sent = internal("serde").message_to_proto(bare)
        with Transfer("sending the reply", echo, lasting=be_patient) as transfer:
            for pause in (*PAUSES, None):
                try:
                    self._push(sent, tree, parts, seconds, transfer)
                    break
                except (self.fleet.grpc.RpcError, LostPartError) as error:
                    why = error.details() if hasattr(error, "details") else error
                if pause is None:
                    print(f"the reply did not get through ({why}), and is dropped", flush=True)
                    break
                print(
                    f"the reply did not get through ({why}); again in {pause:g} s", flush=True
                )
                time.sleep(pause)
        if transfer.size:
            return_memory()

    def _push(
        self, message: Any, tree: Any, parts: dict[str, Any], seconds: float, transfer: Transfer
    ) -> None:
        """Push a reply and those of its parts that the server asks for. Raises as :meth:`serve_one`."""
        answer = self.fleet.ask(
            "PushMessages",
            messages_list=[message],
            message_object_trees=[tree],
            clientapp_runtime_list=[seconds],
        )
        wanted = [name for name in parts if name in {*answer.objects_to_push}]
        transfer.expect(len(wanted), sum(size_of(parts[name]) for name in wanted))
        where = {"run_id": message.metadata.run_id, "session_id": answer.session_id}

        def push(name: str) -> None:
            content = parts[name].deflate()
            call = {**where, "object_id": name, "object_content": content}
            if not self.fleet.ask("PushObject", **call).stored:
                raise LostPartError(f"the server did not take part {name} of it")
            transfer.add(content)

        list(self.movers.map(push, wanted))
