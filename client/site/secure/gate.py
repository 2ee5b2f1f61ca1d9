"""The gate's part of secure aggregation: three messages are answered here, and a vector leaves under masks only."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from ...flower.messages import records_of
from ...protocol.envelope import fingerprint, load_node_key, public_pem
from ...protocol.launch import NODE_KEY as KEY
from ...protocol.parsed import SiteError
from ...protocol.policy import PolicyRefusedError
from ...protocol.run_settings import is_secure, uploads
from ...protocol.secure import (
    ARRAY,
    ARRAYS,
    COUNTED,
    KEYS,
    OWN,
    RECORD,
    SHARE,
    START,
    SURVEY,
    UNMASK,
    masks,
)
from ..message import SiteMessage, whole
from .silo import SecureSilo

SUMMARY = "summary"  # the record of a data summary, with n_train
WITHHELD = "sums_withheld"  # in it: why a silo sends no sums of its columns


class SecureMessage:
    """A message to a silo with data of its own, in a run with or without secure aggregation.

    ``note``: for the audit log. Raises SiteError or OSError, one line, for a message that must not be answered.
    """

    def __init__(self, parsed: SiteMessage) -> None:
        # Not the parsed message itself, whose passage has this object
        self.message, self.name, self.action = parsed.message, parsed.silo, parsed.action
        self.record, self.config, self.note = parsed.masked, parsed.config, dict[str, Any]()
        terms, settings = parsed.terms, parsed.settings
        # A method that sends nothing masks nothing
        secure = is_secure(settings) and uploads(settings)
        self.answers = parsed.action in (KEYS, START, UNMASK)
        self.masks = secure and (parsed.kind == "train" or parsed.action == SURVEY)
        # No array leaves but a masked one
        self.closed = is_secure(settings) or terms.rules.secure_aggregation == "required"
        held_out = terms.study.held_out if terms.study else ()
        self.counts_samples = (
            secure and parsed.action == "query" and parsed.silo not in held_out
        )
        if self.answers and not secure:
            raise SiteError(
                "the run has secure-aggregation = false, or sends nothing, and a message asks for it"
            )
        if self.answers or self.masks or self.counts_samples:
            self.silo = open_silo(parsed)
        if self.masks:
            config, received = (
                parsed.config,
                masks.received_sha256(parsed.arrays, parsed.config),
            )
            own_statistics = config.get("own_statistics", ())
            self.silo.enter(parsed.masked, received, config.get(SHARE), own_statistics)

    def reply(self, answer: Callable[[], Any]) -> Any:
        """Return the reply: this silo's own, or the app's with masks. Raises PolicyRefusedError: it must not leave."""
        with self._refusing():
            if self.masks:
                self._close(self.message.content)
            reply = self._answer() if self.answers else answer()
            if reply.has_error():
                return reply
            if self.masks:
                self._mask(reply.content)
            elif self.closed and records_of(reply.content, "Array"):
                raise SiteError("the reply has a vector, and here none leaves without a mask")
            if self.counts_samples:
                summary = records_of(reply.content, "Config").get(SUMMARY, {})
                samples = max(whole(summary.get("n_train")), 1)
                self.silo.note_samples(samples, alone=WITHHELD in summary)
            if self.answers or self.masks:
                self.note = self.silo.note
            return reply

    def _answer(self) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        call = self.silo.unmask if self.action == UNMASK else self.silo.keys
        record = ConfigRecord(call(self.record))
        return Message(RecordDict({RECORD: record}), reply_to=self.message)

    def _close(self, content: Any) -> None:
        """Leave in a message only what the silos of its sum agree on, and what changes no step; add this silo's own."""
        from flwr.app import ConfigRecord

        config = self.config
        kept = {key: config[key] for key in config.keys() - masks.NOT_FOR_APP}
        kept |= {OWN: self.silo.entry["context"].hex(), COUNTED: " ".join(self.silo.counted)}
        for name in content.keys() - records_of(content, "Array").keys():
            del content[name]
        content["config"] = ConfigRecord(kept)

    def _mask(self, content: Any) -> None:
        """Add the masks to the reply's vector. Raises SiteError if it has an array without them."""
        from flwr.app import Array, ArrayRecord, ConfigRecord

        arrays = records_of(content, "Array")
        if {*arrays} != {ARRAYS} or {*arrays[ARRAYS]} != {ARRAY}:
            raise SiteError(
                f"the reply has the arrays {', '.join(sorted(arrays))[:200] or 'none'}, and only {ARRAYS} is masked"
            )
        vector = arrays[ARRAYS][ARRAY].numpy()
        if str(vector.dtype) != "uint32" or vector.ndim != 1:
            raise SiteError(
                f"the reply's vector is {vector.dtype} and not uint32, so no mask hides it"
            )
        content[RECORD] = ConfigRecord(self.silo.mask(vector))
        content[ARRAYS] = ArrayRecord({ARRAY: Array(vector)})

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (SiteError, OSError) as error:
            raise PolicyRefusedError(f"{self.name} refuses: {error}") from None


def open_silo(parsed: SiteMessage) -> SecureSilo:
    """Return this silo in a run. Raises SiteError, which continues "SILO refuses:"."""
    name, state, key = parsed.silo, parsed.state, node_key()
    study, rules = parsed.terms.study, parsed.terms.rules
    if study is None:
        raise SiteError(
            "secure aggregation needs a study, approved here, that names its peers: study = NAME"
        )
    if not state:
        raise SiteError("it has no state-dir to keep keys and answers in")
    peers, here = study.training_peers, fingerprint(public_pem(key))
    if peers.get(name) != here:
        raise SiteError(
            f"the study {study.name} has [peers] {name} = {peers.get(name, '(none)')}, and this silo's key is {here}"
        )
    agreed = study, rules, parsed.settings, parsed.build
    return SecureSilo(state, name, key, str(parsed.run), *agreed)


def node_key() -> ec.EllipticCurvePrivateKey:
    """Return this SuperNode's private key. Raises SiteError if it cannot be read."""
    path = os.environ.get(KEY, "")
    try:
        return load_node_key(Path(path))
    except SiteError as error:
        raise SiteError(
            f"its key cannot be read ({KEY} = {path or 'not set'}): {error}"
        ) from None
