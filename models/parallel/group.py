"""The processes of one silo that compute a batch's gradient together, each its share on a device of its own.

Every process runs the whole training: the same batches, corrections and steps. Only a batch's gradient is divided, and
the shares' sum is that of the batch (``all_reduce``). So the models of all processes stay equal, and any method works
whose gradients are of the run's loss alone (``plain_loss``). Two processes have the bits of one with ``accumulate =
2``, but for: dropout, which draws for each share; BatchNorm, which normalises each share by its own statistics, as with
``accumulate``, and whose running ones are the mean over the processes; embeddings of words (order of the sum).
"""

from __future__ import annotations

import atexit
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from partitions.common.errors import UserError

if TYPE_CHECKING:
    from models.flat import FlatModel

LIMIT = timedelta(days=7)  # the message's time to live ends earlier


class Group:
    """One of a silo's processes, and its connections to the others. ``devices``: of all, in their order."""

    def __init__(self, rank: int, devices: Sequence[str]) -> None:
        self.rank, self.devices, self.size = rank, devices, len(devices)

    def gradient(
        self,
        model: FlatModel,
        shares: Sequence[tuple[Any, Tensor]],
        of: Callable[[Any, Tensor], Tensor],
    ) -> Tensor:
        """Add the gradient of all shares of a batch to ``model.gradient``; return the sum of their losses.

        ``of(x, y)`` adds a share's own. A batch with fewer shares than processes is computed by each.
        """
        if len(shares) < self.size:
            return sum((of(*share) for share in shares), model.vector.new_zeros(()))
        with self._apart(model):
            loss = of(*shares[self.rank])
        small = [loss.reshape(1), model.buffers] if model.has_batch_norm else [loss.reshape(1)]
        rest = torch.cat(small)
        for tensor in (model.gradient, rest):
            self._add_up(tensor)
        if model.has_batch_norm:
            model.buffers.copy_(rest[1:] / self.size)
        return rest[0]

    def check_equal(self, vector: Tensor) -> None:
        """Raise UserError unless all processes have the same vector after a training."""
        bits = vector.view(torch.int32).sum(dtype=torch.int64).reshape(1)
        ends = torch.cat([bits, -bits])
        self._add_up(ends, distributed.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise UserError(
                f"device = {','.join(self.devices)}: the processes' models differ after the training: set "
                "deterministic = true, or give the silo one device"
            )

    def _add_up(self, tensor: Tensor, how: Any = distributed.ReduceOp.SUM) -> None:
        try:
            distributed.all_reduce(tensor, how)
        except RuntimeError as error:
            raise UserError(
                f"device = {','.join(self.devices)}: a process of the silo has ended: {cause(error)}"
            ) from None

    @contextmanager
    def _apart(self, model: FlatModel) -> Iterator[None]:
        """Context in which dropout draws apart from the other processes; after it all go on alike."""
        if not model.has_dropout:
            yield
            return
        seed = int(torch.randint(1 << 62, ())) + self.rank
        on_gpu = model.device.type == "cuda"
        with torch.random.fork_rng([model.device] if on_gpu else []):
            torch.default_generator.manual_seed(seed)
            if on_gpu:
                torch.cuda.manual_seed(seed)
            yield


def cause(error: Exception) -> str:
    """Return an error's first line, for the server: without the silo's addresses and the library's files."""
    line = str(error).splitlines()[0]
    return re.sub(r" ?\[[^]]*\](:\d+)?|\. This is typically.*", "", line).strip()


@cache
def join_group(rank: int, folder: str, devices: tuple[str, ...]) -> Group:
    """Wait for the other processes of a silo, which meet in a folder, once for all messages. Raises UserError."""
    # NCCL takes each GPU once. The SuperNode, or its job of Slurm, sets the interface of both
    backend = "nccl" if devices[0] != "cpu" and len({*devices}) == len(devices) else "gloo"
    store = distributed.FileStore(str(Path(folder) / "group"), len(devices))
    try:
        distributed.init_process_group(
            backend, store=store, rank=rank, world_size=len(devices), timeout=LIMIT
        )
    except RuntimeError as error:
        raise UserError(
            f"device = {','.join(devices)}: the processes cannot be connected: {cause(error)}"
        ) from None
    # Gloo's threads must end before the interpreter's modules do: else the process aborts now and then
    atexit.register(distributed.destroy_process_group)
    return Group(rank, devices)
