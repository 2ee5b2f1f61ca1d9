# mypy: disable-error-code="no-untyped-call"
"""torchvision beside a build of PyTorch that is not its pair: its compiled operators cannot be loaded there."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

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
    command = [sys.executable, "-c", f"from {__name__} import import_models; import_models()"]
    paths = os.pathsep.join(filter(None, sys.path))
    tried = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        said = tried.stderr.strip().splitlines()
        pytest.skip(
            f"torchvision cannot be imported here (exit {tried.returncode}): {said[-1] if said else ''}"
        )
    return import_models()
