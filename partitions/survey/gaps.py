"""Missing values of a table before they were filled: ``gaps_train`` and so on, or ``gaps`` beside ``x, y``.

They are booleans (n, columns), true where the hospital's csv had no value. ``silofl import`` writes them where there
are any. Nothing is trained on them: a survey leaves filled values out, and reports the count of missing ones
(``models/survey.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from partitions.labels import Fault, keys_by_part
from partitions.reorder import count_columns
from partitions.splits import Array

GAP_NAMES = {"gaps": "all", **{f"gaps_{split}": split for split in ("train", "val", "test")}}


def read_gaps(arrays: Mapping[str, Array], xs: Mapping[str, Array]) -> dict[str, Array]:
    """Read each part's gaps, bool (n, columns); empty without gaps. ``xs``: each part's inputs. Raises Fault."""
    wanted = keys_by_part(arrays, GAP_NAMES, xs, "save the gaps of each part")
    for part, key in wanted.items():
        found, shape = arrays[key], (len(xs[part]), count_columns(xs[part]))
        if found.dtype != np.bool_ or found.shape != shape:
            raise Fault(f"{key} is {found.dtype} {found.shape}", f"save booleans {shape}, or leave the gaps out")
    return {part: arrays[key] for part, key in wanted.items()}
