"""Secure aggregation at the server: each round's keys and list of silos, and the opened sum of masked vectors.

    before round 1      query.secure_keys, query.secure_start: who takes part, and the shares of the first secrets
    round r             train: peers' statements and sealed shares; masked vectors, and what round r + 1 needs
    after its replies   query.secure_unmask: names the silos whose vectors came, and removes the masks of their sum

Keys and start come again where a silo is back, after a resume, and before a round is repeated. The server decides who
is in a sum before it asks for the masks, and writes that down (``secure.safetensors`` of the checkpoint). A round is
repeated, and resumed, over those silos only: two sums over different silos that start from one model show single
updates, and hospitals refuse them (``client/site/secure/silo.py``). An opened sum is written down, too: a resume ends
its round without any silo (``opened.py``). In a simulation nothing is masked; the integers are the same.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Message
from torch import Tensor

from client.flower.messages import array_sums, config_of
from client.protocol.chain import digest
from client.protocol.parsed import SiteError
from client.protocol.secure import KEYS, MOST_SILOS, OTHER_SUM, RECORD, START, UNMASK, masks
from client.protocol.secure.statements import (
    SiloRecord,
    Statement,
    accept,
    digest_of,
    read_statement,
    slot_of,
    threshold,
)
from client.protocol.secure.unmasking import open_sum
from partitions.common.errors import RunFailedError
from partitions.common.sum_weights import whole
from server.run.collector import Collector
from server.run.secure.opened import SUM, pack_round, read_silo_record, replies_of
from strategies.base.aggregation.secure import sums_of, weights_of
from strategies.base.plan import RoundPlan
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload
from strategies.base.transport.reporting import printable, read_replies

MOST_ATTEMPTS = 3  # at one round, and at a silo's answer how to open its sum
KEPT = 3  # the last rounds whose weights are kept
AWAY_SECONDS = 2.0  # between two looks for silos that are away
# In the checkpoint's folder: rounds whose masks were asked for, the silos of each sum with weights, the last opened sum
FILE = "secure.safetensors"


class AttemptFailedError(Exception):
    """The sum of a round cannot be opened. The round is repeated, or the run ends with this line."""


class SecureRounds:
    """The masked rounds of one run. ``masked``: whether its silos add masks; if not, this does nothing.

    ``folder``: of the checkpoints; ``run_config``: the run's settings as its silos have them.
    """

    def __init__(
        self, collector: Collector, folder: Path | None, run_config: Mapping[str, Any]
    ) -> None:
        self.collector = collector
        self.note = collector.reporter.note
        self.path = None if folder is None else folder / FILE
        self.run_config = run_config
        # Of the round that is to be ended
        self.opened = State.load(self.path) if self.path and self.path.exists() else State()
        self.requested: dict[str, dict[str, int]] = self.opened.numbers.get("asked", {})
        # By what a round starts from, the silos of its sum, of all methods: with FedAvg's model Ditto's sum is FedAvg's
        self.summed: dict[str, dict[str, int]] = {}
        for file in sorted(folder.parent.glob(f"*/{FILE}")) if folder else ():
            self.summed |= State.load(file).numbers.get("summed", {})
        self.labels: dict[str, str] = {}  # each silo's group, as it states it
        self.least = 0  # silos of a list, as they state it
        self.since, self.waits = 0.0, ""  # since when it waits, and the line that says so
        self.excluded: dict[str, str] = {}  # in this process, and why
        self.attempt, self.sum = 1, ""  # the sum: what its masks depend on, and its silos
        # Of this round: its number and attempt, its list (empty: nothing is masked), the holders of its shares, and
        # what its masks depend on
        self.slot: dict[str, int] = {}
        self.listed: dict[str, Statement] = {}
        self.holders: dict[str, Statement] = {}
        self.context, self.question = b"", ""
        self.replies: Sequence[Message] = ()
        self.records: dict[str, SiloRecord] = {}
        self.refused = ""  # the first refusal of the last question

    @property
    def masked(self) -> bool:
        """Return whether silos add masks: not in a simulation, nor in this process (unless its grid has gates)."""
        grid, common = self.collector.grid, self.collector.common
        local = self.collector.registration.simulated or hasattr(grid, "seconds")
        return common.secure_aggregation and getattr(grid, "gates", not local)

    def begin(self, strategy: PersonalizedStrategy, server_round: int) -> RoundPlan | None:
        """Agree on the silos of a round; return its plan, with those that take no part in it, and the reasons.

        None: too few are here; then again.

        A round that was asked for before has the silos of then, if they are all here. Else it is over others: hospitals
        that have answered for the first sum refuse a second one. Raises AttemptFailedError, RunFailedError.
        """
        if self.opened.numbers.get("round") == [strategy.plan.numbers["run_id"], server_round]:
            self.sum = self.opened.numbers["sum"]
            return strategy.plan.restored(**self.opened.numbers["plan"])
        self.opened = State()
        if not self.masked or not strategy.upload_names():
            return replace(strategy.plan, attempt=self.attempt)
        self.slot = {"round": server_round, "attempt": self.attempt}
        holders = self.listed
        before = self.requested.get(str(server_round), {})
        if not (here := self._here(strategy, before)):
            return None
        offers = self._offers(holders, self.records)
        if here - offers.keys():
            holders, offers = self._start(strategy, sorted(here))
        before = before if before.keys() <= offers.keys() else {}
        listed = {name: offers[name] for name in before or self._whole(offers)}
        if len(listed) < (least := self._least(strategy, listed.values())):
            raise AttemptFailedError(
                f"{len(listed)} silos have keys for a sum, and {least} are needed"
            )
        self.listed, self.holders = listed, holders
        missing = "it has no keys for this round's sum, or a silo of its group has none"
        reason = "the round is repeated over the silos of before" if before else missing
        others = strategy.silos.keys() - self.listed.keys()
        return replace(
            strategy.plan,
            left_out={name: self.excluded.get(name, reason) for name in sorted(others)},
            attempt=self.attempt,
            groups=self.labels,
            weights=before,
        )

    def attach(
        self, strategy: PersonalizedStrategy, messages: Sequence[Message]
    ) -> list[Message]:
        """Add to a round's messages, a train message to each silo of its list, statements, weights and sealed shares.

        Return the replies of a round that is to be ended.
        """
        if not self.listed:
            return replies_of(self.opened)
        weights, sums = weights_of(strategy, self.listed), strategy.state.sums
        first = messages[0]
        received = masks.received_sha256(array_sums(first.content), config_of(first))
        self.question = received.partition(":")[0]
        self.context = masks.context(received, self.run_config, weights, self.listed, sums)
        sealed = zip(*(statement.sealed for statement in self.listed.values()), strict=True)
        shares = dict(zip(self.holders, sealed, strict=True))
        common: Any = {
            **self.slot,
            "statements": [statement.text for statement in self.listed.values()],
            "again": bool(strategy.plan.weights),
            "sums": sums,
        }
        for message in messages:
            name = strategy.plan.nodes[message.metadata.dst_node_id]
            message.content[RECORD] = ConfigRecord({**common, "sealed": [*shares[name]]})
        return []

    def take(self, strategy: PersonalizedStrategy, replies: Sequence[Message]) -> None:
        """Take the records out of a round's replies: the next round's shares, and whose each silo could not read."""
        self.replies = replies if self.listed else ()
        answered = (reply for reply in self.replies if not reply.has_error())
        self.records = self._read(strategy, answered, "train")

    def unmask(
        self, strategy: PersonalizedStrategy, total: Tensor, silos: Sequence[str]
    ) -> Tensor:
        """Return the sums (k, n) of these silos' integers without masks. Raises AttemptFailedError."""
        if not self.listed:
            return self.opened.arrays.get(SUM, total).view(total.shape)
        survivors, least = sorted(silos), threshold(len(self.holders))
        weights = weights_of(strategy, self.listed)
        if len(survivors) < least:
            raise AttemptFailedError(
                f"{len(survivors)} masked vectors have come, and {least} are needed to open their sum"
            )
        self._exclude_unreadable(survivors, least)
        number, before = str(strategy.round), self.requested
        other = self.summed.get(self.question)
        if other and other.keys() != {*survivors}:
            self.requested = {**before, number: other}
            raise AttemptFailedError(
                f"what it starts from has been summed over {', '.join(other)}, so its sum is over these"
            )
        requested = {**before, number: {name: weights[name] for name in survivors}}
        self.requested = dict([*requested.items()][-KEPT:])
        self._write(State())
        try:
            answers = self._answers(strategy, survivors, least)
        except AttemptFailedError:
            if OTHER_SUM in self.refused and number in before:
                self.requested = before
                self._write(State())
            raise
        totals, false = total.cpu().numpy().astype(np.uint32), dict[str, str]()
        alone = strategy.common.secure_robust != "none"
        try:
            for total_of, of in zip(totals, sums_of(strategy, survivors), strict=True):
                agreed = self.listed, [*self.holders], of, self.context, answers
                false |= open_sum(total_of, *agreed, alone=alone)[1]
        except SiteError as error:
            raise AttemptFailedError(printable(str(error))) from error
        for silo, reason in sorted(false.items()):
            self.note(f"{silo} is at fault: {reason}")
        opened = torch.from_numpy(totals.view(np.int32))
        plan = replace(strategy.plan, weights=weights)
        self.summed[self.question] = {name: weights[name] for name in survivors}
        self.sum = " ".join([self.context.hex(), *survivors])
        packed = pack_round(plan, strategy.round, self.replies, opened)
        self._write(State(packed.arrays, {**packed.numbers, "sum": self.sum}))
        return opened.to(total)

    def _answers(
        self, strategy: PersonalizedStrategy, survivors: Sequence[str], least: int
    ) -> dict[str, Sequence[bytes]]:
        """Return the shares of enough survivors, whichever; waits for those that are away, ``round-timeout`` at most.

        After the question no other set may be asked for. Raises AttemptFailedError if too few answer: a repeat over
        the same silos may need fewer answers.
        """
        answers = dict[str, Sequence[bytes]]()
        times, ends = Counter[str](), time.monotonic() + strategy.common.round_timeout
        while len(answers) < least:
            silent, online = {*survivors} - answers.keys(), self._online(strategy)
            wanted = [name for name in sorted(silent & online) if times[name] < MOST_ATTEMPTS]
            times.update(wanted)
            if wanted:
                records = self._ask(strategy, UNMASK, wanted, survivors=survivors)
                answers |= {name: of.shares for name, of in records.items()}
            elif len(answers) + len(silent - online) < least or time.monotonic() > ends:
                more = f" ({self.refused})" if self.refused else ""
                raise AttemptFailedError(
                    f"{len(answers)} of {len(survivors)} silos have answered how to open its sum, and {least} are "
                    f"needed{more}"
                )
            else:
                time.sleep(AWAY_SECONDS)
        return answers

    def _exclude_unreadable(self, survivors: Sequence[str], least: int) -> None:
        """Exclude silos whose secrets too few could give back. Raises AttemptFailedError, before anyone is asked."""
        holders = {*self.holders}.intersection(survivors)
        unread = [self.records[name].unreadable for name in holders & self.records.keys()]
        most = len(holders) - least
        bad = [name for name in self.listed if sum(name in silos for silos in unread) > most]
        self.excluded |= dict.fromkeys(bad, "too few silos could read the shares of its keys")
        if bad:
            raise AttemptFailedError(
                f"too few silos could read the shares of {', '.join(bad)}, left out until the run is resumed"
            )

    def repeat_round(self, server_round: int, error: AttemptFailedError) -> None:
        """Prepare to repeat the round. Raises RunFailedError after the last attempt, or where no repeat can help."""
        line = f"round {server_round}, attempt {self.attempt}: {error}"
        if self.attempt == MOST_ATTEMPTS or OTHER_SUM in line:
            begun = ", ".join(self.requested.get(str(server_round), ()))
            raise RunFailedError(line + (begun and f"; it was begun over {begun}")) from error
        self.note(f"{line}; the round is repeated")
        self.attempt, self.records = self.attempt + 1, {}

    def end_attempts(self, strategy: PersonalizedStrategy) -> None:
        """Begin to count the next round's attempts; keep the sum if the round has changed the model."""
        if self.sum and strategy.round in strategy.state.counted.values():
            strategy.state.sums = [*strategy.state.sums, self.sum]
        self.attempt, self.sum = 1, ""

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _start(
        self, strategy: PersonalizedStrategy, silos: Sequence[str]
    ) -> tuple[dict[str, Statement], dict[str, Statement]]:
        """Ask these silos for keys; return those of all that have answered, and what these have made for each other."""
        keys = self._offers({}, self._ask(strategy, KEYS, silos))
        self.labels |= {name: statement.group for name, statement in keys.items()}
        holders = {name: keys[name] for name in self._whole(keys)}
        texts = [statement.text for statement in holders.values()]
        records = self._ask(strategy, START, holders, statements=texts)
        return holders, self._offers(holders, records)

    def _here(self, strategy: PersonalizedStrategy, before: Mapping[str, int]) -> set[str]:
        """Return who is here for a list; empty while they are too few, or one of ``before`` is away.

        Raises RunFailedError if they are too few after ``round-timeout``.
        """
        here, least = self._online(strategy) - self.excluded.keys(), self._least(strategy)
        if here <= self.labels.keys():  # else one of them has yet to state its group
            here = {*self._whole(here)}
        self.since = self.since or time.monotonic()
        over = time.monotonic() - self.since > strategy.common.round_timeout
        if len(here) >= least and (over or before.keys() <= here):
            self.since, self.waits = 0.0, ""
            return here
        away = ", ".join(sorted((before or strategy.silos).keys() - here)) or "others"
        line = f"{len(here)} silos are here for a sum, and {max(least, len(before))} are needed; missing: {away}"
        if over or len(strategy.silos) < least:
            raise RunFailedError(
                f"round {self.slot['round']}: {line}: resume the run when they are online"
            )
        if line != self.waits:
            self.note(f"round {self.slot['round']} waits: {line}")
        self.waits = line
        time.sleep(AWAY_SECONDS)
        return set()

    def _least(self, strategy: PersonalizedStrategy, listed: Iterable[Statement] = ()) -> int:
        """Return how many silos a list has at least: two thirds of all, and as many as so many silos accept."""
        least = threshold(len(strategy.silos))
        stated = sorted(statement.least for statement in listed)[least - 1 : least]
        self.least = max(least, *stated, 0 if stated else self.least)
        return self.least

    def _online(self, strategy: PersonalizedStrategy) -> set[str]:
        nodes = {*self.collector.grid.get_node_ids()}
        return {name for name, info in strategy.silos.items() if info.node_id in nodes}

    def _whole(self, silos: Collection[str]) -> list[str]:
        """Return the silos, sorted, whose whole group is among these; no group is smaller than the run has them."""
        least, whole_groups = self.collector.common.secure_group, whole(silos, self.labels)
        return [name for name in whole_groups if len({*self.labels[name].split("\n")}) >= least]

    def _ask(
        self, strategy: PersonalizedStrategy, kind: str, silos: Iterable[str], **record: Any
    ) -> dict[str, SiloRecord]:
        """Send silos a record about this round's attempt; return the records of the answers, by silo."""
        config, messages = {"round": self.slot["round"]}, []
        for name in silos:
            node = strategy.silos[name].node_id
            messages.append(strategy.message(node, kind, Payload(), config))
            messages[-1].content[RECORD] = ConfigRecord({**self.slot, **record})
        replies = self.collector.exchange(messages, strategy, {}) if messages else []
        return self._read(strategy, replies, kind)

    def _read(
        self, strategy: PersonalizedStrategy, replies: Iterable[Message], kind: str
    ) -> dict[str, SiloRecord]:
        """Take the valid records out of replies to messages of a kind; note why others have none."""
        records, faults = read_replies(replies, strategy.plan.nodes, read_silo_record)
        lines = {silo: f"{silo} does not answer {kind}: {why}" for silo, why in faults.items()}
        self.collector.reporter.note_reasons(lines.items())
        self.refused = next(iter(lines.values()), "")
        return records

    def _offers(
        self, holders: Mapping[str, Statement], records: Mapping[str, SiloRecord]
    ) -> dict[str, Statement]:
        """Return the statements that silos have validly made for this round's attempt, with the holders' shares.

        A list with an invalid one is refused by all.
        """
        read, accepted, origin = (
            dict[str, Statement](),
            dict[str, Statement](),
            digest_of(holders),
        )
        for name, record in sorted(records.items()):
            with self._noting(name):
                statement = read_statement(record.statement, record.sealed)
                signed = len(statement.sealed), digest(b"".join(statement.sealed)), origin
                if signed != (len(holders), statement.shares, statement.holders):
                    raise SiteError("its shares are not those that it has signed for this list")
                read[name] = statement
        claims = Counter(statement.of for statement in read.values()).most_common(1)
        for name, statement in read.items():
            (of, study), _ = claims[0]
            run, _, _ = of.partition(".")
            with self._noting(name):
                if len(accepted) == MOST_SILOS:
                    raise SiteError(f"a sum is over {MOST_SILOS} silos at most")
                signer = self.collector.registration.keys.get(name) or statement.signer
                accept(statement, (slot_of(run, **self.slot), study), {name: signer}, accepted)
        return accepted

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except SiteError as error:
            line = f"{name} is left out of the sum: its keys are invalid"
            self.note(f"{line}: {printable(str(error))}")

    def _write(self, opened: State) -> None:
        """Write which sums were asked for, and an opened one."""
        if self.path is not None:
            kept = {"asked": self.requested, "summed": self.summed}
            State(opened.arrays, {**opened.numbers, **kept}).save(self.path)
