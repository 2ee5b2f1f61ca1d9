"""Checks of the statistics that standardise a table, for a silo under a study.

Every message brings them, and the server chooses them. A malicious server could use them to isolate a patient: with a
column's mean just below its greatest value, and a tiny deviation, the seed's own first layer becomes a filter. That
patient's gradient is then alone in half of the units; another column isolates another patient in the next round.

So the statistics must stay the same for the whole run, and must not move this silo's values far from where honest
ones do. The server keeps one choice per run.

Honest statistics are the pooled mean and variance. With them, each standardised column of a silo with the share p of
all samples has a root mean square of at most 1 / sqrt(p).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from client.site.record import Record, disclose
from client.site.study.protocol import Study
from client.site.trust.policy import PolicyRefusedError
from models.privacy.noise import derived
from models.standardisation import Array, Columns

LARGEST = 10.0  # root mean square of a standardised column: the bound for a silo with 1 % of all samples


def check_statistics(columns: Array, mean: Columns, std: Columns, study: Study, silo: str) -> None:
    """Raise PolicyRefusedError if the server's ``mean`` and ``std`` (d,) do not fit data like ``columns``.

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


def claim_statistics(mean: Columns, std: Columns, silo: str, state: Any, run_id: int) -> None:
    """Note a run's statistics in the state directory. Raises PolicyRefusedError if the run had other ones before.

    Empty ones: the silo's own.
    """
    own, run = derived(b"", "statistics", repr(mean), repr(std)).hex(), str(run_id)
    find = "SELECT question FROM disclosed WHERE kind = 'statistics' AND silo = ? AND run = ?"
    with Record(Path(str(state))).writing() as db:
        before = {question for (question,) in db.execute(find, (silo, run))}
        if before - {own}:
            raise PolicyRefusedError(f"{silo} refuses: the run has standardised tables by other statistics before")
        if not before:
            disclose(db, "statistics", silo=silo, run=run, question=own)
