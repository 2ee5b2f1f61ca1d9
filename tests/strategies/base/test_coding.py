"""Formats of changes, worked by hand; vectors told by a base; and what no silo may send."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from failing import fails
from near import near

from strategies.base.settings import Common
from strategies.base.state import State
from strategies.base.transport.codecs import (
    BLOCK,
    CHANGE,
    SPARSE,
    Encoded,
    largest,
    narrow,
    read,
    widen,
    write_change,
    write_sparse,
)
from strategies.base.transport.error_feedback import (
    GLOBAL,
    PROPOSED,
    RESIDUAL,
    commit,
    encode_vectors,
)
from strategies.base.transport.payload import Model, Payload, decode, encode, wire_bytes


@dataclass
class Feedback:
    """What a silo that has received zeros keeps and sends."""

    common: Common
    state: State
    round: int
    size: int

    def code(self, vectors):
        return encode_vectors(
            self.common,
            self.state,
            vectors,
            {GLOBAL: Model(torch.zeros(self.size))},
            self.round,
        )

    def commit(self, acknowledged):
        commit(self.state, acknowledged)


def client(server_round=1, state=None, size=4, **wire):
    return Feedback(Common(**wire), state or State(), server_round, size)


def test_two_steps_of_feedback_by_hand():
    """topk with k = 1 of 4.

    Round 1: p = Δ = (4, -3, 1, 0): sent (4, 0, 0, 0), residual (0, -3, 1, 0).
    Round 2: Δ = (1, -2, 0, 0.5), p = (1, -5, 1, 0.5): sent (0, -5, 0, 0), residual (1, 0, 1, 0.5).
    Sent and residual: (5, -5, 1, 0.5), the sum of both Δ.
    """
    first = client(wire_dtype="topk", wire_topk=0.25)
    sent = first.code({"model": torch.tensor([4.0, -3.0, 1.0, 0.0])})["model"]
    assert read(sent, torch.zeros(4)).tolist() == [4, 0, 0, 0]
    assert first.state.arrays[f"{PROPOSED}{RESIDUAL}model"].tolist() == [0, -3, 1, 0]
    second = client(2, first.state, wire_dtype="topk", wire_topk=0.25)
    second.commit(1)
    sent = second.code({"model": torch.tensor([1.0, -2.0, 0.0, 0.5])})["model"]
    assert read(sent, torch.zeros(4)).tolist() == [0, -5, 0, 0]
    assert second.state.arrays[f"{PROPOSED}{RESIDUAL}model"].tolist() == [1, 0, 1, 0.5]


@pytest.mark.parametrize("taken", [0, None, 7])
def test_a_reply_that_was_not_taken_leaves_the_residual_as_it_was(taken):
    silo = client(
        3, State({f"{RESIDUAL}model": torch.ones(4)}, {}), wire_dtype="topk", wire_topk=0.25
    )
    silo.code({"model": torch.tensor([4.0, -3.0, 1.0, 0.0])})
    silo.commit(taken)
    assert silo.state.arrays.keys() == {f"{RESIDUAL}model"}
    assert silo.state.arrays[f"{RESIDUAL}model"].tolist() == [1, 1, 1, 1]
    assert silo.state.numbers == {}


def test_without_feedback_there_is_no_residual():
    silo = client(wire_dtype="int8", wire_feedback="off")
    silo.code({"model": torch.tensor([4.0, -3.0, 1.0, 0.1])})
    assert silo.state == State()


@pytest.mark.parametrize("dtype", ["int8", "topk", "float16", "bfloat16"])
def test_what_was_sent_and_the_residual_are_the_sum_of_the_changes(dtype):
    """To the rounding of float32, over 30 rounds, of which every third is not taken and changes nothing."""
    draw, state = torch.Generator().manual_seed(0), State()
    total, arrived, last = torch.zeros(3000), torch.zeros(3000), 0
    for server_round in range(1, 31):
        silo = client(
            server_round, state, 3000, wire_dtype=dtype, wire_topk=0.02, wire_feedback="on"
        )
        silo.commit(last)
        change = torch.randn(3000, generator=draw)
        sent = read(silo.code({"model": change})["model"], torch.zeros(3000))
        if server_round % 3:
            total, arrived, last = total + change, arrived + sent, server_round
    silo.commit(last)
    residual = state.arrays.get(f"{RESIDUAL}model", torch.zeros(3000))
    near(arrived + residual, total, 1e-4)
    assert residual.norm() > 0


def test_int8_by_hand():
    """A block whose largest number is 127 has steps of 1; halves go to the even step; the next block has its own."""
    change = torch.cat(
        [
            torch.tensor([127.0, -127.0, 0.5, 1.5, -2.6]),
            torch.zeros(BLOCK - 5),
            torch.tensor([0.254]),
        ]
    )
    coded = write_change(change, "int8")
    assert coded.tensors["scales"].tolist() == pytest.approx([1, 0.002])
    assert coded.tensors["values"][:5].tolist() == [127, -127, 0, 2, -3]
    assert coded.tensors["values"][-1] == 127
    assert coded.bytes == BLOCK + 1 + 2 * 4
    arrived = read(coded, torch.zeros(BLOCK + 1))
    assert arrived[:5].tolist() == [127, -127, 0, 2, -3]
    assert float(arrived[-1]) == pytest.approx(0.254)


@pytest.mark.parametrize("size", [0, 1, 5, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("dtype", ["int8", "topk", "float16", "bfloat16"])
def test_a_change_of_any_length(dtype, size):
    change = torch.randn(size, generator=torch.Generator().manual_seed(1))
    arrived = read(write_change(change, dtype, 1.0), torch.zeros(size))
    near(arrived, change, {"int8": 0.02, "topk": 0, "float16": 3e-3, "bfloat16": 2e-2}[dtype])


def test_a_block_of_zeros_stays_zeros():
    assert not read(write_change(torch.zeros(2000), "int8"), torch.zeros(2000)).any()


def test_topk_takes_the_largest_and_of_equal_ones_the_first():
    assert largest(torch.tensor([1.0, -5.0, 3.0, 2.0]), 2).tolist() == [1, 2]
    assert largest(torch.tensor([2.0, -2.0, 1.0, 2.0, 2.0]), 3).tolist() == [0, 1, 3]
    assert largest(torch.zeros(4), 2).tolist() == [0, 1]
    change = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    assert largest(change, 50).tolist() == sorted(
        change.abs().argsort(descending=True)[:50].tolist()
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_sparse_vector_arrives_as_the_dense_one(dtype):
    """Bit for bit, a zero that became a negative one too. Row by row of 32, as of an embedding."""
    draw = torch.Generator().manual_seed(3)
    base = widen(narrow(torch.randn(3200, generator=draw), dtype), dtype)
    base[77] = 0.0
    vector = base.clone()
    vector[320:384] += torch.randn(64, generator=draw)
    vector[77], vector[0], vector[3199] = -0.0, 9.0, 8.0
    coded = write_sparse(vector, base, dtype)
    assert coded is not None
    assert coded.tensors["runs"].tolist() == [[0, 1], [77, 1], [320, 64], [3199, 1]]
    assert coded.bytes == 4 * 8 + 67 * (4 if dtype == "float32" else 2)
    arrived, dense = read(coded, base), widen(narrow(vector, dtype), dtype)
    assert torch.equal(arrived.view(torch.int32), dense.view(torch.int32))


def test_sparse_only_where_it_is_smaller():
    base = torch.zeros(100)
    assert write_sparse(torch.ones(100), base, "float32") is None
    unchanged = write_sparse(base, base, "float32")
    assert unchanged is not None
    assert unchanged.bytes == 0
    assert not read(unchanged, base).any()
    # A gap of two costs what a run costs: one run, no gain
    every_other = torch.tensor([1.0, 0.0, 0.0] * 33 + [1.0])
    assert write_sparse(every_other, base, "float32") is None


PLACES, TEN = torch.tensor([0, 3], dtype=torch.int32), torch.zeros(10)
TOPK = {"places": PLACES, "values": torch.ones(2)}
INT8 = {"values": torch.zeros(10, dtype=torch.int8), "scales": torch.ones(1)}
RUNS = {"runs": torch.tensor([[0, 2]], dtype=torch.int32), "values": torch.ones(2)}


def places(*given):
    return torch.tensor(given, dtype=torch.int32)


def runs(*given):
    return torch.tensor(given, dtype=torch.int32).view(-1, 2)


HOSTILE = [
    ("topk", CHANGE, {**TOPK, "places": places(-1, 3)}),
    ("topk", CHANGE, {**TOPK, "places": places(3, 10)}),
    ("topk", CHANGE, {**TOPK, "places": places(3, 3)}),
    ("topk", CHANGE, {**TOPK, "places": places(3, 0)}),
    ("topk", CHANGE, {**TOPK, "places": places(0, 3, 4)}),
    ("topk", CHANGE, {**TOPK, "places": torch.tensor([0, 3])}),
    ("topk", CHANGE, {**TOPK, "places": torch.tensor([0.0, 3.0])}),
    ("topk", CHANGE, {"places": places(0, 3).view(1, 2), "values": torch.ones(1, 2)}),
    ("topk", CHANGE, {"places": places(0, 3), "values": torch.ones(2).half()}),
    ("topk", CHANGE, {"values": torch.ones(2)}),
    ("int8", CHANGE, {**INT8, "scales": torch.tensor([math.nan])}),
    ("int8", CHANGE, {**INT8, "scales": torch.tensor([math.inf])}),
    ("int8", CHANGE, {**INT8, "scales": torch.tensor([-1.0])}),
    ("int8", CHANGE, {**INT8, "scales": torch.ones(2)}),
    ("int8", CHANGE, {**INT8, "values": torch.zeros(9, dtype=torch.int8)}),
    ("int8", CHANGE, {**INT8, "values": torch.zeros(10)}),
    ("int8", "", {"vector": torch.zeros(10, dtype=torch.int8)}),
    ("int8", SPARSE, RUNS),
    ("float16", CHANGE, {"vector": torch.zeros(11).half()}),
    ("float16", CHANGE, {"vector": torch.zeros(10)}),
    ("float32", SPARSE, {**RUNS, "runs": runs((-1, 2))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((9, 2))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((3, 1), (3, 1))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((3, 1), (1, 1))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((3, 3), (1, -1))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((0, 2**31 - 1))}),
    ("float32", SPARSE, {**RUNS, "runs": runs((0, 3))}),
    ("float32", SPARSE, {**RUNS, "runs": torch.tensor([0, 2], dtype=torch.int32)}),
    ("float32", SPARSE, {**RUNS, "values": torch.ones(1, 2)}),
    ("float64", SPARSE, RUNS),
    ("float16", SPARSE, RUNS),
    ("no such", CHANGE, {"vector": torch.zeros(10)}),
    ("float32", "no such", {"vector": torch.zeros(10)}),
]


@pytest.mark.parametrize("dtype, form, tensors", HOSTILE)
def test_what_does_not_fit_is_one_line(dtype, form, tensors):
    records = encode(
        Payload({"model": Model(TEN)}), encoded={"model": Encoded(tensors, dtype, form)}
    )
    fails(ValueError, r"^model 'model': .+", decode, records, base=lambda name: TEN)


def test_a_change_of_nothing_that_is_known():
    records = encode(
        Payload({"model": Model(TEN)}), encoded={"model": Encoded(TOPK, "topk", CHANGE)}
    )
    fails(ValueError, "there is no such base", decode, records)


def test_a_coded_model_counts_the_bytes_that_travelled():
    records = encode(
        Payload({"model": Model(TEN)}), encoded={"model": Encoded(TOPK, "topk", CHANGE)}
    )
    model = decode(records, base=lambda name: torch.ones(10))[0].models["model"]
    assert model.vector.tolist() == [2, 1, 1, 2, 1, 1, 1, 1, 1, 1]
    assert model.bytes == wire_bytes(records) == 16
