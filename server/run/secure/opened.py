"""A round whose sum is opened, on the server's disk until its checkpoint: a resume ends it, and needs no silo for that.

The file has the sum and the replies without their vectors. It is written before the sum changes the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor

from client.flower.messages import pack_messages, unpack_messages
from client.protocol.secure import RECORD as SECURE
from client.protocol.secure.statements import SiloRecord
from partitions.common.messages import INTEGERS, MASKED
from partitions.common.parsed import parse_values
from strategies.base.plan import RoundPlan
from strategies.base.state import State

SUM, REPLIES = "sum", "replies"


def read_silo_record(reply: Message, silo: str) -> SiloRecord:
    """Take a silo's record out of its reply. Raises DataError."""
    record = {**reply.content.pop(SECURE, {})}
    return parse_values(SiloRecord, record, Path("its record"), "it is not used")


def pack_round(
    plan: RoundPlan, number: int, replies: Sequence[Message], total: Tensor
) -> State:
    """Return a round as a state, and drop its replies' vectors. ``total``: the opened sums (k, n), int32."""
    for reply in replies:
        if reply.has_content():
            reply.content.pop(MASKED, None)
    saved = torch.frombuffer(bytearray(pack_messages(replies)), dtype=torch.uint8)
    numbers = {"round": [plan.numbers["run_id"], number], "plan": plan.saved()}
    return State({SUM: total, REPLIES: saved}, numbers)


def replies_of(state: State) -> list[Message]:
    """Return the replies of the round in a state, if any, with zeros for the vectors that its sum is of.

    ``state``: of :func:`pack_round`, with the ``sum``: what its masks depended on, and its silos.
    """
    if not state.arrays:
        return []
    replies = unpack_messages(state.arrays[REPLIES].numpy().tobytes())
    zeros = Array(np.zeros(state.arrays[SUM].shape[-1], np.uint32))
    nodes = state.numbers["plan"]["nodes"]
    _, *silos = state.numbers["sum"].split(" ")
    summed = {nodes[name] for name in silos}
    for reply in replies:
        if reply.metadata.src_node_id in summed:
            reply.content[MASKED] = ArrayRecord({INTEGERS: zeros})
    return replies
