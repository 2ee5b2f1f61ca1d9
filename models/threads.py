"""Number of threads that a process computes with."""

from __future__ import annotations

import os

import torch


def threads_for(threads: int) -> int:
    """The run's number of threads (sums depend on it), or with 0 what OMP_NUM_THREADS says, or all cores.

    Silos that share a machine set OMP_NUM_THREADS to their share of it: twelve silos with all cores each would mostly
    wait for one another.
    """
    return threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or os.cpu_count() or 1


def use_threads(threads: int) -> None:
    """Compute with :func:`threads_for` this setting from now on."""
    torch.set_num_threads(threads_for(threads))
