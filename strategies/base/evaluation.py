"""``strategy = evaluate``: given models at every silo, one a round, without training and without changing states.

It is no method, and no comparison lists it. A silo replies with the metrics of the model in its round's message, and
stores nothing. The run's settings name every model, in the order of the rounds, by one SHA-256. It covers the model's
numbers, the statistics that its inputs are standardised by, and the names of columns and labels in their order. So a
silo's audit log records the evaluated models, and a server cannot choose a model by the answer to the one before. A
search for a patient by bisection over models needs a run for each step (docs/attacks.md).

A model that is one silo's own is named with it, ``NAME=SHA-256@SILO``. A site whose policy has ``peers = false``
answers no message with such a model, its own included. The server asks that silo first, and no other if it refuses.

``keep-models = reported``: at a run's end each silo is asked once for its own model that the report shows.

Otherwise such a model has usually never left its hospital, so no other hospital can evaluate it. The silo's checks
before it sends the model are in ``client/app.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from flwr.app import Message, MessageType
from torch import Tensor

from partitions.common.errors import UserError
from partitions.schema import Schema
from strategies.base.client import SiloClient
from strategies.base.info import METHOD, MethodInfo
from strategies.base.settings import Common, setting
from strategies.base.state import BUFFERS, GLOBAL
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import Model, Payload

EVALUATE = "evaluate"
ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,99})=([0-9a-f]{64})(?:@([a-z0-9-]{1,63}))?")
MOST_MODELS = 1000


class EvaluatedEntry(NamedTuple):
    """A model of the run: its file's name, its SHA-256, and the silo that owns it (empty: none)."""

    name: str
    digest: str
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.name}={self.digest}{'@' * bool(self.owner)}{self.owner}"


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of ``silofl evaluate``, which writes them."""

    models: str = setting(
        "",
        "the models, one a round: NAME=SHA-256 with commas, and @SILO behind one that is a silo's own",
    )
    method: str = setting("", "the method whose own head the network has, where it has one")

    @property
    def entries(self) -> list[EvaluatedEntry]:
        """The models; raises UserError if there are none, or an entry is invalid."""
        matches = [ENTRY.fullmatch(entry.strip()) for entry in self.models.split(",")]
        names = [match[1] for match in matches if match]
        if None in matches or len(set(names)) < len(names) or len(names) > MOST_MODELS:
            raise UserError(
                f"evaluate.models = {self.models[:80]!r}: up to {MOST_MODELS} times NAME=SHA-256[@SILO], of different "
                "names, is needed here (silofl evaluate writes it)"
            )
        return [
            EvaluatedEntry(match[1], match[2], match[3] or "") for match in matches if match
        ]


def input_digest(mean: Sequence[float], std: Sequence[float], schema: Schema) -> str:
    """Return the SHA-256 of the standardisation statistics, and of the columns and labels in their order."""
    named = replace(schema, dtype="", table="").text
    return hashlib.sha256(
        json.dumps([list(map(float, mean)), list(map(float, std)), named]).encode()
    ).hexdigest()


def digest_of(vector: Tensor, buffers: Tensor | None, inputs: str) -> str:
    """Return the SHA-256 of ``inputs`` (input_digest), a model's numbers (Σ,) and running statistics, as float32."""
    parts = [vector, *([] if buffers is None or not buffers.numel() else [buffers])]
    numbers = torch.cat([part.detach().cpu().float() for part in parts]).numpy().tobytes()
    return hashlib.sha256(inputs.encode() + numbers).hexdigest()


class EvaluateClient(SiloClient):
    settings: EvaluateSettings

    def receive(self) -> Tensor:
        """Return the round's model; raise UserError if it is not the one in the run's settings."""
        vector = self.shared_model
        buffers = self.models[BUFFERS].vector if BUFFERS in self.models else None
        entries = self.settings.entries
        name, digest, _ = (
            entries[self.round - 1]
            if 0 < self.round <= len(entries)
            else EvaluatedEntry("no model", "")
        )
        if digest != digest_of(vector, buffers, self.silo.inputs):
            raise UserError(
                f"{self.silo.name} refuses: the run's settings have {name} as the model of round {self.round}, and the "
                "message brings another"
            )
        if buffers is not None:
            self.model.buffers.copy_(buffers)
        return vector


class Evaluate(PersonalizedStrategy):
    info = METHOD(
        name=EVALUATE,
        title="Evaluation of given models, without training",
        paper="no method: silofl evaluate",
        spelling="evaluate",
        sends=("Σ", "0"),
        uploads={},
        own_model="kept",
        note="nothing leaves but metrics",
        reports="received",
        one_model=True,
        asks="evaluation",
        buffers="local",
    )
    client = EvaluateClient
    Settings = EvaluateSettings
    settings: EvaluateSettings

    def start_model(self, number: int, vector: Tensor, buffers: Tensor | None) -> None:
        """Begin the round of a model."""
        models = {GLOBAL: Model(vector)}
        models |= {} if buffers is None or not buffers.numel() else {BUFFERS: Model(buffers)}
        self._payload = Payload(models)
        self.start_round(number)

    def payload(self, silo: str) -> Payload:
        return self._payload

    def messages(self, names: Iterable[str]) -> list[Message]:
        """Return one message to each of these silos."""
        config = {"round": self.round, "personal": False, "save": False}
        payload = self._payload
        return [
            self.message(self.silos[n].node_id, MessageType.EVALUATE, payload, config)
            for n in names
        ]


OWN = "own"  # the model's name in the reply; its running statistics have their usual name


def sends_own_model(info: MethodInfo) -> bool:
    """Return whether silos have models to send; not if the report shows the shared one, which the server has."""
    return info.trains and not info.role.pooled and not info.reports_shared


def asks_for_models(info: MethodInfo, common: Common) -> bool:
    """Return whether a run requests silos' own models."""
    return common.keep_models == "reported" and sends_own_model(info)


def check_keep(common: Common) -> None:
    """Raise UserError if a run requests models that it cannot get, or models trained without noise."""
    if common.keep_models == "none":
        return
    for refused, reason in (
        (common.dp, "not with dp = true: a silo's own model may be trained without noise"),
        (
            common.normalization == "silo",
            "not with normalization = silo: a model is of use with its silo's own statistics, which stay there",
        ),
        (
            not common.evaluate_every,
            "with evaluate-every = 0 no report shows a model; set it to 1",
        ),
    ):
        if refused:
            raise UserError(f"keep-models = {common.keep_models}: {reason}")
