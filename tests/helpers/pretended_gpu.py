# mypy: disable-error-code="no-untyped-call"
"""A GPU that is not there: tensors say that they are on ``cuda:0``, and are checked as CUDA would check them.

Each tensor lies in the CPU's memory. Those that were made on, or moved to, ``cuda`` are remembered by their storage.
An operation on them and on a tensor of the CPU is refused, as in PyTorch. Reads by the host are counted with their
place. So a run under :class:`PretendedGpu` has the numbers of a run on the CPU, or fails where a GPU would.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ROOT = Path(__file__).resolve().parents[2]
OURS = ("models", "strategies", "client", "server", "partitions")
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
# Operations that take tensors of both: copies, and indices.
MADE = {"lift_fresh"}  # of numbers of the host
BOTH = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "set_"}


def place() -> str:
    """The innermost line of the product on the stack."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in OURS:
            return f"{path.relative_to(ROOT)}:{frame.lineno} ({frame.name})"
    return "elsewhere"


class Memory:
    """Which storages are on the GPU, for as long as they live."""

    def __init__(self) -> None:
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def holds(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self.storages

    def mark(self, tensor: Tensor, on: bool) -> None:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        address = storage._cdata
        if on:
            self.storages[address] = weakref.ref(
                storage, lambda _: self.storages.pop(address, None)
            )
        else:
            self.storages.pop(address, None)


class _Operations(TorchDispatchMode):
    """Below autograd: marks what an operation makes, and refuses one on tensors of both devices."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        memory, name = self.gpu.memory, func.overloadpacket.__name__
        tensors = [one for one in tree_flatten((args, kwargs))[0] if isinstance(one, Tensor)]
        on = [memory.holds(one) for one in tensors]
        if any(on) and name not in BOTH:
            for tensor, there in zip(tensors, on, strict=True):
                if not there and tensor.dim():
                    raise RuntimeError(
                        f"{name}: all tensors must be on one device; a tensor "
                        f"{tuple(tensor.shape)} is on the CPU: {place()}"
                    )
        if name in ("_local_scalar_dense", "nonzero") and any(on):
            self.gpu.reads[place()] += 1
        out = func(*args, **(kwargs or {}))
        target = self.gpu.target
        if name in MADE or not tensors:
            there = bool(target)
        elif name == "_to_copy" and target is not None:
            there = target
        else:
            there = on[0] if name in BOTH else any(on)
        given = {id(one) for one in tensors if name not in MADE}
        for made in tree_flatten(out)[0]:
            if isinstance(made, Tensor) and id(made) not in given:
                memory.mark(made, there)
        return out


class PretendedGpu(TorchFunctionMode):
    """While it is entered, ``cuda`` is a device. ``reads``: how often each place read a number from it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.reads: Counter[str] = Counter()
        self.target: bool | None = None  # the device that the running call names
        self.operations = _Operations(self)

    def __enter__(self) -> PretendedGpu:
        self.operations.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        self.operations.__exit__(*failure)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func is torch.device or name == "_parse_to":
            return func(*args, **kwargs)
        if func == Tensor.device.__get__:
            return GPU if self.memory.holds(args[0]) else CPU
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return self.memory.holds(args[0])
        if name in ("numpy", "__array__", "tolist") and self.memory.holds(args[0]):
            if name != "tolist":
                raise TypeError(f"can't convert a tensor on cuda:0 to numpy: {place()}")
            self.reads[place()] += 1
        if name in ("cpu", "cuda") and isinstance(args[0], Tensor):
            return self._moved(args[0], name == "cuda")
        named = self._device(args, kwargs)
        if name == "to" and isinstance(args[0], Tensor) and named is not None:
            rest = tree_map(lambda one: CPU if _is_device(one) else one, (args, kwargs))
            with self._aiming(None):
                out = func(*rest[0], **rest[1])
            return self._moved(out, named)
        if named is None:
            return func(*args, **kwargs)
        args, kwargs = tree_map(lambda one: CPU if _is_device(one) else one, (args, kwargs))
        with self._aiming(named):
            return func(*args, **kwargs)

    def _moved(self, tensor: Tensor, on: bool) -> Tensor:
        if self.memory.holds(tensor) == on:
            return tensor
        if not on:
            self.reads[place()] += 1
        with self._aiming(on), torch._C.DisableTorchFunction():
            # a copy, also for autograd
            return tensor.to(torch.device("cpu", 0), copy=True)

    @contextlib.contextmanager
    def _aiming(self, on: bool | None) -> Iterator[None]:
        before, self.target = self.target, on
        try:
            yield
        finally:
            self.target = before

    def _device(self, args: Any, kwargs: Any) -> bool | None:
        """Whether the call names the GPU, the CPU, or neither."""
        for one in tree_flatten((args, kwargs))[0]:
            if _is_device(one):
                return torch.device(one).type == "cuda"
        return None


def _is_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return True
    return isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu")
