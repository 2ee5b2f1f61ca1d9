"""Models to evaluate: files of ``silofl export`` with their model cards, all of one architecture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from client.export import read_model
from client.exporting.model_card import Card
from models.networks.custom import is_custom
from models.networks.registry import spec_of
from models.shapes import columns
from partitions.common.errors import UserError
from partitions.common.names import SILO
from partitions.common.settings import keys_of
from partitions.schema import Schema, parse_schema
from strategies.base.evaluation import EVALUATE, EvaluatedEntry, digest_of, input_digest

# Fields of the model card that all models of one evaluation share
ALIKE = ("model", "task", "classes")


@dataclass(frozen=True)
class EvaluatedModel:
    """A model with its card, and the statistics that standardise its tables, then its measured labels."""

    name: str
    vector: Tensor  # (Σ,)
    buffers: Tensor
    statistics: Mapping[str, list[float]]
    card: Card

    @property
    def schema(self) -> Schema:
        """Columns and labels in the order of the model's inputs and outputs."""
        return parse_schema(schema_of(self.card))

    @property
    def owner(self) -> str:
        """The silo whose own model this is, from its card; empty for a model of no single silo of a deployment."""
        silo = self.card.silo or ""
        return silo if SILO.fullmatch(silo) else ""

    @property
    def digest(self) -> str:
        """The digest that identifies the model in the run's settings."""
        inputs = input_digest(self.statistics["mean"], self.statistics["std"], self.schema)
        return digest_of(self.vector, self.buffers, inputs)


def schema_of(card: Card) -> dict[str, Any]:
    """Return a card's columns and labels."""
    return {
        key: value
        for key, value in card.columns_and_labels.items()
        if key in ("features", "labels")
    }


def read_models(files: Sequence[Path], network: str = "") -> list[EvaluatedModel]:
    """Read exported models, named after their files. ``network``: the network of one's own that they may be of.

    Raises UserError if one does not fit the others.
    """
    models: list[EvaluatedModel] = []
    for file in files:
        card, net = read_model(file, network)
        name = file.name.removesuffix(".safetensors")
        vector, buffers = net.vector.clone(), net.buffers.clone()
        models.append(EvaluatedModel(name, vector, buffers, statistics_of(card), card))
        for what in ALIKE:
            if getattr(card, what) != getattr(models[0].card, what):
                raise UserError(
                    f"{file} has another {what} than {files[0]}: evaluate them one after the other"
                )
        if schema_of(card) != schema_of(models[0].card):
            raise UserError(
                f"{file} has other columns or labels than {files[0]}: evaluate them one after the other"
            )
        if card.shape != models[0].card.shape:
            raise UserError(
                f"{file} takes other samples than {files[0]}: evaluate them one after the other"
            )
    return models


def statistics_of(card: Card) -> dict[str, list[float]]:
    """Return the card's mean and std of a table's columns, then of measured labels; empty: not standardised."""
    d, scale, labels = columns(card.shape), card.normalisation, card.labels
    by_key: dict[str, list[float]] = {}
    for key in ("mean", "std"):
        inputs = list(getattr(scale, key)) if scale and d else []
        if labels and d and not inputs:
            raise UserError("the card has statistics of the labels, and none of the columns")
        by_key[key] = inputs + (list(getattr(labels, key)) if labels else [])
    return by_key


def evaluation_settings(
    models: Sequence[EvaluatedModel], *, owned: bool = True
) -> dict[str, object]:
    """Return the settings of the run that evaluates these models, without data and directory.

    ``owned``: include each model's owner, which the silos' policies check. False: no model leaves this machine.
    """
    card = models[0].card
    name = card.model.name
    # Of one's own network, the task says all
    settings = None if is_custom(name) else spec_of(name).settings
    of_card, fields = card.model.settings, keys_of(settings, name) if settings else {}
    options = {key: of_card[f.name] for key, f in fields.items() if f.name in of_card}
    agreed: dict[str, Any] = {
        "task": card.task,
        "shape": card.input.shape,
        "classes": card.classes,
    }
    agreed |= {"schema": schema} if (schema := schema_of(card)) else {}
    standardised = any(model.statistics["mean"] for model in models)
    return {
        **options,
        "strategy": EVALUATE,
        "wire-dtype": "float32",  # independent of the federation file's settings for training
        "ala": False,
        "keep-models": "none",
        "patience": 0,
        "rounds": len(models),
        "model": name,
        "patch": ",".join(map(str, card.shape[1:])) if card.input.patch else "",
        "agreed": json.dumps(agreed, sort_keys=True),
        "normalization": "agreed" if standardised else "none",
        "evaluate.models": ",".join(
            str(EvaluatedEntry(m.name, m.digest, m.owner if owned else "")) for m in models
        ),
        "evaluate.method": card.model.head or "",
    }
