"""Bytes of whole messages, as Flower's object store moves them, against the method's stated units of model size.

    python -m benchmarks.wire [units] [growth] [dtype] [--dataset mnist]

units: one round of every method over 12 silos; what a silo gets and sends (models, headers, settings, metrics) over
what the method's own arrays take. growth: what the server hands to the SuperLink for one APPLE round with 6 to 48
silos; an object that several messages share is uploaded once. dtype: FedAvg and APPLE with each ``wire-dtype``, bytes
and accuracy after the fifteen rounds of the README's example, three seeds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from typing import Any

from flwr.app import Message

from benchmarks.common import Prepared, each_method, table
from client.flower.internals import internal
from server.simulation.engine import flower_identity
from server.simulation.simulate import simulate
from strategies import strategies

README_SETTINGS = {
    "rounds": 15,
    "partition": "dirichlet",
    "batch-size": 10,
    "local-epochs": 2,
    "momentum": 0.5,
    "apple.common-init": True,
}


class Tapped:
    """A federation in this process that stores the messages of the last round."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.prepared = Prepared(values)
        self.down: list[Message] = []
        self.up: list[Message] = []
        grid = self.prepared.federation.grid
        push, pull = grid.push_messages, grid.pull_messages

        def push_messages(messages: Iterable[Message]) -> Iterable[str]:
            self.down = list(messages)
            return push(self.down)

        def pull_messages(message_ids: Iterable[str]) -> Iterable[Message]:
            self.up = list(pull(message_ids))
            return self.up

        grid.push_messages, grid.pull_messages = push_messages, pull_messages  # type: ignore[method-assign]

    def round(self) -> None:
        self.prepared.round()


def sizes(message: Message) -> dict[str, int]:
    """Return the sizes in bytes of a message's objects, by hash."""
    with flower_identity():
        objects = internal("inflatable_object").get_all_nested_objects(message).items()
        return {key: len(part.deflate()) for key, part in objects}


def units(values: dict[str, Any]) -> str:
    rows = []
    for name, tapped in each_method(values, Tapped).items():
        for _ in range(3):
            tapped.round()
        row = [name, *strategies()[name].info.sends]
        stated = tapped.prepared.strategy.bytes_down, tapped.prepared.strategy.bytes_up
        for messages, arrays in ((tapped.down, stated[0]), (tapped.up, stated[1])):
            whole = sum(sum(sizes(m).values()) for m in messages)
            row.append(
                f"{whole / arrays:.4f}" if arrays else f"{whole / len(messages):.0f} bytes"
            )
        rows.append(row)
    return table(
        rows, ["method", "stated, down", "up", "bytes down over stated", "bytes up over stated"]
    )


def growth(values: dict[str, Any]) -> str:
    rows = []
    for silos in (6, 12, 24, 48):
        tapped = Tapped({**values, "partition": "iid", "strategy": "apple", "silos": silos})
        for _ in range(3):
            tapped.round()
        model = 4 * tapped.prepared.strategy.layout.size
        uploaded: dict[str, int] = {}
        for message in tapped.down:
            uploaded |= sizes(message)
        got = sum(sum(sizes(m).values()) for m in tapped.down) / silos
        rows.append([str(silos), f"{sum(uploaded.values()) / model:.2f}", f"{got / model:.2f}"])
    return table(
        rows, ["silos", "server to SuperLink, models", "SuperLink to one silo, models"]
    )


# Settings of the transport by name; APPLE has no sums of steps, and so only the first three.
KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float16": {"wire-dtype": "float16"},
    "bfloat16": {"wire-dtype": "bfloat16"},
    "float16, feedback": {"wire-dtype": "float16", "wire-feedback": "on"},
    "int8": {"wire-dtype": "int8"},
    "int8, no feedback": {"wire-dtype": "int8", "wire-feedback": "off"},
    "topk 0.1": {"wire-dtype": "topk", "wire-topk": 0.1},
    "topk 0.01": {"wire-dtype": "topk", "wire-topk": 0.01},
    "topk 0.01, no feedback": {"wire-dtype": "topk", "wire-topk": 0.01, "wire-feedback": "off"},
}
SEEDS = (1, 2, 3)


def dtype(values: dict[str, Any]) -> str:
    rows = []
    for name, kinds in (("fedavg", list(KINDS)), ("apple", list(KINDS)[:3])):
        whole: dict[str, float] = {}
        for kind in kinds:
            runs = []
            for seed in SEEDS:
                chosen = {"strategy": name, **KINDS[kind], **README_SETTINGS, "seed": seed}
                with tempfile.TemporaryDirectory() as folder:
                    out = simulate({**values, **chosen, "out": folder}, quiet=True)
                    runs += json.loads((out / "summary.json").read_text())["runs"]
            traffic = {way: runs[0][f"bytes_{way}"] for way in ("up", "down")}
            whole = whole or traffic
            accuracies = [100 * run["final"]["accuracy_mean"] for run in runs]
            shares = [f"{traffic[way] / whole[way]:.4f}" for way in ("up", "down")]
            mean = sum(accuracies) / len(accuracies)
            rows.append(
                [name, kind, *shares, f"{mean:.1f}", ", ".join(f"{a:.1f}" for a in accuracies)]
            )
    header = [
        "method",
        "wire-dtype",
        "up over float32",
        "down",
        "final accuracy (mean)",
        f"seeds {SEEDS}",
    ]
    return table(rows, header)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="*", default=["units", "growth"], help="units, growth, dtype"
    )
    parser.add_argument("--dataset", default="digits")
    given = parser.parse_args()
    values = {"dataset": given.dataset, "partition": "iid", "silos": 12, "threads": 0}
    for name in given.what:
        print(
            f"## {name}\n\n{ {'units': units, 'growth': growth, 'dtype': dtype}[name](values) }\n"
        )


if __name__ == "__main__":
    main()
