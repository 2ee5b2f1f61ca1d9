"""Draft of a study's protocol from a run's settings, and the check that a protocol can be run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

from client.flower.apps import build
from client.protocol.code import code_of_data, content_sum, digest_of_code
from client.protocol.envelope import STUDY, fingerprint
from client.protocol.methods import DEFAULTS
from client.protocol.policy import SCORE
from client.protocol.run_settings import is_secure
from client.protocol.study import (
    FREE,
    TEXTS,
    StudyProtocol,
    open_under_masks,
    parse_study,
    relevant,
    values,
)
from client.studies import corners
from models.shapes import write_shape
from partitions.common.errors import UserError
from partitions.common.sum_weights import FEWEST, groups_of
from partitions.own.index import ENDING
from server.deploy.credentials import Credentials
from server.deploy.federation import Federation
from server.deploy.local.record import remote_keys, state_root
from server.rendering import fill
from server.results.reply_sizes import reply_sizes
from strategies.base.evaluation import EVALUATE, asks_for_models
from strategies.base.run_settings import RunSettings, parse_settings

ALWAYS = (  # settings that every protocol lists, even with default values
    *(
        "rounds",
        "seed",
        "model",
        "local-epochs",
        "batch-size",
        "optimizer",
        "learning-rate",
        "momentum",
    ),
    *("weight-decay", "participation", "evaluate-every", "robust"),
)
UNKNOWN = "not derived: state shape and classes under `agreed` in the federation file, then draft again"
BYTES = 10**9  # limit of the bytes that leave a hospital where the model's size is not known
DAYS = 365
# Messages of a run for secure aggregation, beside one per round: keys, shares and unmask of up to four repeats
REPEATS = 12
GROUPED, GROUP = 9, 3  # hospitals with masks, from which on a draft has groups, and of how many
QUERIES = 4  # data summary requests per run: more than one, as a silo may be offline or its process may die


def _bound(values: Mapping[str, object]) -> tuple[list[RunSettings], dict[str, Any]]:
    """Return the runs, and the settings that the protocol names: those that are not the default, and some always."""
    texts = {key: str(value) for key, value in values.items()}
    methods, seeds = (
        texts.get(key, str(DEFAULTS[key])).split(",") for key in ("strategy", "seed")
    )
    runs = [
        parse_settings({**values, "strategy": method, "seed": seed})
        for method, seed in product(methods, seeds)
    ]
    flat = {key: value for run in runs for key, value in run.flat().items()}
    named = flat.keys() & DEFAULTS.keys() - FREE
    settings = {key: flat[key] for key in named if key in ALWAYS or flat[key] != DEFAULTS[key]}
    return runs, {**settings, "strategy": methods, "seed": [int(seed) for seed in seeds]}


def draft(
    name: str,
    values: Mapping[str, object],
    *,
    texts: Mapping[str, str],
    end: date | None,
    apps: Sequence[str],
    bytes_: int | None = None,
    schema: str = "",
    data: Mapping[str, Any] | None = None,
    held_out: Sequence[str] = (),
    peers: Mapping[str, str] | None = None,
    datasets: Mapping[str, str] | None = None,
    analysis: Mapping[str, Any] | None = None,
) -> str:
    """Return a protocol of runs with these settings; comma-separated strategies or seeds give several runs.

    ``texts``: purpose, contact, results, retention; a missing one stays empty, and the protocol is then incomplete.
    ``bytes_``: their limit; None: what the network and the methods send at most, of ``data`` (``declared_data``).
    ``peers``: the fingerprint of each silo's key, for runs with secure aggregation. ``datasets``: the SHA-256 of the
    source of each silo's own data set. ``analysis``: for :func:`tested`. Raises UserError for
    invalid settings, DataError without ``init-weights``.
    """
    if values.get("strategy") == EVALUATE:
        values = _drop_division(values)
    training, today = (peers := peers or {}).keys() - {*held_out}, datetime.now(UTC).date()
    runs, settings = _bound(_grouped(values, len(training)))
    common = runs[0].common
    return fill(
        "deploy/study.toml.j2",
        kind=STUDY,
        name=name,
        texts=texts,
        start=today,
        end=end or today + timedelta(days=DAYS),
        apps=list(apps),
        schema=schema,
        code=digest_of_code(common.trainer) if common.trainer else "",
        weights=runs[0].part().weights,
        held_out=list(held_out),
        common=common,
        step=max(run.strategy.info.step for run in runs),
        settings=settings,
        limits=_limits(runs, bytes_, data or {}, len(peers)),
        groups=groups_of(training, common.secure_group) if common.secure_group > 1 else (),
        still=open_under_masks(common.secure_group, common.secure_robust),
        peers=peers,
        datasets=datasets,
        **tested(analysis or {}, settings, common.rounds),
    )


def tested(
    wanted: Mapping[str, Any], settings: Mapping[str, Any], rounds: int
) -> dict[str, Any]:
    """Return ``analysis``, the table of runs with these settings, ``planned``, its plan in words, and ``metrics``.

    ``wanted``: method, baseline, effect, harm, estimand, and ``plan`` of ``silofl plan`` (metric, effect, seeds, text)
    or empty; empty for no analysis. Raises UserError where one is missing, or is not the plan's.
    """
    if not wanted:
        return {"analysis": {}, "planned": "", "metrics": ["loss", SCORE]}
    plan, seeds = wanted["plan"], settings["seed"]
    effect = wanted["effect"] or plan.get("effect")
    if plan and (effect, len(seeds)) != (plan["effect"], plan["seeds"]):
        raise UserError(
            f"--plan is of a gain of {plan['effect']:g} and {plan['seeds']} seeds, not of {effect:g} and {len(seeds)}: "
            "plan again"
        )
    if not (wanted["method"] and effect and wanted["harm"]):
        raise UserError(
            "--primary, --harm, and --effect or --plan go together: the method that is tested, the loss at one "
            "hospital that is harm, and the smallest gain worth having"
        )
    table = {
        "method": wanted["method"],
        "baseline": wanted["baseline"],
        "metric": plan.get("metric", SCORE),
        "split": "test",
        "seeds": seeds,
        "rounds": rounds,
        "smallest-effect": effect,
        "harm-margin": wanted["harm"],
        "secondary": [
            name
            for name in settings["strategy"]
            if name not in (wanted["method"], wanted["baseline"])
        ],
        "estimand": wanted["estimand"],
    }
    metrics = [*dict.fromkeys(["loss", SCORE, table["metric"]])]
    return {"analysis": table, "planned": plan.get("text", ""), "metrics": metrics}


def _limits(
    runs: Sequence[RunSettings], bytes_: int | None, data: Mapping[str, Any], silos: int
) -> dict[str, object]:
    """Return the most that one hospital answers in all runs, by the name of the limit; ``why``: where bytes come from.

    With masks there is one message more a round, and repeats; a run that is resumed is one more.
    """
    count, common, evaluations = len(runs), runs[0].common, _evaluations(runs[0])
    masked = common.secure_aggregation
    repeats = REPEATS // 3 if masked else 0
    rounds = common.rounds + repeats
    queries = QUERIES + (common.rounds + REPEATS if masked else 0)
    why, most = "--bytes", bytes_ or 0
    sizes = [] if bytes_ else [reply_sizes(run, data, max(silos, common.silos)) for run in runs]
    for size in sizes:
        if size is None:
            most, why = BYTES, UNKNOWN
            break
        most += rounds * size.train + evaluations * size.evaluate + queries * size.query
        shape, largest = write_shape(data["shape"]), max(size.train, size.evaluate)
        why = f"{largest} for the largest message: shape {shape}, {data['classes']} classes"
    return {
        "runs": count + repeats,
        "rounds": count * rounds,
        "evaluations": count * evaluations,
        "queries": count * queries,
        "messages": count * (rounds + evaluations + queries),
        "bytes": most,
        "days": DAYS,
        "why": why,
    }


def _grouped(values: Mapping[str, object], silos: int) -> Mapping[str, object]:
    """Return the settings with groups of silos, where many train and masks add up what they send."""
    few = not is_secure(values) or silos < GROUPED
    return values if few else {"secure-group": GROUP, **values, "silos": silos}


def _drop_division(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings without those that divide simulated data: hospitals evaluate on their own splits."""
    division = f"{values.get('partition')}."
    return {
        key: value
        for key, value in values.items()
        if key not in ("seed", "validation") and not key.startswith(division)
    }


def _evaluations(run: RunSettings) -> int:
    """Return the maximum number of evaluation requests in a run, with one to spare."""
    if run.common.strategy == EVALUATE:
        return run.common.rounds + 1
    return (
        2 + 2 * (run.common.evidence == "on") + asks_for_models(run.strategy.info, run.common)
    )


def known_peers(federation: Federation) -> dict[str, str]:
    """Return the fingerprints of the keys that a federation has registered from here, by silo."""
    folder, fingerprints = state_root() / federation.name, dict[str, str]()
    credentials = Credentials(folder / "credentials")
    for silo in federation.silos:
        if credentials.node_public_key(silo.name).is_file():
            fingerprints[silo.name] = fingerprint(credentials.node_public_pem(silo.name))
    for file in sorted(remote_keys(folder).glob("*.pem")):
        fingerprints[file.stem] = fingerprint(file.read_bytes())
    return fingerprints


def known_datasets(federation: Federation) -> dict[str, str]:
    """Return the SHA-256 of each own data set's source that lies here. Raises UserError where one has no index."""
    sums = {}
    for silo in federation.silos:
        if silo.data is None:
            continue
        if silo.data.name.endswith(ENDING) and not silo.data.is_file():
            raise UserError(
                f"{silo.name}: {silo.data.name} is not there: silofl up makes it first"
            )
        if code := code_of_data(silo.data):
            sums[silo.name] = code
    return sums


def app_sums(folder: Path) -> list[str]:
    """Return the SHA-256 sum of a checkout's app. Raises UserError if there is none."""
    try:
        return [content_sum(build(folder))]
    except (ValueError, OSError) as error:
        raise UserError(
            f"--app {folder} is no checkout with an app ({error}): name one, or its sums with --sum"
        ) from None


def check_study(text: str, path: str) -> StudyProtocol:
    """Return a file's study after checking each method with the minimum and maximum of every setting.

    Raises SiteError or UserError with one line on the fault.
    """
    study = parse_study(text, path)
    if empty := [key for key in TEXTS if not getattr(study, key).strip(" .")]:
        raise UserError(
            f"{path}: {empty[0]} has no words: a committee reads {', '.join(TEXTS)}"
        )
    least = max(FEWEST, *map(int, values(study, "secure-group")))
    if True in values(study, "secure-aggregation") and len(study.training_peers) < least:
        raise UserError(
            f"{path}: [peers] has {len(study.training_peers)} silos that train: secure-aggregation = true "
            f'needs at least {least}, each as NAME = "SHA256:..." of its key (silofl study new --peer)'
        )
    for method in study.methods:
        check_method(study, method)
    return study


def check_method(study: StudyProtocol, method: str) -> list[RunSettings]:
    """Return the runs of a method with the minimum and maximum of every setting. Raises UserError."""
    allowed = {*relevant(study), *study.settings, "strategy"}
    silos = {"silos": len(study.peers)} if study.peers else {}
    return [
        parse_settings({k: v for k, v in {**run, **silos}.items() if k in allowed})
        for run in corners(study, method)
    ]
