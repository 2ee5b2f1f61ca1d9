"""Vectors that travel up as changes of what the silo received (``wire-...``), and error feedback, for both halves.

Error feedback sends the loss of a format later (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019,
arXiv 1901.09847). Δ_i is the vector the silo would send minus the one it received, C the format and e_i the residual:

    p = Δ_i + e_i,   send C(p),   e_i <- p - C(p)

The server adds C(p) to the vector it sent. Over the rounds the C(p) sum up to the sum of the Δ_i, except for the last
e_i. As with control variates, both sides count a round once or not at all. The silo commits the
new e_i in its next round if the server has acknowledged this round's reply; else it drops it.

It fits methods whose silos send a step from the received model, and whose server sums such steps. Other methods do not
declare ``lossy``: the server stores each silo's model, or a silo starts from another model than the received one.
There the next Δ_i contains what was not sent, and e_i would count it twice. BatchNorm statistics travel whole: a
variance must not become negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from models.flat import is_finite
from partitions.common.errors import DataError, UserError
from strategies.base.info import OWN_START, MethodInfo
from strategies.base.settings import Common
from strategies.base.state import BUFFERS, GLOBAL, State
from strategies.base.transport.codecs import OF_CHANGES, Encoded, read_change, write_change, write_sparse
from strategies.base.transport.payload import Model

# Prefixes of the residuals in a silo's state: now, and once its reply is acknowledged.
RESIDUAL, NEXT = "owed.", "next-owed."


def base_of(received: Mapping[str, Model], name: str, size: int) -> Tensor | None:
    """Return a vector's base, at both ends: the model that the silo received, if it has this name and length."""
    found = received.get(BUFFERS if name == BUFFERS else GLOBAL)
    return found.vector if found is not None and len(found.vector) == size else None


def feeds_back(common: Common) -> bool:
    """Return whether silos store what the format loses, and send it later."""
    lossy = common.wire_dtype != "float32"
    return lossy and (common.wire_feedback == "on" or (common.wire_feedback == "auto" and sends_changes(common)))


def sends_changes(common: Common) -> bool:
    """Return whether models travel up as changes."""
    return common.wire_dtype in OF_CHANGES or (common.wire_feedback == "on" and common.wire_dtype != "float32")


def commit(state: State, acknowledged: object) -> None:
    """Update a silo's residuals by its last reply if the server has acknowledged it.

    ``acknowledged``: the round of the last reply that the server counted, from its message.
    """
    arrays, counted = state.arrays, state.numbers.pop("coded", None) == acknowledged
    for key in [key for key in arrays if key.startswith(NEXT)]:
        vector = arrays.pop(key)
        if counted:
            arrays[f"{RESIDUAL}{key.removeprefix(NEXT)}"] = vector


def encode_vectors(
    common: Common, state: State, vectors: Mapping[str, Tensor], received: Mapping[str, Model], server_round: int
) -> dict[str, Encoded]:
    """Encode a silo's vectors that do not travel whole; store new residuals in its state.

    Raises DataError if a residual is not finite.
    """
    result = {}
    for name, vector in vectors.items():
        base = base_of(received, name, len(vector))
        if base is None:
            continue
        if sends_changes(common) and name != BUFFERS:
            result[name] = _encode_change(common, state, name, vector - base, server_round)
        elif common.wire_sparse and (sparse := write_sparse(vector, base, common.wire_dtype)):
            result[name] = sparse
    return result


def _encode_change(common: Common, state: State, name: str, change: Tensor, server_round: int) -> Encoded:
    residual, back = state.arrays.get(f"{RESIDUAL}{name}"), feeds_back(common)
    if back and residual is not None and len(residual) == len(change):  # else the method now shares other layers
        change = change + residual
    encoded = write_change(change, common.wire_dtype, common.wire_topk)
    left = change - read_change(encoded, len(change))
    if not is_finite(left):
        raise DataError(f"'{name}' holds changes too large for wire-dtype = {common.wire_dtype}")
    if back:
        state.arrays[f"{NEXT}{name}"] = left
        state.numbers["coded"] = server_round
    return encoded


def check_wire(info: MethodInfo, common: Common) -> None:
    """Raise UserError for a format that the method does not declare, or an invalid combination of ``wire-...``."""
    if common.wire_sparse and sends_changes(common):
        how = f"wire-dtype = {common.wire_dtype}"
        raise UserError(f"wire-sparse = true: with {how} changes are sent, of which none is left out")
    sums = info.receives not in ("mixture", "models")
    reason = OWN_START if common.ala and sums else "" if info.lossy else info.not_lossy
    if reason and sends_changes(common) and info.uploads:
        method = f"{info.name} with ala = true" if common.ala else info.name
        feedback = "" if common.wire_dtype in OF_CHANGES else ", wire-feedback = on"
        raise UserError(
            f"wire-dtype = {common.wire_dtype}{feedback}: not for {method}: {reason}; float32, float16 and "
            "bfloat16 are, with wire-feedback = auto"
        )


def acknowledge(common: Common, state: State, silos: Iterable[str], server_round: int) -> None:
    """Record in the server's state that these silos' replies are in the sums."""
    if feeds_back(common):
        known = state.numbers.get("taken", {})
        state.numbers["taken"] = known | dict.fromkeys(silos, server_round)


def acknowledgement(common: Common, state: State, silo: str) -> dict[str, int]:
    """Return the entry of a silo's message with the round of its last reply that is in the sums."""
    return {"taken": state.numbers.get("taken", {}).get(silo, 0)} if feeds_back(common) else {}
