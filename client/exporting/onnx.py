"""``silofl export --onnx``: an exported model as one ONNX file, with scaling and temperature inside.

The input ``x`` is the content of a data file, with channels before places: float32 (n, columns), or (n, c, h, w) with
bytes as 0..255, or int32 tokens (n, t). The output is ``probabilities`` of classes, findings or pixels, or ``values``:
measurements in their own units, a log risk. If onnxruntime's answers deviate from PyTorch's, nothing is written.

PyTorch's exporter by tracing is used: it needs only the package onnx, the newer one also onnxscript. A network that it
cannot translate is refused with its reason.
"""

from __future__ import annotations

import io
import json
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from client.exporting.calibration import TASKS as PROBABILITIES
from client.exporting.model_card import Card, Scale
from models.flat import FlatModel
from partitions.common.errors import UserError

OPSET = 17
CHECKED = (1, 7)  # batch sizes
TOLERANCE = 1e-4  # of an answer, absolute and relative


class Answering(nn.Module):
    """A network with its card's scaling of inputs and outputs, returning answers."""

    mean: Tensor
    std: Tensor

    def __init__(self, card: Card, net: nn.Module) -> None:
        super().__init__()
        self.net, self.task, self.scale = net, card.answering, card.normalisation
        self.temperature = card.divisor
        scale = self.scale or Scale(mean=0.0, std=1.0)
        self.register_buffer("mean", torch.tensor(scale.mean))
        self.register_buffer("std", torch.tensor(scale.std))

    def forward(self, x: Tensor) -> Tensor:
        """Return the answers (n, C, ...) of inputs (n, ...)."""
        outputs = self.net((x - self.mean) / self.std if self.scale else x) / self.temperature
        return self.task.predictions(outputs)


def _export(card: Card, module: nn.Module) -> bytes:
    """Return the ONNX file of a module that answers as the card says."""
    import onnx

    output = "probabilities" if card.task in (*PROBABILITIES, "segmentation") else "values"
    written: Any = io.BytesIO()
    with warnings.catch_warnings():
        # The exporter is the older one; shapes are constants
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (inputs(card, card.shape, 2),),
            written,
            input_names=["x"],
            output_names=[output],
            dynamic_axes={"x": {0: "n"}, output: {0: "n"}},
            opset_version=OPSET,
            dynamo=False,
        )
    model = onnx.load_from_string(written.getvalue())
    schema = card.schema_parsed
    onnx.helper.set_model_props(
        model,
        {
            "columns": json.dumps(schema.names),
            "labels": json.dumps(schema.labels),
            "model": card.model.name,
        },
    )
    content: bytes = model.SerializeToString()
    return content


def onnx_of(card: Card, net: FlatModel) -> tuple[bytes, float]:
    """Return an ONNX file of a model, and its largest difference from PyTorch.

    Raises UserError if the packages are missing, or if the network cannot be translated exactly.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ModuleNotFoundError as error:
        raise UserError(
            f"--onnx needs the package {error.name}: pip install 'silofl[onnx]'"
        ) from None
    shape, name = card.shape, card.model.name
    if not isinstance(shape[0], int) and shape[0] != "tokens":
        raise UserError(
            f"--onnx: {name} takes several inputs, which an ONNX file of ours has not"
        )
    module = Answering(card, net.module).eval()
    try:
        content = _export(card, module)
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        return content, max(
            difference(session, module, inputs(card, shape, n), name) for n in CHECKED
        )
    except UserError:
        raise
    except Exception as error:  # the exceptions of the two packages have no common type
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"--onnx: {name} cannot be written as ONNX ({reason[:200]}); leave --onnx out"
        ) from None


def difference(session: Any, module: nn.Module, x: Tensor, name: str) -> float:
    """Return the largest difference of answers. Raises UserError if it exceeds :data:`TOLERANCE`."""
    with torch.no_grad():
        ours = module(x).numpy()
    theirs = session.run(None, {"x": x.numpy()})[0]
    if ours.shape != theirs.shape or not np.allclose(
        ours, theirs, atol=TOLERANCE, rtol=TOLERANCE
    ):
        raise UserError(
            f"--onnx: {name} gives other answers in onnxruntime than in PyTorch; leave --onnx out"
        )
    return float(np.abs(ours - theirs).max())


def inputs(card: Card, shape: tuple[Any, ...], n: int) -> Tensor:
    """Return random inputs (n, ...) of the model's kind."""
    rng = np.random.default_rng(n)
    if shape[0] == "tokens":
        return torch.from_numpy(rng.integers(0, shape[2], (n, shape[1]), np.int32))
    if card.input.dtype == "uint8":
        return torch.from_numpy(rng.integers(0, 256, (n, *shape)).astype(np.float32))
    x = torch.from_numpy(rng.normal(size=(n, *shape)).astype(np.float32))
    scale = card.normalisation
    return x * torch.tensor(scale.std) + torch.tensor(scale.mean) if scale else x
