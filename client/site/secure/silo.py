"""A silo's part in secure aggregation: its secrets and answers of one run at a time, on its disk.

    STATE_DIR/secure/SILO.json (0600)    by slot: own secrets, peers' shares, and after `unmask` only the answer
    STATE_DIR/record.sqlite              a row per question and set of survivors, before the answer leaves

A silo masks one vector per slot, and answers one set of survivors per slot, for each peer with a share of its self mask
or of its mask key, never of both. It answers one set, with one weight each, per question over all runs: the received
arrays. Two sums over different sets that start from one model would differ by single silos' updates.
"""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ..parsed import SiteError, parse_values
from ..record import Record, disclose
from ..study.protocol import StudyProtocol
from ..trust.chain import canonical, digest, write_whole
from ..trust.envelope import PrivateKey
from ..trust.message_rules import number
from ..trust.policy import Policy
from . import KEPT, OTHER_SUM, masks
from .masks import Vector
from .shamir import SHARE, split
from .statements import (
    HASHES,
    AnyKeys,
    Keys,
    ServerRecord,
    Slot,
    Statement,
    agree,
    digest_of,
    hashes_of,
    labels_of,
    read_list,
    state,
    threshold,
    weights_of,
    whole,
)

SUM = "secure sum"  # kind of a row in the record
# Answers about what a round starts from, and about a round of a run, whatever it starts from
BEFORE = "SELECT run, answer FROM disclosed WHERE kind = ? AND silo = ? AND (question = ? OR run LIKE ?)"
Entry = dict[str, Any]
ONCE = bytes(12)  # a nonce: each key seals one text
BYTES = "="  # key of bytes in the file; no silo has this name


@dataclass
class Entered:
    """A train message that was accepted. ``slots``: with its own; ``faults``: peers whose shares cannot be opened."""

    slot: Slot
    statements: dict[str, Statement]
    slots: dict[Slot, Entry]
    faults: list[str]

    @property
    def entry(self) -> Entry:
        return self.slots[self.slot]


def _bytes(found: Entry) -> Any:
    return bytes.fromhex(found[BYTES]) if BYTES in found else found


@dataclass
class SecureSilo:
    """One silo in one run, as the hospital has approved it in a study and its rules."""

    folder: Path
    silo: str
    key: PrivateKey
    run: str
    study: StudyProtocol
    rules: Policy
    run_config: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.path = self.folder / "secure" / f"{quote(self.silo, safe='')}.json"
        self.labels = labels_of(self.study.groups)
        self.samples = 0
        # Of the last questions, over all runs: the weights of the list that this silo masked its vector for
        self.weighed: dict[str, dict[str, int]] = {}
        self.gone: list[str] = []  # silos of the list that the last `unmask` did not name

    def note_samples(self, count: int) -> None:
        """Keep the number of training samples that this silo's data summary has told; all statements have it."""
        slots = self._read()
        self.samples = count
        self._write(slots)

    # --- the four messages ----------------------------------------------------------------------------------------

    def keys(self, record: Mapping[str, Any]) -> Entry:
        """Return a statement with a key to seal shares with; earlier slots of this run, and other runs, are over."""
        slot, _ = self._asked(record)
        slots = self._read()
        entry = slots.get(slot, {})
        if not self.samples:
            raise SiteError(
                "its data summary has not left in this run: the server asks for it first"
            )
        # The slot after one has its secrets before it is asked for
        if any(slot < one and ("keys" in of or "weights" in of) for one, of in slots.items()):
            raise SiteError(f"round {slot.round}, attempt {slot.attempt}, is over here")
        if "weights" in entry:
            raise SiteError(
                f"a vector of round {slot.round} has left under this attempt's keys"
            )
        if "keys" not in entry:
            private = secrets.token_bytes(32)
            entry = {"keys": self._state(slot, private), "private": private}
        self._write({slot: entry})
        return {"statement": entry["keys"]}

    def start(self, record: Mapping[str, Any]) -> Entry:
        """Return the statement and the sealed shares of this slot's secrets. ``record`` lists the holders' keys."""
        slot, asked = self._asked(record)
        slots = self._read()
        entry = slots.get(slot, {})
        if "keys" not in entry:
            raise SiteError(
                f"there are no keys here for round {slot.round}: ask for them first"
            )
        holders = self._list(Keys, asked, slot, entry["keys"])
        # Each sealing key seals one text: other shares under it would tell the difference of both
        if entry.get("origin", digest_of(holders)) != digest_of(holders):
            raise SiteError(f"the shares of round {slot.round} were made for another list")
        slots[slot] = entry | self._shared(entry, slot, entry["private"], holders)
        self._write(slots)
        return dict(slots[slot]["out"])

    def enter(self, record: Mapping[str, Any], received: str, share: Any) -> Entered:
        """Accept a train message: its list, its shares. ``share``: the weight that the app is to use."""
        slot, asked = self._asked(record)
        slots = self._read()
        entry = slots.get(slot, {})
        if "answer" in entry:
            raise SiteError(f"round {slot.round}, attempt {slot.attempt}, is over here")
        if "out" not in entry:
            raise SiteError(
                f"there are no secrets here for round {slot.round}: repeat its keys"
            )
        listed = self._list(Statement, asked, slot, entry["out"]["statement"])
        if not listed.keys() <= {*entry["holders"]}:
            raise SiteError("the list has silos that hold no shares of this round's secrets")
        for name, one in listed.items():
            if one.holders != listed[self.silo].holders:
                raise SiteError(f"{name}'s shares are not with the silos that hold this silo's")
        self._check_count(listed, len(entry["holders"]))
        question = received.partition(":")[0]
        weights = weights_of(listed, self.run_config, self.labels)
        if asked.again:
            before = self.weighed.get(question, {})
            if not listed.keys() <= before.keys():
                raise SiteError(
                    f"it has no weights of an earlier attempt at round {slot.round}"
                )
            weights = {name: before[name] for name in listed}
        if share != weights[self.silo] / sum(weights.values()):
            raise SiteError(f"its weight is {share!r:.40}, not what the list's samples give")
        context = masks.context(slot, received, self.run_config, weights, listed)
        if entry.get("context", context) != context:
            raise SiteError(f"round {slot.round} has come before with another model or list")
        held, faults = self._open(entry["opens"], asked.sealed, [*listed])
        entry |= {"weights": weights, "question": question, "held": held, "context": context}
        return Entered(slot, listed, slots, faults)

    def mask(self, vector: Vector, entered: Entered) -> tuple[Vector, Entry]:
        """Return the masked vector, once per slot, and what the next round needs, and whose shares are none."""
        slot, entry, own = entered.slot, entered.entry, digest(vector.data)
        if entry.setdefault("vector", own) != own:
            raise SiteError(f"another vector of round {slot.round} has left under these masks")
        listed, context = entered.statements, entry["context"]
        plus, minus = masks.pair_seeds(self.silo, entry["s"], listed.values(), context)
        plus.append(masks.self_seed(entry["b"], context))
        following = Slot(self.run, slot.round + 1, 1)
        kept, out = {slot: entry}, dict[str, Any]()
        if following.round <= (number(self.run_config.get("rounds")) or 0):
            found = entered.slots.get(following, {})
            kept[following] = self._shared(found, following, entry["seal"], listed)
            out |= kept[following]["out"]
        weighed = {**self.weighed, entry["question"]: entry["weights"]}
        self.weighed = dict([*weighed.items()][-KEPT:])
        self._write(kept)
        out |= {"unreadable": entered.faults} if entered.faults else {}
        return masks.add(vector, plus, minus), out

    def unmask(self, record: Mapping[str, Any]) -> Entry:
        """Return a share per silo of the list: of a survivor's self mask, of another's mask key."""
        slot, asked = self._asked(record)
        slots = self._read()
        entry, survivors = slots.get(slot, {}), [*asked.survivors]
        names = [*entry.get("weights", ())]
        if not names:
            raise SiteError(
                f"no vector of round {slot.round}, attempt {slot.attempt}, has left here"
            )
        if survivors != [name for name in names if name in survivors]:
            raise SiteError("the survivors are not silos of the round's list, in its order")
        self._check_count(survivors, len(entry["holders"]))
        if entry.get("survivors", survivors) != survivors:
            raise SiteError(f"round {slot.round} was answered for other survivors")
        weights = {name: entry["weights"][name] for name in survivors}
        # Again with a repeated answer: a power cut may have left the file alone
        self._note(entry["question"], weights, slot)
        if "answer" not in entry:
            halves = {True: slice(SHARE), False: slice(SHARE, None)}
            shares = [entry["held"].get(name, b"")[halves[name in survivors]] for name in names]
            kept = {key: entry[key] for key in ("weights", "holders", "question")}
            slots[slot] = entry = {**kept, "survivors": survivors, "answer": shares}
            # The file of before would give this answer again, and by the record no other one
            self._write(slots, sync_name=False)
        self.gone = [name for name in names if name not in survivors]
        return {"shares": entry["answer"]}

    # --- checks ---------------------------------------------------------------------------------------------------

    def _asked(self, record: Mapping[str, Any]) -> tuple[Slot, ServerRecord]:
        asked = parse_values(
            ServerRecord, {**record}, "the message's record", "repeat the round"
        )
        return Slot(self.run, asked.round, asked.attempt), asked

    def _list(
        self, kind: type[AnyKeys], asked: ServerRecord, slot: Slot, own: str
    ) -> dict[str, AnyKeys]:
        """Return the message's list, which has this silo's own statement and enough peers."""
        peers = self.study.training_peers
        found = read_list(kind, asked.statements, (slot, self.study.digest), peers)
        if self.silo not in found or found[self.silo].text != own:
            raise SiteError("the list lacks this silo's own last statement")
        self._check_count(found, len(peers))
        return found

    def _check_count(self, names: Collection[str], of: int) -> None:
        if len(names) < (least := threshold(of)):
            raise SiteError(
                f"{len(names)} silos of {of} are listed: at least {least} are needed"
            )
        if (others := len({*names} - {self.silo})) < self.rules.secure_peers:
            rule = self.rules.line("secure_peers")
            raise SiteError(f"its policy has {rule}, and the list {others} besides this silo")
        if whole(names, self.labels) != sorted(names):
            raise SiteError(
                "the list has a part of a group of silos, and the study has groups in a sum as a whole (secure-group)"
            )

    def _note(self, question: str, survivors: Mapping[str, int], slot: Slot) -> None:
        """Write down which set, with which weights, this question is answered for. Raises SiteError after another."""
        own = digest(canonical(survivors))
        with Record(self.folder).write(sync=False) as db:
            asked = (SUM, self.silo, question, f"{slot.run}.{slot.round}.%")
            found = db.execute(BEFORE, asked).fetchall()
            for _, before in found:
                if before != own:
                    raise SiteError(
                        f"this round, or what it starts from, {OTHER_SUM}, and two such sums would show one silo's "
                        "update: resume the run from its newest checkpoint, with the same silos"
                    )
            if (str(slot), own) not in found:
                disclose(db, SUM, silo=self.silo, run=str(slot), question=question, answer=own)

    # --- secrets and shares -----------------------------------------------------------------------------------------

    def _state(self, slot: Slot, private: bytes, **more: str) -> str:
        more |= {"study": self.study.digest, "seal": masks.public_of(private)}
        own = {"silo": self.silo, "group": self.labels.get(self.silo, "")}
        return state(slot, self.key, samples=self.samples, **own, **more)

    def _shared(
        self, found: Entry, slot: Slot, private: bytes, holders: Mapping[str, Keys]
    ) -> Entry:
        """Return a slot's secrets, their shares sealed to the holders, and keys to open the holders' own.

        ``found``: those that the silo has, which are for these holders or are replaced. This silo is a holder, too.
        """
        origin = digest_of(holders)
        if found.get("origin") == origin:
            return found
        b, s, seal = (secrets.token_bytes(32) for _ in range(3))
        halves = (split(secret, len(holders), threshold(len(holders))) for secret in (b, s))
        sealed, opens = list[bytes](), dict[str, bytes]()
        for one, *parts in zip(holders.values(), *halves, strict=True):
            shared, share = agree(private, one.seal), b"".join(parts)
            key = masks.sealing_key(shared, str(slot), self.silo, one.silo)
            opens[one.silo] = masks.sealing_key(shared, str(slot), one.silo, self.silo)
            text = ChaCha20Poly1305(key).encrypt(ONCE, share, None)
            sealed.append(hashes_of(share) + text)
        signed = {
            "mask": masks.public_of(s),
            "secret": digest(b),
            "shares": digest(b"".join(sealed)),
            "holders": origin,
        }
        out = {"statement": self._state(slot, seal, **signed), "sealed": sealed}
        made = {"b": b, "s": s, "seal": seal, "opens": opens, "out": out}
        return {**made, "holders": [*holders], "origin": origin}

    def _open(
        self, opens: Mapping[str, bytes], sealed: Sequence[bytes], names: Sequence[str]
    ) -> tuple[dict[str, bytes], list[str]]:
        """Return the shares that silos have sealed for this one, and who sealed none, or another than it has signed."""
        if len(sealed) != len(names):
            raise SiteError("the message has no share of each silo in the list")
        held, faults = dict[str, bytes](), list[str]()
        for name, one in zip(names, sealed, strict=True):
            try:
                share = ChaCha20Poly1305(opens[name]).decrypt(ONCE, one[HASHES:], None)
                if hashes_of(share) != one[:HASHES]:
                    raise InvalidTag
                held[name] = share
            except InvalidTag:
                faults.append(name)
        return held, faults

    # --- the disk -------------------------------------------------------------------------------------------------

    def _read(self) -> dict[Slot, Entry]:
        """Return this run's slots; empty where another run was the last."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"), object_hook=_bytes)
            self.weighed = found["weights"]
            if found["run"] != self.run:
                return {}
            self.samples = int(found["samples"])
            return {Slot(self.run, *of): entry for *of, entry in found["slots"]}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SiteError(
                f"{self.path} cannot be read ({type(error).__name__}): remove it, and repeat the round"
            ) from None

    def _write(self, slots: Mapping[Slot, Entry], *, sync_name: bool = True) -> None:
        """Write this run's slots; other runs, and slots that are not among them, are erased."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        listed = [[*slot[1:], entry] for slot, entry in slots.items()]
        content = {"run": self.run, "samples": self.samples, "slots": listed}
        content |= {"weights": self.weighed}
        text = json.dumps(content, default=lambda one: {BYTES: one.hex()})
        write_whole(self.path, text, sync_name=sync_name)
