"""The gate's part of secure aggregation: three messages are answered here, and a vector leaves under masks only."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from ..budget.release import whole
from ..parsed import SiteError
from ..terms import Terms
from ..trust.envelope import fingerprint, public_pem
from ..trust.message_rules import is_secure
from ..trust.policy import PolicyRefusedError
from . import ARRAY, ARRAYS, KEYS, RECORD, SHARE, START, UNMASK, masks
from .silo import SecureSilo

KEY = "SILOFL_NODE_KEY"  # in a SuperNode's environment: the file of its key
REQUIRED = "required"
SUMMARY = "summary"  # the record of a data summary, with n_train


class SecureMessage:
    """A message to a silo with data of its own, in a run with or without secure aggregation.

    The record ``secure`` is taken out of the message, so that the app does not see it. ``note``: for the audit log.
    Raises PolicyRefusedError, one line, for a message that must not be answered.
    """

    def __init__(self, message: Any, context: Any, terms: Terms) -> None:
        self.message, self.note = message, dict[str, Any]()
        self.asked = message.metadata.message_type
        self.record = dict(message.content.pop(RECORD, {})) if message.has_content() else {}
        self.run = context.run_config
        node, secure = context.node_config, is_secure(self.run)
        self.name = str(node.get("name", "this silo"))
        self.own = self.asked in (KEYS, START, UNMASK)
        self.masks = secure and self.asked.partition(".")[0] == "train"
        # No array leaves but a masked one
        self.closed = secure or terms.rules.secure_aggregation == REQUIRED
        if self.own and not secure:
            raise self._refusal(
                "the run has secure-aggregation = false, and a message asks for it"
            )
        study = terms.study
        held_out = study is not None and self.name in study.held_out
        self.told = secure and self.asked == "query" and not held_out
        if self.own or self.masks or self.told:
            try:
                self.silo = open_silo(self.name, context, terms)
                if self.masks:
                    received = masks.received_sha256(message.content)
                    share = dict(message.content.config_records.get("config", {})).get(SHARE)
                    self.entered = self.silo.enter(self.record, received, share)
            except (SiteError, OSError) as error:
                raise self._refusal(error) from None

    def reply(self, answer: Callable[[], Any]) -> Any:
        """Return the reply: this silo's own, or the app's with masks. Raises PolicyRefusedError: it must not leave."""
        try:
            if self.own:
                return self._own()
            reply = answer()
            if self.closed and not reply.has_error():
                self._mask(reply)
            if self.told and not reply.has_error():
                summary = reply.content.config_records.get(SUMMARY, {})
                self.silo.note_samples(max(whole(summary.get("n_train")), 1))
            return reply
        except (SiteError, OSError) as error:
            raise self._refusal(error) from None

    def _own(self) -> Any:
        from flwr.app import ConfigRecord, Message, RecordDict

        call = {KEYS: self.silo.keys, START: self.silo.start, UNMASK: self.silo.unmask}
        found = ConfigRecord(call[self.asked](self.record))
        self.note = {key: self.record[key] for key in ("round", "attempt")}
        if self.asked == UNMASK:
            self.note |= {"survivors": len(self.record["survivors"]), "gone": self.silo.gone}
        return Message(RecordDict({RECORD: found}), reply_to=self.message)

    def _mask(self, reply: Any) -> None:
        """Add the masks to the reply's vector. Raises SiteError if it has an array without them."""
        from flwr.app import Array, ArrayRecord, ConfigRecord

        arrays = dict(reply.content.array_records)
        if not self.masks:
            if arrays:
                raise SiteError("the reply has a vector, and here none leaves without a mask")
            return
        found = arrays.get(ARRAYS, {})
        if {*arrays} != {ARRAYS} or {*found} != {ARRAY}:
            raise SiteError(
                f"the reply has the arrays {', '.join(sorted(arrays))[:200] or 'none'}, and only {ARRAYS} is masked"
            )
        vector = found[ARRAY].numpy()
        if str(vector.dtype) != "uint32" or vector.ndim != 1:
            raise SiteError(
                f"the reply's vector is {vector.dtype} and not uint32, so no mask hides it"
            )
        masked, following = self.silo.mask(vector, self.entered)
        reply.content[ARRAYS] = ArrayRecord({ARRAY: Array(masked)})
        reply.content.pop(RECORD, None)
        if following:
            reply.content[RECORD] = ConfigRecord(following)
        slot = self.entered.slot
        self.note = {"round": slot.round, "attempt": slot.attempt}
        self.note |= {"silos": len(self.entered.statements)}
        self.note |= {"unreadable": self.entered.faults} if self.entered.faults else {}

    def _refusal(self, fault: object) -> PolicyRefusedError:
        return PolicyRefusedError(f"{self.name} refuses: {fault}")


def open_silo(name: str, context: Any, terms: Terms) -> SecureSilo:
    """Return this silo in a run. Raises SiteError, which continues "SILO refuses:"."""
    study, state, key = terms.study, context.node_config.get("state-dir"), node_key()
    if study is None:
        raise SiteError(
            "secure aggregation needs a study, approved here, that names its peers: study = NAME"
        )
    if not state:
        raise SiteError("it has no state-dir to keep keys and answers in")
    peers, own = study.training_peers, fingerprint(public_pem(key))
    if peers.get(name) != own:
        raise SiteError(
            f"the study {study.name} has [peers] {name} = {peers.get(name, '(none)')}, and this silo's key is {own}"
        )
    agreed = study, terms.rules, context.run_config
    return SecureSilo(Path(str(state)), name, key, str(int(context.run_id)), *agreed)


def node_key() -> ec.EllipticCurvePrivateKey:
    """Return this SuperNode's private key. Raises SiteError if it cannot be read."""
    path = os.environ.get(KEY, "")
    try:
        key = load_ssh_private_key(Path(path).read_bytes(), None)
    except (OSError, ValueError) as error:
        raise SiteError(
            f"its key cannot be read ({KEY} = {path or 'not set'}: {type(error).__name__})"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SiteError(f"{path} is no key of a silo")
    return key
