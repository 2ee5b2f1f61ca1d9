"""Silos of one secure run in one process, each with keys and a disk of its own, and an honest server between them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from failing import fails

from client.protocol.envelope import SECURE, PrivateKey, fingerprint, public_pem, seal
from client.protocol.keys import new_key
from client.protocol.parsed import SiteError
from client.protocol.policy import Policy
from client.protocol.secure import masks
from client.protocol.secure.statements import STATEMENT, Statement, read_statement, threshold
from client.protocol.secure.unmasking import open_sum
from client.protocol.study import StudyProtocol
from client.site.record import close_records
from client.site.secure.silo import SecureSilo
from partitions.common.sum_weights import groups_of

RUN, STUDY, RECEIVED = "7", "a" * 64, "b" * 64
SETTINGS: dict[str, Any] = {
    "strategy": "scaffold",  # whose silos weigh the same
    "rounds": 3,
    "weight-cap": 5.0,
    "secure-aggregation": True,
}
Record = dict[str, Any]


def summing(**of: Any) -> Any:
    """A study of these fields, with the sums of a real one."""
    study: Any = SimpleNamespace(**of)
    study.summed_with = partial(StudyProtocol.summed_with, study)
    return study


class Ring:
    """The silos, what the server has of them, and the steps of a round."""

    def __init__(
        self, folder: Path, count: int, least: int = 2, group: int = 1, robust: str = "none"
    ) -> None:
        self.folder, self.least, self.settings = folder, least, dict(SETTINGS)
        self.robust = robust
        width = max(2, len(str(count)))
        self.names = [f"clinic-{number:0{width}}" for number in range(1, count + 1)]
        self.groups = groups_of(self.names, group)
        self.nodes = {name: new_key() for name in self.names}
        self.peers = {n: fingerprint(public_pem(key)) for n, key in self.nodes.items()}
        self.silos = {name: self.silo(name) for name in self.names}
        self.offers: dict[str, Record] = {}  # what came last of each silo: statement, shares
        self.holders = list[str]()
        self.sent: dict[str, Record] = {}  # the last train record of each silo

    def silo(self, name: str, run: str = RUN) -> SecureSilo:
        study: Any = summing(
            digest=STUDY,
            training_peers=self.peers,
            groups=self.groups,
            settings={"secure-robust": self.robust},
        )
        agreed = study, Policy(secure_peers=self.least), self.settings
        return SecureSilo(self.folder / name, name, self.nodes[name], run, *agreed)

    def begin(self, round: int = 1, attempt: int = 1, among: Sequence[str] = ()) -> None:
        names = sorted(among or self.names)
        slot = {"round": round, "attempt": attempt}
        for name in names:
            self.silos[name].note_samples(100)
        texts = [self.silos[name].keys(slot)["statement"] for name in names]
        record = {**slot, "statements": texts}
        self.offers = {name: self.silos[name].keys(record) for name in names}
        self.holders = names

    def record(self, round: int, attempt: int, names: Sequence[str], to: str) -> Record:
        """The train record for one silo."""
        place = self.holders.index(to)
        return {
            "round": round,
            "attempt": attempt,
            "statements": [self.offers[name]["statement"] for name in names],
            "sealed": [self.offers[name]["sealed"][place] for name in names],
        }

    def received(self, round: int) -> str:
        """The model of a round, which is another one in each."""
        return RECEIVED[:-2] + f"{round:02d}"

    def vectors(self, size: int = 5) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {n: rng.integers(0, 2**32, size, dtype=np.uint32) for n in self.names}

    def enter(self, name: str, record: Record, received: str = "") -> SecureSilo:
        received, silo = received or self.received(record["round"]), self.silos[name]
        silo.enter(record, received, 1 / len(record["statements"]))
        return silo

    def upload(
        self,
        vectors: Mapping[str, Any],
        round: int = 1,
        attempt: int = 1,
        among: Sequence[str] = (),
    ) -> tuple[dict[str, Any], dict[str, Record]]:
        """The masked vectors, and the offers for the next round; all silos of the list send."""
        names, masked, following = sorted(among or self.offers), {}, {}
        for name in names:
            self.sent[name] = self.record(round, attempt, names, name)
            silo = self.enter(name, self.sent[name])
            masked[name] = vectors[name].copy()
            following[name] = silo.mask(masked[name])
        return masked, following

    def open(
        self,
        masked: Mapping[str, Any],
        survivors: Sequence[str],
        round: int = 1,
        attempt: int = 1,
        asked: Sequence[str] = (),
    ) -> tuple[Any, dict[str, str]]:
        """The opened sum of the survivors, and who is at fault. ``asked``: who answers."""
        names = sorted(masked)
        slot = {"round": round, "attempt": attempt, "survivors": [*survivors]}
        answers = {n: self.silos[n].unmask(slot)["shares"] for n in asked or survivors}
        total = np.zeros_like(next(iter(masked.values())))
        for name in survivors:
            total += masked[name]
        listed = {name: read_statement(**self.offers[name]) for name in names}
        agreed = self.received(round), self.settings, dict.fromkeys(names, 1), listed
        context, opened = masks.context(*agreed), (listed, self.holders)
        if self.robust == "none":
            return open_sum(total, *opened, survivors, context, answers)
        sums, false = {}, dict[str, str]()
        for of in self.groups:
            if {*of} <= {*survivors}:
                total = plain_sum(masked, of)
                sums[of[0]], at = open_sum(total, *opened, of, context, answers, alone=True)
                false |= at
        return sums, false


def state(key: PrivateKey, **fields: Any) -> str:
    """A statement of these fields, with the right signature."""
    return seal(SECURE, STATEMENT, fields, key)


def fields_of(one: Statement) -> dict[str, Any]:
    """What a silo signs in a statement."""
    return one.model_dump(exclude={"kind", "signer", "text", "sealed"})


def plain_sum(vectors: Mapping[str, Any], names: Sequence[str]) -> Any:
    total = np.zeros_like(next(iter(vectors.values())))
    for name in names:
        total += vectors[name]
    return total


# --- a server that lies -----------------------------------------------------------------------------------------------


class Symbolic:
    """A server that keeps who has given it which share of which silo, and knows nothing else."""

    def __init__(self, ring: Ring, colluders: Sequence[str]) -> None:
        self.ring, self.colluders = ring, {*colluders}
        self.shares: dict[tuple[int, str, str], set[str]] = {}

    def ask(self, name: str, attempt: int, survivors: Sequence[str]) -> None:
        record = {"round": 1, "attempt": attempt, "survivors": [*survivors]}
        try:
            shares = self.ring.silos[name].unmask(record)["shares"]
        except SiteError:
            return
        for owner, share in zip(self.ring.names, shares, strict=True):
            kind = "b" if owner in survivors else "s"
            if share:
                self.shares.setdefault((attempt, owner, kind), set()).add(name)

    def knows(self, attempt: int, owner: str, kind: str) -> bool:
        given = self.shares.get((attempt, owner, kind), set())
        return len(given | self.colluders) >= threshold(len(self.ring.names))

    def opens(self, attempt: int) -> set[str] | None:
        """The honest silos of the one sum that opens."""
        honest = [name for name in self.ring.names if name not in self.colluders]
        for name in honest:
            assert not all(self.knows(attempt, name, kind) for kind in "bs")
        inside = {name for name in honest if not self.knows(attempt, name, "s")}
        whole = inside and all(self.knows(attempt, name, "b") for name in inside)
        return inside if whole else None


def restore(ring: Ring, stage: str) -> None:
    """Take the silos' disks back to how they were."""
    close_records()
    for name in ring.names:
        shutil.rmtree(ring.folder / name)
        shutil.copytree(ring.folder / stage / name, ring.folder / name)


def refusing(call: Any, *args: Any) -> str:
    return fails(SiteError, None, call, *args)
