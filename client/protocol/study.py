"""A study's protocol, `study.toml`: the question, the methods, their settings, the code, the limits, the dates.

    kind = "silofl study 1"
    name = "heart-2026"
    ...
    [settings]
    strategy = ["fedavg", "apple"]                  # one of these
    learning-rate = {min = 0.001, max = 0.1}        # from, to
    batch-size = 32                                 # this and no other
    [analysis]                                      # what is tested, fixed before the first run: optional
    method = "apple"

A setting that the protocol does not list has silofl's default (`methods.py`); a run with another value is outside
the study. Settings that do not affect a hospital's training are free (:data:`FREE`). The consortium's signature follows
the protocol in a table of its own, and covers it byte for byte, up to the empty line before the table.

    [signature]
    public-key = "PEM"
    signature = "BASE64"
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from datetime import date
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from .envelope import body_of
from .methods import DEFAULTS, LOSSES, METHODS, METRICS
from .ours import sum_weights
from .parsed import Frozen, SiteError, match_pattern, parse_values, read_toml, shorten
from .policy import SCORE, Metrics, among
from .run_settings import methods_of, number, owner, to_plain

# Settings of the server, of a simulation, or of the machine: they do not change how a hospital trains.
_FREE = """study out resume checkpoint-every threads device data-dir dataset partition silos agreed min-silos
round-timeout straggler-factor straggler-floor lost-silo"""
FREE = frozenset(_FREE.split())
TEXTS = ("purpose", "contact", "results", "retention")
MOST = 2**53
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
Method = Annotated[str, among(*METHODS)]
ENDS = ("score_low", "score_high")  # of the score's interval
Metric = Annotated[str, among(SCORE, *(name for name in METRICS if name not in ENDS))]
# Of the metric: percentage points of an accuracy
Hundredths = Annotated[float, Field(gt=0, le=MOST)]


class Kebab(Frozen):
    """Values whose keys have hyphens in a file."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )


class Analysis(Kebab):
    """What a study tests at 5 %: ``method`` over ``baseline``. All else that its runs show is exploratory."""

    method: Method
    baseline: Method
    metric: Metric
    split: Literal["test", "val"]
    seeds: Annotated[tuple[Count, ...], Field(strict=False, min_length=1, max_length=100)]
    rounds: Annotated[int, Field(ge=1, le=MOST)]
    smallest_effect: Hundredths  # the smallest mean gain worth having
    harm_margin: Hundredths  # a hospital that loses more is harmed
    secondary: Annotated[tuple[Method, ...], Field(strict=False, max_length=100)] = ()
    # The mean over hospitals that count alike, or over patients
    estimand: Literal["hospital", "patient"]

    @property
    def methods(self) -> tuple[str, ...]:
        return self.method, self.baseline, *self.secondary

    @property
    def unit(self) -> str:
        return "hundredths" if self.metric in LOSSES else "points"

    @property
    def runs(self) -> list[tuple[str, int]]:
        """Strategy and seed of each run that the analysis needs."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    def in_words(self) -> list[str]:
        """Return what is tested, in plain sentences."""
        whose = {"hospital": "hospitals, each counting alike", "patient": "patients"}
        seeds = ", ".join(map(str, self.seeds))
        sentences = [
            f"{self.method} against {self.baseline}: {self.metric} on each hospital's {self.split} data, mean over "
            f"{whose[self.estimand]}; {self.rounds} rounds, seeds {seeds}; tested at 5 %.",
            f"A mean gain from {self.smallest_effect:g} {self.unit} on is worth having. A hospital that loses more "
            f"than {self.harm_margin:g} {self.unit} is harmed.",
        ]
        if self.secondary:
            sentences.append(
                f"Secondary, with another 5 % among them: {', '.join(self.secondary)} against {self.baseline}."
            )
        return [*sentences, "Everything else is exploratory."]


class StudyLimits(Frozen):
    """The most that one hospital answers in the whole study, over all its runs."""

    runs: Count = Field(description="runs")
    rounds: Count = Field(description="training messages")
    evaluations: Count = Field(description="evaluations without training")
    queries: Count = Field(
        description="requests for the data summary (counts, names of columns, how inputs were made)"
    )
    messages: Count = Field(description="messages of any kind")
    bytes: Count = Field(description="bytes that leave")
    days: Count = Field(description="days on which it answers")

    @model_validator(mode="before")
    @classmethod
    def count_queries(cls, content: Any) -> Any:
        """Return the table with a number of queries: of all messages, where it has none."""
        known = isinstance(content, dict) and "messages" in content
        return {"queries": content["messages"], **content} if known else content


class ProtocolFile(Kebab):
    """A protocol, as its file has it. ``settings``: the allowed values by key."""

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
    analysis: Analysis | None = None

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
        names = self.settings["strategy"]
        return tuple(names) if isinstance(names, list) else (names,)

    @property
    def training_peers(self) -> dict[str, str]:
        """The fingerprints of the peers that train."""
        return {name: key for name, key in self.peers.items() if name not in self.held_out}

    @property
    def groups(self) -> list[list[str]]:
        """The peers that train, in groups that are in a sum as a whole or not; empty if they are too few."""
        groups: list[list[str]] = sum_weights.groups_of(
            self.training_peers, self.settings.get("secure-group", 1)
        )
        return groups

    def summed_with(self, silo: str) -> list[str]:
        """Return the silos of the sum that the server opens with this one in it: those that it shares masks with."""
        if self.settings.get("secure-robust", "none") == "none":
            return [*self.training_peers]
        return next((group for group in self.groups if silo in group), [])


@functools.lru_cache(8)
def parse_study(text: str, path: str) -> StudyProtocol:
    """Return the study in a file's text. Raises SiteError, one line, for the first entry that is invalid."""
    body = body_of(text)
    content = parse_values(ProtocolFile, read_toml(body, path, MEND), path, MEND)
    settings = _settings(path, content.settings)
    for key in ("secure-group", "secure-robust"):
        if isinstance(settings.get(key), dict | list):
            raise SiteError(
                f"{path}: [settings] {key}: one value, for sums of groups of two sizes show single silos"
            )
    if settings.get("init-weights", "") and not content.weights:
        raise SiteError(f"{path}: weights is missing: the SHA-256 of the file init-weights")
    if settings.get("trainer", "") and not content.trainer:
        raise SiteError(f"{path}: trainer is missing: the SHA-256 of the trainer's source")
    study = StudyProtocol(
        **{**dict(content), "settings": settings},
        digest=hashlib.sha256(body.encode()).hexdigest(),
    )
    if settings.get("secure-robust", "none") != "none":
        agreed = len(study.training_peers), settings.get("secure-group", 1)
        if fault := sum_weights.comparison_fault(*agreed):
            raise SiteError(f"{path}: [settings] {fault}")
    if study.analysis and (fault := _analysis_fault(study, study.analysis)):
        raise SiteError(f"{path}: [analysis] {fault}")
    return study


def _analysis_fault(study: StudyProtocol, analysis: Analysis) -> str:
    """Return why the study's runs could not be analysed as it says; empty: they can."""
    if len({*analysis.methods}) < len(analysis.methods):
        return "method, baseline and secondary name a method twice"
    if len({*analysis.seeds}) < len(analysis.seeds):
        return "seeds names one twice"
    wanted = {"strategy": analysis.methods, "seed": analysis.seeds, "rounds": [analysis.rounds]}
    for key, each in wanted.items():
        allowed = study.settings.get(key, DEFAULTS[key])
        for value in each:
            if not allows(allowed, value):
                return f"needs {key} = {value}, and [settings] has {key} = {words(allowed)}"
    for key in ("smallest_effect", "harm_margin"):
        if analysis.unit == "points" and getattr(analysis, key) > 100:
            return f"{key.replace('_', '-')} is more than 100 points"
    if analysis.metric not in study.metrics:
        return f"metric = {analysis.metric}: metrics does not have it, so that it would not leave a hospital"
    for key, least in (
        ("runs", len(analysis.runs)),
        ("rounds", len(analysis.runs) * analysis.rounds),
    ):
        if getattr(study.limits, key) < least:
            return f"needs {least} {key}, and [limits] has {key} = {getattr(study.limits, key)}"
    return ""


def _settings(path: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the allowed values by key, with the methods. Raises SiteError, one line."""
    flat = dict(_flat(table))
    for key, allowed in flat.items():
        if key not in DEFAULTS or key in FREE:
            why = "no study fixes it" if key in FREE else "this silofl has no such setting"
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


def words(allowed: Any) -> str:
    """Return a setting's allowed values, in words."""
    if isinstance(allowed, dict):
        return f"{allowed['min']} to {allowed['max']}"
    if isinstance(allowed, list):
        return " or ".join(map(str, allowed))
    return str(allowed)


def allows(allowed: Any, value: Any) -> bool:
    """Return whether a setting may have this value, parsed as the app does: a number also from text."""
    if isinstance(allowed, dict):
        amount = number(value)
        return amount is not None and allowed["min"] <= amount <= allowed["max"]
    wanted = allowed if isinstance(allowed, list) else [allowed]
    return to_plain(value) in map(to_plain, wanted)


def study_setting_faults(study: StudyProtocol, run: Mapping[str, Any]) -> list[str]:
    """Return which of a run's settings are outside the study.

    Settings of other methods do not count. A setting of the study that the run does not send is outside, since its
    value is unknown here.
    """
    faults = []
    others = METHODS.keys() - methods_of(run)
    settings = {key: value for key, value in run.items() if owner(key) not in others}
    for key, value in settings.items():
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


# --- what its settings may be ---


def open_under_masks(group: int, robust: str) -> list[str]:
    """Return, in plain sentences, what masks leave open with these values of ``secure-group`` and ``secure-robust``."""
    sentences = []
    if group == 1:
        sentences.append(
            "If a hospital is missing in one of two rounds, its update follows from their two sums (secure-group = 1)."
        )
    if robust == "none":
        sentences.append(
            "One hospital that lies can replace the model, since no update is compared (secure-robust = none)."
        )
    else:
        sentences.append(
            "The server reads the sum of each group by itself (secure-robust = groups): behind it are that group's "
            "hospitals, no longer all."
        )
    return sentences


def relevant(study: StudyProtocol) -> Iterator[str]:
    """Yield the settings that the study's methods read, common ones included."""
    owners = {"", "dp", *study.methods}
    return (key for key in DEFAULTS if owner(key) in owners)


def values(study: StudyProtocol, key: str) -> list[Any]:
    """Return the values that a setting may have; the ends of a range."""
    allowed = study.settings.get(key, DEFAULTS[key])
    if isinstance(allowed, dict):
        return [allowed["min"], allowed["max"]]
    return allowed if isinstance(allowed, list) else [allowed]
