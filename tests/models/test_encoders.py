"""The example encoders, with the real libraries and small networks of random weights: no hub can be reached here."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hospitals import hospital_files
from near import near
from safetensors.torch import save_file
from tiny import federate
from torchvision_here import models_or_skip, timm_or_skip

from models.samples import BYTE_MEAN, BYTE_STD

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
RUN = {"trainable": "head", "rounds": 2, "batch_size": 8, "normalization": "none"}


@pytest.fixture(params=["timm_vit", "huggingface_vit"])
def encoder(request, monkeypatch):
    """An example's module, whose network is made small."""
    monkeypatch.syspath_prepend(EXAMPLES)
    models_or_skip()  # both libraries import torchvision where it is installed
    if request.param == "timm_vit":
        timm_or_skip()
    module = importlib.import_module(f"encoders.{request.param}")
    if request.param == "timm_vit":
        monkeypatch.setattr(module, "NAME", "test_vit")
    else:
        small = module.ViTConfig(hidden_size=32, image_size=16, patch_size=4, **SIZES)
        monkeypatch.setattr(module, "CONFIG", small)
    return module


@pytest.mark.exhaustive  # the libraries take long to import
def test_a_head_is_trained_on_the_embeddings_of_the_weights(encoder, tmp_path, monkeypatch):
    """A grey picture of 8 x 8: what a silo keeps is what the file's encoder makes, and it sends a head."""
    torch.manual_seed(3)
    network = encoder.network((1, 8, 8), 3).eval()
    save_file(network.state_dict(), tmp_path / "encoder.safetensors")
    monkeypatch.setenv("SILOFL_WEIGHTS", str(tmp_path))
    file = hospital_files(tmp_path, "multilabel")["north"]
    run = federate(
        {"north": file},
        "fedavg",
        model=f"{encoder.__name__}:network",
        init_weights=str(tmp_path / "encoder.safetensors"),
        state_dir=tmp_path / "states",
        **RUN,
    )
    seen: list[torch.Tensor] = []
    network.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    x = torch.from_numpy(np.load(file)["x"]).float().unsqueeze(1)
    with torch.no_grad():
        network((x - BYTE_MEAN) / BYTE_STD)
    kept = [np.load(file) for file in (tmp_path / "states").rglob(".embeddings/*.npy")]
    assert sum(map(len, kept)) == len(x)
    apart = torch.from_numpy(np.concatenate(kept))[:, None] - seen[0]
    near(apart.abs().amax(2).amin(1), torch.zeros(len(x)), 1e-5)
    assert len(run.received("north", 1)) == 3 * (seen[0].shape[1] + 1)
    assert not torch.equal(run.received("north", 1), run.shared)
