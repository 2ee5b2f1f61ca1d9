"""The settings of local training, which every method shares.

The settings of patches: what a network sees in place of whole samples, and where that is not possible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from models.optimizers import read_shares
from models.tasks import Task, task_of
from models.tasks.patches import Patches, read_sides
from partitions.common.errors import UserError
from partitions.common.settings import find_changed, setting

MOST_ROUNDS = 1_000_000
MOST_SAMPLES = 2**31 - 1
# What a hospital's own trainer does itself
STEPS = (
    *("local-steps", "accumulate", "block-rates", "clip-gradient", "warmup-batches"),
    *("optimizer-state", "precision"),
)
OF_ALL = "it depends on all records, without noise"
NOT_PRIVATE = {
    "trainer": "its sum of clipped gradients cannot be vouched for",
    "clip-gradient": "dp.clip-norm clips each unit's gradient",
    "sampler": OF_ALL,
    "class-weights": OF_ALL,
    "precision": "a clipped sum is exact in float32 alone",
    "local-steps": "the budget counts epochs; set local-epochs",
    "accumulate": "a batch is computed in parts as it is",
    "tf32": "a clipped sum is exact in float32 alone",
}


@dataclass(frozen=True)
class LocalTraining:
    """The settings of local training: batches, loss, optimiser, learning rate, precision."""

    rounds: int = setting(
        20, "communication rounds", symbol="T", minimum=1, maximum=MOST_ROUNDS, kind="rounds"
    )
    local_epochs: int = setting(
        1, "epochs of local training per round", symbol="E", minimum=0, kind="epochs"
    )
    local_steps: int = setting(
        0,
        "mini-batches of local training per round, whatever a silo's size, in place of local-epochs; 0: epochs",
        minimum=0,
        kind="local-steps",
    )
    batch_size: int = setting(
        64, "mini-batch size", symbol="B", minimum=1, maximum=MOST_SAMPLES
    )
    sampler: str = setting(
        "shuffled",
        "an epoch: every sample once, shuffled; or as many draws, with replacement, in which each class is as likely",
        choices=("shuffled", "balanced"),
    )
    min_batch_size: int = setting(
        1,
        "a last batch of fewer samples joins the batch before it; a hospital's policy may ask for more",
        minimum=1,
        maximum=MOST_SAMPLES,
    )
    trainer: str = setting(
        "",
        "package.module:function, a training loop of the hospital's own in place of silofl's; its policy must list it",
    )
    precision: str = setting(
        "float32",
        "number format in which networks compute, in training and evaluation; their weights stay float32",
        choices=("float32", "bf16", "fp16"),
    )
    accumulate: int = setting(
        1,
        "parts that a mini-batch is computed in, one after the other, whose gradients add up to the batch's",
        minimum=1,
        maximum=1024,
    )
    optimizer: str = setting("sgd", "local optimiser", choices=("sgd", "adam", "adamw"))
    optimizer_state: str = setting(
        "reset",
        "what happens to momentum and moments between rounds",
        choices=("reset", "keep"),
    )
    learning_rate: float = setting(
        0.05, "local learning rate", symbol="η", above=0, kind="learning-rate"
    )
    block_rates: str = setting(
        "",
        "share of the learning rate of layer blocks, NAME=SHARE with commas; names may have * and ?; others: all of it",
    )
    momentum: float = setting(0.0, "momentum of sgd", minimum=0, maximum=1)
    weight_decay: float = setting(
        0.0,
        "L2 weight decay in the gradient; of adamw, decoupled from it",
        minimum=0,
        kind="decay",
    )
    amsgrad: bool = setting(False, "the AMSGrad variant of adam and adamw")
    clip_gradient: float = setting(
        0.0, "longest gradient of a batch, a longer one is shortened, 0: any", minimum=0
    )
    lr_decay: float = setting(
        1.0, "factor on the learning rate after every round", above=0, maximum=1
    )
    schedule: str = setting(
        "constant",
        "learning rate over the rounds: constant, falling as a cosine to 0, or in steps",
        choices=("constant", "cosine", "step"),
    )
    schedule_every: int = setting(10, "step: the rate falls after so many rounds", minimum=1)
    schedule_factor: float = setting(
        0.1, "step: to this share of itself", symbol="γ", above=0, maximum=1
    )
    warmup_rounds: int = setting(
        0,
        "rounds in which the rate rises to its full value, before the schedule begins",
        minimum=0,
        kind="rounds",
    )
    warmup_batches: int = setting(
        0, "optimiser steps of a training in which its rate rises to its full value", minimum=0
    )
    loss: str = setting("cross-entropy", "training loss", choices=("cross-entropy", "focal"))
    class_weights: str = setting(
        "none",
        "cross-entropy: weight of each class; balanced: n / (C n_c), of this silo's samples",
        choices=("none", "balanced"),
    )
    label_smoothing: float = setting(
        0.0,
        "cross-entropy: share of a label that is spread over all classes",
        minimum=0,
        below=1,
    )
    # From about 20 on a batch's gradient is its worst sample's alone: one patient's (tests/client/test_extraction.py).
    focal_gamma: float = setting(
        1.0, "focusing parameter of the focal loss", symbol="γ", minimum=0, maximum=5
    )

    def decay(self, rate: float, server_round: int) -> float:
        """Return this round's value of a learning rate: times lr-decay per round since the first, and its schedule.

        The schedule is torch's LinearLR over the warm-up, then its CosineAnnealingLR or StepLR. After the last round,
        where newcomers train, the last one's rate holds.
        """
        past, warm = min(server_round, self.rounds) - 1, self.warmup_rounds
        rate *= self.lr_decay ** (server_round - 1)
        if past < warm:
            return rate * (past + 1) / (warm + 1)
        if self.schedule == "cosine":
            return rate * (1 + math.cos(math.pi * (past - warm) / (self.rounds - warm))) / 2
        falls = (past - warm) // self.schedule_every if self.schedule == "step" else 0
        return rate * self.schedule_factor**falls

    @property
    def l2(self) -> float:
        """The weight decay that is part of a step's gradient."""
        return 0.0 if self.optimizer == "adamw" else self.weight_decay

    def check_rates(self, method: str, block_rates: bool | str) -> None:
        """Raise UserError for rates that a run cannot have. ``block_rates``: whether the method takes them."""
        if read_shares(self.block_rates) and not block_rates:
            raise UserError(
                f"block-rates = {self.block_rates[:80]}: not with {method}: {block_rates}"
            )
        if self.warmup_rounds >= self.rounds:
            raise UserError(
                f"warmup-rounds = {self.warmup_rounds}: fewer than rounds = {self.rounds} are needed here"
            )
        if self.class_weights == "balanced" and self.loss != "cross-entropy":
            raise UserError(
                f"class-weights = balanced: loss = cross-entropy has them, {self.loss} has not"
            )

    def check_trainer(self) -> None:
        """Raise UserError for a setting that would do nothing, since the trainer makes the steps."""
        for key, value in find_changed(self, STEPS):
            if value != "bf16":
                raise UserError(
                    f"trainer = {self.trainer}: it makes the steps, so {key} = {value} is its own to do; leave the "
                    "setting out"
                )

    def check_passes(self, method: str) -> None:
        """Raise UserError for a way of computing a batch that only the run's loss alone allows."""
        reason = f"not for {method}, whose loss depends on features or a whole batch"
        if self.accumulate > 1:
            raise UserError(f"accumulate = {self.accumulate}: {reason}; take accumulate = 1")
        if self.precision == "fp16":
            raise UserError(f"precision = fp16, which may repeat a batch: {reason}; take bf16")

    def check_task(self, task: Task) -> None:
        """Raise UserError for a setting that does not fit the task's labels or loss."""
        balanced = f"sampler = {self.sampler}, class-weights = {self.class_weights}"
        if "balanced" in balanced and not task.single_label:
            raise UserError(f"{balanced}: for samples of one class each, not for {task.name}")
        if self.accumulate > 1 and not task.of_each:
            raise UserError(
                f"accumulate = {self.accumulate}: not for {task.name}, whose loss compares the samples of a batch"
            )

    def check_private(self) -> None:
        """Raise UserError for a setting that clipped and noised gradients do not fit."""
        for key, value in find_changed(self, NOT_PRIVATE):
            if value != "off":
                raise UserError(f"dp = true: not with {key} = {value}: {NOT_PRIVATE[key]}")


def patches_of(common: Any) -> Patches | None:
    """Return the patches that a network sees in place of whole samples; None: it sees these."""
    sides = read_sides(common.patch)
    if not sides:
        return None
    return Patches(sides, common.patches_per_volume, common.foreground_share)


def seen_shape(common: Any, shape: Any, task: str) -> Any:
    """Return the shape of what a network sees of samples of this shape. Raises UserError if there is no such patch."""
    patches = patches_of(common)
    if patches is None:
        return shape
    if not task_of(task).per_pixel:
        raise UserError(f"patch = {common.patch}: it is of outlines, and the task is {task}")
    patches.check(shape)
    return (shape[0], *patches.sides)


def check_patches(common: Any, method: str, whole_samples: str) -> None:
    """Raise UserError for patches that the method, or another setting, has no use for.

    ``whole_samples``: why the method needs whole samples; "" where it does not.
    """
    if not read_sides(common.patch):
        if common.patches_per_volume > 1:
            raise UserError(
                f"patches-per-volume = {common.patches_per_volume} is of patches: set patch, or leave it out"
            )
        return
    for refused, reason in (
        (common.dp, "dp = true, whose noise is for gradients of whole samples"),
        (common.ala, "ala = true, whose weights are learnt on whole samples"),
        (whole_samples, f"strategy = {method}: {whole_samples}"),
    ):
        if refused:
            raise UserError(f"patch = {common.patch}: not with {reason}")
