"""Whether the study that the run names, approved here, has this message."""

import math
from collections.abc import Iterable, Mapping
from datetime import date
from typing import Any

from ...protocol.run_settings import number, uploads
from ...protocol.study import StudyProtocol, study_setting_faults, words
from ..message import SiteMessage
from ..trust.code import dataset_faults, trainer_faults


def study_fault(message: SiteMessage) -> str:
    """Return what is outside the study: date, build, settings, trainer, round, data set. Without a study nothing is."""
    study = message.terms.study
    if study is None or message.public:
        return ""
    assert message.data is not None
    sent = message.kind, message.config, message.app, message.day, message.silo
    faults = message_faults(study, message.settings, *sent)
    faults += dataset_faults(study.name, study.datasets, message.silo, message.data)
    return next(iter(faults), "")


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
    sums = (digest for digest in app if digest)
    first = next(sums, "")
    if first and first not in study.apps and not any(digest in study.apps for digest in sums):
        faults.append(
            f"the study {study.name} has {len(study.apps)} app builds, and {first[:16]}... is none of them"
        )
    faults += study_setting_faults(study, run)
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
    if evaluates := run.get("strategy") == "evaluate":
        allowed = {"train": (1, 0), "evaluate": (1, rounds)}
    least, most = allowed.get(kind, (-math.inf, math.inf))
    if kind not in ("train", "evaluate") or (this is not None and least <= this <= most):
        return []
    of_study = (
        f"the study {study.name} has rounds = {words(study.settings.get('rounds', rounds))}"
    )
    where = (
        f"its evaluation is number {rounds + 1:g}, this one"
        if kind == "evaluate" and not evaluates
        else "the round"
    )
    if evaluates and kind == "train":
        return [
            f"the study {study.name}: a run with strategy = evaluate trains nothing, and a message asks to train"
        ]
    return [f"{of_study}, {where} {sent.get('round')!r:.20}"]
