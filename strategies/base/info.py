"""What a method declares of itself: :class:`MethodInfo`, in groups, each field with a safe default.

A setting that needs a capability the method does not declare is refused with one line; it is never silently ignored.
A method names its fields without their groups: ``ONE_MODEL(name="fednew", ..., lossy=No("why not"))``.
"""

# ruff: noqa: RUF009  (No is a text, which no method changes)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Literal

from partitions.common.errors import UserError
from strategies.base.settings import RULES, Common, Value
from strategies.base.transport.codecs import OF_CHANGES
from strategies.base.transport.error_feedback import sends_changes
from strategies.base.transport.kinds import BUFFERS, MODEL, NUMBERS, SHARED, ReleaseKind


class No(str):
    """The reason why a method lacks a capability: a text that is false."""

    def __bool__(self) -> bool:
        return False


OTHER_LAYERS = No("which layers travel changes from round to round")
OWN_START = No("its silos start from layers of their own, not from what they received")
EACH_MODEL = No("the server needs each silo's own model, not a sum of steps")
LOCAL_SUMS = No(
    "silos and server add up the same changes each for themselves, which would differ"
)
OWN_LOSS = No("its loss is not the run's alone, so a trainer would train another method")
OWN_RATE = No("its equations have the learning rate beside the steps of training")
OWN_STEPS = No("it takes gradients at models that no trainer could step")


@dataclass(frozen=True)
class Sums:
    """The sum over silos that is all its server needs (``secure-aggregation``)."""

    weights: str = (
        "samples"  # or "silos" (equal), or the method's setting that names one of the two
    )
    # Values of its settings that the sum needs, and the reason why not with others
    at: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    otherwise: str = ""
    # Vectors of numbers of at least 0 that silos send besides in the sum, and their weights: "silos", or as above
    also: Mapping[str, Literal["silos", ""]] = field(default_factory=dict)


@dataclass(frozen=True)
class Role:
    """What it is for; of most methods nothing is stated."""

    # The purpose of its messages; only "training" is a method (strategies/base/evaluation, strategies/base/survey).
    asks: Literal["training", "evaluation", "survey"] = "training"
    one_model: bool = False  # whether the run ends with one model for all silos
    baseline: str = ""  # its label as a baseline from which other methods' gains are computed
    # The caption of the report's figure of who learns from whom, if it has one
    relationships: str = ""
    adds: str = ""  # the common setting that adds this method's client to another method's
    pooled: bool = False  # whether the first silo has all silos' training data, in a simulation
    listed: bool = False  # whether a policy must name it; ``all`` does not include it


@dataclass(frozen=True)
class NoisedEpochs:
    """A training with noise in a round: of a number of epochs, or of the setting that holds it (0: local-epochs).

    ``each``: of so many trainings of one epoch. ``where``: only if this setting is not 0, or is ``equals``.
    """

    epochs: int | str = "local-epochs"
    each: bool = False
    where: str = ""
    equals: str = ""


@dataclass(frozen=True)
class Training:
    """What its silos train with."""

    needs_classes: bool = False  # whether it needs samples that have one class each
    # The kinds of inputs that it takes (``models.shapes.KINDS``; (): every kind), and why no others
    inputs: tuple[str, ...] = ()
    not_inputs: str = ""
    # The reason why it needs whole samples, so that ``patch`` is refused
    whole_samples: str = ""
    # Whether each gradient is that of the run's loss alone, so that a batch may be computed in parts, and repeated
    plain_loss: bool = False
    # Whether each training of its silos is one by ``SiloClient.train`` with that loss, so that a trainer can make it
    trainer: bool | No = No("its MethodInfo does not declare `trainer`")
    # Whether layer blocks may have learning rates of their own
    block_rates: bool | No = No("its MethodInfo does not declare `block_rates`")
    local_steps: bool = False  # whether it may be counted in mini-batches instead of epochs
    ala: bool = False  # whether silos start from a received model, which ``ala = true`` may mix
    # Whether it trains boosted trees: them "also", or "only" them
    trees: Literal["", "also", "only"] = ""
    # BatchNorm statistics: "shared" averages them with the setting ``buffers = "shared"``, "local" never does.
    buffers: Literal["", "shared", "local"] = ""
    # Differential privacy: all that leaves is computed from noised "gradient"s, or from noised "sums" over all records,
    # one release a round (``PrivateTraining.noised``), or "nothing" of the data leaves.
    dp: Literal["gradient", "sums", "nothing"] | No = No("its MethodInfo does not declare `dp`")
    # The trainings with noise in a round, for the hospital's privacy account (client/site/budget/accounting.py)
    dp_epochs: tuple[NoisedEpochs, ...] = (NoisedEpochs(),)


@dataclass(frozen=True)
class Aggregation:
    """What its server makes of the silos' vectors."""

    # Values of ``robust`` that can replace its mean (``PersonalizedStrategy.mean``)
    robust: tuple[str, ...] = ()
    # Whether a step holds a dual: at the optimum these differ, and cancel
    sends_duals: bool = False
    # Whether vectors may travel as lossy changes (``wire-dtype = int8``)
    lossy: bool | No = No("its MethodInfo does not declare `lossy`")
    sums: Sums | No = No("its MethodInfo does not declare `sums`")


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """A method's declarations: :attr:`PersonalizedStrategy.info`.

    Tests compare them with the messages (tests/strategies/base/test_declarations.py, test_info.py).
    """

    name: str  # on the command line
    title: str
    paper: str
    spelling: str = ""  # as the paper spells the method

    # What leaves a silo, and what comes back.
    sends: tuple[str, str] = ("Σ", "Σ")  # per participating silo and round: down, up
    # The vectors that ``local_update`` returns, and the numbers in ``replies`` that may leave, each with its kind
    uploads: Mapping[str, ReleaseKind] = field(default_factory=lambda: {"model": MODEL})
    sends_numbers: Mapping[str, ReleaseKind] = field(default_factory=dict)
    # The silo's own model: sent, some layers of it, or kept
    own_model: Literal["sent", "layers", "kept"] = "sent"
    # What a silo receives of others: the same "mean" as all, a "mixture" made for it, others' "models" by name.
    receives: Literal["mean", "mixture", "models", "nothing"] = "mean"
    # A draft's ``step`` of a study: an honest model is not so far from the silo's last one
    step: float = 1.0
    keeps: tuple[str, ...] = ()  # what stays in the silo in addition to data and personal model
    note: str = ""  # further information for hospitals

    # How results are read, and what a silo gets that comes later.
    # The snapshot that the paper evaluates
    reports: Literal["received", "personal"] = "personal"
    # What a new silo starts from ("": not declared, so no silo can be held out or join late): the shared "model"; a
    # "copy" of it to train; the shared "layers", below or above some of its own to train; a "mixture" of the silos'
    # models; or the common initial model, as its "own".
    newcomer: Literal["", "model", "copy", "layers", "mixture", "own"] = ""
    # A hospital that joins during the run "starts" like every silo, or what is kept for N silos "grows".
    late: Literal["starts", "grows"] | No = No("its MethodInfo does not declare `late`")

    role: Role = Role()
    training: Training = Training()
    aggregation: Aggregation = Aggregation()

    def __post_init__(self) -> None:
        for name, kind in {**self.uploads, **self.sends_numbers}.items():
            masked = self.aggregation.sums and not kind.summed
            if (self.training.dp == "gradient" and not kind.noised) or masked:
                raise UserError(
                    f"{self.name}: neither noise nor masks fit the kind of '{name}'"
                )

    @property
    def kinds(self) -> dict[str, ReleaseKind]:
        """Return the kind of every array that may leave, by name."""
        return {"buffers": BUFFERS, **dict.fromkeys(self.summed_also, NUMBERS), **self.uploads}

    @property
    def summed_also(self) -> Mapping[str, Literal["silos", ""]]:
        """Return the vectors that only a secure sum has, with their weights."""
        sums = self.aggregation.sums
        return sums.also if isinstance(sums, Sums) else {}

    @property
    def whole(self) -> bool | Mapping[str, tuple[Value, ...]]:
        """Return whether a message may hold all layers; a mapping: only with these values of the settings."""
        return next((kind.whole for kind in self.uploads.values() if kind.whole), False)

    @property
    def trains(self) -> bool:
        """Return whether it is a method, not the evaluation of given models or a survey of the data."""
        return self.role.asks == "training"

    @property
    def reports_shared(self) -> bool:
        """Return whether the report shows the score of the one model that all silos share."""
        return self.role.one_model and self.reports == "received"


def declare(base: MethodInfo, **changes: Any) -> MethodInfo:
    """Return a declaration with these fields changed, in whichever group each of them is."""
    for group in ("role", "training", "aggregation"):
        before = getattr(base, group)
        names = {f.name for f in fields(before)} & changes.keys()
        changes[group] = replace(before, **{name: changes.pop(name) for name in names})
    return replace(base, **changes)


# Presets: what most methods of a kind declare. A method states its difference; one that declares little starts from
# METHOD, where everything is refused.
_NOTHING = MethodInfo(name="", title="", paper="")
METHOD = partial(declare, _NOTHING)
_TYPICAL = METHOD(
    late="starts",
    ala=True,
    buffers="shared",
    dp="gradient",
    plain_loss=True,
    trainer=True,
    block_rates=True,
)
_SUMMED = declare(_TYPICAL, robust=RULES, lossy=True, sums=Sums())
ONE_MODEL = partial(
    declare,
    declare(_SUMMED, reports="received", newcomer="model", one_model=True, local_steps=True),
)
OWN_COPY = partial(declare, declare(_SUMMED, newcomer="copy"))
OWN_LAYERS = partial(
    declare,
    declare(
        _SUMMED,
        sends=("Σ_s", "Σ_s"),
        uploads={"shared": SHARED},
        own_model="layers",
        newcomer="layers",
    ),
)
# A loss of its own, of which a silo keeps parts
OWN_PARTS = partial(
    declare,
    METHOD(
        own_model="layers",
        reports="received",
        newcomer="layers",
        late="starts",
        robust=RULES,
        sums=Sums(),
        buffers="shared",
        trainer=OWN_LOSS,
        block_rates=True,
    ),
)
OWN_MIXTURE = partial(
    declare,
    declare(
        _TYPICAL, receives="mixture", newcomer="mixture", lossy=EACH_MODEL, sums=EACH_MODEL
    ),
)


def check_wire(info: MethodInfo, common: Common) -> None:
    """Raise UserError for a format that the method does not declare, or an invalid combination of ``wire-...``."""
    if common.wire_sparse and sends_changes(common):
        how = f"wire-dtype = {common.wire_dtype}"
        raise UserError(
            f"wire-sparse = true: with {how} changes are sent, of which none is left out"
        )
    sums = info.receives not in ("mixture", "models")
    lossy = OWN_START if common.ala and sums else info.aggregation.lossy
    if not lossy and sends_changes(common) and info.uploads:
        method = f"{info.name} with ala = true" if common.ala else info.name
        feedback = "" if common.wire_dtype in OF_CHANGES else ", wire-feedback = on"
        raise UserError(
            f"wire-dtype = {common.wire_dtype}{feedback}: not for {method}: {lossy}; float32, float16 and "
            "bfloat16 are, with wire-feedback = auto"
        )
