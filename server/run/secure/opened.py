"""A round whose sum is opened, on the server's disk until its checkpoint: a resume ends it, and needs no silo for that.

The file has the sum and the replies without their vectors. It is written before the sum changes the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor

from client.site.flower import internal
from strategies.base.aggregation.secure import ARRAY, RECORD
from strategies.base.info import RoundPlan
from strategies.base.state import State

SUM, REPLIES = "sum", "replies"


def pack_round(
    plan: RoundPlan,
    number: int,
    replies: Sequence[Message],
    total: Tensor,
    silos: Sequence[str],
) -> State:
    """Return a round as a state, and drop its replies' vectors. ``total``: the sum of these silos' integers, int32."""
    for reply in replies:
        if reply.has_content():
            reply.content.pop(RECORD, None)
    listed = map(internal("serde").message_to_proto, replies)
    text = internal("fleet_pb2").PushMessagesRequest(messages_list=listed).SerializeToString()
    saved = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    numbers = {"round": [plan.numbers["run_id"], number], "silos": silos, "plan": plan.saved()}
    return State({SUM: total, REPLIES: saved}, numbers)


def replies_of(state: State) -> list[Message]:
    """Return the replies of the round in a state, if any. The first silo of the sum has it, the others have zeros."""
    if not state.arrays:
        return []
    text = state.arrays[REPLIES].numpy().tobytes()
    listed = internal("fleet_pb2").PushMessagesRequest.FromString(text).messages_list
    replies = [*map(internal("serde").message_from_proto, listed)]
    left = state.arrays[SUM].numpy().view(np.uint32)
    nodes = state.numbers["plan"]["nodes"]
    summed = {nodes[name] for name in state.numbers["silos"]}
    for reply in replies:
        if reply.metadata.src_node_id in summed:
            reply.content[RECORD] = ArrayRecord({ARRAY: Array(left)})
            left = np.zeros_like(left)
    return replies
