"""Hospitals of this process that mask what they send: keys, lists, masks and answers are those of a SuperNode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Context, Error, Message
from secure_ring import summing
from tiny import Files, Run, TinyGrid, federate, seen

from client.flower.messages import array_sums, config_of
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import new_key, write_key
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy, PolicyRefusedError
from client.protocol.secure import masks
from client.site.message import read_message
from client.site.secure.gate import KEY, SecureMessage

# (silo, message type, round) -> whether the message is lost before it arrives, or its reply on the way back
Lost = Callable[[str, str, int], bool]
SECURE: dict[str, Any] = {"secure_aggregation": True, "strategy": "fedavg"}


def received_by(message: Message) -> str:
    """Return the sums of what a silo has received in a train message."""
    return masks.received_sha256(array_sums(message.content), config_of(message))


class Secured:
    """For ``prepare``: a gate around each silo's app. ``asked``: (silo, message type, round) of every message."""

    def __init__(
        self,
        folder: Path,
        names: Mapping[str, Any],
        peers: int = 2,
        groups: Sequence[Sequence[str]] = (),
        robust: str = "none",
    ) -> None:
        self.folder, self.asked, self.run = folder, list[tuple[str, str, int]](), 1
        self.gone: Lost = lambda silo, kind, number: False
        self.lost: Lost = lambda silo, kind, number: False
        self.change: Callable[[str, str, int, Message], object] = lambda *of: None
        self.offline: set[str] = set()
        signers = {}
        for name in names:
            key = new_key()
            write_key(folder / f"{name}.key", key)
            signers[name] = fingerprint(public_pem(key))
        rules = Policy(secure_peers=peers)
        self.terms: Any = SimpleNamespace(
            policy=rules,
            error=None,
            study=summing(
                name="heart",
                settings={"secure-robust": robust},
                digest="ab" * 32,
                training_peers=signers,
                held_out=(),
                groups=groups or [[name] for name in sorted(names)],
            ),
            rules=rules,
        )

    def __call__(self, grid: TinyGrid) -> None:
        grid.gates = True  # type: ignore[attr-defined]
        for context in grid.contexts.values():
            context.run_id = self.run
        grid.get_node_ids = lambda: [  # type: ignore[method-assign]
            node for node in grid.contexts if grid.name_of(node) not in self.offline
        ]
        inner = grid.app
        grid.app = lambda message, context: self.pass_gate(grid, inner, message, context)  # type: ignore[assignment]

    def pass_gate(
        self, grid: TinyGrid, app: Any, message: Message, context: Context
    ) -> Message:
        silo, number = grid.key_of(message)
        kind = message.metadata.message_type
        self.asked.append((silo, kind, number))
        if silo in self.offline or self.gone(silo, kind, number):
            return Message(Error(1, "the line is cut"), reply_to=message)
        noted = len(grid.traffic)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(KEY, str(self.folder / f"{silo}.key"))
            try:
                masks = SecureMessage(read_message(message, context, terms=self.terms))
                reply: Message = masks.reply(lambda: app(message, context))
            except PolicyRefusedError as error:
                return Message(Error(1, str(error)), reply_to=message)
            except (SiteError, OSError) as error:
                return Message(Error(1, f"{silo} refuses: {error}"), reply_to=message)
        self.change(silo, kind, number, reply)
        if len(grid.traffic) > noted:
            # What leaves the gate, not the app
            grid.traffic[-1] = message, seen(reply)
        if self.lost(silo, kind, number):
            return Message(Error(1, "the line was cut"), reply_to=message)
        return reply


def go(files: Files, folder: Path, secured: Any, **changes: Any) -> Run:
    state = folder / ("masked" if isinstance(secured, Secured) else "plain")
    return federate(
        files, state_dir=state, prepare=secured, **{"rounds": 3, **SECURE, **changes}
    )


def kinds(secured: Secured, kind: str) -> list[int]:
    """The rounds in which messages of a kind went out, once each."""
    return [*dict.fromkeys(number for _, asked, number in secured.asked if asked == kind)]


def close(one: Run, other: Run) -> None:
    """Up to the rounding: a sum over a list of five has another scale than one of six without one."""
    torch.testing.assert_close(
        one.strategy.state.model, other.strategy.state.model, rtol=0, atol=1e-6
    )


def absent(rounds: set[int], silo: str = "f") -> Any:
    """For ``prepare``: without gates, a silo whose training fails in these rounds."""

    def prepare(grid: TinyGrid) -> None:
        grid.absent = {(silo, number) for number in rounds}

    return prepare
