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

from client.site.parsed import SiteError, parse_values
from client.site.secure import KEPT, KEYS, MOST_SILOS, OTHER_SUM, RECORD, START, UNMASK, masks
from client.site.secure.statements import (
    AnyKeys,
    Keys,
    SiloRecord,
    Slot,
    Statement,
    accept,
    digest_of,
    read_statement,
    threshold,
)
from client.site.secure.unmasking import Offers, open_sum
from client.site.trust.chain import digest
from partitions.common.errors import RunFailedError
from partitions.common.sum_weights import whole
from server.run.collector import Collector
from server.run.secure.opened import pack_round, replies_of
from strategies.base.aggregation.secure import weights_of
from strategies.base.info import RoundPlan
from strategies.base.state import State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Payload
from strategies.base.transport.reporting import printable

# At one round, and at a silo's answer how to open its sum
MOST_ATTEMPTS = 3
AWAY_SECONDS = 2.0  # between two looks for silos that are away
# In the checkpoint's folder: the last rounds whose masks were asked for, silos' weights, and the last opened sum
FILE = "secure.safetensors"
Record = Mapping[str, Any]


class AttemptFailedError(Exception):
    """The sum of a round cannot be opened. The round is repeated, or the run ends with this line."""


NOTHING = Offers(Slot("", 0, 0), {}, {}, {})


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
        self.asked: dict[str, dict[str, int]] = self.opened.numbers.get("asked", {})
        self.replies: Sequence[Message] = ()  # of the round
        self.made, self.following = NOTHING, NOTHING
        self.labels: dict[str, str] = {}  # each silo's group, as it states it
        # By silo: whose shares it could not read
        self.unreadable: dict[str, Sequence[str]] = {}
        self.excluded: dict[str, str] = {}  # in this process, and why
        self.attempt, self.context = 1, b""
        self.weights: dict[str, int] = {}  # of the silos in the round's sum, by name
        self.refused = ""  # the first refusal of the last question

    @property
    def masked(self) -> bool:
        """Return whether silos add masks: not in a simulation, nor in this process (unless its grid has gates)."""
        grid, common = self.collector.grid, self.collector.common
        local = self.collector.registration.simulated or hasattr(grid, "seconds")
        return common.secure_aggregation and getattr(grid, "gates", not local)

    def begin(self, strategy: PersonalizedStrategy, server_round: int) -> RoundPlan:
        """Agree on the silos of a round; return its plan, with those that take no part in it, and the reasons.

        Raises RunFailedError if the round was asked for before, and a silo of then is missing.
        """
        self.made = NOTHING
        if self.opened.numbers.get("round") == [strategy.plan.numbers["run_id"], server_round]:
            return strategy.plan.restored(**self.opened.numbers["plan"])
        self.opened = State()
        if not self.masked or not strategy.upload_names():
            return replace(strategy.plan, attempt=self.attempt)
        here = self._online(strategy) - self.excluded.keys()
        if here <= self.labels.keys():  # else one of them has yet to state its group
            here = {*self._whole(here)}
        self.made, slot = self.following, (server_round, self.attempt)
        if self.made.slot[1:] != slot or here - self.made.statements.keys():
            self.made = self._start(strategy, slot, sorted(here))
        before = self.asked.get(str(server_round), {})
        if missing := before.keys() - self.made.statements.keys():
            raise RunFailedError(
                f"round {server_round} was begun over {', '.join(before)}, and another sum would show single updates: "
                f"{', '.join(sorted(missing))} must be online; then resume the run"
            )
        listed = [*before] or self._whole(self.made.statements)
        if len(listed) < (least := threshold(len(strategy.silos))):
            raise RunFailedError(
                f"round {server_round}: {len(listed)} silos have keys for a sum, and {least} of {len(strategy.silos)} "
                "are needed: resume when more are online"
            )
        reason = "it has no keys for this round's sum, or a silo of its group has none"
        if before:
            reason = "the round is repeated over the silos of before"
        left_out = {n: self.excluded.get(n, reason) for n in strategy.silos if n not in listed}
        return replace(
            strategy.plan,
            left_out=left_out,
            attempt=self.attempt,
            groups=self.labels,
            weights=before,
        )

    def attach(
        self, strategy: PersonalizedStrategy, messages: Sequence[Message]
    ) -> list[Message]:
        """Add to each train message of a round its peers' statements, weights and sealed shares.

        Return the replies of a round that is to be ended.
        """
        nodes, made = strategy.plan.nodes, self.made
        trains = {
            name: message
            for message in messages
            if (name := nodes[message.metadata.dst_node_id]) in strategy.sent
        }
        if not made.statements or not trains:
            return replies_of(self.opened)
        self.weights, slot = weights_of(strategy, trains), made.slot
        received = masks.received_sha256(trains[min(trains)].content)
        agreed = received, self.run_config, self.weights, made.statements
        self.context = masks.context(slot, *agreed)
        sealed = zip(*(made.sealed[name] for name in self.weights), strict=True)
        shares = dict(zip(made.holders, sealed, strict=True))
        common: Any = {
            "round": slot.round,
            "attempt": slot.attempt,
            "statements": [made.statements[name].text for name in self.weights],
            "again": bool(strategy.plan.weights),
        }
        for name, message in trains.items():
            message.content[RECORD] = ConfigRecord({**common, "sealed": [*shares[name]]})
        return []

    def take(self, strategy: PersonalizedStrategy, replies: Sequence[Message]) -> None:
        """Take the records for the next round out of the replies, and whose shares each silo could not read."""
        told, self.replies, made = self._told(strategy, replies), replies, self.made
        self.unreadable = {name: of.unreadable for name, of in told.items()}
        if made.statements:
            found = {name: of for name, of in told.items() if of.statement}
            holders = {name: made.statements[name] for name in self.weights}
            self.following = self._offers((made.slot.round + 1, 1), holders, found)

    def unmask(
        self, strategy: PersonalizedStrategy, total: Tensor, silos: Sequence[str]
    ) -> Tensor:
        """Return the sum (n,) of these silos' integers without masks. Raises AttemptFailedError."""
        made, survivors = self.made, sorted(silos)
        if not made.statements:
            return total
        number, least = made.slot.round, threshold(len(made.holders))
        before = self.asked.get(str(number), {})
        if missing := before.keys() - {*survivors}:
            raise AttemptFailedError(
                f"its masks were asked for over {', '.join(before)}, and now {', '.join(sorted(missing))} sent no "
                "vector: resume the run when they are online"
            )
        if len(survivors) < least:
            raise AttemptFailedError(
                f"{len(survivors)} masked vectors have come, and {least} are needed to open their sum"
            )
        self._exclude_unreadable(survivors, least)
        self.asked[str(number)] = {name: self.weights[name] for name in survivors}
        self.asked = dict([*self.asked.items()][-KEPT:])
        self._write(State())
        answers = self._answers(strategy, survivors, least)
        try:
            opened = open_sum(
                total.cpu().numpy().astype(np.uint32),
                *(made, self.weights, survivors, self.context),
                {name: answer.shares for name, answer in answers.items()},
            )
        except SiteError as error:
            raise AttemptFailedError(printable(str(error))) from error
        for silo, reason in sorted(opened.false.items()):
            self.note(f"{silo} is at fault: {reason}")
        found = torch.from_numpy(opened.total.view(np.int32))
        plan = replace(strategy.plan, weights=self.weights)
        self._write(pack_round(plan, number, self.replies, found, survivors))
        return found.to(total.device, torch.int64)

    def _answers(
        self, strategy: PersonalizedStrategy, survivors: Sequence[str], least: int
    ) -> dict[str, SiloRecord]:
        """Return the answers of enough survivors, whichever; waits for those that are away, ``round-timeout`` at most.

        After the question no other set may be asked for. Raises AttemptFailedError if too few answer: a repeat over
        the same silos may need fewer answers.
        """
        answers, question = dict[str, SiloRecord](), {"survivors": survivors}
        times, ends = Counter[str](), time.monotonic() + strategy.common.round_timeout
        while len(answers) < least:
            silent, online = {*survivors} - answers.keys(), self._online(strategy)
            away = silent - online
            asked = [name for name in sorted(silent - away) if times[name] < MOST_ATTEMPTS]
            times.update(asked)
            if asked:
                answers |= self._ask(strategy, UNMASK, asked, self.made.slot[1:], question)
            elif len(answers) + len(away) < least or time.monotonic() > ends:
                break
            else:
                time.sleep(AWAY_SECONDS)
        if len(answers) < least:
            line = f"{len(answers)} of {len(survivors)} silos have answered how to open its sum, and {least} are needed"
            line += f" ({self.refused})" if self.refused else ""
            if OTHER_SUM in line:
                raise RunFailedError(f"round {self.made.slot.round}: {line}")
            raise AttemptFailedError(line)
        return answers

    def _exclude_unreadable(self, survivors: Sequence[str], least: int) -> None:
        """Exclude silos whose secrets too few could give back. Raises AttemptFailedError, before anyone is asked."""
        holders = {*self.made.holders}.intersection(survivors)
        bad = [
            name
            for name in self.weights
            if sum(name not in self.unreadable.get(holder, ()) for holder in holders) < least
        ]
        self.excluded |= dict.fromkeys(bad, "too few silos could read the shares of its keys")
        if bad:
            raise AttemptFailedError(
                f"too few silos could read the shares of {', '.join(bad)}, left out until the run is resumed"
            )

    def repeat_round(self, server_round: int, error: AttemptFailedError) -> None:
        """Prepare to repeat the round. Raises RunFailedError after the last attempt."""
        line = f"round {server_round}, attempt {self.attempt}: {error}"
        if self.attempt == MOST_ATTEMPTS:
            raise RunFailedError(line) from error
        self.note(f"{line}; the round is repeated")
        self.attempt, self.following = self.attempt + 1, NOTHING

    def end_attempts(self) -> None:
        """Begin to count the next round's attempts."""
        self.attempt, self.replies, self.opened = 1, (), State()

    # --- exchanges ------------------------------------------------------------------------------------------------

    def _start(
        self, strategy: PersonalizedStrategy, slot: tuple[int, int], silos: Sequence[str]
    ) -> Offers:
        """Ask these silos for keys, and for shares of new secrets for all of those that have answered."""
        keys = self._valid(Keys, slot, self._ask(strategy, KEYS, silos, slot, {}))
        self.labels |= {name: one.group for name, one in keys.items()}
        holders = {name: keys[name] for name in self._whole(keys)}
        texts = {"statements": [one.text for one in holders.values()]}
        return self._offers(slot, holders, self._ask(strategy, START, holders, slot, texts))

    def _online(self, strategy: PersonalizedStrategy) -> set[str]:
        nodes = {*self.collector.grid.get_node_ids()}
        return {name for name, info in strategy.silos.items() if info.node_id in nodes}

    def _whole(self, silos: Collection[str]) -> list[str]:
        """Return the silos, sorted, whose whole group is among these; no group is smaller than the run has them."""
        least, found = self.collector.common.secure_group, whole(silos, self.labels)
        return [name for name in found if len({*self.labels[name].split("\n")}) >= least]

    def _ask(
        self,
        strategy: PersonalizedStrategy,
        kind: str,
        silos: Iterable[str],
        slot: tuple[int, int],
        record: Record,
    ) -> dict[str, SiloRecord]:
        """Send silos a record about a round's attempt; return the records of the answers, by silo."""
        config, messages = {"round": slot[0]}, []
        for name in silos:
            node = strategy.silos[name].node_id
            messages.append(strategy.message(node, kind, Payload(), config))
            own = {**config, "attempt": slot[1], **record}
            messages[-1].content[RECORD] = ConfigRecord(own)
        replies = self.collector.exchange(messages, strategy, {}) if messages else []
        self.refused = ""
        for reply in replies:
            if reply.has_error():
                silo = strategy.plan.nodes[reply.metadata.src_node_id]
                line = f"{silo} does not answer {kind}: {printable(reply.error.reason)}"
                self.refused = self.refused or line
                self.note(line)
        return self._told(strategy, replies)

    def _told(
        self, strategy: PersonalizedStrategy, replies: Iterable[Message]
    ) -> dict[str, SiloRecord]:
        """Take the valid records out of replies."""
        found = dict[str, SiloRecord]()
        for reply in replies:
            if not reply.has_error():
                silo = strategy.plan.nodes[reply.metadata.src_node_id]
                record = {**reply.content.pop(RECORD, {})}
                with self._noting(silo):
                    found[silo] = parse_values(
                        SiloRecord, record, "its record", "it is not used"
                    )
        return found

    def _offers(
        self,
        asked: tuple[int, int],
        holders: Mapping[str, Keys],
        told: Mapping[str, SiloRecord],
    ) -> Offers:
        """Return what silos have validly made for these holders and this round's attempt."""
        sealed = {name: of.sealed for name, of in told.items()}
        origin, signed, slot = digest_of(holders), dict[str, Statement](), NOTHING.slot
        for name, one in self._valid(Statement, asked, told).items():
            with self._noting(name):
                own = len(sealed[name]), digest(b"".join(sealed[name])), origin
                if own != (len(holders), one.shares, one.holders):
                    raise SiteError("its shares are not those that it has signed for this list")
                signed[name], (slot, _) = one, one.of
        return Offers(slot, holders, signed, sealed)

    def _valid(
        self, kind: type[AnyKeys], asked: tuple[int, int], told: Mapping[str, SiloRecord]
    ) -> dict[str, AnyKeys]:
        """Return the valid statements of this round's attempt; a list with an invalid one is refused by all."""
        read, found = dict[str, AnyKeys](), dict[str, AnyKeys]()
        for name, record in sorted(told.items()):
            with self._noting(name):
                read[name] = read_statement(kind, record.statement)
        claims = Counter((one.run, one.study) for one in read.values()).most_common(1)
        for name, one in read.items():
            (run, study), _ = claims[0]
            with self._noting(name):
                if len(found) == MOST_SILOS:
                    raise SiteError(f"a sum is over {MOST_SILOS} silos at most")
                signer = self.collector.registration.keys.get(name) or one.signer
                accept(one, (Slot(run, *asked), study), {name: signer}, found)
        return found

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
            State(opened.arrays, {**opened.numbers, "asked": self.asked}).save(self.path)
