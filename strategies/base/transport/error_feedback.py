"""Both halves of every method, as far as vectors travel up as changes of what the silo received (``wire-...``).

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
from typing import Any, ClassVar

from torch import Tensor

from models.flat import is_finite
from partitions.common.errors import DataError, UserError
from strategies.base.info import OWN_START, MethodInfo
from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.transport.codecs import OF_CHANGES, Coded, read_change, write_change, write_sparse
from strategies.base.transport.payload import BUFFERS, GLOBAL, Model, Wire

RESIDUAL, NEXT = "owed.", "next-owed."  # prefixes of the residuals in a silo's state: now, and once its reply is taken


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


class CodedClient:
    """Part of :class:`SiloClient`."""

    common: Common
    state: State
    round: int
    models: Mapping[str, Model]

    def settle(self, taken: object) -> None:
        """Update the residuals by the silo's last reply if the server has taken it; ``taken``: its last such round."""
        arrays, numbers = self.state.arrays, self.state.numbers
        counted = numbers.pop("coded", None) == taken
        for key in [key for key in arrays if key.startswith(NEXT)]:
            vector = arrays.pop(key)
            if counted:
                arrays[f"{RESIDUAL}{key.removeprefix(NEXT)}"] = vector

    def code(self, vectors: Mapping[str, Tensor]) -> dict[str, Coded]:
        """Those of the vectors that travel otherwise than as they are. Raises DataError where one is not finite."""
        result, c = {}, self.common
        for name, vector in vectors.items():
            base = base_of(self.models, name, len(vector))
            if base is None:
                continue
            if sends_changes(c) and name != BUFFERS:
                result[name] = self._change(name, vector - base)
            elif c.wire_sparse and (sparse := write_sparse(vector, base, c.wire_dtype)):
                result[name] = sparse
        return result

    def _change(self, name: str, change: Tensor) -> Coded:
        c, residual = self.common, self.state.arrays.get(f"{RESIDUAL}{name}")
        back = feeds_back(c)
        if back and residual is not None and len(residual) == len(change):  # else the method now shares other layers
            change = change + residual
        coded = write_change(change, c.wire_dtype, c.wire_topk)
        left = change - read_change(coded, len(change))
        if not is_finite(left):
            raise DataError(f"'{name}' holds changes too large for wire-dtype = {c.wire_dtype}")
        if back:
            self.state.arrays[f"{NEXT}{name}"] = left
            self.state.numbers["coded"] = self.round
        return coded


class CodedStrategy:
    """Part of :class:`PersonalizedStrategy`."""

    info: ClassVar[MethodInfo]
    common: Common
    state: State
    round: int
    sent: dict[str, Mapping[str, Model]]
    wire: Wire
    upload_size: Any

    @classmethod
    def check_wire(cls, common: Common) -> None:
        """Raises UserError for a way to send that this method has not, or that is none."""
        if common.wire_sparse and sends_changes(common):
            how = f"wire-dtype = {common.wire_dtype}"
            raise UserError(f"wire-sparse = true: with {how} changes are sent, of which none is left out")
        info = cls.info
        sums = info.receives not in ("mixture", "models")
        reason = OWN_START if common.ala and sums else "" if info.lossy else info.not_lossy
        if reason and sends_changes(common) and info.uploads:
            method = f"{info.name} with ala = true" if common.ala else info.name
            feedback = "" if common.wire_dtype in OF_CHANGES else ", wire-feedback = on"
            raise UserError(
                f"wire-dtype = {common.wire_dtype}{feedback}: not for {method}: {reason}; float32, float16 and "
                "bfloat16 are, with wire-feedback = auto"
            )

    def base(self, name: str, silo: str) -> Tensor | None:
        """Return the base of this silo's vector of this name: what the server sent, as it arrived."""
        found = base_of(self.sent.get(silo, {}), name, self.upload_size(name, silo))
        return None if found is None else self.wire.arrives(found)

    def take(self, silos: Iterable[str]) -> None:
        """Note that these silos' replies are in the sums; their next message acknowledges it."""
        if feeds_back(self.common):
            taken = self.state.numbers.get("taken", {})
            self.state.numbers["taken"] = taken | dict.fromkeys(silos, self.round)

    def taken(self, silo: str) -> dict[str, int]:
        """What a silo's message says of the last of its replies that was taken."""
        return {"taken": self.state.numbers.get("taken", {}).get(silo, 0)} if feeds_back(self.common) else {}
