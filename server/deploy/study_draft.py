"""Draft of a study's protocol from a run's settings, and the check that a protocol can be run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

from client.site.study.dangers import relevant, values
from client.site.study.protocol import FREE, STUDY, TEXTS, StudyProtocol, parse_study
from client.site.trust.apps import build
from client.site.trust.code import digest_of_code
from client.site.trust.envelope import fingerprint
from client.site.trust.methods import DEFAULTS
from client.site.trust.pins import content_sum
from client.studies import corners
from partitions.common.errors import UserError
from partitions.common.sum_weights import groups_of
from server.deploy.credentials import Credentials
from server.deploy.federation import Federation
from server.deploy.local.record import remote_keys, state_root
from strategies.base.aggregation.secure import FEWEST
from strategies.base.evaluation import EVALUATE, asks_for_models
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.settings import Common

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
BYTES = 10**9  # default limit of the bytes that leave a hospital
DAYS = 365
# Messages of a run for secure aggregation, beside one per round: keys, shares and unmask of up to four repeats
REPEATS = 12
QUERIES = 4  # data summary requests per run: more than one, as a silo may be offline or its process may die


NOT_TRAINED = "evaluated, not trained on"


def _bound(values: Mapping[str, object]) -> tuple[list[RunSettings], dict[str, Any]]:
    """Return the runs, and the settings that the protocol names: those that are not the default, and some always."""
    given = {key: str(value) for key, value in values.items()}
    methods, seeds = (
        given.get(key, str(DEFAULTS[key])).split(",") for key in ("strategy", "seed")
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
    bytes_: int = BYTES,
    schema: str = "",
    held_out: Sequence[str] = (),
    peers: Mapping[str, str] | None = None,
) -> str:
    """Return a protocol of runs with these settings; comma-separated strategies or seeds give several runs.

    ``texts``: purpose, contact, results, retention; a missing one stays empty, and the protocol is then incomplete.
    ``peers``: the fingerprint of each silo's key, for runs with secure aggregation.
    Raises UserError for invalid settings.
    """
    if values.get("strategy") == EVALUATE:
        values = _drop_division(values)
    runs, settings = _bound(values)
    today = datetime.now(UTC).date()
    lines = [
        f"kind = {json.dumps(STUDY)}",
        f"name = {json.dumps(name)}",
        *(f"{key} = {json.dumps(texts.get(key, ''), ensure_ascii=False)}" for key in texts),
        f"start = {today}",
        f"end = {end or today + timedelta(days=DAYS)}",
        f"apps = {json.dumps(list(apps))}  # builds that may be sent, by SHA-256 of what they hold",
        *([f"schema = {json.dumps(schema)}  # SHA-256 of the federation's"] if schema else []),
        *_trainer(runs[0].common.trainer),
        *([f"held-out = {json.dumps(list(held_out))}  # {NOT_TRAINED}"] if held_out else []),
        f"participants = {max(3, runs[0].common.min_silos)}  # fewest hospitals that train in a round",
        "step = 1.0  # a received model is at most so many lengths away from the hospital's last one",
        'metrics = ["loss", "score"]',
        "",
        "# One value, a list of values, or {min = LEAST, max = MOST}. A setting that is not here has silofl's default.",
        "[settings]",
        *(
            f"{json.dumps(key) if '.' in key else key} = {_toml(value)}"
            for key, value in sorted(settings.items())
        ),
        *_limits(runs, bytes_),
        *(
            _peers(peers or {}, held_out, runs[0].common)
            if runs[0].common.secure_aggregation
            else []
        ),
    ]
    return "\n".join(lines) + "\n"


def _drop_division(values: Mapping[str, object]) -> dict[str, object]:
    """Return the settings without those that divide simulated data: hospitals evaluate on their own splits."""
    division = f"{values.get('partition')}."
    return {
        key: v
        for key, v in values.items()
        if key not in ("seed", "validation") and not key.startswith(division)
    }


def _evaluations(run: RunSettings) -> int:
    """Return the maximum number of evaluation requests in a run, with one to spare."""
    if run.common.strategy == EVALUATE:
        return run.common.rounds + 1
    return (
        2 + 2 * (run.common.evidence == "on") + asks_for_models(run.strategy.info, run.common)
    )


def _limits(runs: Sequence[RunSettings], bytes_: int) -> list[str]:
    """Return the lines of a draft's limits. With secure aggregation rounds have one message more, and repeats."""
    common, evaluations, count = runs[0].common, _evaluations(runs[0]), len(runs)
    queries, rounds = QUERIES, common.rounds
    if common.secure_aggregation:
        queries, rounds = queries + rounds + REPEATS, rounds + REPEATS // 3
    return [
        "",
        "# What one hospital answers at most, in all runs together.",
        "[limits]",
        f"runs = {count}",
        f"rounds = {count * rounds}",
        f"evaluations = {evaluations * count}",
        f"queries = {queries * count}",
        f"messages = {count * (rounds + evaluations + queries)}",
        f"bytes = {bytes_}",
        f"days = {DAYS}",
    ]


def _trainer(name: str) -> list[str]:
    """Return the line of a draft's trainer: the sum of the source that this machine has; none without one here."""
    found = digest_of_code(name) if name else ""
    return [f'trainer = "{found}"  # SHA-256 of the source of {name}'] if found else []


def _peers(peers: Mapping[str, str], held_out: Sequence[str], common: Common) -> list[str]:
    """Return the lines of a draft's peers, and of their groups."""
    size = common.secure_group
    groups = groups_of(peers.keys() - {*held_out}, size) if size > 1 else ()
    return [
        "",
        "# The fingerprint of each hospital's key, as it tells you: no other is in a sum.",
        *(f"# In a sum together or not at all: {', '.join(group)}" for group in groups),
        "[peers]",
        *(f"{name} = {json.dumps(own)}" for name, own in sorted(peers.items())),
    ]


def known_peers(federation: Federation) -> dict[str, str]:
    """Return the fingerprints of the keys that a federation has registered from here, by silo."""
    folder, found = state_root() / federation.name, dict[str, str]()
    credentials = Credentials(folder / "credentials")
    for silo in federation.silos:
        if credentials.node_public_key(silo.name).is_file():
            found[silo.name] = fingerprint(credentials.node_public_pem(silo.name))
    for file in sorted(remote_keys(folder).glob("*.pem")):
        found[file.stem] = fingerprint(file.read_bytes())
    return found


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def app_sums(folder: Path) -> list[str]:
    """Return the SHA-256 sum of a checkout's app. Raises UserError if there is none."""
    try:
        return [content_sum(build(folder))]
    except (ValueError, OSError) as error:
        raise UserError(
            f"--app {folder} is no checkout with an app ({error}): name one, or its sums with --sum"
        ) from None


def check(text: str, path: str) -> StudyProtocol:
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
        for run in corners(study, method):
            asked = {*relevant(study), *study.settings, "strategy"}
            parse_settings({key: value for key, value in run.items() if key in asked})
    return study
