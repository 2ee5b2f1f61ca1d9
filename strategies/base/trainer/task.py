"""What a hospital's own trainer gets: ``trainer = MODULE:FUNCTION`` calls ``FUNCTION(task)`` in place of silofl's loop.

Everything that a method adds to a step (a proximal term, a control variate) enters by the step hooks of the trainer's
``torch.optim`` optimiser, so that a trainer serves every method whose local update is a training of that kind.
"""

from __future__ import annotations

import math
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from models.flat import FlatModel
from models.training import Loss
from partitions.common.errors import DataError, UserError
from partitions.common.memory import is_out_of_memory
from partitions.common.own_code import put_back
from strategies.base.settings.training import LocalTraining
from strategies.base.trainer.taking_back import Held, gather_gradients, take_back

Batch = tuple[Any, Tensor]
Correction = Callable[[Tensor, Tensor], object]  # of a step's (vector, gradient)


class SplitBatches:
    """Batches (x, y) of one split on the silo's device; each iteration is an epoch, as the built-in training has it."""

    def __init__(
        self, epochs: Iterator[Iterator[Batch]], batches: int, repeats: int = 1
    ) -> None:
        self._epochs = epochs
        self._batches = batches
        self._repeats = repeats
        self.seen: deque[Batch] = deque(maxlen=16)  # a library may read some batches ahead

    def __len__(self) -> int:
        return self._batches * self._repeats

    def __iter__(self) -> Iterator[Batch]:
        for batch in next(self._epochs):
            self.seen.append(batch)
            for _ in range(self._repeats):
                yield batch


@dataclass(eq=False)
class TrainingTask:
    """One training of one silo in one round.

    ``network``: the model to train, an ordinary module; ``loss(outputs, y)``: the run's; ``learning_rate``, ``epochs``:
    the round's, within the hospital's policy. ``loader(split)``: batches; ``attach(optimizer)``: to be called before
    the first step; ``optimizer()``: the run's, attached.
    """

    model: FlatModel
    loaders: dict[str, SplitBatches]
    loss: Loss
    settings: LocalTraining
    learning_rate: float
    epochs: int
    round: int
    correction: Correction | None = None
    after: Callable[[], object] | None = None
    note: Callable[[Batch | None], object] = lambda batch: None
    plain: bool = False  # whether the method makes plain gradient steps
    steps: int = 0
    _attached: bool = False
    _frozen: list[nn.Parameter] = field(default_factory=list)
    _input: list[Any] = field(default_factory=list)

    @property
    def network(self) -> nn.Module:
        return self.model.module

    @property
    def device(self) -> torch.device:
        return self.model.device

    def loader(self, split: str = "train") -> SplitBatches:
        """Return the batches of a split: train, val or test."""
        if split not in self.loaders:
            raise self.error(f"task.loader({split!r}): train, val or test is needed here")
        return self.loaders[split]

    def optimizer(self) -> torch.optim.Optimizer:
        """Return the run's optimiser over the network, as ``torch.optim`` has it, attached."""
        s = self.settings
        parameters = self.network.parameters()
        rate = self.learning_rate
        decay = s.weight_decay
        if self.plain:
            return self.attach(torch.optim.SGD(parameters, rate))
        if s.optimizer == "sgd":
            return self.attach(
                torch.optim.SGD(parameters, rate, s.momentum, weight_decay=decay)
            )
        kind = torch.optim.AdamW if s.optimizer == "adamw" else torch.optim.Adam
        return self.attach(kind(parameters, rate, weight_decay=decay, amsgrad=s.amsgrad))

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Put the method's part of each step into an optimiser by its hooks; return the optimiser."""
        if self._attached:
            raise self.error("task.attach was called twice: a training has one optimizer")
        known = {id(parameter) for parameter in self.model.parameters}
        trained = [
            p for group in optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if strange := sum(id(parameter) not in known for parameter in trained):
            raise self.error(
                f"its optimizer has {strange} tensors that are no parameters of task.network, and no model holds them"
            )
        self._attached = True
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        return optimizer

    def error(self, what: str) -> UserError:
        return UserError(f"trainer = {self.settings.trainer}: {what}")

    def run(self, trainer: Trainer) -> float:
        """Call the trainer; return the loss that it returns, nan for none. Raises UserError where it fails."""
        self._frozen = [p for p in self.model.parameters if not p.requires_grad]
        kept = [parameter.detach().clone() for parameter in self._frozen]
        held = Held(self.network)
        hook = self.network.register_forward_pre_hook(self._look)
        try:
            with torch.enable_grad(), put_back():
                loss = trainer(self)
        except (UserError, DataError):
            raise
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            text = " ".join(str(error).split())[:300]
            raise self.error(f"{type(error).__name__}: {text}{_line_of(error)}") from error
        finally:
            hook.remove()
            lost = take_back(self.model, held)
            for parameter, before in zip(self._frozen, kept, strict=True):
                parameter.data.copy_(before)
        if lost:
            raise self.error(
                f"it replaced {lost[0]} of task.network, or changed its size: change it in place"
            )
        if self.correction is not None and self.epochs and not self.steps:
            raise self.error(
                "it made no step with an optimizer that task.attach was given, and the method corrects each step"
            )
        try:
            return math.nan if loss is None else float(loss)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            raise self.error(
                f"it returned {type(loss).__name__}: return the mean loss, or nothing"
            ) from None

    def _look(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._input[:] = inputs[:1]

    def _before(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Correct the gradient before a step; of a step with a closure, after each call of the closure."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._correct()
            return None

        def closure_corrected() -> Any:
            value = closure()
            self._correct()
            return value

        return (args[0], closure_corrected), {k: v for k, v in kwargs.items() if k != "closure"}

    @torch.enable_grad()
    def _correct(self) -> None:
        for parameter in self._frozen:  # a library may train all again
            parameter.requires_grad_(False)
        gather_gradients(self.model)
        self.steps += 1
        self.note(self._batch())
        if self.correction is not None:
            self.correction(self.model.vector, self.model.gradient)

    def _after(self, *_: object) -> None:
        if self.after is not None:
            self.after()

    def _batch(self) -> Batch | None:
        """Return the batch of the loader that the network saw last; None for another one."""
        for batch in reversed(self.loaders["train"].seen):
            if self._input and batch[0] is self._input[0]:
                return batch
        return None


Trainer = Callable[[TrainingTask], object]


def _line_of(error: BaseException) -> str:
    """Return the innermost line of a traceback, in words."""
    lines = traceback.extract_tb(error.__traceback__)
    return f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
