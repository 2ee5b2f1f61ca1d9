"""What a method may touch of a silo."""

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
    """What a method may touch of a silo: its data on its device, one model to work with, seeded initial models."""

    name: str
    train: Samples
    val: Samples
    test: Samples
    model: FlatModel
    initial: Callable[[str], Tensor]  # purpose -> initial vector (Σ,), the same in every process
    task: Task = MULTICLASS
    # What the personal model that was evaluated last on these data in this process came to, by run, round and splits.
    known: dict[Hashable, dict[str, float]] = field(default_factory=dict)
    augment: Augmentation | None = None  # how its training pictures are changed
    min_batch_size: int = 1  # its own rule: batches of fewer samples are not trained with
    max_decay: float = math.inf  # its own rule: the most of a model that one step may replace
    max_step: float = math.inf  # its own rule: how far a received model may be from its last one, in lengths of it
    inputs: str = ""  # where a run only evaluates: the digest of the statistics and of the order of columns and labels
