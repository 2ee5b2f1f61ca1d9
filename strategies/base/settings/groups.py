"""The settings that every method shares, in groups: each a part of :class:`~strategies.base.settings.Common`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from partitions.common.names import split_names
from partitions.common.settings import Value, setting
from partitions.labels import TASKS
from strategies.base.settings.training import MOST_ROUNDS, MOST_SAMPLES

MOST_SILOS = 1_000_000
KRUM = ("krum", "multi-krum")
RULES = ("trimmed-mean", "median", *KRUM, "geometric-median")  # rules that can replace the mean
ATTACKER_RULES = ("trimmed-mean", *KRUM)  # those of RULES that use robust-attackers
# Unless set, a simulation bounds no silo: it is for methods as published, a deployment for hospitals
TEXTBOOK: Mapping[str, Value] = {"robust": "none", "weight-cap": 0.0}


@dataclass(frozen=True)
class Program:
    """The method, and what computes: device, numbers, network."""

    strategy: str = setting("fedavg", "method; several, joined by commas, make a study")
    seed: int = setting(
        42,
        "seed of data split, initial models, batches and sampling",
        minimum=0,
        maximum=2**63 - 1,
    )
    threads: int = setting(
        0,
        "CPU threads per process, 0: OMP_NUM_THREADS or all; last bits depend on it",
        minimum=0,
        maximum=256,
    )
    tf32: str = setting(
        "auto",
        "a GPU's products and convolutions in TF32, with 10 bits: on, off, or auto: convolutions alone, with dp none",
        choices=("auto", "on", "off"),
    )
    deterministic: bool = setting(
        False,
        "a GPU computes by algorithms alone that repeat their numbers on that GPU; one that has none is an error",
    )
    device: str = setting(
        "auto", "auto, cpu, cuda or cuda:N; a deployed silo's own device stands above it"
    )
    model: str = setting(
        "auto",
        "architecture, or package.module:factory for one of your own; auto chooses by the shape of the input",
    )
    trainable: str = setting(
        "all",
        "what is trained, and so what is sent: all, or with commas head (the last layer) and patterns of names",
    )
    lora_rank: int = setting(
        0,
        "rank of the change that frozen linear layers learn (LoRA), 0: none; with it `trainable = all` is head",
        symbol="r",
        minimum=0,
        maximum=1024,
    )
    lora_alpha: float = setting(8.0, "LoRA's change counts α / r times", symbol="α", above=0)
    init_weights: str = setting(
        "",
        "a file of weights that the network starts from; a deployed silo has one of the same name, and SHA-256",
    )

    @property
    def which(self) -> tuple[str, int]:
        """Method and seed, which name the run within its study."""
        return self.strategy, self.seed


@dataclass(frozen=True)
class Data:
    """The samples: where they come from, how they are divided, what a network sees of them."""

    dataset: str = setting("digits", "a data set's name, or the path of an .npz file")
    data_dir: str = setting("", "where data sets lie or are downloaded to")
    task: str = setting(
        "auto",
        "what there is to learn; auto: what the data file or the data set says, or its labels look like",
        choices=("auto", *TASKS),
    )
    partition: str = setting("dirichlet", "how the data are split over the silos")
    silos: int = setting(12, "number of silos", symbol="N", minimum=1, maximum=MOST_SILOS)
    hold_out: str = setting(
        "",
        "hospitals, with commas, that do not train and at the end are evaluated as newcomers",
    )
    hold_out_epochs: int = setting(
        5, "epochs of a held-out hospital on what is its own", minimum=0, kind="epochs"
    )
    late_joiners: str = setting(
        "",
        "hospitals that may join while the run goes on: any, or NAME=ROUND with commas, from which round on",
    )
    validation: float = setting(
        -1.0,
        "share of a silo's training part held out for validation, -1: the partition's own; of a silo's own file, which "
        "only the silo divides, 0 leaves the part for validation unused",
        minimum=-1,
        maximum=0.9,
    )
    augment: str = setting(
        "",
        "how training pictures are changed anew in every epoch, e.g. flip,shift:2,rotate:10,brightness:0.1; there are: "
        "flip, flip-vertical, crop:PIXELS, shift:PIXELS, rotate:DEGREES, scale:SHARE, perspective:SHARE, "
        "contrast:SHARE, brightness:SHARE",
    )
    patch: str = setting(
        "",
        "outlines: train on random patches of d,h,w or h,w pixels, and evaluate by a window of that size; empty: whole "
        "samples",
    )
    patches_per_volume: int = setting(
        1,
        "patch: how often an epoch goes over the samples, with a patch of each",
        minimum=1,
        maximum=1000,
        kind="epochs",
    )
    foreground_share: float = setting(
        0.5,
        "patch: share of patches about a pixel that is not background",
        minimum=0,
        maximum=1,
    )

    @property
    def held_out(self) -> tuple[str, ...]:
        """The names in ``hold-out``."""
        return tuple(split_names(self.hold_out))

    @property
    def late(self) -> dict[str, int]:
        """The names in ``late-joiners``, each with the first round that it takes part in; empty for ``any``."""
        entries = [
            entry.partition("=") for entry in self.late_joiners.split(",") if "=" in entry
        ]
        return {name.strip(): int(number) for name, _, number in entries}


@dataclass(frozen=True)
class Travel:
    """What models and numbers travel as, and what a silo makes of them."""

    ala: bool = setting(
        False,
        "mix the received model with the silo's own by adaptive local aggregation (settings: fedala.*)",
    )
    buffers: str = setting(
        "shared",
        "BatchNorm statistics: averaged over silos, or each silo's own",
        choices=("shared", "local"),
    )
    normalization: str = setting(
        "agreed",
        "tables: standardised by statistics agreed over all silos, by the silo's own, or not",
        choices=("agreed", "silo", "none"),
    )
    wire_dtype: str = setting(
        "float32",
        "number format of what is sent; int8 and topk are for what silos send, as changes of what they received",
        choices=("float32", "float16", "bfloat16", "int8", "topk"),
    )
    wire_topk: float = setting(
        0.01, "topk: the share of a change's numbers that is sent", above=0, maximum=1
    )
    wire_feedback: str = setting(
        "auto",
        "a silo keeps what the format loses and adds it to its next change: auto with int8 and topk; on also with "
        "float16 and bfloat16; or off",
        choices=("auto", "on", "off"),
    )
    wire_sparse: bool = setting(
        False,
        "silos send only the numbers that are not those they received, such as the rows of an embedding that they "
        "trained; nothing is lost",
    )


@dataclass(frozen=True)
class Rounds:
    """When silos are evaluated, which of them a round has, and how long it waits."""

    evaluate_every: int = setting(
        1,
        "evaluate every so many rounds and at the end, 0: never",
        minimum=0,
        maximum=MOST_ROUNDS,
    )
    patience: int = setting(
        0,
        "early stopping: end the run once so many rounds have passed since the mean validation score was last better, "
        "0: never; test data are not looked at",
        minimum=0,
        maximum=MOST_ROUNDS,
    )
    min_delta: float = setting(
        0.0,
        "early stopping: by more than this a mean validation score must be better to count as better",
        minimum=0,
    )
    participation: float = setting(
        1.0, "share of the silos that train in a round", symbol="ρ", above=0, maximum=1
    )
    min_silos: int = setting(
        0,
        "quorum: fewest silos to begin, resume or end a round with once the time is up, 0: all that can, all that can, "
        "one",
        minimum=0,
        maximum=MOST_SILOS,
    )
    weight_cap: float = setting(
        5.0,
        "where silos count as their samples, none counts as more than so many times the median silo, 0: as it says; "
        "what the federation file says of a silo stands above it; unless set, a simulation has 0",
        minimum=0,
    )
    agreed: str = setting(
        "",
        "what is agreed on of the silos' data, JSON: task, shape, classes, schema, samples of each silo; `silofl run` "
        "takes it from the federation file",
    )
    round_timeout: float = setting(
        3600.0, "seconds that a round may last", above=0, maximum=30 * 24 * 3600
    )
    straggler_factor: float = setting(
        20.0,
        "once the quorum and half of the silos have answered, the others have so many times the median of their time, "
        "0: all of `round-timeout`; not in a simulation",
        minimum=0,
    )
    straggler_floor: float = setting(
        300.0, "seconds that a silo has at least, however fast the others are", minimum=0
    )
    lost_silo: str = setting(
        "resend",
        "a silo that goes away in a round: wait for it, as for a straggler, and send it its message once more; or go "
        "on without it as soon as that is known",
        choices=("go-on", "resend"),
    )


@dataclass(frozen=True)
class Protection:
    """What bounds a silo, and what stays with it."""

    robust: str = setting(
        "screen",
        "what bounds a silo that lies or is broken: cuts of outliers, a longest step, or what stands for the mean; "
        "unless set, a simulation has none",
        choices=("none", "screen", "clip", *RULES),
    )
    robust_clip: float = setting(
        10.0,
        "screen, clip: the longest step, in multiples of the round's median step",
        symbol="τ",
        above=0,
    )
    robust_attackers: int = setting(
        1,
        f"{', '.join(ATTACKER_RULES)}: how many silos may send anything",
        symbol="f",
        minimum=0,
    )
    min_metric_samples: int = setting(
        0,
        "metrics over fewer patients, or samples where no patient is named, stay in the silo, 0: 10 for a silo's own "
        "file, 1 for named public data",
        minimum=0,
        maximum=MOST_SAMPLES,
    )
    dp: bool = setting(
        False,
        "differential privacy: silos clip the gradient of each record or patient and add noise (settings: dp.*)",
    )
    secure_aggregation: bool = setting(
        False,
        "the server adds up integers, so that it needs sums over silos only; each silo cuts its own step",
    )
    secure_clip: float = setting(
        0.0,
        "secure-aggregation: the longest step, 0: by the length of what all silos received",
        symbol="C",
        minimum=0,
        maximum=1e12,
    )
    secure_group: int = setting(
        1,
        "secure-aggregation: silos in groups of so many, by name, each in a sum as a whole or not",
        symbol="g",
        minimum=1,
        maximum=100,
    )
    secure_robust: str = setting(
        "none",
        "secure-aggregation: what `robust` compares: nothing, so that each silo's own cut is all, or groups of silos "
        "(secure-group), whose sums the server then opens one by one",
        choices=("none", "groups"),
    )


@dataclass(frozen=True)
class Outcome:
    """What a run ends with, and where it is kept."""

    evidence: str = setting(
        "auto",
        "ask the silos once, at the end, for the evidence of the reported model (calibration, net benefit, conformal "
        "sets): auto asks where all data are simulated, and on also hospitals, whose policies decide",
        choices=("auto", "on", "off"),
    )
    evidence_horizon: float = setting(
        0.0,
        "survival: the time at which calibration is measured, in the unit of the data; 0: none",
        minimum=0,
    )
    keep_models: str = setting(
        "none",
        "reported: at its end the run asks each silo once for the model of its own that the report shows, for "
        "silofl evaluate --models all; hospitals' policies decide, and no such silo trains in the run again",
        choices=("none", "reported"),
    )
    study: str = setting(
        "", "the study that the run belongs to, by the name under which hospitals approved it"
    )
    checkpoint_every: int = setting(
        1,
        "save the state of server and silos every so many rounds",
        minimum=1,
        maximum=MOST_ROUNDS,
    )
    resume: bool = setting(False, "continue the run in the output directory")
    out: str = setting("", "run directory; empty: runs/TIME-STRATEGY")
