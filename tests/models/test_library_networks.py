"""Networks of MONAI, torchvision and timm as one's own: blocks, free parameters, several answers in training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from near import near
from representatives import seldom
from tiny import federate

from models.flat import FlatModel
from models.networks.custom import CustomSettings
from models.networks.outputs import LossOfSeveral
from models.networks.registry import build
from models.tasks import task_of
from partitions.common.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore")  # MONAI's own imports

OUTLINES = {
    "unet": "model.0 model.1 model.2",
    "dynunet": "input_block downsamples bottleneck upsamples output_block",
    "deep_dynunet": "input_block downsamples bottleneck upsamples output_block",
    "segresnet": "encoder up_layers",
    "unetr": "vit encoder1 encoder2 encoder3 encoder4 decoder5 decoder4 decoder3 decoder2 out",
    "swin_unetr": "swinViT "
    "encoder1 encoder2 encoder3 encoder4 encoder10 decoder5 decoder4 decoder3 decoder2 decoder1 out",
    "auxiliary": "body head",
}
CLASSES = {
    "two_answers": "body aux fc",
    "vit_answers": "vit.cls_token vit.patch_embedding vit.blocks vit.norm vit.classification_head",
    "vit_b_16": "class_token conv_proj encoder heads",
    "convnext": "features classifier",
    "efficientnet": "features classifier",
    "timm_vit": "cls_token pos_embed patch_embed blocks norm head",
    "timm_resnet": "conv1 bn1 layer1 layer2 layer3 layer4 fc",
    "timm_convnext": "stem stages head",
    "own_vit": "cls_token pos_embed patch_embed blocks head",
    "wrapped": "0.0 0.1 0.4",
}
WITH_NORM = ("segresnet", "auxiliary", "efficientnet", "timm_resnet", "wrapped")


def run(tmp_path, name, **changes):
    """One round of two silos with four pictures each, or outlines of them."""
    side = 64 if name == "swin_unetr" else 32
    files = {}
    for i, silo in enumerate("ab"):
        x = np.random.default_rng(i).random((4, 3, side, side), np.float32)
        y = np.arange(4) % 2 if name in CLASSES else (x[:, 0] > 0.5).astype(np.uint8)
        arrays: dict[str, Any] = {
            f"{k}_{s}": v for s in ("train", "test") for k, v in (("x", x), ("y", y))
        }
        if name not in CLASSES:
            arrays["task"] = np.array("segmentation")
        files[silo] = tmp_path / f"{silo}.npz"
        np.savez(files[silo], classes=np.array(2), **arrays)
    own = {
        "batch_size": 4,
        "learning_rate": 0.1,
        "model": f"library_networks:{name}",
        "rounds": 1,
    }
    return federate(files, **{**own, **changes})


# MONAI's take seconds to import, and to train
SLOW = [
    name for name in (*OUTLINES, *CLASSES) if name in [*OUTLINES][:6] or name == "vit_answers"
]


@pytest.mark.parametrize(
    "name", [seldom(name) if name in SLOW else name for name in (*OUTLINES, *CLASSES)]
)
def test_blocks_and_a_round(name, tmp_path):
    """FedAvg sends all, FedPer all but the last block, FedBN all but normalisation, where there is some."""
    blocks = (OUTLINES | CLASSES)[name]
    side = 64 if name == "swin_unetr" else 32
    settings = CustomSettings(per_pixel=name in OUTLINES)
    layout = FlatModel(build(f"library_networks:{name}", (3, side, side), 2, settings)).layout
    assert " ".join(block.name for block in layout.blocks) == blocks
    assert bool(layout.norms) == (name in WITH_NORM)
    sent = {"fedavg": layout.size, "fedper": layout.blocks[-1].start}
    sent["fedbn"] = sum(part.stop - part.start for part in layout.norm_parts(False))
    for method, size in sent.items():
        if method == "fedbn" and not layout.norms:
            with pytest.raises(UserError, match="keeps batch normalisation in the silo"):
                run(tmp_path, name, strategy=method)
            continue
        done = run(tmp_path, name, strategy=method)
        assert len(done.strategy.state.model) == size
        assert np.isfinite(done.values("loss", "a", "received")).all()


@pytest.mark.parametrize(
    "name, said",
    [
        (
            "unet_plus",
            r"it makes list, where outputs of shape \(2, 2, 32, 32\) are wanted in evaluation",
        ),
        ("monai_vit", r"it makes tuple, where outputs of shape \(2, 2, 32, 32\) are wanted"),
    ],
)
@pytest.mark.exhaustive
def test_several_answers_in_evaluation_are_refused(name, said):
    with pytest.raises(UserError, match=f"{said}: let it return one answer"):
        build(f"library_networks:{name}", (3, 32, 32), 2, CustomSettings(per_pixel=True))


@pytest.mark.parametrize(
    "changes",
    [{"dp": "true"}, {"strategy": "apfl", "apfl__mix": "logits"}, {"strategy": "fedlc"}],
)
def test_what_needs_one_answer_is_refused(changes, tmp_path):
    """Each silo says it in one line."""
    with pytest.raises(
        Exception, match=r"gives several answers in training \(deep supervision\), and"
    ):
        run(tmp_path, "two_answers", **{"strategy": "fedavg", **changes})


def test_the_loss_of_several_answers_is_monais():
    """Halved from one to the next, masks in each answer's size; one answer, in evaluation, has the loss itself."""
    from monai.losses import DeepSupervisionLoss

    loss: Any = task_of("segmentation").loss("cross-entropy", 0)
    answers = tuple(torch.randn(2, 3, side, side) for side in (16, 8, 4))
    y = torch.randint(0, 3, (2, 16, 16))

    of_channels: Any = lambda own, masks: loss(own, masks[:, 0].long())  # noqa: E731

    theirs = DeepSupervisionLoss(of_channels)([*answers], y[:, None].float())
    near(LossOfSeveral(loss)(answers, y), theirs, 1e-5)
    assert torch.equal(LossOfSeveral(loss)(answers[0], y), loss(answers[0], y))


def test_a_head_of_training_belongs_to_the_last_block():
    """The further answer's layer, made last, is personal with the answer's own, and has no part in evaluation."""
    network = build("library_networks:auxiliary", (3, 8, 8), 2, CustomSettings(per_pixel=True))
    layout = FlatModel(network).layout
    assert [e.name for e in layout.parameters if e.start >= layout.blocks[-1].start] == [
        "head.weight",
        "head.bias",
        "aux.weight",
        "aux.bias",
    ]
    x = torch.zeros(2, 3, 8, 8)
    assert isinstance(network.eval()(x), torch.Tensor) and len(network.train()(x)) == 2
