"""What masks cost a silo and the server in a round, measured in turns with one ChaCha20 stream over the same vector.

    python -m benchmarks.secure [--silos 12,40,100] [--size 582026] [--repeats 5]

silo: CPU time of the integers of its step, the checks of the list, the masks, the next round's shares and the answer.
server: CPU time of the sum and of opening it where a quarter of the silos is gone. bytes: what the reply has beside
four bytes a parameter. The exchange itself is not part of it: the messages are handed over in this process.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import table
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import new_key
from client.protocol.policy import Policy
from client.protocol.secure import masks
from client.protocol.secure.statements import read_statement
from client.protocol.secure.unmasking import open_sum
from client.site.secure.silo import SecureSilo
from partitions.common.sum_weights import groups_of
from strategies.base.aggregation.secure import add_integers, integers_of
from strategies.base.settings import Common
from strategies.base.transport.payload import Model
from strategies.fedavg import FedAvg

RUN, STUDY = "1", "a" * 64
SETTINGS: dict[str, Any] = {
    "strategy": "scaffold",
    "rounds": 10_000,
    "secure-aggregation": True,
}
Vector = Any


class SeededRing:
    """The silos of one run, each with keys and a folder, and the server between them. All weigh the same."""

    def __init__(self, folder: Path, count: int, size: int, group: int = 1) -> None:
        self.names = [f"clinic-{number:03d}" for number in range(count)]
        nodes = {name: new_key() for name in self.names}
        peers = {name: fingerprint(public_pem(key)) for name, key in nodes.items()}
        groups = groups_of(self.names, group)
        study: Any = SimpleNamespace(
            digest=STUDY,
            training_peers=peers,
            groups=groups,
            summed_with=lambda silo: self.names,
        )
        self.silos = {
            name: SecureSilo(
                folder / name, name, key, RUN, study, Policy(secure_peers=2), SETTINGS
            )
            for name, key in nodes.items()
        }
        rng = np.random.default_rng(0)
        self.model = torch.from_numpy(rng.normal(size=size).astype(np.float32))
        self.trained = self.model + 0.01
        self.round = 1
        slot = {"round": 1, "attempt": 1}
        for silo in self.silos.values():
            silo.note_samples(100)
        texts = [self.silos[name].keys(slot)["statement"] for name in self.names]
        record = {**slot, "statements": texts}
        self.made = {name: self.silos[name].keys(record) for name in self.names}

    def record(self, name: str) -> dict[str, Any]:
        """The record of a train message."""
        place, made = self.names.index(name), [self.made[one] for one in self.names]
        return {
            "round": self.round,
            "attempt": 1,
            "statements": [one["statement"] for one in made],
            "sealed": [one["sealed"][place] for one in made],
        }

    def received(self) -> str:
        return f"{self.round:064x}"

    def upload(self, name: str, record: Mapping[str, Any]) -> tuple[Vector, dict[str, Any]]:
        """What a silo does with a train message after its training: the masked vector, the next round's shares."""
        config = {"secure_share": 1 / len(self.names), "participants": len(self.names)}
        integers = integers_in(self, config)
        self.silos[name].enter(record, self.received(), config["secure_share"])
        vector = integers.view(np.uint32)
        return vector, self.silos[name].mask(vector)

    def open(
        self, sent: Mapping[str, Vector], answers: Mapping[str, Any], survivors: list[str]
    ) -> Vector:
        """The opened sum."""
        tensors = [torch.from_numpy(sent[name].view(np.int32)) for name in survivors]
        total = add_integers(tensors).numpy().view(np.uint32)
        listed = {name: read_statement(**self.made[name]) for name in self.names}
        weights = dict.fromkeys(self.names, 1)
        context = masks.context(self.received(), SETTINGS, weights, listed)
        opened, _ = open_sum(total, listed, self.names, survivors, context, answers)
        return opened


def integers_in(ring: SeededRing, config: Mapping[str, Any]) -> Vector:
    """A silo's step as integers, int32."""
    vectors, received = {"model": ring.trained}, {"global": Model(ring.model)}
    common = Common(secure_aggregation=True)
    integers, _ = integers_of(FedAvg.info, common, vectors, received, config)
    return integers.numpy()


def cpu(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the CPU seconds of a work, and its result."""
    started = time.process_time()
    result = work()
    return time.process_time() - started, result


def measure(count: int, size: int, repeats: int, folder: Path) -> list[str]:
    """Return a row of the table: medians over ``repeats`` rounds of the first silo and of the server."""
    ring, first = SeededRing(folder, count, size), "clinic-000"
    survivors = ring.names[: count - count // 4]
    silo, server, stream, more = list[float](), list[float](), list[float](), 0
    for _ in range(repeats):
        took, _ = cpu(lambda: masks.add(np.zeros(size, np.uint32), [(1, bytes(32))]))
        stream.append(took)
        records = {name: ring.record(name) for name in ring.names}
        took, (vector, ahead) = cpu(lambda r=records: ring.upload(first, r[first]))  # type: ignore[misc]
        others = {
            name: ring.upload(name, record) for name, record in records.items() if name != first
        }
        sent, following = {first: vector}, {first: ahead}
        for name, (masked, shares) in others.items():
            sent[name], following[name] = masked, shares
        question = {"round": ring.round, "attempt": 1, "survivors": survivors}
        took_, answer = cpu(lambda q=question: ring.silos[first].unmask(q))  # type: ignore[misc]
        silo.append(took + took_)
        answers = {name: ring.silos[name].unmask(question)["shares"] for name in survivors[1:]}
        answers[first] = answer["shares"]
        took, opened = cpu(lambda s=sent, a=answers: ring.open(s, a, survivors))  # type: ignore[misc]
        server.append(took)
        _check(opened, ring, len(survivors))
        more = len(ahead["statement"]) + sum(map(len, ahead["sealed"]))
        ring.made, ring.round = following, ring.round + 1
    of = [statistics.median(a / b for a, b in zip(silo, stream, strict=True))]
    of += [statistics.median(a / b for a, b in zip(server, stream, strict=True))]
    return [
        *(str(count), str(count // 4)),
        *(f"{1000 * statistics.median(silo):.0f}", f"{of[0]:.0f}"),
        *(f"{1000 * statistics.median(server):.0f}", f"{of[1]:.0f}", f"{more / count:.0f}"),
    ]


def _check(total: Vector, ring: SeededRing, survivors: int) -> None:
    """All silos moved equally, so the sum is this many times one silo's integers."""
    config = {"secure_share": 1 / len(ring.names), "participants": len(ring.names)}
    assert (total.view(np.int32) == survivors * integers_in(ring, config)).all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--silos", default="12,40,100")
    parser.add_argument("--size", type=int, default=582_026)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    header = [
        "silos",
        "gone",
        "silo, ms",
        "in streams",
        "server, ms",
        "in streams",
        "bytes a silo",
    ]
    rows = []
    for count in map(int, args.silos.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(count, args.size, args.repeats, Path(folder)))
    print(table(rows, header))


if __name__ == "__main__":
    main()
