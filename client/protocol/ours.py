"""What this folder takes of the rest of the house: modules of `partitions/common`.

In a process of the site they come from the installed silofl, under a name that no app has (`private.py`).
"""

from types import ModuleType
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

    def __getattr__(name: str) -> ModuleType:
        """Load a module for the first that takes it: `parsed` brings pydantic, which a silo that waits does without."""
        if name not in __all__:
            raise AttributeError(name)
        return load_ours("partitions/common", name)


__all__ = ["errors", "files", "messages", "names", "parsed", "source_sum", "sum_weights"]
