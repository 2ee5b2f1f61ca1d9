# mypy: disable-error-code="arg-type,index,operator,union-attr"
# To PyTorch an attribute of a module is a tensor or a module; the tests know which.
"""The networks: parameter counts of the papers, layer blocks, forward passes, refusals."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.nn.functional as F
from failing import fails
from near import near
from representatives import sampled
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from typical_inputs import TYPICAL

from models.networks.blocks import StemSettings
from models.networks.cnn import PlayerCnnSettings
from models.networks.fusion import ImageTextSettings
from models.networks.mlp import MlpSettings
from models.networks.registry import MODELS, build, model_settings, resolve
from models.networks.text import PlayerTransformerSettings
from models.networks.unet import UnetSettings
from models.networks.vit import VitSettings
from models.shapes import example, kind_of

KU_HAR = (("acc", (3, 128)), ("gyro", (3, 128)))
CREMA_D = (("audio", (80, 600)), ("video", (1280, 10)))
CRISIS = (("image", (1280,)), ("text", (512, 40)))
CONV_NETS = ["apple-cnn", "fedala-cnn", "diversifed-cnn", "fedapm-cnn", "small-cnn"]


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


def block_sizes(network):
    return {name: size(network.get_submodule(name)) for name in network.block_names}


@pytest.mark.parametrize(
    "name, shape, classes, count",
    [
        ("apple-cnn", (1, 28, 28), 10, 431_080),  # MNIST
        ("apple-cnn", (3, 28, 28), 10, 432_080),  # CIFAR-10 at 28x28
        ("apple-cnn", (1, 28, 28), 11, 431_581),  # OrganMNIST
        ("apple-cnn", (3, 28, 28), 9, 431_579),  # PathMNIST
        ("fedala-cnn", (1, 28, 28), 10, 582_026),  # MNIST
        ("fedala-cnn", (3, 32, 32), 10, 878_538),  # CIFAR-10
        ("fedala-cnn", (3, 32, 32), 100, 924_708),  # CIFAR-100
        ("fedala-cnn", (3, 64, 64), 200, 5_694_600),  # Tiny-ImageNet
        ("mlp", (1, 28, 28), 10, 50_890),  # DiversiFed, FMNIST
        ("diversifed-cnn", (3, 32, 32), 10, 62_006),  # CIFAR-10
        ("diversifed-cnn", (3, 32, 32), 9, 61_921),  # PathMNIST at 32x32
        ("resnet8", (3, 32, 32), 100, 1_258_404),  # CIFAR-100, Fling
        ("fedapm-cnn", (3, 32, 32), 10, 268_650),  # CIFAR-10
        ("player-cnn", (1, 28, 28), 10, 1_052_758),  # FMNIST
        ("player-cnn", (1, 28, 28), 62, 1_058_010),  # EMNIST
        ("player-cnn", (3, 32, 32), 10, 3_963_094),  # CIFAR-10
        ("player-cnn", (3, 200, 200), 4, 1_700_932),  # ISIC
        ("player-heart", (10,), 5, 2_095),
        # FedALA's table for Tiny-ImageNet, where ten outputs are counted
        ("resnet18", (3, 64, 64), 10, 11_181_642),
        # Tiny-ImageNet: torchvision's 11,689,512 with 800 outputs fewer
        ("resnet18", (3, 64, 64), 200, 11_279_112),
        # AG News: 98,635 * 32 + 32 * 33 + 4 * 33
        ("fasttext", ("tokens", 200, 98_635), 4, 3_157_508),
        # 7,084,034 beside the embeddings (see the docstring of PlayerTransformer), and 768 a token and a position.
        # Sent-140, 14.49 million
        ("player-transformer", ("tokens", 119, 9_524), 2, 14_489_858),
        # MIMIC-III, 17.33 million
        ("player-transformer", ("tokens", 512, 12_835), 2, 17_334_530),
        # Convolutions 512 + 10,304 + 41,088, GRU 99,072, of each; attention 69,126; 49,216 + 520.
        ("fedapm-signals", KU_HAR, 8, 420_814),
        # Convolutions 12,832 + 10,304 + 41,088, GRUs 99,072 and 541,440; 69,126; 49,216 + 260.
        ("fedapm-signals", CREMA_D, 4, 823_338),
        # 81,984; GRU 110,976; attention 35,332; 16,448 + 520
        ("fedapm-image-text", CRISIS, 8, 245_260),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),  # torchvision's published counts
        ("densenet121", (3, 224, 224), 1000, 7_978_856),
        ("vit-s", (3, 224, 224), 1000, 22_050_664),
        ("resnet50", (1, 28, 28), 1000, 25_557_032 - 2 * 64 * 49),  # two channels fewer
        # 991 classes of 1024 features fewer
        ("densenet121", (1, 28, 28), 9, 7_978_856 - 2 * 64 * 49 - 991 * 1025),
        ("linear", (30,), 2, 62),
        ("linear", (1, 28, 28), 10, 7_850),
        # 9 i o + 9 o o + 6 o a level of 16, 32, 64, 128 channels: 2,544 + 14,016 + 55,680 + 221,952 down, 147,840 +
        # 37,056 + 9,312 up, 16 * 2 + 2 out.
        ("unet", (1, 28, 28), 2, 488_434),
    ],
)
def test_parameter_counts_are_the_papers(name, shape, classes, count):
    assert size(build(name, shape, classes)) == count


def test_settings_change_the_network():
    """MLP 30-128-64-2: 30*128+128 + 128*64+64 + 64*2+2 = 3,968 + 8,256 + 130. Regression 30-2: 62.

    A 3x3 stem has 64*3*9 weights where the 7x7 one has 64*3*49: 7,680 fewer.
    """
    assert block_sizes(build("mlp", (30,), 2, MlpSettings("128, 64"))) == {
        "fc1": 3_968,
        "fc2": 8_256,
        "fc3": 130,
    }
    assert block_sizes(build("mlp", (30,), 2, MlpSettings(""))) == {"fc1": 62}
    for name in ("resnet8", "resnet18"):
        small, large = (
            block_sizes(build(name, (3, 32, 32), 10, StemSettings(stem)))
            for stem in ("3x3", "7x7")
        )
        assert large["stem"] - small["stem"] == 7_680
        assert {**large, "stem": 0} == {**small, "stem": 0}
    # 8x8 patches of one channel: 64 of 192 numbers fewer into each of 384; 12 tokens, and the first one, more than 4.
    patches = block_sizes(build("vit-s", (1, 32, 24), 10, VitSettings(8)))
    assert patches["embed"] == 384 * (64 + 1) + 384 * (1 + 12) + 384
    # The code's network for CrisisMMD: two layers, 163,968 and 16,512, for the picture; GRU 246,528; the rest KU-HAR's.
    crisis = block_sizes(
        build("fedapm-image-text", CRISIS, 8, ImageTextSettings(128, 6, projection=2))
    )
    assert crisis == {
        "image_fc": 180_480,
        "text_gru": 246_528,
        "attention": 69_126,
        "fc1": 49_216,
        "fc2": 520,
    }
    # Grey layout on colour pictures: two more channels into 64 kernels of 5x5.
    assert (
        size(build("player-cnn", (3, 28, 28), 10, PlayerCnnSettings("fmnist")))
        == 1_052_758 + 2 * 64 * 25
    )


def test_typical_covers_every_model():
    assert set(TYPICAL) == set(MODELS) - {
        "trees"
    }  # no gradient: tests/strategies/test_fedxgb.py
    assert {
        name: spec.settings for name, spec in MODELS.items() if spec.settings
    } == model_settings()


# ---- Layer blocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, shape, blocks",
    [
        ("apple-cnn", (1, 28, 28), "conv1 conv2 fc1 fc2"),
        ("fedala-cnn", (1, 28, 28), "conv1 conv2 fc1 fc2"),
        ("diversifed-cnn", (3, 32, 32), "conv1 conv2 fc1 fc2 fc3"),
        ("fedapm-cnn", (3, 32, 32), "conv1 conv2 fc1 fc2"),
        ("player-cnn", (1, 28, 28), "conv1 conv2 conv3 fc1 fc2"),
        ("player-cnn", (3, 32, 32), "conv1 conv2 conv3 conv4 conv5 fc1 fc2"),
        ("player-heart", (10,), "fc1 fc2 fc3 fc4"),
        ("mlp", (30,), "fc1 fc2"),
        ("small-cnn", (1, 8, 8), "conv1 conv2 fc1 fc2"),
        ("resnet8", (3, 32, 32), "stem layer1 layer2 layer3 fc"),
        ("resnet18", (3, 32, 32), "stem layer1 layer2 layer3 layer4 fc"),
        ("linear", (1, 8, 8), "fc1"),
        ("resnet50", (3, 32, 32), "stem layer1 layer2 layer3 layer4 fc"),
        ("densenet121", (3, 32, 32), "stem stage1 stage2 stage3 stage4 classifier"),
        ("vit-s", (3, 32, 32), f"embed {' '.join(f'block{i}' for i in range(12))} norm head"),
        ("unet", (3, 20, 28), "down0 down1 down2 down3 up2 up1 up0 out"),
        ("fasttext", ("tokens", 9, 30), "embedding fc1 fc2"),
        ("player-transformer", ("tokens", 9, 30), "embedding attention feedforward fc2"),
        ("fedapm-signals", (3, 40), "conv gru attention fc1 fc2"),
        ("fedapm-signals", (129, 40), "gru attention fc1 fc2"),
        ("fedapm-signals", (3, 7), "gru attention fc1 fc2"),
        ("fedapm-signals", KU_HAR, "acc_conv gyro_conv acc_gru gyro_gru attention fc1 fc2"),
        ("fedapm-signals", CREMA_D, "audio_conv audio_gru video_gru attention fc1 fc2"),
        ("fedapm-image-text", CRISIS, "image_fc text_gru attention fc1 fc2"),
        (
            "fedapm-image-text",
            (
                ("scan", (1, 8, 8)),
                ("keys", (5,)),
                ("notes", ("tokens", 9, 30)),
                ("ct", (1, 4, 8, 8)),
            ),
            "scan_conv keys_fc notes_embedding ct_conv scan_fc notes_gru ct_fc attention fc1 fc2",
        ),
    ],
)
def test_blocks_hold_every_tensor_once_and_in_order(name, shape, blocks):
    network = build(name, shape, 10)
    assert network.block_names == tuple(blocks.split())
    children = dict(network.named_children())
    in_blocks = [children[block] for block in network.block_names]
    for tensors in (nn.Module.parameters, nn.Module.buffers):
        expected = [
            id(tensor) for tensor in chain.from_iterable(tensors(block) for block in in_blocks)
        ]
        assert [id(tensor) for tensor in tensors(network)] == expected
        assert len(set(expected)) == len(expected)


def test_shared_parts_are_the_papers():
    """FedAPM shares its convolutions: 448 + 4,640 = 5,088 scalars.

    PLayer-FL's table gives the traffic of a round, 2 directions x clients x 4 bytes x shared scalars, for
    FMNIST and CIFAR (5 clients), ISIC and Heart (4). Its cuts: the convolutions, and fc1 + fc2 for Heart.
    """
    fedapm = block_sizes(build("fedapm-cnn", (3, 32, 32), 10))
    assert fedapm["conv1"] + fedapm["conv2"] == 5_088

    def megabytes(name, shape, classes, clients, shared):
        sizes = block_sizes(build(name, shape, classes))
        return 2 * clients * 4 * sum(sizes[block] for block in shared.split()) / 1e6

    convolutions = "conv1 conv2 conv3 conv4 conv5"
    near(megabytes("player-cnn", (1, 28, 28), 10, 5, "conv1 conv2 conv3"), 41.04, 0.005)
    near(megabytes("player-cnn", (3, 32, 32), 10, 5, convolutions), 156.43, 0.005)
    near(megabytes("player-cnn", (3, 200, 200), 4, 4, convolutions), 50.19, 0.005)
    near(megabytes("player-heart", (10,), 5, 4, "fc1 fc2") * 1e3, 50.24, 0.005)


def test_resnet_tensors_have_the_usual_names():
    """torchvision's ``resnet18``, prefix ``stem.`` aside; every stage but the first has a 1x1 shortcut."""

    def norm(prefix):
        return [
            f"{prefix}.{name}"
            for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        ]

    expected = ["conv1.weight", *norm("bn1")]
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            prefix = f"layer{stage}.{block}"
            expected += [f"{prefix}.conv1.weight", *norm(f"{prefix}.bn1")]
            expected += [f"{prefix}.conv2.weight", *norm(f"{prefix}.bn2")]
            if stage > 1 and block == 0:
                expected += [f"{prefix}.downsample.0.weight", *norm(f"{prefix}.downsample.1")]
    expected += ["fc.weight", "fc.bias"]
    network = build("resnet18", (3, 64, 64), 10)
    assert [name.removeprefix("stem.") for name in network.state_dict()] == expected


# ---- Forward passes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPICAL)
def test_logits_and_memory_layout(name):
    shape = TYPICAL[name]
    network = build(name, shape, 7).eval()
    x = example(shape, 5)
    logits = network(x)
    assert (
        logits.shape == (5, 7, *(shape[1:] if MODELS[name].per_pixel else ()))
        and logits.dtype == torch.float32
    )
    assert (logits < 0).any()  # no activation behind the last layer
    assert_close(network(x[2:3]), logits[2:3], rtol=1e-4, atol=1e-5)
    if kind_of(shape) == "picture":
        channels_last = x.contiguous(memory_format=torch.channels_last)
        assert_close(network(channels_last), logits, rtol=1e-4, atol=1e-5)


def plain_conv_net(network, x, padding):
    """The papers' order: convolution, ReLU, pooling; then fully connected layers with ReLU."""
    for name in ("conv1", "conv2"):
        layer = network.get_submodule(name)
        x = F.max_pool2d(F.relu(F.conv2d(x, layer.weight, layer.bias, padding=padding)), 2, 2)
    x = x.reshape(len(x), -1)
    last = network.block_names[-1]
    for name in network.block_names[2:]:
        layer = network.get_submodule(name)
        x = F.linear(x, layer.weight, layer.bias)
        x = x if name == last else F.relu(x)
    return x


@pytest.mark.parametrize("name", CONV_NETS)
def test_conv_nets_compute_what_the_papers_draw(name):
    """Pooling before the ReLU, as built, changes neither the logits nor the gradients."""
    torch.manual_seed(1)
    network = build(name, TYPICAL[name], 10)
    x = torch.randn(6, *TYPICAL[name])
    padding = 1 if name in ("fedapm-cnn", "small-cnn") else 0
    parameters = list(network.parameters())
    built, drawn = network(x), plain_conv_net(network, x, padding)
    assert torch.equal(built, drawn)
    for ours, theirs in zip(
        torch.autograd.grad(built.square().sum(), parameters),
        torch.autograd.grad(drawn.square().sum(), parameters),
        strict=True,
    ):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_player_cifar_computes_what_the_code_draws():
    """3x3 convolutions with padding 2 grow the picture: 32 -> 34 -> 36 -> 18 -> 20 -> 22 -> 11 -> 13."""
    torch.manual_seed(2)
    network = build("player-cnn", (3, 32, 32), 10).eval()
    x = torch.randn(2, 3, 32, 32)
    drawn = nn.Sequential(
        *(network.conv1, nn.ReLU(), nn.Dropout(0.3)),
        *(network.conv2, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)),
        *(network.conv3, nn.ReLU(), nn.Dropout(0.3)),
        *(network.conv4, nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3)),
        *(network.conv5, nn.ReLU(), nn.Dropout(0.3)),
    ).eval()
    features = drawn(x)
    assert features.shape == (2, 512, 13, 13)
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), network.fc1, nn.ReLU(), network.fc2
    )
    assert_close(network(x), head(features), rtol=1e-4, atol=1e-5)
    # Trained, both drop the same units: the same random numbers reach the same five places.
    torch.manual_seed(3)
    trained = network.train()(x)
    torch.manual_seed(3)
    assert_close(trained, head(drawn.train()(x)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "name, shape, settings, drops",
    [
        ("player-cnn", (1, 28, 28), None, False),
        ("player-cnn", (3, 32, 32), None, True),
        ("player-cnn", (3, 16, 16), PlayerCnnSettings("isic"), True),
        ("mlp", (30,), None, False),
        ("mlp", (30,), MlpSettings(dropout=0.5), True),
    ],
)
def test_dropout_only_where_stated_and_only_in_training(name, shape, settings, drops):
    torch.manual_seed(4)
    network = build(name, shape, 3, settings)
    x = torch.randn(4, *shape)
    assert torch.equal(network.train()(x), network(x)) is not drops
    assert torch.equal(network.eval()(x), network(x))


def test_residual_stages_halve_the_picture():
    """The papers' stem quarters the picture, the 3x3 one keeps it; every stage but the first halves it."""
    for stem, expected in (("7x7", [16, 16, 8, 4, 2]), ("3x3", [64, 64, 32, 16, 8])):
        network = build("resnet18", (3, 64, 64), 10, StemSettings(stem)).eval()
        x, sides = torch.randn(1, 3, 64, 64), []
        for name in network.block_names[:-1]:
            x = network.get_submodule(name)(x)
            sides.append(x.shape[-1])
        assert sides == expected
        assert x.shape[1] == 512


@sampled("name", TYPICAL, 2)
def test_networks_are_functions_of_their_tensors(name):
    """Given another network's tensors, a network gives the other one's logits and leaves its own alone."""
    torch.manual_seed(5)
    shape = TYPICAL[name]
    one, other = build(name, shape, 4).eval(), build(name, shape, 4).eval()
    before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    x = example(shape, 3)
    # Parameters, for PyTorch computes a GRU in another way where its weights need no gradient: last bits differ.
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(functional_call(one, tensors, (x,)), other(x))
    assert not torch.equal(one(x), other(x))
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.state_dict().items())


# ---- Initialisation ----------------------------------------------------------------------------------------


@sampled("name", TYPICAL, 2)
def test_the_seed_decides_the_start(name):
    def start(seed):
        torch.manual_seed(seed)
        return list(build(name, TYPICAL[name], 4).state_dict().values())

    assert all(torch.equal(a, b) for a, b in zip(start(7), start(7), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(start(7), start(8), strict=True))


def test_player_starts_kaiming_normal():
    """Standard deviation sqrt(2 / fan-in): conv2 of the FMNIST network has fan-in 64 * 25. With 204,800
    weights it is known to 0.16 % (1 / sqrt(2 * 204,800)), and 1 % is six times that. Biases are zero."""
    torch.manual_seed(9)
    network = build("player-cnn", (1, 28, 28), 10)
    assert network.conv2.weight.std().item() == pytest.approx((2 / 1600) ** 0.5, rel=0.01)
    for module in (network, build("player-heart", (10,), 5)):
        assert all(
            not tensor.any()
            for key, tensor in module.named_parameters()
            if key.endswith("bias")
        )


def test_other_networks_start_as_pytorch_does():
    """Uniform within 1 / sqrt(fan-in): conv2 of APPLE's network has fan-in 20 * 25, bound 0.0447."""
    torch.manual_seed(10)
    network = build("apple-cnn", (1, 28, 28), 10)
    bound = 500**-0.5
    assert 0.99 * bound < network.conv2.weight.abs().max().item() <= bound
    assert 0.5 * bound < network.conv2.bias.abs().max().item() <= bound


def test_residual_networks_start_as_torchvision_does():
    """Kaiming-normal by fan-out: layer3's first 3x3 convolution has 256 outputs and fan-out 256 * 9, so a
    standard deviation of sqrt(2 / 2304). Its fan-in, 128 * 9, would give a 1.41 times larger one."""
    torch.manual_seed(11)
    network = build("resnet8", (3, 32, 32), 10)
    weight = network.layer3[0].conv1.weight
    assert weight.shape == (256, 128, 3, 3)
    assert weight.std().item() == pytest.approx((2 / 2304) ** 0.5, rel=0.01)


# ---- Choice and refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, name",
    [
        ((1, 8, 8), "small-cnn"),
        ((3, 16, 40), "small-cnn"),
        ((1, 28, 28), "fedala-cnn"),
        ((3, 28, 28), "fedala-cnn"),
        ((3, 32, 32), "fedala-cnn"),
        ((1, 28, 32), "player-cnn"),
        ((1, 17, 63), "player-cnn"),
        ((3, 64, 64), "resnet18"),
        ((1, 28, 28, 28), "small-cnn"),
        ((1, 8, 64, 64), "small-cnn"),
        ((1, 64, 64, 64), "resnet18"),
        ((1, 3, 64, 64), "mlp"),
        ((1, 3, 3), "mlp"),
        ((30,), "mlp"),
        ((3, 128), "fedapm-signals"),
        ((512, 40), "fedapm-signals"),
        (("tokens", 9, 30), "fasttext"),
        (KU_HAR, "fedapm-signals"),
        (CREMA_D, "fedapm-signals"),
        (CRISIS, "fedapm-image-text"),
        ((("ecg", (12, 100)), ("age", (1,))), "fedapm-signals"),
        (
            (("scan", (3, 28, 28)), ("age", (1,)), ("notes", ("tokens", 9, 30))),
            "fedapm-image-text",
        ),
    ],
)
def test_auto_goes_by_the_shape(shape, name):
    assert resolve("auto", shape) == name
    torch.manual_seed(12)
    chosen = build("auto", shape, 3).state_dict()
    torch.manual_seed(12)
    named = build(name, shape, 3).state_dict()
    assert chosen.keys() == named.keys() and all(
        torch.equal(chosen[key], named[key]) for key in named
    )


@pytest.mark.parametrize(
    "name", [name for name in TYPICAL if kind_of(TYPICAL[name]) == "picture"]
)
def test_the_smallest_picture_works_and_a_smaller_one_is_refused(name):
    least = MODELS[name].smallest
    assert f"at least {least}x{least}" in MODELS[name].takes
    settings = VitSettings(patch=1) if name == "vit-s" else None
    assert build(name, (2, least, least), 3, settings).eval()(
        torch.randn(1, 2, least, least)
    ).shape[:2] == (1, 3)
    for shape in ((2, least - 1, 64), (2, 64, least - 1)):
        with pytest.raises(
            ValueError, match=f"'{name}' cannot take .*at least {least}x{least}"
        ):
            build(name, shape, 3)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("fedala-cn", (1, 28, 28), 10), r"unknown model 'fedala-cn'; there are: "),
        (
            ("transformer", (1, 28, 28), 10),
            r"unknown model 'transformer'; there are: auto, apple-cnn, ",
        ),
        (
            ("apple-cnn", (30,), 2),
            r"'apple-cnn' cannot take .* \(30,\): it takes pictures \(c, h, w\)",
        ),
        (("player-heart", (1, 28, 28), 10), r"'player-heart' cannot take .*tables \(d,\)"),
        (
            ("mlp", (2, 2, 2, 2, 2), 10),
            r"a volume \(c, d, h, w\), a text or several of them, not of shape \(2, 2, 2, 2, 2\)",
        ),
        (
            ("apple-cnn", (1, 28, 28, 28), 2),
            r"'apple-cnn' cannot take .* \(1, 28, 28, 28\): it takes pictures",
        ),
        (
            ("small-cnn", (1, 8, 3, 8), 2),
            r"'small-cnn' cannot take .*volumes \(c, d, h, w\) of at least 4x4x4",
        ),
        (("unet", (1, 7, 8, 8), 2), r"'unet' cannot take .* of at least 8x8x8"),
        (("mlp", ("tokens", 9, 30), 2), r"'mlp' cannot take .*tables \(d,\), and signals"),
        (("fasttext", (3, 40), 2), r"'fasttext' cannot take .* texts of tokens \(t,\)"),
        (
            ("player-transformer", ("tokens", 9, 30), 2, PlayerTransformerSettings(heads=5)),
            r"player-transformer.heads = 5 does not divide a width of 768",
        ),
        (
            ("auto", (("scan", (1, 3, 8)), ("age", (1,))), 2),
            r"pictures of \(3, 8\) are too small: 4 pixels a side",
        ),
        (("mlp", (1, 2, 3, 4, 5), 2), r"not of shape \(1, 2, 3, 4, 5\)"),
        (("auto", (), 10), r"not of shape \(\)"),
        (("mlp", (0,), 10), r"not of shape \(0,\)"),
        (
            ("vit-s", (1, 28, 42), 2),
            r"vit-s.patch = 16 does not divide .* \(28, 42\); these do: 14, 7, 2, 1$",
        ),
        (
            ("vit-s", (1, 66, 66), 2, VitSettings(1)),
            r"vit-s.patch = 1 cuts .*\(66, 66\) into 4356 patches: 4096 are",
        ),
        (
            ("unet", (1, 16, 60), 2, UnetSettings(levels=5)),
            r"unet.levels = 5 halves pictures of \(16, 60\) to nothing",
        ),
    ],
)
def test_bad_input_gives_one_clear_line(arguments, message):
    fails(ValueError, message, build, *arguments)


@pytest.mark.parametrize("hidden", ["64,x", "0"])
def test_widths_that_are_none(hidden):
    with pytest.raises(
        ValueError, match=rf"^mlp.hidden must be widths such as '128,64', not '{hidden}'"
    ):
        MlpSettings(hidden)


# ---- Learning ----------------------------------------------------------------------------------------------


def test_small_cnn_learns_digits():
    """1,437 of scikit-learn's 8x8 digits, ten epochs of plain SGD; the 360 others are held out."""
    from sklearn.datasets import load_digits

    torch.manual_seed(13)
    pictures, labels = load_digits(return_X_y=True)
    x = torch.tensor(pictures, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(labels)
    order = torch.randperm(len(y))
    training, held_out = order[:1437], order[1437:]
    network = build("auto", (1, 8, 8), 10)
    parameters = list(network.parameters())
    for _ in range(10):
        for batch in training[torch.randperm(len(training))].split(32):
            gradients = torch.autograd.grad(
                F.cross_entropy(network(x[batch]), y[batch]), parameters
            )
            with torch.no_grad():
                torch._foreach_add_(parameters, gradients, alpha=-0.1)
    accuracy = (network(x[held_out]).argmax(1) == y[held_out]).double().mean().item()
    assert accuracy > 0.96, accuracy
