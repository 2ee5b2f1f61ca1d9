"""Per-sample gradients of each kind of layer: their squared norms, and their weighted sum over samples.

For a layer called once with inputs a (b, ...), sample i's gradient follows from d_i = ∂ l_i / ∂ outputs. So its norm
can be computed without the gradient. A linear map of T positions has G_i = d_iᵀ a_i, and

    |G_i|² = Σ_{s,t} (a_s · a_t) (d_s · d_t)

(ghost norm: Goodfellow, arXiv 1510.01799, for T = 1; Li et al., arXiv 2110.05679, section 4; for convolutions, whose
positions are those of their outputs, Bu, Mao and Xu, arXiv 2205.10683). It is computed by this formula or from G_i,
whichever is cheaper. The weighted sum Σ_i f_i G_i follows from a and f d without another backward pass
("book-keeping": Bu et al., arXiv 2210.00038).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from models.lora import LowRank


class Rows(NamedTuple):
    """The gradient of an embedding table: ``values`` are added to the rows ``which``; all other rows are zeros."""

    which: Tensor
    values: Tensor


Each = Iterator[tuple[nn.Parameter, Tensor, tuple[int, ...]]]
Gradients = Iterator[tuple[nn.Parameter, Tensor | Rows]]
CONVOLUTIONS = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}
UNFOLDED = 2**18  # numbers of unfolded inputs at once
DOUBLES = 2**16  # numbers of float64 at once
SHORT = 1e-18  # least norm of a term: squares of shorter vectors underflow in float32
CANCELLED = 1000  # largest ratio of the sum of the terms' norms to the norm of their sum; see at_least


@dataclass(frozen=True)
class Layer:
    """The functions for a kind of layer.

    * ``square(layer, a, d, k)``: squared norms (b,) of the units' gradients; each is the sum over k consecutive samples
      in a and d (b k, ...).
    * ``weighted(layer, a, d)``: the sum over samples of each trained parameter's gradient, with d already weighted.
    """

    square: Callable[[Any, Tensor, Tensor, int], Tensor]
    weighted: Callable[[Any, Tensor, Tensor], Gradients]


def layer_of(module: Any) -> Layer | None:
    """Return the :class:`Layer` for a module's own parameters; None where it is not supported."""
    if type(module) is nn.Linear:
        return LINEAR
    if type(module) in CONVOLUTIONS and _is_plain(module):
        return CONVOLUTION
    if type(module) is nn.Embedding and module.max_norm is None and not module.scale_grad_by_freq:
        return EMBEDDING
    if type(module) in (nn.GroupNorm, nn.LayerNorm):
        return NORM
    if hasattr(module, "own_gradients"):
        return OWN
    if hasattr(module, "linear_maps"):
        return MAPS
    return LORA if _low_rank(module) is not None else None


def is_trained(parameter: object) -> bool:
    return isinstance(parameter, Tensor) and parameter.requires_grad


# -- a linear map, of one or of several positions ------------------------------------------------------------


def linear_square(a: Tensor, d: Tensor) -> Tensor:
    """Return |d_iᵀ a_i|² (b,) for a (b, [T,] I) and d (b, [T,] O); see :func:`at_least`."""
    a, d = (v.flatten(1, -2) if v.dim() > 2 else v.unsqueeze(1) for v in (a, d))
    positions = a.shape[1]
    if positions == 1:  # float64 holds the squares of all float32; for 1e-23 times 1e19 one would underflow to 0
        return torch.mul(*(torch.linalg.vector_norm(v, dim=2, dtype=torch.float64) for v in (a, d))).square().sum(1)
    terms = torch.mul(*(_lengths(v).clamp(min=SHORT) for v in (a, d))).sum(1)
    if 2 * positions**2 < a.shape[2] * d.shape[2]:
        each = max(1, DOUBLES // (positions * (a.shape[2] + d.shape[2])))
        parts = zip(torch.split(a, each), torch.split(d, each), strict=True)
        return at_least(torch.cat([_by_positions(x.double(), y.double()) for x, y in parts]), terms)
    return at_least((d.mT @ a).square().sum((1, 2)), terms)


def _by_positions(a: Tensor, d: Tensor) -> Tensor:
    """Return the squared norms by positions, in float64: squares of terms that cancel to a thousandth need it."""
    return ((a @ a.mT) * (d @ d.mT)).sum((1, 2)).clamp(min=0)


def _lengths(v: Tensor) -> Tensor:
    """Return the norms (b, T) of v (b, T, C), by the faster of two ways."""
    return torch.linalg.vector_norm(v, dim=2) if v.is_contiguous() else v.square().sum(2).sqrt()


def at_least(squares: Tensor, terms: Tensor) -> Tensor:
    """Return squared norms (b,) for clipping: at least (terms / 1000)², with ``terms`` (b,) the sum of terms' norms.

    If terms cancel to less than a thousandth, float32 cannot represent the rest, neither here nor in the sum over
    samples. A server can choose weights for which this happens with any sample.
    """
    return torch.maximum(squares, (terms / CANCELLED).square())


def _bias_square(d: Tensor) -> Tensor:
    """Return the squared norms (b,) of a bias's gradients, from d (b, [positions,] O)."""
    if d.dim() == 2:
        return d.square().sum(1)
    d = d.flatten(1, -2)
    return at_least(d.sum(1).square().sum(1), d.square().sum(2).sqrt().sum(1))


def by_unit(v: Tensor, k: int) -> Tensor:
    """Reshape (b k, ...) to (b, k, ...): for a linear map, a unit's samples are further positions."""
    return v if k == 1 else v.view(-1, k, *v.shape[1:])


def _linear(layer: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
    a, d = by_unit(a, k), by_unit(d, k)
    total = d.new_zeros(len(d))
    if is_trained(layer.weight):
        total += linear_square(a, d)
    return total + _bias_square(d) if is_trained(layer.bias) else total


def _linear_weighted(layer: Any, a: Tensor, d: Tensor) -> Gradients:
    flat = d.flatten(0, -2)
    if is_trained(layer.weight):
        yield layer.weight, flat.mT @ a.flatten(0, -2)
    if is_trained(layer.bias):
        yield layer.bias, flat.sum(0)


# -- a linear map with a change of low rank (models/lora.py): W + s B A --------------------------------------


def _low_rank(module: Any) -> LowRank | None:
    if not (isinstance(module, nn.Linear) and parametrize.is_parametrized(module, "weight")):
        return None
    if parametrize.type_before_parametrizations(module) is not nn.Linear:
        return None
    changes: list[nn.Module] = list(module.parametrizations["weight"])  # type: ignore[index]
    return changes[0] if len(changes) == 1 and isinstance(changes[0], LowRank) else None


def _parts(module: Any, a: Tensor, d: Tensor) -> tuple[LowRank, Tensor, Tensor]:
    """Return the change, the inputs of B, and the gradient of A's outputs, both scaled."""
    change = _low_rank(module)
    assert change is not None
    return change, change.scale * (a @ change.lora_a.mT), change.scale * (d @ change.lora_b)


def _lora(module: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
    a, d = by_unit(a, k), by_unit(d, k)
    change, inner, back = _parts(module, a, d)
    total = d.new_zeros(len(d))
    if is_trained(change.lora_a):
        total += linear_square(a, back)
    if is_trained(change.lora_b):
        total += linear_square(inner, d)
    original = module.parametrizations["weight"].original
    if is_trained(original):
        total += linear_square(a, d)
    return total + _bias_square(d) if is_trained(module.bias) else total


def _lora_weighted(module: Any, a: Tensor, d: Tensor) -> Gradients:
    change, inner, back = _parts(module, a, d)
    flat, original = d.flatten(0, -2), module.parametrizations["weight"].original
    if is_trained(change.lora_a):
        yield change.lora_a, back.flatten(0, -2).mT @ a.flatten(0, -2)
    if is_trained(change.lora_b):
        yield change.lora_b, flat.mT @ inner.flatten(0, -2)
    if is_trained(original):
        yield original, flat.mT @ a.flatten(0, -2)
    if is_trained(module.bias):
        yield module.bias, flat.sum(0)


# -- convolutions --------------------------------------------------------------------------------------------


def _is_plain(conv: Any) -> bool:
    return (
        conv.groups == 1
        and not isinstance(conv.padding, str)
        and conv.padding_mode == "zeros"
        and set(conv.dilation) == {1}
    )


def unfolded(conv: Any, a: Tensor) -> Tensor:
    """Return the inputs of each position of the outputs (b, positions, C x kernel)."""
    dims = CONVOLUTIONS[type(conv)]
    padding = [p for side in reversed(conv.padding) for p in (side, side)]
    a = F.pad(a, padding) if any(padding) else a
    for dim in range(dims):
        a = a.unfold(2 + dim, conv.kernel_size[dim], conv.stride[dim])
    places = range(2, 2 + dims)  # a (b, C, places, kernel)
    kernel = range(2 + dims, 2 + 2 * dims)
    return a.permute(0, *places, 1, *kernel).flatten(1 + dims).flatten(1, dims)


def _convolution(conv: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
    d = by_unit(d.flatten(2).mT, k)  # (b, [k,] positions, O)
    total = d.new_zeros(len(d))
    if is_trained(conv.weight):
        each = max(1, UNFOLDED // (k * d.shape[-2] * conv.weight[0].numel()))
        parts = zip(torch.split(a, each * k), torch.split(d, each), strict=True)
        total += torch.cat([linear_square(by_unit(unfolded(conv, x), k), y) for x, y in parts])
    return total + _bias_square(d) if is_trained(conv.bias) else total


def _convolution_weighted(conv: Any, a: Tensor, d: Tensor) -> Gradients:
    weight, bias = conv.weight, conv.bias
    if is_trained(weight):
        gradient = torch.ops.aten.convolution_backward(
            d,
            a,
            weight,
            None,
            conv.stride,
            conv.padding,
            conv.dilation,
            False,
            [0] * len(conv.stride),
            1,
            [False, True, False],
        )[1]
        yield weight, gradient
    if is_trained(bias):
        yield bias, d.flatten(2).sum((0, 2))


# -- embeddings ----------------------------------------------------------------------------------------------


def _embedding(layer: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
    """Return the squared norms (b,); rows that a unit looks up several times are summed before they are squared."""
    tokens, rows = by_unit(a, k).flatten(1), by_unit(d, k).flatten(1, -2)
    if layer.padding_idx is not None:
        rows = rows * torch.ne(tokens, layer.padding_idx).unsqueeze(-1)
    unit = torch.arange(len(tokens), device=tokens.device).unsqueeze(1)
    key, place = torch.unique(unit * layer.num_embeddings + tokens, return_inverse=True)
    sums = d.new_zeros(len(key), d.shape[-1]).index_add_(0, place.flatten(), rows.flatten(0, 1))
    which = torch.div(key, layer.num_embeddings, rounding_mode="floor")
    squares = d.new_zeros(len(tokens)).index_add_(0, which, sums.square().sum(1))
    return at_least(squares, rows.square().sum(2).sqrt().sum(1))


def _embedding_weighted(layer: Any, a: Tensor, d: Tensor) -> Gradients:
    tokens, rows = a.flatten().long(), d.flatten(0, -2)
    if layer.padding_idx is not None:
        rows = rows * torch.ne(tokens, layer.padding_idx).unsqueeze(-1)
    yield layer.weight, Rows(tokens, rows)


# -- normalisation within a sample, and parameters that a module uses itself ---------------------------------


def _norm_each(layer: Any, a: Tensor, d: Tensor) -> Each:
    """Yield for each parameter the terms of the samples' gradients (b, ...), and the dimensions to sum over."""
    if isinstance(layer, nn.GroupNorm):
        scaled, dims = F.group_norm(a, layer.num_groups, eps=layer.eps), tuple(range(2, d.dim()))
    else:
        assert isinstance(layer, nn.LayerNorm)
        scaled = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
        dims = tuple(range(1, d.dim() - len(layer.normalized_shape)))
    if is_trained(layer.weight):
        yield layer.weight, d * scaled, dims
    if is_trained(layer.bias):
        yield layer.bias, d, dims


def _own_each(module: Any, _: Tensor, d: Tensor) -> Each:
    for name, gradient in module.own_gradients(d).items():
        parameter = getattr(module, name)
        if is_trained(parameter):
            yield parameter, gradient, ()


def _of_each(each: Callable[[Any, Tensor, Tensor], Each]) -> Layer:
    """Return the :class:`Layer` for few parameters, whose gradients are small enough to hold one per sample."""

    def summed(terms: Tensor, dims: tuple[int, ...]) -> Tensor:
        return (terms.sum(dims) if dims else terms).flatten(1)

    def square(layer: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
        total = d.new_zeros(len(d) // k)
        for _, terms, dims in each(layer, a, d):
            if k > 1:
                terms, dims = by_unit(terms, k), (1, *(dim + 1 for dim in dims))
            found = summed(terms, dims).square().sum(1)
            total += at_least(found, summed(terms.abs(), dims).square().sum(1).sqrt()) if dims else found
        return total

    def weighted(layer: Any, a: Tensor, d: Tensor) -> Gradients:
        return ((parameter, summed(terms, dims).sum(0)) for parameter, terms, dims in each(layer, a, d))

    return Layer(square, weighted)


# -- a module that is made of linear maps of its own parameters (a GRU) --------------------------------------


def _maps(module: Any, a: Tensor, d: Tensor, k: int) -> Tensor:
    total = d.new_zeros(len(d) // k)
    for weight, bias, inputs, gradients in module.linear_maps(a, d):
        inputs, gradients = by_unit(inputs, k), by_unit(gradients, k)
        if is_trained(weight):
            total += linear_square(inputs, gradients)
        if is_trained(bias):
            total += _bias_square(gradients)
    return total


def _maps_weighted(module: Any, a: Tensor, d: Tensor) -> Gradients:
    for weight, bias, inputs, gradients in module.linear_maps(a, d):
        flat = gradients.flatten(0, -2)
        if is_trained(weight):
            yield weight, flat.mT @ inputs.flatten(0, -2)
        if is_trained(bias):
            yield bias, flat.sum(0)


LINEAR = Layer(_linear, _linear_weighted)
LORA = Layer(_lora, _lora_weighted)
CONVOLUTION = Layer(_convolution, _convolution_weighted)
EMBEDDING = Layer(_embedding, _embedding_weighted)
NORM = _of_each(_norm_each)
OWN = _of_each(_own_each)
MAPS = Layer(_maps, _maps_weighted)
