"""Processes that train one network together, for tests of models/parallel."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from models.flat import FlatModel, Passes
from models.optimizers import Sgd
from models.parallel.group import Group, join_group
from models.training import loss_gradient
from partitions.common.errors import UserError

WEIGHTS = torch.tensor([0.5, 3.0, 1.25])
PLAIN = (nn.Linear, 6, 8), (nn.Tanh,), (nn.Linear, 8, 3)
NORM = (nn.Linear, 6, 8), (nn.BatchNorm1d, 8), (nn.Tanh,), (nn.Linear, 8, 3)
DROPOUT = (nn.Linear, 6, 8), (nn.Dropout, 0.5), (nn.Linear, 8, 3)
WORDS = (nn.Embedding, 20, 4), (nn.Flatten,), (nn.Linear, 24, 3)
# Layers, the passes of all, sizes of batches
CASES: dict[str, tuple[Any, Passes, tuple[int, ...]]] = {
    "plain": (PLAIN, Passes(), (8, 8, 8)),
    "odd": (PLAIN, Passes(), (9, 7, 3, 2, 1)),
    "weighted": (PLAIN, Passes(weights=WEIGHTS), (8, 9, 7)),
    "clipped": (PLAIN, Passes(clip=0.05), (8, 9)),
    "words": (WORDS, Passes(), (8, 5, 8)),
    "norm": (NORM, Passes(), (8, 9, 3, 8)),
    "dropout": (DROPOUT, Passes(), (8, 9, 8)),
}


def trained(case: str, group: Group | None, parts: int = 1) -> dict[str, Tensor]:
    """A network after a few steps, by one process of a group or by one alone, in parts."""
    layers, passes, sizes = CASES[case]
    torch.manual_seed(7)
    model = FlatModel(nn.Sequential(*(kind(*arguments) for kind, *arguments in layers)))
    model.compute(replace(passes, parts=parts, group=group))
    loss, optimizer, losses = partial(cross_entropy, weight=passes.weights), Sgd(0.5, 0.9), []
    for size in sizes:
        x = torch.randint(20, (size, 6)) if layers is WORDS else torch.randn(size, 6)
        losses.append(loss_gradient(model, x, torch.randint(3, (size,)), loss))
        optimizer.step(model.vector, model.gradient)
    if group is not None:
        group.check_equal(model.vector)
    return {"vector": model.vector, "buffers": model.buffers, "losses": torch.stack(losses)}


def run_rank(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    group = join_group(rank, folder, ("cpu",) * count)
    results: dict[str, Any] = {case: trained(case, group) for case in CASES}
    try:
        group.check_equal(torch.full((4,), 1.0 + rank))
    except UserError as error:
        results["error"] = str(error)
    if not rank:
        try:  # the others end
            group.check_equal(torch.zeros(4))
        except UserError as error:
            results["left"] = str(error)
    torch.save(results, Path(folder, f"rank-{rank}"))


def ranks(count: int, folder: Path) -> list[dict[str, Any]]:
    """The results of this many processes, which train all cases together, and then have different vectors."""
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=run_rank, args=(rank, count, str(folder))) for rank in range(count)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        assert process.exitcode == 0
    return [torch.load(folder / f"rank-{rank}", weights_only=True) for rank in range(count)]
