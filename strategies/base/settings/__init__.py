"""The settings that every method shares, by groups; a method's own are in the method's file.

Keys, ranges and kinds: ``partitions/common/settings.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from partitions.common.errors import UserError
from partitions.common.names import unknown_name
from partitions.common.settings import Value as Value
from partitions.common.settings import setting as setting
from strategies.base.settings.groups import ATTACKER_RULES as ATTACKER_RULES
from strategies.base.settings.groups import KRUM as KRUM
from strategies.base.settings.groups import MOST_SILOS as MOST_SILOS
from strategies.base.settings.groups import RULES as RULES
from strategies.base.settings.groups import TEXTBOOK as TEXTBOOK
from strategies.base.settings.groups import Data, Outcome, Program, Protection, Rounds, Travel
from strategies.base.settings.training import MOST_ROUNDS as MOST_ROUNDS
from strategies.base.settings.training import MOST_SAMPLES as MOST_SAMPLES
from strategies.base.settings.training import LocalTraining


@dataclass(frozen=True)
class Common(Outcome, Protection, Rounds, Travel, Data, Program, LocalTraining):
    """The settings that every method shares; local training reads those of :class:`LocalTraining` alone."""


@dataclass(frozen=True)
class NoSettings:
    """A method without settings of its own."""


@dataclass(frozen=True)
class Averaging:
    """Settings of methods whose paper and published code average differently."""

    average: str = setting(
        "samples",
        "what silos count in the mean: as their samples, or alike",
        choices=("samples", "silos"),
    )


def choose(kind: str, name: str, known: Iterable[str]) -> str:
    """Return ``name`` if it is known; else raise a UserError that lists the known names."""
    names = list(known)
    if name not in names:
        raise UserError(str(unknown_name(kind, name, names)))
    return name
