"""Number of threads that a process computes with."""

from __future__ import annotations

import os

import torch


def threads_for(threads: int) -> int:
    """Return the run's number of threads, on which sums depend; with 0 OMP_NUM_THREADS, or else all cores.

    Silos that share a machine set OMP_NUM_THREADS to their share of the cores: twelve silos with all cores each would
    mostly wait for one another.
    """
    return threads or int(os.environ.get("OMP_NUM_THREADS") or 0) or os.cpu_count() or 1


def use_threads(threads: int) -> None:
    """Set the number of threads of this process to :func:`threads_for` this setting."""
    torch.set_num_threads(threads_for(threads))
