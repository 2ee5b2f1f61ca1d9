# mypy: disable-error-code="assignment,override,no-untyped-call"
# A tensor class of our own overrides what PyTorch types more narrowly than it uses it.
"""A device that is not the CPU, for machines without a GPU: it shows what would go wrong or wait on one.

A tensor on it is a shell around one of the CPU, which does the arithmetic, so results are the CPU's bit for bit. As on
a GPU, an operation refuses tensors of both devices, but for single numbers. What makes the processor wait for the
device is counted: copies either way, and numbers and truths read from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("phony")
DEVICE = torch.device("phony:0")
CPU = torch.device("cpu")
aten = torch.ops.aten
READS = (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default)

Crossings = Counter[tuple[str, int]]  # ("in" or "out" or "read", scalars) -> times
_counting: list[Crossings] = []


@contextmanager
def phony_device() -> Iterator[Crossings]:
    """In which tensors can be on ``DEVICE``; yields the count of what crosses."""
    crossings: Crossings = Counter()
    _counting.append(crossings)
    try:
        with Factories(), FromNumbers():
            yield crossings
    finally:
        _counting.remove(crossings)


def cross(way: str, scalars: int) -> None:
    for crossings in _counting:
        crossings[way, scalars] += 1


class Phony(Tensor):
    """A tensor on the phony device: the shell; ``inner`` holds the numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Phony:
        shell: Phony = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        shell.inner = inner
        return shell

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(func, args, kwargs or {})

    # What PyTorch would answer of the shell alone.

    @property
    def data(self) -> Tensor:
        return self.detach()

    @data.setter
    def data(self, value: Phony) -> None:
        self.inner = value.inner

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()


class Factories(TorchDispatchMode):
    """Operations without a tensor that says where they happen."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return compute(func, args, kwargs or {})


class FromNumbers(TorchFunctionMode):
    """``torch.tensor(numbers, device=...)``, which no dispatch mode sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or CPU) == DEVICE:
            return func(*args, **{**kwargs, "device": CPU}).to(DEVICE)
        return func(*args, **kwargs)


def mapped(change: Callable[[Tensor], Any], given: Any) -> Any:
    """What an operation takes or gives, with its tensors changed; PyTorch's own ``tree_map`` takes half of a run."""
    if isinstance(given, Tensor):
        return change(given)
    if isinstance(given, (tuple, list)):
        return type(given)([mapped(change, item) for item in given])
    return (
        {key: mapped(change, item) for key, item in given.items()}
        if isinstance(given, dict)
        else given
    )


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation on the inner tensors; its results on the device where a GPU would have them."""
    tensors: list[Tensor] = []
    mapped(tensors.append, (args, kwargs))
    shells = [t for t in tensors if isinstance(t, Phony)]
    target = torch.device(kwargs.get("device") or (DEVICE if shells else CPU))
    if func in (aten._to_copy.default, aten.copy_.default):
        in_place = func is aten.copy_.default
        source = args[1] if in_place else args[0]
        target = (
            args[0].device if in_place else torch.device(kwargs.get("device") or source.device)
        )
        if target != source.device:
            cross("in" if target == DEVICE else "out", source.numel())
    elif shells and any(t.dim() and not isinstance(t, Phony) for t in tensors):
        raise RuntimeError(f"{func}: tensors on {CPU} and on {DEVICE}")
    elif shells and func in READS:
        cross("read", 1)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": CPU}
    inner_args, inner_kwargs = mapped(
        lambda t: t.inner if isinstance(t, Phony) else t, (args, kwargs)
    )
    result = func(*inner_args, **inner_kwargs)
    if target != DEVICE:
        return result
    # An operation in place gives its argument back
    given = {id(shell.inner): shell for shell in shells}
    return mapped(lambda t: given[id(t)] if id(t) in given else Phony(t), result)
