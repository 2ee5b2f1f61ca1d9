"""The weighted mean of vectors."""

from collections.abc import Iterable, Sequence

from torch import Tensor

from partitions.common.errors import UserError


def weighted_mean(vectors: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return sum_k w_k v_k / sum_k w_k, added up in the given order (floating-point sums depend on it)."""
    total = sum(weights)
    result: Tensor | None = None
    for vector, weight in zip(vectors, weights, strict=True):
        if result is None:
            result = vector * (weight / total)
        else:
            result.add_(vector, alpha=weight / total)
    if result is None:
        raise UserError("a mean of no vectors")
    return result
