"""What this folder takes of the rest of the house: modules of `partitions/common`.

In a process of the site they come from the installed silofl, under a name that no app has (`private.py`).
"""

from typing import TYPE_CHECKING

from .private import load_ours

if TYPE_CHECKING:
    from partitions.common import (
        errors,
        files,
        messages,
        names,
        parsed,
        source_sum,
        sum_weights,
    )
else:
    errors, files, messages, names, parsed, source_sum, sum_weights = (
        load_ours("partitions/common", name)
        for name in (
            "errors",
            "files",
            "messages",
            "names",
            "parsed",
            "source_sum",
            "sum_weights",
        )
    )

__all__ = ["errors", "files", "messages", "names", "parsed", "source_sum", "sum_weights"]
