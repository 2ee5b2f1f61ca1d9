"""The free memory of this machine or container, for processes that import nothing of ours but this folder.

``partitions/common/memory.py`` reads it. It is loaded by its path here, because the name ``partitions`` belongs to the
app in these processes (``private.py``).
"""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path


def available_share() -> float:
    """Return the free share of the scarcest memory, from 0 to 1."""
    file = Path(__file__).resolve().parents[2] / "partitions" / "common" / "memory.py"
    spec = spec_from_file_location(f"{__package__}.memory_reader", file)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(module := module_from_spec(spec))
    return float(module.available_share())
