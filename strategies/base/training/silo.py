"""The part of a silo that a method may use."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from models.augmentation import Augmentation
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import MULTICLASS, Task


@dataclass(frozen=True)
class Silo:
    """The part of a silo that a method may use: its data on its device, one working model, seeded initial models."""

    name: str
    train: Samples
    val: Samples
    test: Samples
    model: FlatModel
    initial: Callable[[str], Tensor]  # purpose -> initial vector (Σ,), the same in every process
    task: Task = MULTICLASS
    # Metrics of the personal model that this process evaluated last on these data, by run, round and splits.
    known: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    augment: Augmentation | None = None  # augmentation of its training images
    min_batch_size: int = 1  # the site's rule: the fewest samples of a training batch
    max_decay: float = math.inf  # the site's rule: the largest share of a model that one step may replace
    max_step: float = math.inf  # the site's rule: largest distance of a received model from its last, in lengths of it
    inputs: str = ""  # in an evaluation: the digest of the statistics and of the order of columns and labels
