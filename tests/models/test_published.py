# mypy: disable-error-code="no-untyped-call,no-untyped-def"
"""The networks that torchvision and timm have: on the same weights ours say the same, and names are known."""

from __future__ import annotations

import pytest
import torch
from representatives import seldom
from torch.testing import assert_close
from torchvision_here import models_or_skip, timm_or_skip

from models.networks.registry import build, spec_of
from models.networks.vit import VitSettings
from models.weights import our_name


@pytest.fixture(scope="module")
def torchvision_models():
    return models_or_skip()


def small_vit(models):
    return models.VisionTransformer(
        32, 8, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536, num_classes=5
    )


THEIRS = {
    "resnet18": (lambda models: models.resnet18(num_classes=5), None),
    "resnet50": (lambda models: models.resnet50(num_classes=5), None),
    "densenet121": (lambda models: models.densenet121(num_classes=5), None),
    "vit-s": (small_vit, VitSettings(8)),
}


@pytest.mark.parametrize(
    "name", ["resnet18"] + [seldom(name) for name in THEIRS if name != "resnet18"]
)
def test_torchvisions_own_outputs(torchvision_models, name):
    """Every tensor finds its place by its name; then outputs are equal, and after a step in training they still are.

    Weights are drawn anew, for torchvision's transformer starts with a head of zeros, and normalisations with ones.
    """
    make, settings = THEIRS[name]
    torch.manual_seed(1)
    theirs, ours = make(torchvision_models), build(name, (3, 32, 32), 5, settings)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    own_names = {
        our_name(key, spec_of(name).published): tensor
        for key, tensor in theirs.state_dict().items()
    }
    # Strict: the same names and shapes, none missing, none too many
    ours.load_state_dict(own_names)
    x = torch.randn(4, 3, 32, 32)
    assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-4, atol=1e-4)
    losses = [network.train()(x).square().mean() for network in (ours, theirs)]
    assert_close(*losses, rtol=1e-4, atol=1e-5)
    gradients = []
    for network, loss in zip((ours, theirs), losses, strict=True):
        loss.backward()
        gradients.append(
            {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
        )
    named = {
        our_name(key, spec_of(name).published): gradient
        for key, gradient in gradients[1].items()
    }
    assert named.keys() == gradients[0].keys() == dict(ours.named_parameters()).keys()
    for key, gradient in gradients[0].items():
        assert (gradient - named[key]).norm() <= 1e-3 * named[key].norm() + 1e-6, key


@pytest.mark.parametrize("name", ["resnet50", "densenet121"])
def test_they_start_as_torchvision_does(torchvision_models, name):
    """The standard deviation of every convolution with over 30,000 weights is torchvision's within 2 %."""
    torch.manual_seed(2)
    theirs, ours = THEIRS[name][0](torchvision_models), build(name, (3, 32, 32), 5)
    own, seen = dict(ours.named_parameters()), 0
    for key, tensor in theirs.named_parameters():
        if tensor.dim() == 4 and tensor.numel() > 30_000:
            assert own[our_name(key, spec_of(name).published)].std().item() == pytest.approx(
                tensor.std().item(), rel=0.02
            )
            seen += 1
    assert seen > 20


@pytest.mark.parametrize(
    "name, theirs, settings",
    [
        ("resnet18", "resnet18", None),
        ("resnet50", "resnet50", None),
        ("densenet121", "densenet121", None),
        ("vit-s", "vit_small_patch16_224", VitSettings(8)),
    ],
)
@pytest.mark.exhaustive
def test_timms_own_outputs(name, theirs, settings):
    """Of weights that are drawn anew: timm's head begins with zeros."""
    more = {"img_size": 32, "patch_size": 8} if settings else {}
    network = timm_or_skip().create_model(theirs, num_classes=5, **more)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ours, x = build(name, (3, 32, 32), 5, settings), torch.randn(4, 3, 32, 32)
    names = {our_name(k, spec_of(name).published): v for k, v in network.state_dict().items()}
    ours.load_state_dict(names)
    assert torch.equal(ours.eval()(x), network.eval()(x))


def test_the_transformers_names_in_timms_files():
    """DeiT's and DINO's ViT-S/16 are published with these names (timm's)."""
    timm = [
        "cls_token",
        "pos_embed",
        "patch_embed.proj.weight",
        "blocks.11.attn.qkv.bias",
        "blocks.0.mlp.fc2.weight",
    ]
    ours = [
        "embed.cls_token",
        "embed.pos_embed",
        "embed.proj.weight",
        "block11.attn.qkv.bias",
        "block0.mlp.fc2.weight",
    ]
    assert [our_name(name, spec_of("vit-s").published) for name in timm] == ours
    same = [*ours, "norm.weight", "head.bias"]
    assert [our_name(name, spec_of("vit-s").published) for name in same] == same
