"""The private gradients of one round; their noise is bound to every input of the round.

The key of a silo's noise is a secret of the site, never derived from the run's seed, which the server has. A deployed
silo makes it once and keeps it in ``STATE_DIR/noise-key``: 32 bytes, readable by their owner only. With the key the
noise could be computed and subtracted from what was sent, so it must not leave the silo. In a simulation there is
nothing to protect: the key is derived from the seed, so that runs are repeatable, and the log notes this.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from flwr.common import log

from client.local_data import is_own_file, silo_name
from client.site.budget.ledger import in_ledger
from models.privacy.accountant import epsilon_of
from models.privacy.noise import derive_key
from models.privacy.records import check_unmixed
from partitions.common.errors import DataError, UserError
from partitions.common.files import hold_lock, make_folder, write_atomically
from partitions.common.settings import values_of
from partitions.splits import Split
from strategies.base.client import SiloClient
from strategies.base.privacy import (
    Privacy,
    PrivateTraining,
    Sampling,
    Units,
    plan_of,
    round_digest,
)
from strategies.base.transport.payload import Model, Number

# The largest number of a received vector: products of two, and sums of 10^9 such products, are finite in float32.
# Trained weights are smaller by orders of magnitude, so that a larger one is crafted, or of a run that has diverged.
LARGEST = 1e6
# Settings that change no number of a round, or only through the data; all others are part of a round's digest. Not
# ``threads`` and ``device``: they change the rounding of sums. A server that varied them would get sums of one and the
# same sample with other noise each, charged as if each were of a sample of its own.
ELSEWHERE = {
    *("out", "resume", "data-dir", "dataset", "partition", "silos", "agreed", "study"),
    *(
        "min-metric-samples",
        "checkpoint-every",
        "round-timeout",
        "straggler-factor",
        "straggler-floor",
        "lost-silo",
    ),
    *("min-silos", "evaluate-every", "validation"),
}
# Entries of a silo's state that evaluation writes, or that name the run: no training depends on them.
EVALUATED = ("run_id", "model", "metrics", "best", "reported", "candidate")


def units_of(s: Privacy, train: Split) -> Units:
    """Return the units (records or patients) that differential privacy protects in a training part."""
    return Units(len(train), train.patient if s.unit == "patient" else None)


def private_round(
    client: SiloClient,
    s: Privacy,
    units: Units,
    key: bytes,
    config: Mapping[str, Any],
    network: object = None,
) -> None:
    """Make the gradients of the client's next round private.

    ``key``: the silo's key for this run; ``network``: the network's name and settings, such as its dropout.
    Raises UserError if that is not possible.
    """
    sums = client.info.training.dp == "sums"  # of all records, each by itself
    if not sums:
        check_unmixed(client.model.module)
    check_sizes(config["models"], client.silo.name)
    client.round = config["round"]
    size = units.records if sums else client.common.batch_size
    sampling = Sampling(units.records, units.count, size)
    passes = (1,) if sums else client.noised_passes()
    digest = _digest(client, s, units, config, network)
    plan = plan_of(s, client.common, sampling, passes, digest.hex())
    # Gradients of each batch in a round
    uses = getattr(client.settings, "gradients_per_batch", 1)
    from_here = derive_key(key, "round", client.round, digest)
    client.privacy = PrivateTraining(plan, sampling, units, from_here, client.model, uses)


def check_sizes(models: Mapping[str, Model], silo: str) -> None:
    """Raise UserError for a received model or buffer with a number beyond :data:`LARGEST`, or that is not finite."""
    for name, model in models.items():
        if model.vector.is_floating_point() and not bool((model.vector.abs() <= LARGEST).all()):
            raise UserError(
                f"{silo} refuses: dp = true, and '{name}' of the message has numbers beyond {LARGEST:g} or not finite; "
                "a lower learning-rate or dp.noise-multiplier may help"
            )


def _digest(
    client: SiloClient, s: Privacy, units: Units, config: Mapping[str, Any], network: object
) -> bytes:
    models: Mapping[str, Model] = config["models"]
    numbers: Mapping[str, Number] = config["numbers"]
    train, state = client.silo.train, client.state
    content = {f"model {name}": m.vector for name, m in models.items()}
    content |= {
        f"state {k}": array for k, array in state.arrays.items() if not k.startswith(EVALUATED)
    }
    content |= train.content
    if units.patient is not None:
        content["patient"] = torch.from_numpy(units.patient)
    kept = {k: v for k, v in state.numbers.items() if not k.startswith(EVALUATED)}
    settings = (
        values_of(client.common)
        | values_of(client.settings, client.common.strategy)
        | values_of(s, "dp")
    )
    used = {k: v for k, v in settings.items() if k not in ELSEWHERE}
    values = [
        client.silo.name,
        client.round,
        network,
        sorted(numbers.items()),
        sorted(kept.items()),
        used,
    ]
    # A late joiner starts from another model
    return round_digest(content, [*values, bool(config.get("late"))])


# The key of the noise


FILE, LENGTH = "noise-key", 32
_LOGGED: set[str] = set()


def noise_key(context: Context, seed: int, run_id: str) -> bytes:
    """Return the silo's key for this run (32 bytes). Raises UserError or DataError if it cannot be saved or read."""
    name, state = silo_name(context), str(context.node_config.get("state-dir", ""))
    if state:
        return derive_key(kept_key(Path(state)), "run", run_id)
    if is_own_file(context):
        raise UserError(f"dp = true: {name} has no state-dir to keep the key of its noise in")
    if name not in _LOGGED:
        _LOGGED.add(name)
        log(
            INFO,
            "%s: a simulation, its noise is made of the seed: it protects no data that matter",
            name,
        )
    return derive_key(b"", "simulation", seed, name)


def kept_key(state: Path) -> bytes:
    """Return the key in this state directory; create it if there is none."""
    file = state / FILE
    make_folder(state, 0o700)
    with hold_lock(
        state / f".{FILE}.lock", "another process of this silo makes the key of its noise"
    ):
        if not file.exists():
            write_atomically(file, secrets.token_bytes(LENGTH), mode=0o600)
            log(
                WARNING,
                "%s: made the key of this silo's noise; it must not leave the site",
                file,
            )
    key = file.read_bytes()
    if len(key) != LENGTH:
        raise DataError(
            f"{file} is damaged: {len(key)} bytes, not {LENGTH}; remove it, and a new key is made"
        )
    return key


# --- the cost of a run, as a reply has it ---
# For a deployed silo it comes from the site's ledger of the run, including repeated rounds. A simulation, and public
# data, have no ledger: it comes from the silo's state.

KEPT = "privacy"  # in a silo's state: noise, rate and steps of each kind of release in this run


def add_cost(
    plan: Any, numbers: dict[str, Any], ledger: Path | None, run_id: str, silo: str
) -> dict[str, float]:
    """Add a round's steps (``plan``) to those of the silo's state (``numbers``); return the run's cost so far.

    ``ledger``: the ledger's folder; None if there is none.
    """
    kept = {
        (release["noise"], release["rate"]): int(release["steps"])
        for release in numbers.get(KEPT, ())
    }
    kind = plan.noise_multiplier, plan.sample_rate
    kept[kind] = kept.get(kind, 0) + plan.steps
    numbers[KEPT] = [
        {"noise": noise, "rate": rate, "steps": steps} for (noise, rate), steps in kept.items()
    ]
    releases = (in_ledger(ledger, run_id, silo) if ledger else ()) or numbers[KEPT]
    steps = sum(release["steps"] for release in releases)
    return {
        "epsilon": epsilon_of(releases, plan.delta),
        "delta": plan.delta,
        "dp_steps": float(steps),
    }
