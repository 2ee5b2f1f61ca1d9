"""Gradients of small networks on a GPU by CUDA graphs: one call in place of a hundred.

A small network's batch takes a GPU less time than Python needs to ask for its steps. A graph holds the steps of one
batch's gradient (zero, forward, loss, backward) for batches of one shape, and a replay does the same arithmetic.
"""

from __future__ import annotations

from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from models.flat import FlatModel

EAGER = 3  # batches of one shape that are computed step by step, before its graph is made
MOST_GRAPHS = 32  # of one model
# Beyond these the GPU's work takes longer than the calls, and a graph would hold much of its memory
MOST_PARAMETERS, MOST_VALUES = 5_000_000, 1_000_000
LIBRARIES = (
    "models",
    "torchvision",
    "torch",
)  # whose layers do the same for each batch of a shape


class GradientGraph:
    """The gradient of a batch of the shape of ``x`` and ``y``, in ``model.gradient``."""

    def __init__(self, x: Tensor, y: Tensor, gradient: Any) -> None:
        self.x, self.y = x.clone(), y.clone()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss: Tensor = gradient(self.x, self.y)

    def replay(self, x: Tensor, y: Tensor) -> Tensor:
        """Compute the gradient; return the batch's mean loss."""
        self.x.copy_(x)
        self.y.copy_(y)
        self.graph.replay()
        return self.loss.clone()


def graph_of(
    model: FlatModel, x: Any, y: Tensor, loss: Any, gradient: Any
) -> GradientGraph | None:
    """Return the graph of ``gradient(x, y)`` for batches like this one; None where it is computed step by step.

    ``loss``: what the gradient is of, a function of outputs and labels alone.
    """
    if model.device.type != "cuda" or not _repeats(model, x, loss):
        return None
    backends = torch.backends
    key = (
        loss,
        model.passes,
        model.module.training,
        tuple(parameter.requires_grad for parameter in model.parameters),
        *((t.shape, t.stride(), t.dtype) for t in (x, y)),
        *(backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32),
        *(backends.cudnn.deterministic, torch.are_deterministic_algorithms_enabled()),
    )
    known = model.graphs.get(key, 0)
    if known == EAGER:
        known = None
        if (
            sum(isinstance(graph, GradientGraph) for graph in model.graphs.values())
            < MOST_GRAPHS
        ):
            try:
                known = GradientGraph(x, y, gradient)
            except RuntimeError:
                known = None  # memory ran out, or a step cannot be part of a graph
    elif isinstance(known, int):
        known += 1
    model.graphs[key] = known
    return known if isinstance(known, GradientGraph) else None


def _repeats(model: FlatModel, x: Any, loss: Any) -> bool:
    """Return whether every batch of a shape takes the same steps, and few values."""
    return (
        isinstance(x, Tensor)
        and x.numel() <= MOST_VALUES
        and model.layout.size <= MOST_PARAMETERS
        and not (model.has_dropout or model.embeddings or model.scale.used)
        and model.passes.parts == 1
        and model.passes.group is None
        and isinstance(loss, FunctionType)
        and not loss.__closure__
        and all(map(_is_steady, model.module.modules()))
    )


def _is_steady(layer: nn.Module) -> bool:
    """Return whether nothing of a layer's forward pass is anybody's own code, which a replay would not run."""
    library = type(layer).__module__.partition(".")[0]
    return library in LIBRARIES and not (layer._forward_hooks or layer._forward_pre_hooks)
