"""A study's protocol, `study.toml`: the question, the methods, their settings, the code, the limits, the dates.

    kind = "silofl study 1"
    name = "heart-2026"
    ...
    [settings]
    strategy = ["fedavg", "apple"]                  # one of these
    learning-rate = {min = 0.001, max = 0.1}        # from, to
    batch-size = 32                                 # this and no other

A setting that the protocol does not list has silofl's default (`trust/methods.py`); a run with another value is outside
the study. Settings that do not affect a hospital's training are free (:data:`FREE`). The consortium's signature follows
the protocol in a table of its own, and covers it byte for byte, up to the empty line before the table.

    [signature]
    public-key = "PEM"
    signature = "BASE64"

The site's own process checks a message before the app is loaded.
"""

import functools
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from ...flower.private import load_ours
from ..parsed import Frozen, SiteError, match_pattern, parse_values, read_toml, shorten
from ..trust.code import trainer_faults
from ..trust.envelope import body_of
from ..trust.message_rules import methods_of, number, owner, to_plain, uploads
from ..trust.methods import DEFAULTS, METHODS
from ..trust.policy import Metrics

# Settings of the server, of a simulation, or of the machine: they do not change how a hospital trains.
_FREE = """study out resume checkpoint-every threads device data-dir dataset partition silos agreed min-silos
round-timeout straggler-factor straggler-floor lost-silo"""
FREE = frozenset(_FREE.split())
TEXTS = ("purpose", "contact", "results", "retention")
# Of earlier versions, as unused
NO_COMBAT = {"survey.harmonize": "", "survey.covariates": "", "survey.shrink": True}
MOST = 2**53
_sums: Any = load_ours("partitions/common", "sum_weights")
MEND = "`silofl study new` writes a protocol with every key"
NAME = match_pattern(
    r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", "must be 1 to 63 lower-case letters, digits and hyphens"
)
Name = Annotated[str, NAME]
Text = Annotated[str, match_pattern(r"(?s).*\S.*", "must be a text")]
Sum = Annotated[str, match_pattern("[0-9a-f]{64}", "must be a SHA-256, 64 hexadecimal digits")]
Fingerprint = Annotated[
    str, match_pattern("SHA256:[0-9a-f]{64}", "must be SHA256: and 64 hexadecimal digits")
]
Count = Annotated[int, Field(ge=0, le=MOST)]


class StudyLimits(Frozen):
    """The most that one hospital answers in the whole study, over all its runs."""

    runs: Count = Field(description="runs")
    rounds: Count = Field(description="training messages")
    evaluations: Count = Field(description="evaluations without training")
    queries: Count = Field(description="requests for the data summary")
    messages: Count = Field(description="messages of any kind")
    bytes: Count = Field(description="bytes that leave")
    days: Count = Field(description="days on which it answers")

    @model_validator(mode="before")
    @classmethod
    def count_queries(cls, content: Any) -> Any:
        """Return the table with a number of queries: of all messages, where it has none."""
        known = isinstance(content, dict) and "messages" in content
        return {"queries": content["messages"], **content} if known else content


class ProtocolFile(Frozen):
    """A protocol, as its file has it. ``settings``: the allowed values by key."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )

    kind: Literal["silofl study 1"]
    name: Name
    purpose: Text
    contact: Text
    results: Text  # who may see them
    retention: Text  # who keeps what for how long
    start: date
    end: date
    # Of the app's builds, or of their content
    apps: Annotated[tuple[Sum, ...], Field(strict=False, min_length=1)]
    participants: Annotated[int, Field(ge=1, le=MOST)]  # fewest silos that train in a round
    # Largest distance of a received model, in lengths of this silo's last one
    step: Annotated[float, Field(gt=0)]
    metrics: Metrics
    settings: dict[str, Any]
    limits: StudyLimits
    # The federation's; empty: none is declared
    schema_digest: Sum | Literal[""] = Field("", alias="schema")
    weights: Sum | Literal[""] = ""  # the file of initial weights; empty: the seed's
    trainer: Sum | Literal[""] = ""  # the source of the setting `trainer`
    # The source of each silo's own data set; where one is listed, others have data files
    datasets: dict[Name, Sum] = Field(default_factory=dict, max_length=100)
    # Silos that are evaluated and do not train
    held_out: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    # The key of each silo, for secure aggregation: no other silo is in a sum
    peers: dict[Name, Fingerprint] = Field(default_factory=dict, max_length=100)

    @model_validator(mode="after")
    def check_days(self) -> Self:
        """Raise SiteError where the end is before the start."""
        if self.end < self.start:
            raise SiteError(f"end = {self.end}: must be a day after start = {self.start}")
        return self

    @model_validator(mode="after")
    def check_peers(self) -> Self:
        """Raise SiteError where two silos have one key: one of them would count twice."""
        if len({*self.peers.values()}) < len(self.peers):
            raise SiteError("[peers] names one key twice: each silo has a key of its own")
        return self


class StudyProtocol(ProtocolFile):
    """A protocol that was read."""

    digest: str  # SHA-256 of the protocol, without its signature

    @property
    def methods(self) -> tuple[str, ...]:
        found = self.settings["strategy"]
        return tuple(found) if isinstance(found, list) else (found,)

    @property
    def training_peers(self) -> dict[str, str]:
        """The fingerprints of the peers that train."""
        return {name: own for name, own in self.peers.items() if name not in self.held_out}

    @property
    def groups(self) -> list[list[str]]:
        """The peers that train, in groups that are in a sum as a whole or not; empty if they are too few."""
        found: list[list[str]] = _sums.groups_of(
            self.training_peers, self.settings.get("secure-group", 1)
        )
        return found

    def summed_with(self, silo: str) -> list[str]:
        """Return the silos of the sum that the server opens with this one in it: those that it shares masks with."""
        if self.settings.get("secure-robust", "none") == "none":
            return [*self.training_peers]
        return next((group for group in self.groups if silo in group), [])


# --- reading ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(8)
def parse_study(text: str, path: str) -> StudyProtocol:
    """Return the study in a file's text. Raises SiteError, one line, for the first entry that is invalid."""
    body = body_of(text)
    found = parse_values(ProtocolFile, read_toml(body, path, MEND), path, MEND)
    settings = _settings(path, found.settings)
    for key in ("secure-group", "secure-robust"):
        if isinstance(settings.get(key), dict | list):
            raise SiteError(
                f"{path}: [settings] {key}: one value, for sums of groups of two sizes show single silos"
            )
    if settings.get("init-weights", "") and not found.weights:
        raise SiteError(f"{path}: weights is missing: the SHA-256 of the file init-weights")
    if settings.get("trainer", "") and not found.trainer:
        raise SiteError(f"{path}: trainer is missing: the SHA-256 of the trainer's source")
    study = StudyProtocol(
        **{**dict(found), "settings": settings},
        digest=hashlib.sha256(body.encode()).hexdigest(),
    )
    if settings.get("secure-robust", "none") != "none":
        agreed = len(study.training_peers), settings.get("secure-group", 1)
        if fault := _sums.comparison_fault(*agreed):
            raise SiteError(f"{path}: [settings] {fault}")
    return study


def _settings(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the allowed values by key, with the methods. Raises SiteError, one line."""
    flat = {
        key: own for key, own in _flat(table) if key not in NO_COMBAT or own != NO_COMBAT[key]
    }
    for key, allowed in flat.items():
        if key not in DEFAULTS or key in FREE:
            why = "no study fixes it" if key in FREE else "this silofl has no such setting"
            why = "ComBat left silofl in 0.3.0" if key in NO_COMBAT else why
            raise SiteError(f"{path}: [settings] {shorten(key)}: {why}; leave it out")
        if fault := _constraint_fault(allowed, DEFAULTS[key]):
            raise SiteError(f"{path}: [settings] {key} = {shorten(allowed)}: {fault}")
    methods = flat.get("strategy", DEFAULTS["strategy"])
    for name in methods if isinstance(methods, list) else [methods]:
        if name not in METHODS:
            raise SiteError(f"{path}: [settings] strategy: there is no method {shorten(name)}")
    return {"strategy": DEFAULTS["strategy"], **flat}


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the key and value of each entry; `[settings.apple] mu = 0.1` is `apple.mu`."""
    for key, value in table.items():
        if isinstance(value, dict) and not value.keys() & {"min", "max"}:
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def _constraint_fault(allowed: Any, default: Any) -> str:
    """Return why a protocol's allowed values are invalid for a setting with this default; empty: they are valid."""
    if isinstance(allowed, dict):
        numeric = isinstance(default, int | float) and not isinstance(default, bool)
        low, high = (number(allowed.get(end)) for end in ("min", "max"))
        if (
            not numeric
            or set(allowed) != {"min", "max"}
            or low is None
            or high is None
            or low > high
        ):
            return "a range is {min = LEAST, max = MOST}, of a number"
        return ""
    if isinstance(allowed, list) and not allowed:
        return "a list of the values that it may have is needed here"
    for value in allowed if isinstance(allowed, list) else [allowed]:
        if isinstance(value, dict | list) or any(
            isinstance(value, kind) != isinstance(default, kind) for kind in (bool, str)
        ):
            return f"a value like {default!r} is needed here"
    return ""


# --- checking ---------------------------------------------------------------------------------------------------------


def allows(allowed: Any, value: Any) -> bool:
    """Return whether a setting may have this value, parsed as the app does: a number also from text."""
    if isinstance(allowed, dict):
        found = number(value)
        return found is not None and allowed["min"] <= found <= allowed["max"]
    wanted = allowed if isinstance(allowed, list) else [allowed]
    return any(_same(one, value) for one in wanted)


def _same(wanted: Any, value: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return str(wanted).lower() == str(value).lower()
    return bool(to_plain(wanted) == to_plain(value))


def words(allowed: Any) -> str:
    """Return a setting's allowed values, in words."""
    if isinstance(allowed, dict):
        return f"{allowed['min']} to {allowed['max']}"
    if isinstance(allowed, list):
        return " or ".join(map(str, allowed))
    return str(allowed)


def setting_faults(study: StudyProtocol, run: Mapping[str, Any]) -> list[str]:
    """Return which of a run's settings are outside the study.

    Settings of other methods do not count. A setting of the study that the run does not send is outside, since its
    value is unknown here.
    """
    faults = []
    others = METHODS.keys() - methods_of(run)
    asked = {key: value for key, value in run.items() if owner(key) not in others}
    for key, value in asked.items():
        if key in FREE:
            continue
        if key not in DEFAULTS:
            faults.append(f"the study {study.name} knows no setting {key[:80]!r}")
            continue
        allowed = study.settings.get(key, DEFAULTS[key])
        if not allows(allowed, value):
            faults.append(
                f"the study {study.name} has {key} = {words(allowed)}, the run {value!r:.80}"
            )
    for key in (key for key in study.settings if owner(key) not in others and key not in run):
        faults.append(
            f"the study {study.name} has {key} = {words(study.settings[key])}, the run none"
        )
    return faults


def message_faults(
    study: StudyProtocol,
    run: Mapping[str, Any],
    kind: str,
    sent: Mapping[str, Any],
    app: Iterable[str],
    today: date,
    silo: str = "",
) -> list[str]:
    """Return why a message is outside a study, one line each.

    ``run``: the run's settings; ``kind``: train, evaluate or query; ``sent``: the config of the message; ``app``: the
    sums of the app's build, empty if another process has compared them; ``silo``: the name of the silo.
    """
    faults = []
    if today < study.start:
        faults.append(f"the study {study.name} starts on {study.start}")
    if today > study.end:
        faults.append(f"the study {study.name} ended on {study.end}")
    sums = (one for one in app if one)
    first = next(sums, "")
    if first and first not in study.apps and not any(one in study.apps for one in sums):
        faults.append(
            f"the study {study.name} has {len(study.apps)} app builds, and {first[:16]}... is none of them"
        )
    faults += setting_faults(study, run)
    faults += trainer_faults(study.name, study.trainer, run)
    faults += round_fault(
        study, run, kind, sent, newcomer=silo in study.held_out and "newcomer" in sent
    )
    if kind == "train" and silo in study.held_out:
        faults.append(
            f"the study {study.name} has held-out = {silo}, and this would train there"
        )
    present = number(sent.get("participants")) or 0
    if kind == "train" and uploads(run) and present < study.participants:
        faults.append(
            f"the study {study.name} has participants = {study.participants}, the round {present:g}"
        )
    return faults


def round_fault(
    study: StudyProtocol,
    run: Mapping[str, Any],
    kind: str,
    sent: Mapping[str, Any],
    *,
    newcomer: bool = False,
) -> list[str]:
    """Return why the number of a message's round is invalid: training has 1 to `rounds`.

    A run evaluates without training once, after its last round; with `patience` that may be an earlier one. A held-out
    hospital is evaluated with what it would have received in the reported round (``newcomer``). A run of given models
    (strategy = evaluate) trains in none of its rounds, and evaluates in each.
    """
    rounds = number(run.get("rounds")) or 0
    this = number(sent.get("round"))
    first = 1 if newcomer else 2 if number(run.get("patience")) else rounds + 1
    allowed = {"train": (1, rounds), "evaluate": (first, rounds + 1)}
    if given := run.get("strategy") == "evaluate":
        allowed = {"train": (1, 0), "evaluate": (1, rounds)}
    least, most = allowed.get(kind, (-math.inf, math.inf))
    if kind not in ("train", "evaluate") or (this is not None and least <= this <= most):
        return []
    of_study = (
        f"the study {study.name} has rounds = {words(study.settings.get('rounds', rounds))}"
    )
    where = (
        f"its evaluation is number {rounds + 1:g}, this one"
        if kind == "evaluate" and not given
        else "the round"
    )
    if given and kind == "train":
        return [
            f"the study {study.name}: a run with strategy = evaluate trains nothing, and a message asks to train"
        ]
    return [f"{of_study}, {where} {sent.get('round')!r:.20}"]
