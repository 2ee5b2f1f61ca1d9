"""The free memory of this machine or container (`partitions/common/memory.py`)."""

from .private import load_ours


def available_share() -> float:
    """Return the free share of the scarcest memory, from 0 to 1."""
    return float(load_ours("partitions/common", "memory").available_share())
