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

SUM, REPLY = "sum", "reply."


def pack_round(
    plan: RoundPlan,
    number: int,
    replies: Sequence[Message],
    total: Tensor,
    silos: Sequence[str],
) -> State:
    """Return a round as a state, and drop its replies' vectors. ``total``: the sum of these silos' integers, int32."""
    arrays = {SUM: total}
    for reply in replies:
        if reply.has_content():
            reply.content.pop(RECORD, None)
        text = internal("serde").message_to_proto(reply).SerializeToString()
        name = plan.nodes[reply.metadata.src_node_id]
        array = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        arrays[REPLY + name] = array
    numbers = {"round": [plan.numbers["run_id"], number], "silos": silos, "plan": plan.saved()}
    return State(arrays, numbers)


def replies_of(state: State) -> list[Message]:
    """Return the replies of the round in a state, if any. The first silo of the sum has it, the others have zeros."""
    replies, arrays = list[Message](), {**state.arrays}
    total = arrays.pop(SUM, torch.empty(0, dtype=torch.int32))
    left = total.numpy().view(np.uint32)
    for key, array in arrays.items():
        text = array.numpy().tobytes()
        proto = internal("message_pb2").Message.FromString(text)
        reply = internal("serde").message_from_proto(proto)
        name = key.removeprefix(REPLY)
        if name in state.numbers["silos"]:
            reply.content[RECORD] = ArrayRecord({ARRAY: Array(left)})
            left = np.zeros_like(left)
        replies.append(reply)
    return replies
