"""Vectors that travel up as changes of what the silo received (``wire-...``), and error feedback, for both halves.

Error feedback sends the loss of a format later (Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019,
arXiv 1901.09847). Δ_i is the vector the silo would send minus the one it received, C the format and e_i the residual:

    p = Δ_i + e_i,   send C(p),   e_i <- p - C(p)

The server adds C(p) to the vector it sent. Over the rounds the C(p) sum up to the sum of the Δ_i, except for the last
e_i.

A reply may be lost, or the server may leave it out. So both sides count a round once or not at all: a silo only
*proposes* its new e_i, and the control variates or duals that a method sums (:func:`propose`). The server's
next message contains the last round of this silo that it counted, and only then does the silo commit them.

It fits methods whose silos send a step from the received model, and whose server sums such steps. Other methods do not
declare ``lossy``: the server stores each silo's model, or a silo starts from another model than the received one.
There the next Δ_i contains what was not sent, and e_i would count it twice. BatchNorm statistics travel whole: a
variance must not become negative.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from models.flat import is_finite
from partitions.common.errors import DataError
from strategies.base.settings import Common
from strategies.base.state import BUFFERS, GLOBAL, State
from strategies.base.transport.codecs import (
    OF_CHANGES,
    Encoded,
    read_change,
    write_change,
    write_sparse,
)
from strategies.base.transport.payload import Model

# Prefixes in a silo's state: of residuals, and of what is not counted yet
RESIDUAL = "owed."
PROPOSED = "proposed."


def base_of(received: Mapping[str, Model], name: str, size: int) -> Tensor | None:
    """Return a vector's base, at both ends: the model that the silo received, if it has this name and length."""
    model = received.get(BUFFERS if name == BUFFERS else GLOBAL)
    return model.vector if model is not None and len(model.vector) == size else None


def feeds_back(common: Common) -> bool:
    """Return whether silos store what the format loses, and send it later."""
    when = common.wire_feedback
    if common.wire_dtype == "float32":
        return False
    return when == "on" or (when == "auto" and sends_changes(common))


def sends_changes(common: Common) -> bool:
    """Return whether models travel up as changes."""
    return common.wire_dtype in OF_CHANGES or (
        common.wire_feedback == "on" and common.wire_dtype != "float32"
    )


def propose(state: State, server_round: int, arrays: Mapping[str, Tensor]) -> None:
    """Set entries of a silo's state that :func:`commit` takes over once the server has counted this round's reply."""
    state.arrays |= {f"{PROPOSED}{name}": array for name, array in arrays.items()}
    state.numbers["proposed"] = server_round


def commit(state: State, counted: object) -> None:
    """Take over what the silo's last reply proposed if the server has counted that reply; else drop it.

    ``counted``: the round of the last reply that the server counted, from its message.
    """
    arrays = state.arrays
    takes = state.numbers.pop("proposed", None) == counted
    for key in [key for key in arrays if key.startswith(PROPOSED)]:
        array = arrays.pop(key)
        if takes:
            arrays[key.removeprefix(PROPOSED)] = array


def encode_vectors(
    common: Common,
    state: State,
    vectors: Mapping[str, Tensor],
    received: Mapping[str, Model],
    server_round: int,
) -> dict[str, Encoded]:
    """Encode a silo's vectors that do not travel whole; store new residuals in its state.

    Raises DataError for numbers beyond the range of the run's format.
    """
    result = {}
    for name, vector in vectors.items():
        base = base_of(received, name, len(vector))
        if base is not None and sends_changes(common) and name != BUFFERS:
            result[name] = _encode_change(common, state, name, vector - base, server_round)
        elif common.wire_dtype == "float16" and not is_finite(vector.half()):
            raise _too_large(name, common)
        elif (
            base is not None
            and common.wire_sparse
            and (sparse := write_sparse(vector, base, common.wire_dtype))
        ):
            result[name] = sparse
    return result


def _too_large(name: str, common: Common) -> DataError:
    return DataError(
        f"'{name}' holds numbers too large for wire-dtype = {common.wire_dtype}; bfloat16 and float32 take them"
    )


def _encode_change(
    common: Common, state: State, name: str, change: Tensor, server_round: int
) -> Encoded:
    residual = state.arrays.get(f"{RESIDUAL}{name}")
    back = feeds_back(common)
    # Else the method now shares other layers
    if back and residual is not None and len(residual) == len(change):
        change = change + residual
    encoded = write_change(change, common.wire_dtype, common.wire_topk)
    left = change - read_change(encoded, len(change))
    if not is_finite(left):
        raise _too_large(name, common)
    if back:
        propose(state, server_round, {f"{RESIDUAL}{name}": left})
    return encoded
