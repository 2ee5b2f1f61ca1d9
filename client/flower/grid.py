"""A ServerApp's Grid of the calls of Flower's Runtime API: small parts of messages travel with them, few are copied.

Flower's own Grid copies all parts of all messages at once, moves each part in a call of its own, and gives up a reply
after so many tries. Its client, with address, token and repeated calls, is used.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from flwr.app import Error, Message, Metadata, RecordDict
from flwr.serverapp import Grid

from ..protocol.private import return_memory
from .internals import internal
from .messages import error_code, name_message
from .transfers import (
    AGAIN_SECONDS,
    LostPartError,
    Transfer,
    keep_pieces,
    names_in,
    parts_in,
    tree_of,
)

SUPERLINK = 1  # the id of a server's node
# Parts move two at a time; by the same threads, for what each has freed stays with it
MOVERS = ThreadPoolExecutor(2)


def own_grid(grid: Grid) -> Grid:
    """Return a Grid of ours in place of Flower's in a deployment; another one as it is."""
    return RuntimeGrid(grid) if isinstance(grid, internal("http_grid").HttpGrid) else grid


class MessageGrid(Grid):
    """What Grids of ours share."""

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Return a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


class RuntimeGrid(MessageGrid):
    """``grid``: Flower's own. ``report`` receives the progress of a long reply."""

    def __init__(self, grid: Any) -> None:
        keep_pieces()
        self.flowers, self.client = grid, grid._runtime_client
        self.report: Callable[[str], object] = lambda line: None
        self.node = internal("node_pb2").Node(node_id=SUPERLINK)

    @property
    def run(self) -> Any:
        """Return the run, as Flower describes it."""
        return self.flowers.run

    def set_run(self, run: Any) -> None:
        """Set the run."""
        self.flowers.set_run(run)

    def get_nodes(self) -> Iterable[Any]:
        """Return the nodes that are online."""
        return list(self.client.GetNodes(internal("runtime_pb2").GetNodesRequest()).nodes)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that are online."""
        return [node.node_id for node in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; return their ids, empty for one whose node is unknown.

        Raises LostPartError if a part is not taken: two processes that push equal parts at once may hinder each other.
        """
        flower, calls = internal("inflatable_object"), internal("runtime_pb2")
        parts, bare, trees = dict[str, Any](), [], []
        with flower.no_object_id_recompute():
            for message in messages:
                name_message(message)
                objects = flower.get_all_nested_objects(message)
                # Chunks of arrays go to many silos, and once to the server
                trees.append(tree_of(message, objects, 0))
                content = internal("remove_content_from_message")(message)
                bare.append(internal("serde").message_to_proto(content))
                parts |= objects
        if not bare:
            return []
        answer = self.client.PushMessages(
            calls.PushAppMessagesRequest(messages_list=bare, message_object_trees=trees)
        )
        where = {**self._where(), "session_id": answer.session_id}

        def push(name: str) -> None:
            content = parts[name].deflate()
            call = internal("message_pb2").PushObjectRequest(
                **where, object_id=name, object_content=content
            )
            if not self.client.PushObject(call).stored:
                raise LostPartError(f"the server did not take part {name}")

        list(MOVERS.map(push, dict.fromkeys(answer.objects_to_push)))
        return list(answer.message_ids)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to messages that there are; an error in place of one that cannot arrive any more."""
        calls = internal("runtime_pb2")
        answer = self.client.PullMessages(calls.PullAppMessagesRequest(message_ids=message_ids))
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        return [self._pull(reply.metadata, tree) for reply, tree in pairs]

    def _pull(self, metadata: Any, tree: Any) -> Message:
        """Return a reply with its parts, which the server may then drop."""
        name, names, parts = metadata.message_id, dict.fromkeys(names_in(tree)), parts_in(tree)
        try:
            self._pull_parts([part for part in names if part not in parts], parts)
        except LostPartError as error:
            return lost_reply(metadata, str(error))
        confirmed = internal("message_pb2").ConfirmMessageReceivedRequest(
            **self._where(), message_object_id=name
        )
        # The reply is here: a call that fails costs memory of the server until the run ends
        with suppress(internal("http_grid").httpx.HTTPError):
            self.client.ConfirmMessageReceived(confirmed)
        reply: Message = internal("inflatable_utils").inflate_object_from_contents(name, parts)
        name_message(reply, name)
        return reply

    def _pull_parts(self, missing: Sequence[str], parts: dict[str, bytes]) -> None:
        """Add the missing parts of a reply. Raises LostPartError."""
        if not missing:
            return
        with Transfer("receiving a reply", self.report, len(missing) + len(parts)) as transfer:
            for content in parts.values():
                transfer.add(content)

            def pull(name: str) -> None:
                pause, most = AGAIN_SECONDS
                call = internal("message_pb2").PullObjectRequest(
                    **self._where(), object_id=name
                )
                while not (answer := self.client.PullObject(call)).object_available:
                    if not answer.object_found or transfer.over.wait(pause):
                        raise LostPartError(f"the server has no part {name} of it any more")
                    pause = min(2 * pause, most)
                parts[name] = transfer.add(answer.object_content)

            list(MOVERS.map(pull, missing))
        return_memory()

    def _where(self) -> dict[str, Any]:
        return {"node": self.node, "run_id": self.run.run_id}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: the round loop sends and receives (``server/run/exchange.py``)."""
        raise NotImplementedError("use push_messages and pull_messages")


def lost_reply(metadata: Any, reason: str) -> Message:
    """Return the error in place of a reply whose parts are lost, as Flower's own Grid does."""
    message: Message = internal("make_message")(
        metadata=Metadata(
            run_id=metadata.run_id,
            message_id="",
            reply_to_message_id=metadata.reply_to_message_id,
            group_id="",
            created_at=metadata.created_at,
            ttl=metadata.ttl,
            message_type="system",
            src_node_id=SUPERLINK,
            dst_node_id=SUPERLINK,
        ),
        error=Error(error_code("MESSAGE_UNAVAILABLE"), reason),
    )
    return message
