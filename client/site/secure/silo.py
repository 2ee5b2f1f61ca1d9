"""A silo's part in secure aggregation: its secrets and answers of one run at a time, on its disk.

    STATE_DIR/secure/SILO.json (0600)    by slot: own secrets, peers' shares, and after `unmask` only the answer
    STATE_DIR/record.sqlite              a row per masked vector; per question and set of survivors, before they leave

A silo masks one vector per slot, and answers one set of survivors per slot, for each peer with a share of its self mask
or of its mask key, never of both. It answers one set, with one weight each, per question over all runs: the received
arrays, or in a survey its vector. Two such sums over different sets would differ by single silos' updates.
Its next step starts from the state after the last sum that it is in. Which sums those are, all silos of a list agree on
(`ServerRecord.sums`), and each compares them with its record: a server can change no single silo's state.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from ...protocol.chain import canonical, digest, write_whole
from ...protocol.envelope import SECURE, PrivateKey, seal
from ...protocol.parsed import SiteError, parse_values
from ...protocol.policy import Policy
from ...protocol.run_settings import is_survey, number
from ...protocol.secure import OTHER_SUM, masks
from ...protocol.secure.masks import Vector
from ...protocol.secure.shamir import SHARE, split
from ...protocol.secure.statements import (
    HASHES,
    STATEMENT,
    ServerRecord,
    Statement,
    accept,
    agree,
    digest_of,
    hashes_of,
    labels_of,
    read_statement,
    slot_of,
    threshold,
    weights_of,
    whole,
)
from ...protocol.study import StudyProtocol
from ..record import Record, disclose

# Kinds of rows in the record
SUM, VECTOR = "secure sum", "masked vector"
# Answers about what a round starts from, and about a round of a run, whatever it starts from
BEFORE = "SELECT run, answer FROM disclosed WHERE kind = ? AND silo = ? AND (question = ? OR run LIKE ?)"
VECTORS = "SELECT run, question, answer FROM disclosed WHERE kind = ? AND silo = ?"
Entry = dict[str, Any]
ONCE = bytes(12)  # a nonce: each key seals one text
BYTES = "="  # key of bytes in the file; no silo has this name


def _bytes(entry: Entry) -> Any:
    return bytes.fromhex(entry[BYTES]) if BYTES in entry else entry


@dataclass
class SecureSilo:
    """One silo in one run, as the hospital has approved it in a study and its rules; it answers a message at a time."""

    folder: Path
    silo: str
    key: PrivateKey
    run: str
    study: StudyProtocol
    rules: Policy
    run_config: Mapping[str, Any]
    build: str = ""  # the SHA-256 of the app, which is the same at all silos of a sum

    def __post_init__(self) -> None:
        self.path = self.folder / "secure" / f"{quote(self.silo, safe='')}.json"
        self.labels, self.surveys = labels_of(self.study.groups), is_survey(self.run_config)
        self.summed = {*self.study.summed_with(self.silo)}
        self.agreed = digest(f"{self.study.digest} {self.build}".encode())
        # In the file: training samples, whether sums were withheld, the least round and attempt with keys, slots
        self.samples, self.alone, self.least = 0, False, [0, 0]
        self.slots: dict[str, Entry] = {}
        # Of the message: its list, the sums that this silo is in, the newest first, the peers whose shares cannot be
        # opened, and what the audit log has of it
        self.listed: dict[str, Statement] = {}
        self.counted: list[str] = []
        self.faults: list[str] = []
        self.note = Entry()

    def note_samples(self, count: int, *, alone: bool = False) -> None:
        """Keep the number of training samples that this silo's data summary has told; all statements have it.

        ``alone``: whether it withholds the sums of its columns, so that its own statistics standardise them.
        """
        self._read()
        self.samples, self.alone = count, alone
        self._write()

    # --- the four messages ----------------------------------------------------------------------------------------

    def keys(self, record: Mapping[str, Any]) -> Entry:
        """Return a statement of this slot's new keys; earlier slots of this run, and other runs, are over.

        With such statements in ``record``, of the holders: the one that counts, and the shares sealed to the holders.
        """
        request, entry = self._begin(record), self.entry
        if not self.samples:
            raise SiteError(
                "its data summary has not left in this run: the server asks for it first"
            )
        if request.slot < self.least:
            raise SiteError(f"round {request.round}, attempt {request.attempt}, is over here")
        if request.statements:
            holders = self._list(request, entry.get("keys"))
            out = self._share(self.slot, entry, entry["seal"], holders)
        else:
            if "keys" not in entry:
                entry = masks.new_secrets()
                entry["keys"] = self._state(self.slot, entry, {}, [])
            out = {"statement": entry["keys"]}
        self.least, self.slots = request.slot, {self.slot: entry}
        self._write()
        return out

    def enter(
        self, record: Mapping[str, Any], received: str, share: Any, own_statistics: Any = ()
    ) -> None:
        """Accept a train message: its list, its shares. ``share``: the weight that the app is to use.

        ``own_statistics``: the silos whose own ones standardise their columns, as the server has it.
        """
        request, entry = self._begin(record), self.entry
        listed = self.listed = self._list(request, entry.get("statement"))
        if not listed.keys() <= entry["opens"].keys():
            raise SiteError("the list has silos that hold no shares of this round's secrets")
        for name, statement in listed.items():
            if statement.holders != entry["origin"]:
                raise SiteError(f"{name}'s shares are not with the silos that hold this silo's")
        question = "" if self.surveys else received.partition(":")[0]
        weights = weights_of(listed, self.run_config, self.labels)
        if request.again and question:
            earlier = (of for *_, of in self._vectors("question", question))
            before = next((of for of in earlier if listed.keys() <= of.keys()), {})
            if not before:
                raise SiteError(
                    f"it has no weights of an earlier attempt at round {request.round}"
                )
            weights = {name: before[name] for name in listed}
        if share != weights[self.silo] / sum(weights.values()):
            raise SiteError(f"its weight is {share!r:.40}, not what the list's samples give")
        if (self.silo in own_statistics) != self.alone:
            raise SiteError("the message has other statistics for it than its data summary")
        self.counted = self._settle(request.sums)
        context = masks.context(received, self.run_config, weights, listed, request.sums)
        if entry.setdefault("context", context) != context:
            raise SiteError(f"round {request.round} has come before with another model or list")
        entry |= {"weights": weights, "question": question, "held": self._open(request.sealed)}

    def mask(self, vector: Vector) -> Entry:
        """Mask the vector itself, once per slot; return what the next round needs, and whose shares are none."""
        request, entry, sent = self.request, self.entry, digest(vector.data)
        if entry.setdefault("vector", sent) != sent:
            raise SiteError(
                f"another vector of round {request.round} has left under these masks"
            )
        context, entry["question"] = entry["context"], entry["question"] or sent
        peers = [peer for name, peer in self.listed.items() if name in self.summed]
        seeds = masks.pair_seeds(self.silo, entry["s"], peers, context)
        seeds.append((1, masks.self_seed(entry["b"], context)))
        kept, out = {self.slot: entry}, Entry()
        if request.round < (number(self.run_config.get("rounds")) or 0):
            following = slot_of(self.run, request.round + 1, 1)
            kept[following] = self.slots.get(following) or masks.new_secrets()
            out |= self._share(following, kept[following], entry["seal"], self.listed)
        fields = {"run": self.slot, "question": entry["question"], "model": context.hex()}
        fields["answer"] = canonical(entry["weights"]).decode()
        with Record(self.folder).write(sync=False) as db:
            disclose(db, VECTOR, silo=self.silo, **fields)
        # A vector has left under this attempt's keys
        self.least, self.slots = [request.round, request.attempt + 1], kept
        self._write()
        faults = {"unreadable": self.faults} if self.faults else {}
        out |= faults
        self.note |= {"silos": len(self.listed), **faults}
        masks.add(vector, seeds)
        return out

    def unmask(self, record: Mapping[str, Any]) -> Entry:
        """Return a share per silo of the list: of a survivor's self mask, of another's mask key."""
        request, entry = self._begin(record), self.entry
        survivors, names = [*request.survivors], [*entry.get("weights", ())]
        if not names:
            raise SiteError(
                f"no vector of round {request.round}, attempt {request.attempt}, has left here"
            )
        if survivors != [name for name in names if name in survivors]:
            raise SiteError("the survivors are not silos of the round's list, in its order")
        self._check_count(survivors, entry["holders"])
        if entry.setdefault("survivors", survivors) != survivors:
            raise SiteError(f"round {request.round} was answered for other survivors")
        # Again with a repeated answer: a power cut may have left the file alone
        self._note((self.slot, entry["question"]), entry["weights"], survivors)
        if "answer" not in entry:
            halves = {True: slice(SHARE), False: slice(SHARE, None)}
            shares = [entry["held"].get(name, b"")[halves[name in survivors]] for name in names]
            kept = {key: entry[key] for key in ("weights", "holders", "question", "survivors")}
            self.slots[self.slot] = entry = {**kept, "answer": shares}
            # The file of before would give this answer again, and by the record no other one
            self._write(sync_name=False)
        gone = [name for name in names if name not in survivors]
        self.note |= {"survivors": len(survivors), "gone": gone}
        return {"shares": entry["answer"]}

    # --- checks ---------------------------------------------------------------------------------------------------

    def _begin(self, record: Mapping[str, Any]) -> ServerRecord:
        """Return a message's record; ``entry`` is what the file has of its ``slot``."""
        self.request = request = parse_values(
            ServerRecord, {**record}, "the message's record", "repeat the round"
        )
        self._read()
        self.slot = slot_of(self.run, *request.slot)
        self.entry = self.slots.get(self.slot, {})
        self.note = {"round": request.round, "attempt": request.attempt}
        return request

    def _list(self, request: ServerRecord, last: str | None) -> dict[str, Statement]:
        """Return the statements of the message's list, by silo: enough peers', and ``last``. Raises SiteError."""
        if last is None:
            raise SiteError(
                f"there are no keys here for round {request.round}: it is over, or they have yet to be asked for"
            )
        of, peers = (self.slot, self.agreed), self.study.training_peers
        listed = dict[str, Statement]()
        for place, text in enumerate(request.statements, 1):
            try:
                accept(read_statement(text), of, peers, listed)
            except SiteError as error:
                raise SiteError(f"statement {place} of the list: {error}") from None
        if self.silo not in listed or listed[self.silo].text != last:
            raise SiteError("the list lacks this silo's own last statement")
        self._check_count(listed, len(peers))
        return listed

    def _check_count(self, names: Collection[str], of: int) -> None:
        if len(names) < (least := threshold(of)):
            raise SiteError(
                f"{len(names)} silos of {of} are listed: at least {least} are needed"
            )
        if (
            others := len(self.summed.intersection(names) - {self.silo})
        ) < self.rules.secure_peers:
            rule = self.rules.line("secure_peers")
            where = "list" if self.summed.issuperset(names) else "sum of its group"
            raise SiteError(
                f"its policy has {rule}, and the {where} {others} besides this silo"
            )
        if whole(names, self.labels) != sorted(names):
            raise SiteError(
                "the list has a part of a group of silos, and the study has groups in a sum as a whole (secure-group)"
            )

    def _settle(self, sums: Sequence[str]) -> list[str]:
        """Return which of the run's sums this silo is in, the newest first; its state is of that one.

        A sum of a vector that it has sent counts as answered for those silos. Raises SiteError after another answer.
        """
        counted, settled = list[str](), False
        for text in reversed(sums):
            context, *silos = text.split(" ")
            for slot, question, weights in () if settled else self._vectors("model", context):
                self._note((slot, question), weights, silos, strict=self.silo not in silos)
                settled = self.silo in silos
            counted += [context] * (self.silo in silos)
        return counted

    def _vectors(self, key: str, of: str) -> list[tuple[str, str, dict[str, int]]]:
        """Return slot, question and weights of the vectors that have left, the newest first. ``key``: a column."""
        find = f"{VECTORS} AND {key} = ? ORDER BY rowid DESC"
        with Record(self.folder).reading() as db:
            rows = db.execute(find, (VECTOR, self.silo, of)).fetchall()
        return [(slot, question, json.loads(weights)) for slot, question, weights in rows]

    def _note(
        self, of: tuple[str, str], weights: Entry, silos: Iterable[str], *, strict: bool = True
    ) -> None:
        """Write down which set, with which weights, this question is answered for. Raises SiteError after another.

        Not ``strict``: after another answer in this very slot. So a silo goes on that answered an attempt of no sum.
        """
        run, question = of
        # What is opened with this silo's vector in it
        summed = self.summed.intersection(silos)
        answer = digest(canonical({name: weights.get(name, 0) for name in summed}))
        with Record(self.folder).write(sync=False) as db:
            attempts = f"{run.rpartition('.')[0]}.%"
            answers = db.execute(BEFORE, (SUM, self.silo, question, attempts)).fetchall()
            if any(before != answer and (strict or slot == run) for slot, before in answers):
                mend = "resume the run from its newest checkpoint, with the same silos, or begin one with another seed"
                mend = "survey the same silos" if self.surveys else mend
                raise SiteError(
                    f"this round, or what it starts from, {OTHER_SUM}, and two such sums would show one silo's "
                    f"update: {mend}"
                )
            if (run, answer) not in answers:
                disclose(db, SUM, silo=self.silo, run=run, question=question, answer=answer)

    # --- secrets and shares -----------------------------------------------------------------------------------------

    def _share(
        self, slot: str, entry: Entry, private: bytes, holders: Mapping[str, Statement]
    ) -> Entry:
        """Return a slot's statement, and the shares of its secrets, sealed to the holders: this silo is one, too.

        ``private``: its seal key in the holders' list. ``entry`` gets the keys to open the holders' own shares. Raises
        SiteError for other holders than before: each sealing key seals one text, for two would tell their difference.
        """
        origin = digest_of(holders)
        if entry.setdefault("origin", origin) != origin:
            raise SiteError(f"the shares of slot {slot} were made for another list")
        if "statement" not in entry:
            halves = (split(entry[of], len(holders), threshold(len(holders))) for of in "bs")
            sealed, opens = list[bytes](), dict[str, bytes]()
            for holder, *parts in zip(holders.values(), *halves, strict=True):
                shared, share = agree(private, holder.seal), b"".join(parts)
                key = masks.sealing_key(shared, slot, self.silo, holder.silo)
                opens[holder.silo] = masks.sealing_key(shared, slot, holder.silo, self.silo)
                text = ChaCha20Poly1305(key).encrypt(ONCE, share, None)
                sealed.append(hashes_of(share) + text)
            entry |= {"opens": opens, "holders": len(holders), "sealed": sealed}
            entry["statement"] = self._state(slot, entry, holders, sealed)
        return {key: entry[key] for key in ("statement", "sealed")}

    def _state(
        self, slot: str, of: Entry, holders: Mapping[str, Statement], sealed: Sequence[bytes]
    ) -> str:
        """Return the signed statement of secrets, and of their shares for these holders."""
        fields = {
            "study": self.agreed,
            "slot": slot,
            "silo": self.silo,
            "samples": self.samples,
            "group": self.labels.get(self.silo, ""),
            "least": max(
                threshold(len(self.study.training_peers)), self.rules.secure_peers + 1
            ),
            "seal": masks.public_of(of["seal"]),
            "mask": masks.public_of(of["s"]),
            "secret": digest(of["b"]),
            "shares": digest(b"".join(sealed)),
            "holders": digest_of(holders),
        }
        return seal(SECURE, STATEMENT, fields, self.key)

    def _open(self, sealed: Sequence[bytes]) -> dict[str, bytes]:
        """Return the shares that the list's silos have sealed for this one.

        ``faults`` gets those that sealed none, or another than they have signed.
        """
        if len(sealed) != len(self.listed):
            raise SiteError("the message has no share of each silo in the list")
        held, self.faults = dict[str, bytes](), []
        for name, text in zip(self.listed, sealed, strict=True):
            try:
                key = self.entry["opens"][name]
                share = ChaCha20Poly1305(key).decrypt(ONCE, text[HASHES:], None)
                if hashes_of(share) != text[:HASHES]:
                    raise InvalidTag
                held[name] = share
            except InvalidTag:
                self.faults.append(name)
        return held

    # --- the disk -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Read this run's slots; there are none where another run was the last."""
        self.slots = {}
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"), object_hook=_bytes)
            if content["run"] == self.run:
                self.samples, self.least = int(content["samples"]), [*content["least"]]
                self.alone = content["alone"]
                self.slots = {**content["slots"]}
        except FileNotFoundError:
            pass
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise SiteError(
                f"{self.path} cannot be read ({type(error).__name__}): remove it, and repeat the round"
            ) from None

    def _write(self, *, sync_name: bool = True) -> None:
        """Write this run's slots; other runs, and slots that are not among them, are erased."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        content = {"run": self.run, "samples": self.samples, "alone": self.alone}
        content |= {"least": self.least, "slots": self.slots}
        text = json.dumps(content, default=lambda value: {BYTES: value.hex()})
        write_whole(self.path, text, sync_name=sync_name)
