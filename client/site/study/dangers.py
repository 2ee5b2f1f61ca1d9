"""What is known to be dangerous in a study, with the attack that it opens: shown before somebody approves it."""

from collections.abc import Iterator, Sequence
from typing import Any

from client.site.study.approvals import Approved
from client.site.study.protocol import Study
from client.site.trust.methods import DEFAULTS, METHODS, SETTINGS
from client.site.trust.policy import Policy
from client.site.trust.run_config import number, owner

SMALL_BATCH = 32  # samples: below it, published attacks rebuild single records from one gradient
LARGE_SHARE = 0.01  # of a model that one step may replace
MANY_EVALUATIONS = 50
SMALL_COHORT = 200  # training samples


def dangers(study: Study, policy: Policy, earlier: Sequence[Approved] = (), samples: int | None = None) -> list[str]:
    """Return a line for each danger: what it is, and the attack.

    ``earlier``: the studies that this site approved before; ``samples``: its training samples, where they are known.
    """
    return [*_of_settings(study, policy), *_of_queries(study), *_of_people(study, earlier, samples)]


def _of_settings(study: Study, policy: Policy) -> Iterator[str]:
    batch = least(study, "batch-size")
    if batch < SMALL_BATCH:
        yield (
            f"batch-size may be {batch:g}: gradient inversion. Records of so small a batch can be rebuilt from the "
            f"reply (below {SMALL_BATCH}; your policy's min-batch-size is {policy.min_batch_size})"
        )
    rate, decays = most(study, "learning-rate"), [key for key in relevant(study) if SETTINGS.get(key) == "decay"]
    for key in decays:
        share = rate * most(study, key)
        if share > LARGE_SHARE:
            yield (
                f"learning-rate x {key} may be {share:g}: forgetting. A step may replace so much of the model that "
                "the reply is little more than the last batch's gradient"
            )
    trainable = study.settings.get("trainable", "all")
    if trainable not in ("all", "head"):
        yield (
            f"trainable = {trainable}: training of some layers alone. A first linear layer's gradient is a sum of the "
            "inputs themselves"
        )
    if study.settings.get("init-weights", ""):
        yield (
            "init-weights is set: imprint. Weights that somebody prepared may hold a layer that writes single records "
            "into its rows; ask who trained them, on what"
        )
    if any(":" in str(name) for name in values(study, "model")):
        yield "model names a network of the run's own: imprint. Have its code read before you approve"
    for name in study.methods:
        if METHODS[name].get("peers"):
            yield f"{name} hands your model to the other hospitals by name: each of them can attack it"
        if METHODS[name].get("per_class"):
            yield f"{name} sends means per class: class counts, and the mean record of a rare class"


def _of_queries(study: Study) -> Iterator[str]:
    if study.limits.evaluations > MANY_EVALUATIONS:
        yield (
            f"limits.evaluations = {study.limits.evaluations}: metric oracle. Models that differ in one answer tell "
            f"which label a record has (above {MANY_EVALUATIONS})"
        )


def _of_people(study: Study, earlier: Sequence[Approved], samples: int | None) -> Iterator[str]:
    if samples is not None and samples < SMALL_COHORT:
        yield (
            f"you have {samples} training samples: membership. A model trained on fewer than {SMALL_COHORT} shows who "
            "was among them"
        )
    for other in earlier:
        if other.study.name != study.name:
            yield (
                f"the study {other.study.name} was approved here on {other.when[:10]}: differencing. If your data have "
                "changed by a few patients since, two models give these away"
            )


def relevant(study: Study) -> Iterator[str]:
    """The settings that the study's methods read, common ones included."""
    owners = {"", "dp", *study.methods}
    return (key for key in DEFAULTS if owner(key) in owners)


def values(study: Study, key: str) -> list[Any]:
    """What a setting may be; of a range its ends."""
    allowed = study.settings.get(key, DEFAULTS[key])
    if isinstance(allowed, dict):
        return [allowed["min"], allowed["max"]]
    return allowed if isinstance(allowed, list) else [allowed]


def least(study: Study, key: str) -> float:
    return min(number(value) or 0.0 for value in values(study, key))


def most(study: Study, key: str) -> float:
    return max(number(value) or 0.0 for value in values(study, key))
