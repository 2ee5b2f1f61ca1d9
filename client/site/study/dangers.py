"""Known dangers of a study, each with the attack that it allows: shown before a person approves the study."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from client.protocol.methods import METHODS, SETTINGS
from client.protocol.policy import Policy
from client.protocol.run_settings import number
from client.protocol.study import StudyProtocol, open_under_masks, relevant, values
from client.site.study.approvals import Approved
from partitions.common.errors import DataError

# Samples: below it, published attacks rebuild single records from one gradient
SMALL_BATCH = 32
LARGE_SHARE = 0.01  # of a model, replaced by one step
SLOW = 0.01  # a smaller learning rate barely moves a model, so all its gradients are alike
MANY_EVALUATIONS = 50
NEAR = 0.25  # relative distance: the red team's imprints within it recover no record (tests/client/test_redteam.py)
# A layer is an imprint from this cosine between rows, share of such rows, and number of rows on
PARALLEL, SHARE, ROWS = 0.99, 0.5, 8
SMALL_COHORT = 200  # training samples


def dangers(
    study: StudyProtocol,
    policy: Policy,
    earlier: Sequence[Approved] = (),
    samples: int | None = None,
) -> list[str]:
    """Return a line for each danger, with its attack.

    ``earlier``: studies that this site approved before; ``samples``: its training samples, if known.
    """
    return [
        *_of_settings(study, policy),
        *_of_rates(study),
        *_of_queries(study, policy),
        *_of_people(study, earlier, samples),
    ]


def _of_settings(study: StudyProtocol, policy: Policy) -> Iterator[str]:
    batch = least(study, "batch-size")
    if batch < SMALL_BATCH:
        yield (
            f"batch-size may be {batch:g}: gradient inversion. Records of so small a batch can be rebuilt from the "
            f"reply (below {SMALL_BATCH}; your policy's min-batch-size is {policy.min_batch_size}). "
            f"Ask for {SMALL_BATCH}"
        )
    trainable = study.settings.get("trainable", "all")
    if trainable not in ("all", "head"):
        yield (
            f"trainable = {trainable}: training of some layers alone. A first linear layer's gradient is a sum of the "
            "inputs themselves. Ask for all, or head"
        )
    if study.settings.get("init-weights", ""):
        yield (
            "init-weights is set: imprint. Weights that somebody prepared may hold a layer that writes single records "
            "into its rows; ask who trained them, on what"
        )
    if any(":" in str(name) for name in values(study, "model")):
        yield "model names a network of the run's own: imprint. Have its code read before you approve"
    if "survey" in study.methods:
        summed = values(study, "secure-aggregation") == [True]
        times = " or ".join(map(str, values(study, "survey.times")))
        survival = f", and patients by the times {times}" if summed and times else ""
        yield (
            f"strategy may be survey: differencing. Counts and sums of your columns{survival} leave"
            f"{', in a sum with other hospitals' * summed} (your policy's min-cell is "
            f"{policy.min_cell}, max-surveys {policy.max_surveys}). Two answers about different data tell who changed. "
            "Ask for one survey, in a study of its own"
        )
    if "reported" in values(study, "keep-models"):
        stays = "" if policy.own_model else " (your policy has own-model = false: it stays)"
        yield (
            f"keep-models may be reported: membership. Your own model leaves whole at the end of each of "
            f"{study.limits.runs} runs{stays}. It shows who was among your patients, and two runs what a round added. "
            "Ask for none"
        )
    for name in study.methods:
        yield from (
            f"{name} {danger}. Ask why it has to be {name}"
            for danger in METHODS[name].get("dangers", ())
        )


def _of_rates(study: StudyProtocol) -> Iterator[str]:
    rate = most(study, "learning-rate")
    decays = [key for key in relevant(study) if SETTINGS.get(key) == "decay"]
    for key in decays:
        share = rate * most(study, key)
        if share > LARGE_SHARE:
            yield (
                f"learning-rate x {key} may be {share:g}: forgetting. A step may replace so much of the model that "
                f"the reply is little more than the last batch's gradient. Ask for at most {LARGE_SHARE:g}"
            )
    slowest, blocks = least(study, "learning-rate"), any(values(study, "block-rates"))
    for key in ("momentum", "warmup-batches"):
        if (largest := most(study, key)) > 0 and (slowest < SLOW or blocks):
            also = ", and less by block-rates" if blocks else ""
            yield (
                f"{key} may be {largest:g} with learning-rate = {slowest:g}{also}: momentum subsets. Batches weigh "
                "unequally in a reply, and the same model in many rounds makes a system of equations for each record's "
                f"gradient. Ask for {key} = 0, or a learning-rate of at least {SLOW:g}"
            )


def _of_queries(study: StudyProtocol, policy: Policy) -> Iterator[str]:
    if study.step > NEAR:
        yield (
            f"step = {study.step:g}: imprint. A model so far from your last one can hold a layer that writes single "
            f"records into its rows (docs/attacks.md has counts; none was read up to {NEAR:g}). "
            "Ask for the least step that the method needs"
        )
    bounded = policy.epsilon or least(study, "dp.target-epsilon")
    if True in values(study, "dp") and not bounded:
        yield (
            "dp may be true, and neither your policy has epsilon nor the study dp.target-epsilon: imprint. Noise may "
            "be so small that a model within step reads single records. Ask for dp.target-epsilon"
        )
    if "net_benefit" in study.metrics:
        yield (
            "metrics has net_benefit: small cells. It tells how many of your test samples lie above each of 19 "
            "thresholds and have the disease; where few are left, that is about single patients. "
            "Ask for metrics without it"
        )
    if study.limits.evaluations > MANY_EVALUATIONS:
        yield (
            f"limits.evaluations = {study.limits.evaluations}: metric oracle. Models that differ in one answer tell "
            f"which label a record has (above {MANY_EVALUATIONS}). Ask for fewer"
        )


def _of_people(
    study: StudyProtocol, earlier: Sequence[Approved], samples: int | None
) -> Iterator[str]:
    if samples is not None and samples < SMALL_COHORT:
        yield (
            f"you have {samples} training samples: membership. A model trained on fewer than {SMALL_COHORT} shows who "
            "was among them. Ask for dp = true"
        )
    for other in earlier:
        if other.study.name != study.name:
            yield (
                f"the study {other.study.name} was approved here on {other.when[:10]}: differencing. If your data have "
                "changed by a few patients since, two models give these away. "
                "Ask for dp = true, or train on the data of then"
            )
            if _other_groups(study, other.study) and not other.revoked:
                yield (
                    f"the study {other.study.name}, approved here, has other groups of hospitals (secure-group): "
                    "differencing. Two sums over groups of both may differ by one hospital; revoke one of the studies"
                )


def _other_groups(*studies: StudyProtocol) -> bool:
    if not all(True in values(study, "secure-aggregation") for study in studies):
        return False
    first, other = ({*map(tuple, study.groups)} for study in studies)
    return first != other and max(map(len, first | other), default=1) > 1


def sums_text(study: StudyProtocol) -> str:
    """Describe whether the server opens only sums of what hospitals send; empty: it opens each update."""
    if values(study, "secure-aggregation") != [True]:
        return ""
    how = (values(study, key)[0] for key in ("secure-group", "secure-robust"))
    return (
        "Vectors leave under masks (secure-aggregation = true): the server opens only sums over several hospitals. "
        f"{' '.join(open_under_masks(*how))} Counts, metrics and data summaries leave as they are. docs/security.md "
        "says what a server that lies can still open. A key does not show who holds it: one operator may hold several, "
        "and then sees the others' sum less its own. Ask each hospital for its fingerprint. The hospitals, and the "
        "keys that must sign for them:"
    )


def of_weights(file: Path, wanted: str) -> list[str]:
    """Return a line for each layer of a file of initial weights that is built like an imprint.

    In an imprint the rows have one direction and differ in length, so the biases sort records into bins (Fowl et al.
    2022). ``wanted``: the file's SHA-256 in the study. Raises DataError for another file.
    """
    content = file.read_bytes()
    if (digest := hashlib.sha256(content).hexdigest()) != wanted:
        raise DataError(
            f"{file} has SHA-256 {digest[:16]}..., and the study's weights have {wanted[:16] or 'none'}..."
        )
    try:
        tensors = load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{file} is no safetensors file ({type(error).__name__})") from None
    return [
        f"{file.name}: the rows of {name} are one direction: imprint. Such a layer writes single records into its rows"
        for name, tensor in sorted(tensors.items())
        if is_imprint(tensor)
    ]


def is_imprint(tensor: np.ndarray) -> bool:
    """Return whether most rows of a layer's weights (out, in, ...) are parallel to one another."""
    if tensor.ndim < 2 or len(tensor) < ROWS or tensor[0].size < 2 or tensor.dtype.kind != "f":
        return False
    rows = tensor.reshape(len(tensor), -1).astype(np.float64)
    lengths = np.linalg.norm(rows, axis=1)
    rows = rows[lengths > 0] / lengths[lengths > 0, None]
    if len(rows) < ROWS or not np.isfinite(rows).all():
        return False
    direction = np.linalg.svd(rows, full_matrices=False)[2][0]
    return bool((np.abs(rows @ direction) > PARALLEL).mean() > SHARE)


def least(study: StudyProtocol, key: str) -> float:
    return min(number(value) or 0.0 for value in values(study, key))


def most(study: StudyProtocol, key: str) -> float:
    return max(number(value) or 0.0 for value in values(study, key))
