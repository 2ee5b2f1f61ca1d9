"""The policy of this hospital, which holds whatever a run's settings are: `policy.toml`, beside `allowed-apps`.

    max-local-epochs = 5
    peers = false

A file may set any of the rules of :class:`Policy`; the others keep their default. `SILOFL_POLICY` names the file (or
the node config's `policy`, for silos that share a process); without a file the defaults hold. The value `public`
in its place means data without any secret, such as a demo's: nothing is withheld.

The site's SuperNode reads it once for a message, and checks the settings that came with it before the app is unpacked
or imported (`../messages.py`). The app gets the same value, and withholds what only it can compute: sums, metrics, the
size of what is sent. The stricter of site and run holds. A refusal is one line with rule and setting. This policy
cannot control what the app does in memory; `allowed-apps` controls which app runs.

Relative imports, as in all files of this folder that a process loads beside an app (`../private.py`).
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, ConfigDict, Field

from .methods import EVIDENCE, METHODS, METRICS
from .parsed import Frozen, SiteError, match_pattern, parse_values, read_bounded, read_toml

PUBLIC = "public"  # in place of a file: the data are public
NO_LIMIT = 2**31
UNITS = ("record", "patient")
SCORE = "score"  # among the metrics: the task's own score, with its interval
MOST_DELTA = 0.01  # more is no protection: one unit in a hundred may be shown
APP_NETWORKS = "models."  # networks of the app itself, which `allowed-apps` pins, whatever else is installed here
LIMITS = {  # the rule for settings of a kind; the others are factors of `max_decay`
    "epochs": "max_local_epochs",
    "local-steps": "max_local_steps",
    "mixing-epochs": "max_mixing_epochs",
    "steps": "max_inner_steps",
    "rounds": "max_rounds",
}
# In the name of a setting that needs a rule
AMOUNT = re.compile(r"(^|[-.])(epochs|steps|rounds)(-|$)")


class PolicyRefusedError(SiteError):
    """A run's settings or messages exceed what this site allows."""


def rule(default: Any, public: Any, help: str) -> Any:
    """Return a rule: its default, its value for public data, and its help text."""
    return Field(default, description=help, json_schema_extra={"public": public})


def among(*known: str) -> AfterValidator:
    """Return the validator of a text that is one of these."""

    def check(text: str) -> str:
        if text not in known:
            raise SiteError(f"must be one of {', '.join(known)}")
        return text

    return AfterValidator(check)


LISTED = Field(strict=False)  # a tuple, which files have as a list
Method = Annotated[str, among("all", *METHODS)]
Module = Annotated[
    str,
    match_pattern(r"(?a:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)", 'must be a module, "app" or "all"'),
]
Metrics = Annotated[tuple[Annotated[str, among(*METRICS, SCORE, *EVIDENCE)], ...], LISTED]
Least = Annotated[int, Field(ge=1, le=NO_LIMIT)]
Most = Annotated[int, Field(ge=0, le=NO_LIMIT)]
Amount = Annotated[float, Field(ge=0, le=NO_LIMIT)]
Wanted = Literal["required", "optional"]


class Rules(Frozen):
    """The rules, as a file has them."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        validate_by_name=True,
        validate_by_alias=True,
    )

    methods: Annotated[tuple[Method, ...], LISTED] = rule(
        ("all",),
        ("all",),
        "methods that may run here; all: those the other rules allow, without fedxgb and survey, which must be listed",
    )
    whole_model: bool = rule(
        True, True, "whether all layers of a model trained here may leave; false: some stay"
    )
    networks: Annotated[tuple[Module, ...], LISTED] = rule(
        ("app",),
        ("all",),
        "modules or installed packages' networks that a run may name; app: those in the app's models; all: any",
    )
    trainers: Annotated[tuple[Module, ...], LISTED] = rule(
        (),
        ("all",),
        "modules whose functions a run may name to train in place of silofl; app: those in the app's models; all: any",
    )
    peers: bool = rule(
        False,
        True,
        "whether silos' own models, or sums, go round: this one's to other hospitals, and theirs here",
    )
    own_model: bool = rule(
        False,
        True,
        "whether this silo's own model may leave, once, at the end of a run that asks for it (keep-models = reported)",
    )
    class_means: bool = rule(
        False, True, "whether means per class and how many samples each class has may leave"
    )
    sums: bool = rule(
        True,
        True,
        "whether the sums of a table's columns may leave, rounded, once per version of it",
    )
    min_sum_samples: Least = rule(
        50, 1, "fewest patients behind such sums, and behind the difference of two of them"
    )
    min_cell: Least = rule(
        10,
        1,
        "fewest patients behind any count of a survey, and behind the mean of a class; smaller cells stay",
    )
    max_surveys: Most = rule(
        3, 0, "most different answers to surveys that ever leave from here; 0: any number"
    )
    metrics: Metrics = rule(
        ("loss", SCORE),
        (*METRICS, *EVIDENCE),
        "metrics that may leave; score: the task's own, with its interval",
    )
    min_metric_samples: Least = rule(
        10,
        1,
        "fewest patients behind a metric, or samples where none is named; those over fewer stay",
    )
    min_batch_size: Least = rule(
        8, 1, "fewest samples in a mini-batch of a run; a smaller last one joins the one before"
    )
    max_local_epochs: Most = rule(
        20, NO_LIMIT, "most epochs per round, of each training that a method has"
    )
    max_local_steps: Most = rule(
        1000, NO_LIMIT, "most mini-batches per round that a run asks for in place of epochs"
    )
    max_mixing_epochs: Most = rule(
        100, NO_LIMIT, "most epochs per round that learn only how models are mixed"
    )
    max_inner_steps: Most = rule(20, NO_LIMIT, "most inner steps of a method")
    max_decay: Amount = rule(
        0.1,
        float(NO_LIMIT),
        "most of a model that a step may replace: learning rate x weight decay or proximal weight",
    )
    max_rounds: Most = rule(
        200,
        0,
        "most rounds that a run asks for, and most of its training messages; 0: any number",
    )
    max_evaluations: Most = rule(
        50, 0, "most evaluations without training in a run; 0: any number"
    )
    max_messages: Most = rule(500, 0, "most messages of a run, of any kind; 0: any number")
    min_silos: Least = rule(3, 1, "fewest silos that train in a round in which this one does")
    runs_per_day: Most = rule(20, 0, "most runs on one day (UTC); 0: any number")
    floor: Least = rule(
        10,
        1,
        "fewest patients to train with, or samples where none is named, for what leaves without a rule",
    )
    require_dp: bool = rule(
        False, False, "whether a run must have differential privacy (dp = true)"
    )
    epsilon: Amount = rule(
        0.0,
        0.0,
        "most epsilon that all runs together may spend of a cohort's people; 0: any; else dp = true is required",
    )
    delta: Annotated[float, Field(ge=0, le=MOST_DELTA)] = rule(
        0.0, 0.0, "delta at which that is counted; 0: 1e-5, and with n units at most 1 / (10 n)"
    )
    privacy_unit: Literal["record", "patient"] = rule(
        "record", "record", "what a run with dp = true must protect at least: record or patient"
    )
    secure_aggregation: Literal["off", "allowed", "required"] = rule(
        "allowed",
        "allowed",
        "whether vectors may leave under masks, so that the server opens only sums; required: not without",
    )
    secure_peers: Least = rule(
        3, 1, "fewest other silos of the study in such a sum, with this silo's vector in it"
    )
    secure_group: Least = rule(
        1, 1, "fewest silos of the study that are in such a sum together or not at all"
    )
    studies: Wanted = rule(
        "optional",
        "optional",
        "whether a run must belong to a study that was approved here: required or optional",
    )
    receipts: Wanted = rule(
        "optional",
        "optional",
        "whether the server must countersign this site's audit log: required or optional",
    )


class Policy(Rules):
    """The rules, and the file that they come from."""

    where: str = "no policy.toml, so the defaults"
    sha256: str = ""  # of the file; empty: none

    @property
    def public(self) -> bool:
        return self.where == PUBLIC

    @property
    def private_only(self) -> bool:
        """Return whether only runs with differential privacy are answered: other runs have no epsilon to count."""
        return self.require_dp or self.epsilon > 0

    def line(self, name: str) -> str:
        """Return a rule's line in the file: `peers = false`."""
        return f"{key_of(name)} = {toml(getattr(self, name))}"


def key_of(name: str) -> str:
    return name.replace("_", "-")


def toml(value: Any) -> str:
    """Return a rule's value as the file has it, which is JSON's form, too."""
    return json.dumps(value)


# --- reading ----------------------------------------------------------------------------------------------------------


def policy_of(node_config: Mapping[str, Any]) -> Policy:
    """Return the policy of the silo with this node config, in this process."""
    return read_policy(str(node_config.get("policy") or os.environ.get("SILOFL_POLICY", "")))


def read_policy(where: str) -> Policy:
    """Return the policy of a file, of `public`, or the defaults. Raises SiteError, one line, for an invalid file."""
    if not where:
        return Policy()
    if where == PUBLIC:
        return public_policy()
    path = Path(where).expanduser()
    try:
        content = read_bounded(path)
    except OSError as error:
        raise SiteError(
            f"{path}: {error.strerror}; write the policy there: without it nothing leaves"
        ) from None
    policy = parse_policy(content.decode(errors="replace"), str(path))
    return policy.model_copy(update={"sha256": hashlib.sha256(content).hexdigest()})


@cache
def public_policy() -> Policy:
    """Return the policy of public data."""
    extras = {
        name: cast(dict[str, Any], rule_field.json_schema_extra)
        for name, rule_field in Rules.model_fields.items()
    }
    return Policy(**{name: extra["public"] for name, extra in extras.items()}, where=PUBLIC)


def parse_policy(text: str, path: str) -> Policy:
    """Return the policy of a file's text. Raises SiteError, one line, if it is invalid."""
    content = read_toml(text, path, "a rule is a line such as peers = false")
    rules = parse_values(Rules, content, path, "`silofl policy` prints all rules")
    return Policy(**dict(rules), where=path)


def default_file(**others: Any) -> str:
    """Return the text of a `policy.toml` with every default, or with the values of ``others``, for a bundle."""
    lines = [
        "# What this hospital allows, whatever a run asks for. `silofl policy` prints what it comes to."
    ]
    for name, rule_field in Rules.model_fields.items():
        lines += [
            "",
            f"# {rule_field.description}",
            f"{key_of(name)} = {toml(others.get(name, rule_field.default))}",
        ]
    return "\n".join(lines) + "\n"
