"""Per-sample gradients of each kind of layer: their squared norms, and their weighted sum over samples.

For a layer called once with inputs a (b, ...), sample i's gradient follows from d_i = ∂ l_i / ∂ outputs. So its norm
can be computed without the gradient. A linear map of T positions has G_i = d_iᵀ a_i, and

    |G_i|² = Σ_{s,t} (a_s · a_t) (d_s · d_t)

(ghost norm: Goodfellow, arXiv 1510.01799, for T = 1; Li et al., arXiv 2110.05679, section 4; for convolutions, whose
positions are those of their outputs, Bu, Mao and Xu, arXiv 2205.10683). It is computed by this formula or from G_i,
whichever is cheaper. The weighted sum Σ_i f_i G_i follows from a and f d without another backward pass
("book-keeping": Bu et al., arXiv 2210.00038).

A layer's gradient is a list of :class:`ParameterGradients`, one for each trained parameter. Norm and sum are computed
from the same part, hence from the same numbers: computed anew they could differ by rounding, which a server's weights
can enlarge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.lora import LowRank

CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
UNFOLDED = 2**18  # numbers of unfolded inputs at once
DOUBLES = 2**16  # numbers of float64 at once
SHORT = 1e-18  # least norm of a term: squares of shorter vectors underflow in float32
LONG = 1e15  # largest norm of an input: f d of longer ones would underflow in float32
# Largest ratio of the sum of the terms' norms to the norm of their sum; see at_least
CANCELLED = 1000


class Rows(NamedTuple):
    """The gradient of an embedding table: ``values`` are added to the rows ``which``; all other rows are zeros."""

    which: Tensor
    values: Tensor


@dataclass(frozen=True)
class ParameterGradients:
    """The gradients of one parameter, for b samples: ``d`` (b, ...) is ∂ loss / ∂ outputs, ``a`` (b, ...) the inputs.

    A unit is k consecutive samples. Its squared norm is infinite or nan where an element of its ``a`` or ``d`` is.
    """

    parameter: Tensor
    d: Tensor

    def only(self, kept: Tensor) -> ParameterGradients:
        """Return the gradients with zeros in place of the samples that are not ``kept`` (b,)."""
        return replace(self, d=kept_rows(self.d, kept))

    def of_units(self, k: int) -> list[Tensor]:
        """Return all that the units' clipped gradients are made of, tensors (b / k, ...)."""
        return [self.square(k), self.d.reshape(-1, k, *self.d.shape[1:])]

    def square(self, k: int) -> Tensor:
        """Return the squared norms (b / k,) of the units' gradients."""
        raise NotImplementedError

    def weighted_sum(self, factors: Tensor) -> Tensor | Rows:
        """Return the sum of the samples' gradients, each times its factor (b,)."""
        raise NotImplementedError

    def _times(self, factors: Tensor) -> Tensor:
        return self.d * factors.view(-1, *[1] * (self.d.dim() - 1))


def kept_rows(v: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept.view(-1, *[1] * (v.dim() - 1)), v, 0)


def equal_part(most: int, of: int) -> int:
    """Return the size of parts of ``of`` units, by halving: all have one shape, and at most ``most`` units, or one."""
    while of > max(most, 1):
        of //= 2
    return of


Parts = Callable[[Any, Tensor, Tensor], Iterator[ParameterGradients]]


def gradient_parts(module: Any) -> Parts | None:
    """Return the function (module, a, d) -> gradients of each trained parameter of its own; None: not supported."""
    if type(module) is nn.Linear:
        return _linear
    if type(module) in CONVOLUTIONS and _is_plain(module):
        return _convolution
    if (
        type(module) is nn.Embedding
        and module.max_norm is None
        and not module.scale_grad_by_freq
    ):
        return _embedding
    if type(module) in (nn.GroupNorm, nn.LayerNorm):
        return _norm
    if hasattr(module, "own_gradients"):
        return _own
    if hasattr(module, "linear_maps"):
        return _maps
    return _lora if _low_rank(module) is not None else None


def is_trained(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and parameter.requires_grad


def by_unit(v: Tensor, k: int) -> Tensor:
    """Reshape (b k, ...) to (b, k, ...): for a linear map, a unit's samples are further positions."""
    return v if k == 1 else v.view(-1, k, *v.shape[1:])


def at_least(squares: Tensor, terms: Tensor) -> Tensor:
    """Return squared norms (b,) for clipping: at least (terms / 1000)², with ``terms`` (b,) the sum of terms' norms.

    If terms cancel to less than a thousandth, float32 cannot represent the rest, neither here nor in the sum over
    samples. A server can choose weights for which this happens with any sample.
    """
    return torch.maximum(squares, (terms / CANCELLED).square())


# -- a linear map, of one or of several positions ------------------------------------------------------------


@dataclass(frozen=True)
class LinearMap(ParameterGradients):
    a: Tensor

    def only(self, kept: Tensor) -> ParameterGradients:
        return replace(self, d=kept_rows(self.d, kept), a=kept_rows(self.a, kept))

    def of_units(self, k: int) -> list[Tensor]:
        return [*super().of_units(k), self.a.reshape(-1, k, *self.a.shape[1:])]

    def square(self, k: int) -> Tensor:
        return linear_square(by_unit(self.a, k), by_unit(self.d, k))

    def weighted_sum(self, factors: Tensor) -> Tensor | Rows:
        return self._times(factors).flatten(0, -2).mT @ self.a.flatten(0, -2)


def linear_square(a: Tensor, d: Tensor) -> Tensor:
    """Return |d_iᵀ a_i|² (b,) for a (b, [T,] I) and d (b, [T,] O); see :func:`at_least`."""
    a, d = (v.flatten(1, -2) if v.dim() > 2 else v.unsqueeze(1) for v in (a, d))
    positions = a.shape[1]
    # float64 holds the squares of all float32; for 1e-23 times 1e19 one would underflow to 0
    if positions == 1:
        inputs, back = (torch.linalg.vector_norm(v, dim=2, dtype=torch.float64) for v in (a, d))
        return _of_short(inputs, (inputs * back).square().sum(1))
    inputs, back = (_lengths(v).clamp(min=SHORT) for v in (a, d))
    terms = (inputs * back).sum(1)
    if 2 * positions**2 < a.shape[2] * d.shape[2]:
        each = equal_part(DOUBLES // (positions * (a.shape[2] + d.shape[2])), len(a))
        parts = zip(torch.split(a, each), torch.split(d, each), strict=True)
        squares = torch.cat([_by_positions(x.double(), y.double()) for x, y in parts])
    else:
        squares = (d.mT @ a).square().sum((1, 2))
    return _of_short(inputs, at_least(squares, terms))


def _of_short(inputs: Tensor, squares: Tensor) -> Tensor:
    """Return the squared norms (b,), infinite where the norm of an input (b, T) is more than :data:`LONG`."""
    return torch.where(inputs.amax(1) <= LONG, squares, torch.inf)


def _by_positions(a: Tensor, d: Tensor) -> Tensor:
    """Return the squared norms by positions, in float64: squares of terms that cancel to a thousandth need it."""
    return ((a @ a.mT) * (d @ d.mT)).sum((1, 2)).clamp(min=0)


def _lengths(v: Tensor) -> Tensor:
    """Return the norms (b, T) of v (b, T, C), by the faster of two ways."""
    return torch.linalg.vector_norm(v, dim=2) if v.is_contiguous() else v.square().sum(2).sqrt()


def _bias(bias: Any, d: Tensor) -> Iterator[ParameterGradients]:
    """Yield the part of a bias, whose terms are d at each position (b, [positions,] O), if it is trained."""
    if is_trained(bias):
        yield SummedTerms(bias, d, tuple(range(1, d.dim() - 1)))


def _linear(layer: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    if is_trained(layer.weight):
        yield LinearMap(layer.weight, d, a)
    yield from _bias(layer.bias, d)


# -- a linear map with a change of low rank (models/lora.py): W + s B A --------------------------------------


def _low_rank(module: Any) -> LowRank | None:
    if not (isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight")):
        return None
    if parametrize.type_before_parametrizations(module) is not nn.Linear:
        return None
    changes: list[nn.Module] = list(module.parametrizations["weight"])  # type: ignore[index]
    return changes[0] if len(changes) == 1 and isinstance(changes[0], LowRank) else None


def _lora(module: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    change = _low_rank(module)
    assert change is not None
    if is_trained(change.lora_a):
        yield LinearMap(change.lora_a, change.scale * (d @ change.lora_b), a)
    if is_trained(change.lora_b):
        yield LinearMap(change.lora_b, d, change.scale * (a @ change.lora_a.mT))
    original = module.parametrizations["weight"].original
    if is_trained(original):
        yield LinearMap(original, d, a)
    yield from _bias(module.bias, d)


# -- convolutions --------------------------------------------------------------------------------------------


def _is_plain(conv: Any) -> bool:
    return (
        conv.groups == 1
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and set(conv.dilation) == {1}
    )


@dataclass(frozen=True)
class Convolved(LinearMap):
    conv: Any

    def square(self, k: int) -> Tensor:
        d = by_unit(self.d.flatten(2).mT, k)  # (b, [k,] positions, O)
        each = equal_part(UNFOLDED // (k * d.shape[-2] * self.conv.weight[0].numel()), len(d))
        parts = zip(torch.split(self.a, each * k), torch.split(d, each), strict=True)
        return torch.cat(
            [linear_square(by_unit(unfold_inputs(self.conv, x), k), y) for x, y in parts]
        )

    def weighted_sum(self, factors: Tensor) -> Tensor | Rows:
        conv = self.conv
        total: Tensor = torch.ops.aten.convolution_backward(
            self._times(factors),
            self.a,
            conv.weight,
            None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.stride),
            1,
            [False, True, False],
        )[1]
        return total


@contextmanager
def in_float32() -> Iterator[None]:
    """Context in which all products are in float32, and those of a shape are computed in one way.

    TF32, a GPU's default for convolutions, has 11 bits, and terms may cancel.
    """
    now, precision = torch.backends.cudnn, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with now.flags(
            enabled=now.enabled, benchmark=False, deterministic=True, allow_tf32=False
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


def unfold_inputs(conv: Any, a: Tensor) -> Tensor:
    """Return the inputs of each position of the outputs (b, positions, C x kernel)."""
    dims = CONVOLUTIONS[type(conv)]
    padding = [p for side in reversed(conv.padding) for p in (side, side)]
    a = F.pad(a, padding) if any(padding) else a
    for dim in range(dims):
        a = a.unfold(2 + dim, conv.kernel_size[dim], conv.stride[dim])
    places = range(2, 2 + dims)  # a (b, C, places, kernel)
    kernel = range(2 + dims, 2 + 2 * dims)
    return a.permute(0, *places, 1, *kernel).flatten(1 + dims).flatten(1, dims)


def _convolution(conv: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    if is_trained(conv.weight):
        yield Convolved(conv.weight, d, a, conv)
    if is_trained(conv.bias):
        yield SummedTerms(conv.bias, d, tuple(range(2, d.dim())))


# -- embeddings ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LookedUp(LinearMap):
    """Rows ``a`` (b, ...) of a table, with the gradients d (b, ..., width)."""

    def square(self, k: int) -> Tensor:
        """Return the squared norms; rows that a unit looks up several times are summed before they are squared."""
        d, count = self.d, len(self.parameter)
        tokens = by_unit(self.a, k).flatten(1)
        rows = by_unit(d, k).flatten(1, -2)
        unit = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
        key, place = torch.unique(unit * count + tokens, return_inverse=True)
        sums = d.new_zeros(len(key), d.shape[-1]).index_add_(
            0, place.flatten(), rows.flatten(0, 1)
        )
        which = torch.div(key, count, rounding_mode="floor")
        squares = d.new_zeros(len(tokens)).index_add_(0, which, sums.square().sum(1))
        return at_least(squares, rows.square().sum(2).sqrt().sum(1))

    def weighted_sum(self, factors: Tensor) -> Tensor | Rows:
        return Rows(self.a.flatten().long(), self._times(factors).flatten(0, -2))


def _embedding(layer: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    if layer.padding_idx is not None:
        d = d.masked_fill(torch.eq(a, layer.padding_idx).unsqueeze(-1), 0.0)
    yield LookedUp(layer.weight, d, a)


# -- few parameters, whose gradients are small enough to hold one per sample ---------------------------------


@dataclass(frozen=True)
class SummedTerms(ParameterGradients):
    """The terms ``d`` (b, ...) of the samples' gradients, to be summed over ``dims``."""

    dims: tuple[int, ...]

    def square(self, k: int) -> Tensor:
        terms, dims = self.d, self.dims
        if k > 1:
            terms = by_unit(terms, k)
            dims = (1, *(dim + 1 for dim in dims))
        if not dims:
            return terms.flatten(1).square().sum(1)
        squares, most = (v.sum(dims).flatten(1).square().sum(1) for v in (terms, terms.abs()))
        return at_least(squares, most.sqrt())

    def weighted_sum(self, factors: Tensor) -> Tensor | Rows:
        return self._times(factors).sum((0, *self.dims))


def _norm(layer: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    if isinstance(layer, nn.GroupNorm):
        scaled = F.group_norm(a, layer.num_groups, eps=layer.eps)
        dims = tuple(range(2, d.dim()))
    else:
        scaled = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        dims = tuple(range(1, d.dim() - len(layer.normalized_shape)))
    if is_trained(layer.weight):
        yield SummedTerms(layer.weight, d * scaled, dims)
    if is_trained(layer.bias):
        yield SummedTerms(layer.bias, d, dims)


def _own(module: Any, _: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    for name, gradient in module.own_gradients(d).items():
        if is_trained(parameter := getattr(module, name)):
            yield SummedTerms(parameter, gradient, ())


# -- a module that is made of linear maps of its own parameters (a GRU) --------------------------------------


def _maps(module: Any, a: Tensor, d: Tensor) -> Iterator[ParameterGradients]:
    for weight, bias, inputs, gradients in module.linear_maps(a, d):
        if is_trained(weight):
            yield LinearMap(weight, gradients, inputs)
        yield from _bias(bias, gradients)
