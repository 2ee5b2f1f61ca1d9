"""The units in a silo's data file, for a privacy budget: their number, the cohort, a digest of each sample.

python -m partitions.units FILE      as JSON, for the site's own process, which cannot import this package
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from partitions.silo_file import read_silo_file
from partitions.stored import sample_digests


def describe_units(path: Path) -> dict[str, Any]:
    """Count the training part's records and patients (None: the file has none), and list all samples' digests.

    Raises DataError with the first fault of the file.
    """
    data = read_silo_file(path)
    digests = np.concatenate([sample_digests(split.x) for split in data.splits if len(split)])
    patients = data.train.patient
    return {
        "cohort": data.cohort,
        "records": len(data.train),
        "patients": None if patients is None else len(np.unique(patients)),
        "samples": [f"{digest:016x}" for digest in np.unique(digests).tolist()],
    }


def main(arguments: list[str]) -> None:
    try:
        print(json.dumps(describe_units(Path(arguments[0]))))
    except (OSError, ValueError) as error:
        sys.exit(" ".join(str(error).split()))


if __name__ == "__main__":
    main(sys.argv[1:])
