"""A ServerApp's Grid of the calls of Flower's Runtime API: small parts of messages travel with them, few are copied.

Flower's own Grid copies all parts of all messages at once, moves each part in a call of its own, and gives up a reply
after so many tries. Its client, with address, token and repeated calls, is used.
"""

import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid

from .internals import internal
from .messages import FAILED, LOST, error_code, name_message, with_content
from .slots import pull_by_slot
from .transfers import LostPartError, keep_pieces, receive_parts, tree_of

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
    """``grid``: Flower's own. ``report`` receives the progress of a long reply.

    ``until``: the time (``time.monotonic``) after which a reply is not waited for whose parts have begun to come.
    """

    def __init__(self, grid: Any) -> None:
        keep_pieces()
        self.flowers, self.client = grid, grid._runtime_client
        self.report: Callable[[str], object] = lambda line: None
        self.until = math.inf
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
                bare.append(internal("serde").message_to_proto(with_content(message)))
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
        replies = map(internal("serde").message_from_proto, answer.messages_list)
        return [*map(self._pull, replies, answer.message_object_trees)]

    def _pull(self, bare: Any, tree: Any) -> Message:
        """Return a reply with its parts, which the server may then drop.

        Where they are lost, or are no reply, an error is in its place: the other silos' replies go on. Who a reply is
        of, and to what, the server has checked in ``bare`` alone.
        """
        name, calls = bare.metadata.message_id, internal("message_pb2")

        def ask(part: str) -> Any:
            call = calls.PullObjectRequest(**self._where(), object_id=part)
            return pull_by_slot(self.client.PullObject, call)

        try:
            parts = receive_parts(
                tree, ask, MOVERS, "receiving a reply", self.report, until=self.until
            )
        except LostPartError as error:
            lost: Message = with_content(bare, error=Error(error_code(LOST), str(error)))
            return lost
        confirmed = calls.ConfirmMessageReceivedRequest(**self._where(), message_object_id=name)
        # The reply is here: a call that fails costs memory of the server until the run ends
        with suppress(internal("http_grid").httpx.HTTPError):
            self.client.ConfirmMessageReceived(confirmed)
        try:
            sent = internal("inflatable_utils").inflate_object_from_contents(name, parts)
            held = {"error": sent.error} if sent.has_error() else {"content": sent.content}
        except Exception as fault:  # of any kind, for the parts are a stranger's
            reason = f"its reply cannot be read ({type(fault).__name__})"
            held = {"error": Error(error_code(FAILED), reason)}
        reply: Message = with_content(bare, **held)
        return reply

    def _where(self) -> dict[str, Any]:
        return {"node": self.node, "run_id": self.run.run_id}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: the round loop sends and receives (``server/run/exchange.py``)."""
        raise NotImplementedError("use push_messages and pull_messages")
