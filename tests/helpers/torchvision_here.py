# mypy: disable-error-code="no-untyped-call"
"""torchvision beside a build of PyTorch that is not its pair: its compiled operators cannot be loaded there.

Its networks alone are compared all the same; what users are told to run is imported as they import it.
"""

from __future__ import annotations

import contextlib
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from forks import in_fork

# What torchvision registers for its compiled operators, whose libraries are not always there beside torch's CPU wheel.
# The networks use none of them.
COMPILED = ("nms", "qnms")


def import_models() -> Any:
    """Import torchvision's networks, also where its compiled operators cannot be loaded without them."""
    try:
        import torchvision.models
    except (ImportError, RuntimeError):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in COMPILED:
            with contextlib.suppress(RuntimeError):  # it is there
                library.define(
                    f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        import torchvision.models
    return torchvision.models


def models_or_skip() -> Any:
    """Try it in a process of its own first: beside another build of PyTorch the import can abort the process."""
    if code := _tried():
        pytest.skip(
            f"torchvision cannot be imported here (exit {code}), and standard error says why"
        )
    return import_models()


def whole_or_skip() -> None:
    """Skip where torchvision cannot be imported as the documents' examples, and Lightning, import it."""
    if in_fork(lambda: __import__("torchvision.transforms.v2")):
        pytest.skip("torchvision is no pair of torch here, as `make install` says")


def timm_or_skip() -> Any:
    """Import timm, which `make install` does not bring, behind torchvision."""
    models_or_skip()
    return pytest.importorskip("timm", reason="timm is not installed: pip install timm")


@cache
def _tried() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return in_fork(import_models)
