"""Vectors that travel up as changes of what the silo received (``wire-...``), and error feedback, for both halves.

What is lost on the way is not lost (error feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019,
arXiv 1901.09847). With Δ_i what the silo would send minus what it received, C the format and e_i its residual:

    p = Δ_i + e_i,   send C(p),   e_i <- p - C(p)

The server adds C(p) to what it sent. What arrives over the rounds sums up to what was to be sent, but for the last e_i.
As with control variates (``acknowledged.py``) a round counts once, in both places. The silo keeps the new e_i from its
next round on if the server has acknowledged this round's reply; else it drops it.

It is for methods whose silos send a step from the model that they received, and whose server adds up such steps. Where
it keeps each silo's model, or a silo starts from another than the received one, what was not sent is in the next Δ_i
again, and e_i would count it twice; such a method does not declare ``lossy``. BatchNorm statistics travel as they
are: a variance must not become negative.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from models.flat import is_finite
from partitions.common.errors import DataError, UserError
from strategies.base.info import OWN_START, MethodInfo
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.transport.codecs import OF_CHANGES, Encoded, read_change, write_change, write_sparse
from strategies.base.transport.payload import BUFFERS, GLOBAL, Model

# Prefixes of the residuals in a silo's state: now, and once its reply is acknowledged.
RESIDUAL, NEXT = "owed.", "next-owed."


def base_of(received: Mapping[str, Model], name: str, size: int) -> Tensor | None:
    """Return a vector's base, at both ends: the model that the silo received, if it has this name and length."""
    found = received.get(BUFFERS if name == BUFFERS else GLOBAL)
    return found.vector if found is not None and len(found.vector) == size else None


def feeds_back(common: Common) -> bool:
    """Whether silos keep what the format loses, and send it later."""
    lossy = common.wire_dtype != "float32"
    return lossy and (common.wire_feedback == "on" or (common.wire_feedback == "auto" and sends_changes(common)))


def sends_changes(common: Common) -> bool:
    """Whether models travel up as changes."""
    return common.wire_dtype in OF_CHANGES or (common.wire_feedback == "on" and common.wire_dtype != "float32")


def commit(state: State, acknowledged: object) -> None:
    """Update a silo's residuals by its last reply if the server has acknowledged it.

    ``acknowledged``: the round of the last reply that the server took, as its message says.
    """
    arrays, counted = state.arrays, state.numbers.pop("coded", None) == acknowledged
    for key in [key for key in arrays if key.startswith(NEXT)]:
        vector = arrays.pop(key)
        if counted:
            arrays[f"{RESIDUAL}{key.removeprefix(NEXT)}"] = vector


def encode_vectors(
    common: Common, state: State, vectors: Mapping[str, Tensor], received: Mapping[str, Model], server_round: int
) -> dict[str, Encoded]:
    """Encode those of a silo's vectors that do not travel as they are; new residuals go into its state.

    Raises DataError where one is not finite.
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
    """Raise UserError for a way to send that the method does not declare, or that is none."""
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
    """Note in the server's state that these silos' replies are in the sums."""
    if feeds_back(common):
        known = state.numbers.get("taken", {})
        state.numbers["taken"] = known | dict.fromkeys(silos, server_round)


def acknowledgement(common: Common, state: State, silo: str) -> dict[str, int]:
    """Return what a silo's message says of the last of its replies that is in the sums."""
    return {"taken": state.numbers.get("taken", {}).get(silo, 0)} if feeds_back(common) else {}
