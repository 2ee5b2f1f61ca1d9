"""The statistics by which a table is standardised, as a silo under a study accepts them.

They come with every message, as the server's word. A server that chose them could turn the seed's own first layer into
one that picks a patient: a column's mean just below its greatest value, and a tiny deviation, leave that patient's
gradient alone in half of the units, and another column in the next round another patient's. So they stay the same for
the whole run, and may not put this silo's values far from where honest ones do. One choice per run is left.

An honest pooled mean and variance give a silo with the share p of all samples a root mean square of at most 1 / sqrt(p)
in each standardised column.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from client.site.study.protocol import Study
from client.site.trust.counters import noted
from client.site.trust.policy import PolicyRefusedError
from models.privacy.noise import derived
from models.standardisation import Array, Columns

LARGEST = 10.0  # root mean square of a standardised column: a silo with 1 % of all samples may have it


def check_statistics(columns: Array, mean: Columns, std: Columns, study: Study, silo: str) -> None:
    """Raise PolicyRefusedError where the server's ``mean`` and ``std`` (d,) are not those of data like ``columns``.

    ``columns`` (n, d): the silo's training part.
    """
    refuses = f"{silo} refuses: under the study {study.name} tables are standardised by all hospitals' statistics"
    if not len(mean) == len(std) == columns.shape[1]:
        raise PolicyRefusedError(f"{refuses}, and the message has {len(mean)} means for {columns.shape[1]} columns")
    with np.errstate(all="ignore"):
        standardised = (columns.astype(np.float64) - np.array(mean)) / np.array(std)
        size = np.sqrt((standardised * standardised).mean(0))
    far = ~(size <= LARGEST)
    if far.any():
        column = int(far.argmax())
        raise PolicyRefusedError(
            f"{refuses}: with the message's, column {column + 1} has a root mean square of {size[column]:.3g} here, "
            f"and at most {LARGEST:g} is taken"
        )


def claim_statistics(mean: Columns, std: Columns, study: Study, silo: str, state: Any, run_id: int) -> None:
    """Note a run's statistics in the state directory. Raises PolicyRefusedError where the run had other ones before.

    Empty ones: the silo's own.
    """
    own = derived(b"", "statistics", repr(mean), repr(std)).hex()

    def entry(lines: list[list[str]]) -> tuple[str, str]:
        before = next((words[0] for words in lines if words[1:] == silo.split()), "")
        if before and before != own:
            return "", "the run has standardised tables by other statistics before"
        return ("" if before else f"{own} {silo}"), ""

    if fault := noted(state, f"statistics/{run_id}", f"the study {study.name}", entry):
        raise PolicyRefusedError(f"{silo} refuses: {fault}")
