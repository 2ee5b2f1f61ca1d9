"""Frozen values: what a method declares of itself, and what the round loop hands its strategy.

A setting that needs a capability the method does not declare is refused with one line; it is never silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from partitions.common.errors import UserError
from strategies.base.robust import plausible_counts
from strategies.base.settings import RULES, Common, Value
from strategies.base.transport.codecs import OF_CHANGES
from strategies.base.transport.data_summary import read_agreed, sample_weights
from strategies.base.transport.error_feedback import sends_changes
from strategies.base.transport.kinds import BUFFERS, MODEL, NUMBERS, SHARED, ReleaseKind

OTHER_LAYERS = "which layers travel changes from round to round"
OWN_START = "its silos start from layers of their own, not from what they received"
EACH_MODEL = "the server needs each silo's own model, not a sum of steps"
LOCAL_SUMS = "silos and server add up the same changes each for themselves, which would differ"
OWN_LOSS = "its loss is not the run's alone, so a trainer would train another method"
OWN_RATE = "its equations have the learning rate beside the steps of training"
OWN_STEPS = "it takes gradients at models that no trainer could step"
UNDECLARED = "its MethodInfo does not declare `lossy`"


@dataclass(frozen=True)
class NoisedEpochs:
    """A training with noise in a round: of a number of epochs, or of the setting that holds it (0: local-epochs).

    ``each``: of so many trainings of one epoch. ``where``: only if this setting is not 0, or is ``equals``.
    """

    epochs: int | str = "local-epochs"
    each: bool = False
    where: str = ""
    equals: str = ""


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
    # The vectors that ``local_update`` returns, by name, each with its kind (kinds.py)
    uploads: Mapping[str, ReleaseKind] = field(default_factory=lambda: {"model": MODEL})
    # The numbers in the client's ``replies`` that may leave the silo
    sends_numbers: Mapping[str, ReleaseKind] = field(default_factory=dict)
    # The silo's own model: sent, some layers of it, or kept
    own_model: Literal["sent", "layers", "kept"] = "sent"
    # What a silo receives of others: the same "mean" as all, a "mixture" made for it, others' "models" by name.
    receives: Literal["mean", "mixture", "models", "nothing"] = "mean"
    keeps: tuple[str, ...] = ()  # what stays in the silo in addition to data and personal model
    note: str = ""  # further information for hospitals

    # How results are read.
    # The snapshot that the paper evaluates
    reports: Literal["received", "personal"] = "personal"
    # What a new silo starts from ("": not declared, so no silo can be held out or join late): the shared "model"; a
    # "copy" of it to train; the shared "layers", below or above some of its own to train; a "mixture" of the silos'
    # models; or the common initial model, as its "own".
    newcomer: Literal["", "model", "copy", "layers", "mixture", "own"] = ""
    # The effect of a hospital that joins during the run: it "starts" like every silo and nothing of the others changes,
    # or the state for N silos "grows".
    late: Literal["", "starts", "grows"] = ""
    # The reason, if ``late`` is not declared
    not_late: str = "its MethodInfo does not declare `late`"
    one_model: bool = False  # whether the run ends with one model for all silos
    baseline: str = ""  # its label as a baseline from which other methods' gains are computed
    # The caption of the report's figure of who learns from whom, if it has one
    relationships: str = ""

    # The purpose of its messages; only "training" is a method (strategies/base/evaluation, strategies/base/survey).
    asks: Literal["training", "evaluation", "survey"] = "training"
    # Whether a policy must list it by its name; ``all`` does not include it
    listed: bool = False

    # Requirements of the method.
    needs_classes: bool = False  # whether it needs samples that have one class each
    # The kinds of inputs that it takes (``models.shapes.KINDS``), and the reason; (): every kind
    inputs: tuple[str, ...] = ()
    not_inputs: str = ""
    # The reason why it needs whole samples, so that ``patch`` is refused
    whole_samples: str = ""
    pooled: bool = False  # whether the first silo has all silos' training data, in a simulation
    adds: str = ""  # the common setting that adds this method's client to another method's

    # Capabilities.
    # Whether each gradient is that of the run's loss alone, so that a batch may be computed in parts, and repeated.
    plain_loss: bool = False
    # Whether each training of its silos is one by ``SiloClient.train`` with that loss, so that a trainer can make it.
    trainer: bool = False
    # Whether it trains boosted trees (``model = trees``): them "also", or "only" them
    trees: Literal["", "also", "only"] = ""
    not_trainer: str = "its MethodInfo does not declare `trainer`"  # the reason, if not
    # The reason why all layer blocks need one learning rate; "": they may differ (``block-rates``)
    not_block_rates: str = "its MethodInfo does not declare `not_block_rates`"
    # Values of ``robust`` that can replace its mean (``PersonalizedStrategy.mean``)
    robust: tuple[str, ...] = ()
    # Whether a step holds a dual: at the optimum these differ, and cancel
    sends_duals: bool = False
    # Whether vectors may travel as lossy changes (``wire-dtype = int8``, ...)
    lossy: bool = False
    not_lossy: str = UNDECLARED  # the reason, if not ``lossy``
    # The weights of the sum that is all its server needs (``secure-aggregation``): "samples", "silos" (equal), or the
    # method's setting that names one of the two. "": the server needs more than a sum.
    sums: str = ""
    # Values of its settings that the sum needs
    sums_at: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    not_sums: str = "its MethodInfo does not declare `sums`"  # the reason, if not ``sums``
    # Vectors of numbers of at least 0 that silos send besides in a secure sum, and their weights: "silos", or as above
    sums_also: Mapping[str, Literal["silos", ""]] = field(default_factory=dict)
    # Whether its local training may be counted in mini-batches instead of epochs (``local-steps``)
    local_steps: bool = False
    # Whether its silos start from a received model, which ``ala = true`` may mix
    ala: bool = False
    # BatchNorm statistics: "shared" averages them with the setting ``buffers = "shared"``, "local" never does.
    buffers: Literal["", "shared", "local"] = ""
    # Differential privacy: all that leaves is computed from noised "gradient"s, or "nothing" of the data leaves.
    dp: Literal["", "gradient", "nothing"] = ""
    # The reason, if ``dp`` is not declared
    not_dp: str = "its MethodInfo does not declare `dp`"
    # The trainings with noise in a round, for the hospital's privacy account (client/site/budget/accounting.py)
    dp_epochs: tuple[NoisedEpochs, ...] = (NoisedEpochs(),)

    def __post_init__(self) -> None:
        # A reason why not stands above what a preset declares; beside `sums_at` it is that of its other values
        for capability, reason, lacking in ABSENT:
            stated = getattr(self, reason) != getattr(type(self), reason)
            if stated and not (capability == "sums" and self.sums_at):
                object.__setattr__(self, capability, lacking)
        for name, kind in {**self.uploads, **self.sends_numbers}.items():
            if (self.dp == "gradient" and not kind.noised) or (self.sums and not kind.summed):
                raise UserError(
                    f"{self.name}: neither noise nor masks fit the kind of '{name}'"
                )

    @property
    def kinds(self) -> dict[str, ReleaseKind]:
        """Return the kind of every array that may leave, by name."""
        also = dict.fromkeys(self.sums_also, NUMBERS)
        return {"buffers": BUFFERS, **also, **self.uploads}

    @property
    def whole(self) -> bool | Mapping[str, tuple[Value, ...]]:
        """Return whether a message may hold all layers; a mapping: only with these values of the settings."""
        return next((kind.whole for kind in self.uploads.values() if kind.whole), False)

    @property
    def trains(self) -> bool:
        """Return whether it is a method, not the evaluation of given models or a survey of the data."""
        return self.asks == "training"

    @property
    def reports_shared(self) -> bool:
        """Return whether the report shows the score of the one model that all silos share."""
        return self.one_model and self.reports == "received"


# Capabilities, the reasons why a method lacks one, and what it then declares
ABSENT: tuple[tuple[str, str, object], ...] = (
    ("dp", "not_dp", ""),
    ("lossy", "not_lossy", False),
    ("trainer", "not_trainer", False),
    ("sums", "not_sums", ""),
)


# Presets: what most methods of a kind declare. A method states its difference; one that declares little starts from
# MethodInfo, where everything is refused.
_TYPICAL = partial(
    MethodInfo,
    late="starts",
    ala=True,
    buffers="shared",
    dp="gradient",
    plain_loss=True,
    trainer=True,
    not_block_rates="",
)
ONE_MODEL = partial(
    _TYPICAL,
    reports="received",
    newcomer="model",
    one_model=True,
    robust=RULES,
    lossy=True,
    sums="samples",
    local_steps=True,
)
OWN_COPY = partial(_TYPICAL, newcomer="copy", robust=RULES, lossy=True, sums="samples")
OWN_LAYERS = partial(
    _TYPICAL,
    sends=("Σ_s", "Σ_s"),
    uploads={"shared": SHARED},
    own_model="layers",
    newcomer="layers",
    robust=RULES,
    lossy=True,
    sums="samples",
)
# A loss of its own, of which a silo keeps parts
OWN_PARTS = partial(
    MethodInfo,
    own_model="layers",
    reports="received",
    newcomer="layers",
    late="starts",
    robust=RULES,
    sums="samples",
    buffers="shared",
    not_trainer=OWN_LOSS,
    not_block_rates="",
)
OWN_MIXTURE = partial(
    _TYPICAL, receives="mixture", newcomer="mixture", not_lossy=EACH_MODEL, not_sums=EACH_MODEL
)


def shares_buffers(info: MethodInfo, common: Common) -> bool:
    """Return whether BatchNorm statistics travel with the method's models."""
    return bool(info.uploads) and info.buffers == "shared" and common.buffers == "shared"


def upload_names(
    info: MethodInfo, settings: Any, *, buffers: bool, secure: bool
) -> tuple[str, ...]:
    """Return the names of the vectors that a silo sends in a round; a method's settings may narrow ``uploads``."""
    names = getattr(settings, "uploads", info.uploads)
    also = tuple(info.sums_also) if secure else ()
    statistics = ("buffers",) if buffers else ()
    return (*names, *also, *statistics)


def check_wire(info: MethodInfo, common: Common) -> None:
    """Raise UserError for a format that the method does not declare, or an invalid combination of ``wire-...``."""
    if common.wire_sparse and sends_changes(common):
        how = f"wire-dtype = {common.wire_dtype}"
        raise UserError(
            f"wire-sparse = true: with {how} changes are sent, of which none is left out"
        )
    sums = info.receives not in ("mixture", "models")
    reason = OWN_START if common.ala and sums else "" if info.lossy else info.not_lossy
    if reason and sends_changes(common) and info.uploads:
        method = f"{info.name} with ala = true" if common.ala else info.name
        feedback = "" if common.wire_dtype in OF_CHANGES else ", wire-feedback = on"
        raise UserError(
            f"wire-dtype = {common.wire_dtype}{feedback}: not for {method}: {reason}; float32, float16 and "
            "bfloat16 are, with wire-feedback = auto"
        )


OFFLINE = 0  # no node has this number: a silo of a resumed run that is offline


@dataclass(frozen=True)
class SiloInfo:
    """A silo as the server sees it, from its data summary."""

    name: str
    node_id: int
    n_train: int
    n_val: int = 0
    n_test: int = 0


@dataclass(frozen=True)
class RoundPlan:
    """What the round loop decides of a round; a strategy receives a new one before each round, and only reads it."""

    # The run's silos, sorted by name
    silos: Mapping[str, SiloInfo] = field(default_factory=dict)
    # For every silo's app, beside the payload (classes, ...)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    # Each silo's weight in a mean: agreed, or capped; never taken from the silos' replies
    samples: Mapping[str, int] = field(default_factory=dict)
    last: int = 0  # the run's last round: an earlier one than planned where it stops early
    # Silo -> the round that a report would show of it now
    shown: Mapping[str, int] = field(default_factory=dict)
    # Silo -> its rounds with differential privacy
    attended: Mapping[str, int] = field(default_factory=dict)
    # Silo that joined during the run -> its first round
    joined: Mapping[str, int] = field(default_factory=dict)
    # Silo that takes no part in the next round -> why
    left_out: Mapping[str, str] = field(default_factory=dict)
    # Silo -> its group in sums, as the silos state it; empty: by the setting
    groups: Mapping[str, str] = field(default_factory=dict)
    # Silo -> its weight in the sum that was asked for in this round before
    weights: Mapping[str, int] = field(default_factory=dict)
    # Attempts at the next round so far, with this one
    attempt: int = 1

    def with_silos(self, silos: Iterable[SiloInfo], common: Common) -> RoundPlan:
        """Return the plan with these silos; a weight by sample count is taken from their data summaries alone."""
        infos = {info.name: info for info in sorted(silos, key=lambda info: info.name)}
        agreed = read_agreed(common.agreed).get("samples", {})
        samples = sample_weights(
            {name: info.n_train for name, info in infos.items()}, common.weight_cap, agreed
        )
        if common.robust == "screen" and common.weight_cap:
            samples = plausible_counts(samples, agreed)
        return replace(self, silos=infos, samples=samples)

    def saved(self) -> dict[str, Any]:
        """Return what a later process needs to end this round, in JSON values."""
        nodes = {name: info.node_id for name, info in self.silos.items()}
        of = {"attempt": self.attempt, "weights": self.weights, "left_out": self.left_out}
        return {**of, "nodes": nodes}

    def restored(self, nodes: Mapping[str, int], **of: Any) -> RoundPlan:
        """Return the plan of a saved round: its silos are those of then, online or not."""
        silos = {name: replace(info, node_id=nodes[name]) for name, info in self.silos.items()}
        return replace(self, silos=silos, **of)

    @property
    def nodes(self) -> dict[int, str]:
        """The silos' names by node."""
        return {info.node_id: name for name, info in self.silos.items()}

    def flags(self, silo: str) -> dict[str, int]:
        """Return what a message to this silo says of the silo."""
        known = {"reported": self.shown, "attended": self.attended, "late": self.joined}
        return {key: of[silo] for key, of in known.items() if silo in of}


Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Relationships:
    """``values[k, i, j]``: the weight, at least 0, of silo j for silo i after round ``rounds[k]``."""

    names: list[str]
    rounds: list[int]
    values: Array  # (rounds, N, N), nan before a silo's first round

    @classmethod
    def of(
        cls, histories: Mapping[str, Array], rounds: Mapping[str, Sequence[int]]
    ) -> Relationships | None:
        """Build it from each silo's own history (rounds, N) and the rounds of its rows; None if they do not match."""
        names = sorted(histories)
        n = len(names)
        if n < 2 or any(history.shape[1] != n for history in histories.values()):
            return None
        every = sorted({r for name in names for r in rounds[name]})
        values = np.full((len(every), n, n), np.nan)
        for i, name in enumerate(names):
            for row, r in zip(histories[name], rounds[name], strict=True):
                values[every.index(r) :, i] = row  # an absent silo keeps its last row
        return cls(names, every, values)
