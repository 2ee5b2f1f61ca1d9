"""The model card: what is needed to use an exported model, as typed and bounded values.

A card comes from another hospital, by a stick or by mail. It is data and never code: it cannot name a module to import,
turn probabilities round, or make them no numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from client.faults import as_user_error
from client.protocol.keys import site_root
from models.networks.custom import is_custom
from models.shapes import Shape, read_shape
from models.tasks import Task, task_of
from partitions.common.errors import DataError, UserError
from partitions.common.files import make_folder, private
from partitions.common.parsed import Frozen, parse_values
from partitions.labels import MOST_CLASSES
from partitions.recipes.pictures import parse_any
from partitions.schema import Schema, parse_schema

MOST_BYTES = 1 << 26
MEND = "export the model again"
T_RANGE = (0.05, 20.0)  # of the temperature
COVERAGE = (0.5, 0.99)

Name = Annotated[str, Field(max_length=1000)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Share = Annotated[float, Field(ge=0, le=1)]


class Architecture(Frozen):
    """The architecture: its name, its own settings, a method's head, and the part that was trained."""

    name: Name
    settings: dict[str, Any]
    head: Name | None = None
    part: dict[str, Any] | None = None


class Input(Frozen):
    """Shape (``models.shapes.write_shape``) and number format of a sample."""

    shape: list[int] | list[str]
    # Of several inputs one each, as ``partitions.splits.dtype_of`` writes them
    dtype: Name | None
    # Whether samples are larger, and a window of this shape slides over them
    patch: bool = False


class Scale(Frozen):
    """Mean and standard deviation by column or channel, as numbers or nested lists of one shape."""

    mean: Any
    std: Any

    @model_validator(mode="after")
    def _numbers_fit(self) -> Scale:
        means, deviations = list(_numbers(self.mean)), list(_numbers(self.std))
        if len(means) != len(deviations) or not all(map(math.isfinite, means)):
            raise DataError("must have as many finite means as deviations")
        if not all(math.isfinite(deviation) and deviation > 0 for deviation in deviations):
            raise DataError("must have deviations above 0")
        return self


class Temperature(Frozen):
    """The divisor T of the outputs, and the loss on the validation samples before and after."""

    T: Annotated[float, Field(ge=T_RANGE[0], le=T_RANGE[1])]
    samples: Count
    loss_before: float
    loss_after: float
    as_trained: bool


class Conformal(Frozen):
    """The threshold of sets of classes, or the half widths of intervals of measurements."""

    coverage: Annotated[float, Field(ge=COVERAGE[0], le=COVERAGE[1])]
    records: Count
    patients: bool
    as_trained: bool
    threshold: Share | None = None
    half_widths: list[Annotated[float, Field(ge=0)]] | None = None

    @model_validator(mode="after")
    def _one_kind(self) -> Conformal:
        if (self.threshold is None) is (self.half_widths is None):
            raise DataError("must have either threshold or half_widths")
        return self


class Onnx(Frozen):
    """The ONNX file beside the model, and its largest difference from PyTorch's answers."""

    file: Name
    sha256: Name
    apart: Annotated[float, Field(ge=0)]


class Lineage(Frozen):
    """What the site's audit log has of the last reply that trained the model: the hash of its line pins the rest."""

    run: Name
    round: Count
    time: Name
    asked_by: Name
    app: Name
    settings: Name
    data: Name  # SHA-256 of the data file
    study: dict[Literal["name", "digest"], Name] | None = None
    trainer: Name | None = None
    line: Count
    hash: Name

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Lineage:
        """Return the lineage in a line of the audit log."""
        named = {"asked_by": entry["asked-by"], "data": entry.get("cohort", "")}
        return cls(**named, **{key: entry[key] for key in cls.model_fields if key in entry})


class Card(Frozen):
    """The whole card. ``schema`` and ``recipe`` are checked by their own parsers."""

    method: Name
    paper: str
    seed: int
    silo: Name | None
    run: Name
    which: Name
    snapshot: Literal["received", "personal"]
    round: Count
    when: Name
    metrics: dict[str, float | None]
    samples: dict[Literal["train", "val", "test"], Count]
    model: Architecture
    input: Input
    task: Literal[
        "multiclass", "ordinal", "multilabel", "regression", "survival", "segmentation"
    ] = "multiclass"
    classes: Annotated[int, Field(ge=1, le=MOST_CLASSES)]
    columns_and_labels: dict[str, Any] = Field(default={}, alias="schema")
    normalisation: Scale | None
    labels: Scale | None = None
    silofl: Name
    recipe: dict[str, Any] | None = None
    trainer: Name | None = None  # the hospital's own training loop that made it
    temperature: Temperature | None = None
    conformal: Conformal | None = None
    onnx: Onnx | None = None
    lineage: Lineage | None = None  # of a hospital's own model

    @property
    def shape(self) -> Shape:
        """The shape of a sample."""
        return read_shape(self.input.shape)

    @property
    def schema_parsed(self) -> Schema:
        """The columns and labels of the model."""
        return parse_schema(self.columns_and_labels)

    @property
    def answering(self) -> Task:
        """The task of the model, with the scale of its labels."""
        scale = self.labels
        return task_of(self.task, scale.mean, scale.std) if scale else task_of(self.task)

    @property
    def divisor(self) -> float:
        """The number by which outputs are divided before they become probabilities."""
        return self.temperature.T if self.temperature else 1.0

    @property
    def text(self) -> bytes:
        """The content of the card's file."""
        content = self.model_dump(by_alias=True, exclude_unset=True)
        return (
            json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        ).encode()


def checked_card(content: dict[str, Any], source: Path) -> Card:
    """Return the card with this content, made of what is in ``source``. Raises UserError, one line."""
    with as_user_error():
        return parse_values(Card, content, source, "train the model again")


def parse_card(text: bytes, file: Path, network: str = "") -> Card:
    """Return a checked card. ``network``: the network of one's own that the user has named, to be imported.

    A card that this user has exported on this machine may name its network, too.

    Raises DataError, one line, for invalid content, and UserError for a network that the user has not named.
    """
    if len(text) > MOST_BYTES:
        raise DataError(
            f"{file} has {len(text)} bytes, a model card has at most {MOST_BYTES}; {MEND}"
        )
    card = parse_values(Card, text, file, MEND)
    try:
        _ = card.schema_parsed
        if card.recipe:
            parse_any(card.recipe)
    except DataError as error:
        raise DataError(f"{file}: {error}; {MEND}") from None
    if is_custom(card.model.name) and card.model.name != network and not was_made_here(text):
        raise UserError(
            f"{file} is of the network {card.model.name}, code of its own, and was not exported here: --network "
            f"{card.model.name} runs yours of this name"
        )
    return card


def note_export(text: bytes) -> None:
    """Remember a card that was written here, of a run whose network the user had named: its model may be used again.

    Where nothing can be remembered, ``--network`` names the network.
    """
    with contextlib.suppress(OSError), private():
        file = _exports()
        make_folder(file.parent)
        with file.open("a", encoding="ascii") as out:
            out.write(f"{hashlib.sha256(text).hexdigest()}\n")


def was_made_here(text: bytes) -> bool:
    """Return whether this user has exported this card on this machine."""
    try:
        return (
            hashlib.sha256(text).hexdigest() in _exports().read_text("ascii", "replace").split()
        )
    except OSError:
        return False


def _exports() -> Path:
    """Return the file with the SHA-256 of each card of an own network that was exported here."""
    return site_root().with_name("silofl-exported")


def _numbers(value: Any) -> Any:
    """Yield the numbers of nested lists. Raises DataError for anything else."""
    if isinstance(value, list):
        for number in value:
            yield from _numbers(number)
        return
    try:
        if isinstance(value, bool | str):
            raise TypeError
        yield float(value)
    except (TypeError, OverflowError):  # a whole number may be larger than any float
        raise DataError("must be numbers, or lists of them") from None
