"""The cost of a training message under differential privacy, computed by this site itself.

Inputs are the run's settings, the units that this site counts, and the method's declaration (`trust/methods.py`). The
app that the message is for cannot influence them, and it takes at most that many noised steps.

The accountant (`models/privacy/accountant.py`) is loaded from its file, since `models` is the app's package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SiteError
from ..private import load_ours
from ..trust.methods import DEFAULTS, METHODS
from ..trust.policy import UNITS
from ..trust.run_config import number
from .cohort import DataFile

MOST_DELTA = 1e-5  # if neither the site nor the run sets one


@dataclass(frozen=True)
class MessageCost:
    """The noised steps of one message: number of units, share per step, and noise."""

    unit: str
    units: int
    rate: float  # mean share of the units in a step's batch
    noise: float  # noise multiplier: standard deviation in clip norms
    steps: int
    delta: float  # of the run

    @property
    def fields(self) -> dict[str, Any]:
        """Return the values as in a line of the ledger."""
        return {
            "unit": self.unit,
            "units": self.units,
            "rate": self.rate,
            "noise": self.noise,
            "steps": self.steps,
        }


def accountant() -> Any:
    """Return the module with the accountant, which imports NumPy."""
    return load_ours("models/privacy", "accountant")


def epsilon_of(lines: Iterable[Mapping[str, Any]], delta: float) -> float:
    """Return the epsilon of all charges together (ledger lines: noise, rate, steps); equal steps are summed first."""
    steps: dict[tuple[float, float], int] = {}
    for line in lines:
        kind = float(line["noise"]), float(line["rate"])
        steps[kind] = steps.get(kind, 0) + int(line["steps"])
    releases = [accountant().Releases(*kind, count) for kind, count in sorted(steps.items())]
    return float(accountant().composed_epsilon(releases, delta))


def default_delta(units: int) -> float:
    """Return the default delta: at most one tenth of a unit's share."""
    return min(MOST_DELTA, 1 / (10 * max(units, 1)))


def cost_of(run: Mapping[str, Any], data: DataFile) -> MessageCost:
    """Compute the cost of a training message of this run. Raises SiteError if it cannot be computed.

    With ``dp.target-epsilon`` the noise is such that all rounds of the run together cost that epsilon. A patient is
    sampled at the rate of a record.
    """

    def value(key: str) -> float:
        found = number(run.get(key, DEFAULTS[key]))
        if found is None or found < 0:
            raise SiteError(f"{key} = {run.get(key)!r:.40}: no cost can be computed")
        return found

    unit = str(run.get("dp.unit", DEFAULTS["dp.unit"]))
    if unit not in UNITS:
        raise SiteError(f"dp.unit = {unit:.40}: one of {', '.join(UNITS)} is needed here")
    units = data.units(unit)
    batch = min(value("batch-size"), data.records)
    if batch < 1:
        raise SiteError(
            f"batch-size = {run.get('batch-size')!r:.40} of {data.records} records: no cost can be computed"
        )
    rate, steps = batch / data.records, steps_of(run, data.records / batch, value)
    delta = value("dp.delta") or default_delta(units)
    noise, target = value("dp.noise-multiplier"), value("dp.target-epsilon")
    try:
        if target and steps:
            noise = accountant().noise_multiplier_for(
                target, rate, steps * int(value("rounds")), delta
            )
        epsilon_of([{"noise": noise, "rate": rate, "steps": steps}], delta)
    except ValueError as error:
        raise SiteError(str(error)) from None
    return MessageCost(unit=unit, units=units, rate=rate, noise=noise, steps=steps, delta=delta)


def steps_of(run: Mapping[str, Any], per_epoch: float, value: Callable[[str], float]) -> int:
    """Return the number of noised steps of one training message, over all epochs of each training with noise.

    Raises SiteError for a method without a declaration of differential privacy at this site.
    """
    method = str(run.get("strategy"))
    declared = METHODS.get(method, {}).get("dp")
    if not declared:
        raise SiteError(
            f"strategy = {method[:80]}: this site knows no differential privacy of it"
        )
    if isinstance(declared, str):  # nothing computed from the data leaves
        return 0
    epochs = (count for term in declared for count in epochs_of(term, run, value))
    return sum(max(round(count * per_epoch), 1) for count in epochs if count)


def epochs_of(term: str, run: Mapping[str, Any], value: Callable[[str], float]) -> list[float]:
    """Return the epochs of each training with noise in a term of ``MethodInfo.dp_epochs``."""
    what, _, condition = term.partition(" if ")
    if condition:
        key, _, wanted = condition.partition(" = ")
        given = run.get(key, DEFAULTS[key])
        if str(given) != wanted if wanted else not number(given):
            return []
    if what.isdecimal():
        return [float(what)]
    key = what.removeprefix("each ")
    epochs = value(key) or value("local-epochs")
    return [epochs] if key == what else [1.0] * int(epochs)
