# mypy: disable-error-code="arg-type,index,operator,union-attr"
# To PyTorch an attribute of a module is a tensor or a module; the tests know which.
"""Networks for texts, signals and several inputs: by hand, against plain PyTorch, padding, what is missing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from near import near
from torch import nn

from models.flat import FlatModel
from models.networks.fusion import (
    FusedAttention,
    Fusion,
    Gru,
    ImageTextSettings,
    SignalsSettings,
    halve_mask,
)
from models.networks.registry import build
from models.networks.text import (
    FastText,
    FastTextSettings,
    PlayerTransformer,
    PlayerTransformerSettings,
)
from models.shapes import batch_type, example, real_steps

SMALL = SignalsSettings(width=4, heads=2, filters=3, dropout=0.0)
SEVERAL = (
    ("ecg", (2, 24)),
    ("video", (130, 5)),
    ("age", (3,)),
    ("notes", ("tokens", 7, 11)),
    ("scan", (1, 8, 8)),
)


def several(n=3):
    """A batch of SEVERAL in which every step is real."""
    torch.manual_seed(1)
    batch = example(SEVERAL, n)
    return batch._replace(notes=batch.notes.clamp(min=1))


# ---- fastText --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mean, expected", [("all", [3.0, 5.0]), ("words", [5.5, 7.5])])
def test_fasttext_by_hand(mean, expected):
    """Vocabulary 3 with rows (0, 0), (1, 2), (4, 6); the text (1, 2, 0, 0) of 4 positions.

    Sum (5, 8); over 4 positions (1.25, 2), over 2 words (2.5, 4). fc1 = [[2, 0], [0, 1]] + (0.5, 0): (3, 2), or
    (5.5, 4). fc2 = [[1, 0], [1, 1]] + (0, 0): (3, 5), or (5.5, 9.5). Without words the mean is 0: fc1 (0.5, 0),
    fc2 (0.5, 0.5).
    """
    network = FastText(("tokens", 4, 3), 2, FastTextSettings(width=2, mean=mean))
    with torch.no_grad():
        network.embedding.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 2.0], [4.0, 6.0]]))
        network.fc1.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        network.fc1.bias.copy_(torch.tensor([0.5, 0.0]))
        network.fc2.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
        network.fc2.bias.zero_()
    logits = network(torch.tensor([[1, 2, 0, 0], [0, 0, 0, 0]], dtype=torch.int32))
    expected = [3.0, 5.0] if mean == "all" else [5.5, 9.5]
    assert logits.tolist() == [expected, [0.5, 0.5]]


def test_the_token_without_a_word_starts_at_zero_and_learns_nothing():
    model = FlatModel(FastText(("tokens", 4, 3), 2, FastTextSettings(width=2)))
    assert not model.vector[:2].any() and model.vector[2:6].all()
    F.cross_entropy(model.module(torch.tensor([[1, 0, 0, 0]])), torch.tensor([0])).backward()
    assert (
        not model.gradient[:2].any()
        and model.gradient[2:4].any()
        and not model.gradient[4:6].any()
    )


# ---- PLayer-FL's transformer -----------------------------------------------------------------------------------------


def drawn(network, x):
    """The whole sequence, text by text and without padding, as the code draws it: then the first position."""
    logits = []
    for row in x:
        length = int(real_steps(row[None]).sum().clamp(min=1))
        h = (
            network.embedding.tokens.weight[row[:length].long()]
            + network.embedding.positions[:length]
        )
        a = network.attention
        q, k, v = h @ a.query.weight.T, h @ a.key.weight.T, h @ a.value.weight.T
        heads = [
            torch.softmax(qh @ kh.T / qh.shape[1] ** 0.5, 1) @ vh
            for qh, kh, vh in zip(*(part.chunk(a.heads, 1) for part in (q, k, v)), strict=True)
        ]
        h = h + a.proj(torch.cat(heads, 1))
        h = h + network.feedforward.resid1(F.relu(network.feedforward.fc1(h)))
        logits.append(network.fc2(h[0]))
    return torch.stack(logits)


@pytest.mark.parametrize("heads", [1, 2])
def test_the_transformer_computes_what_its_code_draws(heads):
    """Logits and gradients, of full, short and empty texts; only the first position is ever computed here."""
    network = PlayerTransformer(("tokens", 5, 9), 3, PlayerTransformerSettings(8, 16, heads))
    x = torch.tensor(
        [[1, 2, 3, 4, 5], [6, 7, 0, 0, 0], [8, 0, 1, 0, 0], [0, 0, 0, 0, 0]], dtype=torch.int32
    )
    ours, theirs = network(x), drawn(network, x)
    near(ours, theirs, 1e-5)
    parameters = list(network.parameters())
    for one, other in zip(
        torch.autograd.grad(ours.square().sum(), parameters),
        torch.autograd.grad(theirs.square().sum(), parameters),
        strict=True,
    ):
        near(one, other, 1e-5)


def test_the_transformer_starts_as_its_code_does():
    """Embeddings of length 1; Kaiming-normal weights, sqrt(2 / 768) for the first layer of 3072, biases at zero."""
    torch.manual_seed(3)
    network = build("player-transformer", ("tokens", 9, 30), 2)
    for table in (network.embedding.tokens.weight, network.embedding.positions):
        near(table.norm(dim=1), torch.ones(len(table)), 1e-5)
    assert network.feedforward.fc1.weight.std().item() == pytest.approx(
        (2 / 768) ** 0.5, rel=0.01
    )
    assert all(not p.any() for name, p in network.named_parameters() if name.endswith("bias"))


def test_the_slides_megabytes_are_those_of_the_implied_sizes():
    """2 directions x silos x 4 bytes: MIMIC-III with 4 silos 554.7 MB, and 479.1 without fc2 and one layer before it;
    Sent-140 with 15 silos 1.7 GB, of which the same saves 16.3 %.
    """

    def sizes(length, vocabulary):
        with torch.device("meta"):
            network = PlayerTransformer(
                ("tokens", length, vocabulary), 2, PlayerTransformerSettings()
            )
        own = sum(
            p.numel()
            for layer in (network.fc2, network.feedforward.resid1)
            for p in layer.parameters()
        )
        return sum(p.numel() for p in network.parameters()), own

    whole, own = sizes(512, 12_835)
    near((8 * 4 * whole / 1e6, 8 * 4 * (whole - own) / 1e6), (554.7, 479.1), 0.05)
    whole, own = sizes(119, 9_524)
    assert 8 * 15 * whole / 1e9 == pytest.approx(
        1.7, abs=0.05
    ) and 100 * own / whole == pytest.approx(16.3, abs=0.05)


# ---- FedAPM's networks -----------------------------------------------------------------------------------------------


def test_real_steps():
    """Up to the last step that is not zero, gaps too; a signal's by any of its channels."""
    tokens = torch.tensor([[3, 0, 2, 0], [0, 0, 0, 0], [0, 0, 0, 1]], dtype=torch.int32)
    assert real_steps(tokens).int().tolist() == [[1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    signal = torch.tensor([[[0.0, 0.0, -1.0, 0.0], [2.0, 0.0, 0.0, 0.0]]])
    assert real_steps(signal).int().tolist() == [[1, 1, 1, 0]]


def test_poolings_halve_the_lengths():
    """5 -> 2 -> 1 -> 1, and 1 stays 1: what is there keeps a step; 16 -> 8 -> 4 -> 2, as L // 8."""
    lengths = [[0, 1, 5, 15, 16]]
    real = torch.arange(16) < torch.tensor(lengths[0])[:, None]
    for _ in range(3):
        real = halve_mask(real)
        lengths.append(real.sum(1).tolist())
    assert lengths[1:] == [[0, 1, 2, 7, 8], [0, 1, 1, 3, 4], [0, 1, 1, 1, 2]]
    assert real.shape == (5, 2)


def test_the_gru_is_pytorchs():
    ours, theirs, x = Gru(3, 4), nn.GRU(3, 4, batch_first=True), torch.randn(2, 6, 3)
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(x), theirs(x)[0])
    # Uniform within 1 / sqrt(width)
    assert all(0.2 < p.abs().max() <= 0.25 for p in Gru(9, 16).parameters())


def test_attention_by_hand():
    """Width 1, states (1, 3, 100), the last not real. With fc1 = 0 all scores are equal: the mean of the real ones, 2.

    With scores tanh(h) * 1000 nearly equal at 3 and 1 (tanh 0.76 and 0.995): all goes to 3. Nothing real: 0.
    """
    attention = FusedAttention(1, 1)
    x, real = torch.tensor([[[1.0], [3.0], [100.0]]]), torch.tensor([[True, True, False]])
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.zero_()
        assert attention(x, real).tolist() == [[2.0]]
        attention.fc1.weight[0] = 1.0
        attention.fc2.weight[0, 0] = 1000.0
        assert attention(x, real).tolist() == [[3.0]]
        assert attention(x, ~real).tolist() == [[100.0]]
        assert attention(x, torch.zeros_like(real)).tolist() == [[0.0]]


def test_ku_har_computes_what_its_code_draws():
    """Full windows: convolution, ReLU, pooling three times, GRU, for each; softmax over all steps; two layers."""
    network = build("fedapm-signals", (("acc", (3, 64)), ("gyro", (3, 64))), 8).eval()
    batch = batch_type(("acc", "gyro"))(torch.randn(2, 3, 64), torch.randn(2, 3, 64))
    states = []
    for name, x in batch._asdict().items():
        encoder = network.get_submodule(f"{name}_conv")
        for layer in (encoder.conv1, encoder.conv2, encoder.conv3):
            x = F.max_pool1d(F.relu(layer(x)), 2)
        gru = nn.GRU(128, 128, batch_first=True)
        gru.load_state_dict(network.get_submodule(f"{name}_gru").state_dict())
        states.append(gru(x.mT)[0])
    h = torch.cat(states, 1)
    assert h.shape == (2, 16, 128)
    weights = torch.softmax(network.attention.fc2(torch.tanh(network.attention.fc1(h))), 1)
    fused = torch.cat([(weights[..., [k]] * h).sum(1) for k in range(6)], 1)
    near(network(batch), network.fc2(F.relu(network.fc1(fused))), 1e-5)


def test_dropout_is_where_the_code_has_it():
    """Of a signal behind each of three poolings and before the last layer, of a vector behind its layer."""
    network = build(
        "fedapm-signals", (("ecg", (2, 24)), ("age", (3,))), 2, SignalsSettings(dropout=0.5)
    )
    assert [type(m) for m in network.age_fc] == [nn.Linear, nn.ReLU, nn.Dropout]
    assert network.ecg_conv.dropout == network.age_fc[2].p == network.dropout == 0.5
    assert (
        FlatModel(network).has_dropout and not FlatModel(Fusion((2, 24), 2, SMALL)).has_dropout
    )
    x = several()
    x = batch_type(("ecg", "age"))(x.ecg, x.age)
    assert not torch.equal(network(x), network(x))
    assert torch.equal(network.eval()(x), network(x))


@pytest.mark.parametrize("channels, steps", [(2, 24), (2, 21), (130, 5)])
def test_padding_changes_nothing(channels, steps):
    """A signal, and the same with zeros behind it; one that is odd in length loses its last step to pooling anyway."""
    x = torch.randn(3, channels, steps)
    network = Fusion((channels, steps), 2, SMALL)
    for more in (1, 8, 19):
        near(network(F.pad(x, (0, more))), network(x), 1e-5)


@pytest.mark.parametrize("name", ["fedapm-image-text", "player-transformer"])
def test_padding_of_a_text_changes_nothing(name):
    network = build(name, ("tokens", 9, 30), 2).eval()
    x = F.pad(example(("tokens", 5, 30), 4).clamp(min=1), (0, 4))
    before = network(x)
    if name == "fedapm-image-text":
        near(network(x[:, :5]), before, 1e-5)
    with torch.no_grad():  # what stands for no word
        network.get_submodule(
            "embedding.tokens" if name == "player-transformer" else "embedding"
        ).weight[0] = 7.0
    near(network(x), before, 1e-5)


@pytest.mark.parametrize("name", [name for name, _ in SEVERAL])
def test_a_missing_input_changes_nothing_whatever_its_encoder_is(name):
    """Missing in sample 1 alone: there the weights of its encoder play no part, and get no gradient; in 0 they do."""
    network = Fusion(SEVERAL, 2, SMALL)
    batch = several()
    batch = batch._replace(**{name: getattr(batch, name).clone()})
    getattr(batch, name)[1] = 0
    own = [p for key, p in network.named_parameters() if key.startswith(f"{name}_")]
    assert own
    before = network(batch)
    found = torch.autograd.grad(before[1].sum(), own, retain_graph=True)
    assert not any(g.any() for g in found)
    assert all(g.any() for g in torch.autograd.grad(before[0].sum(), own))
    with torch.no_grad():
        for parameter in own:
            parameter.add_(0.3)
    after = network(batch)
    assert torch.equal(after[1], before[1]) and not torch.equal(after[0], before[0])


def test_where_everything_is_missing_the_output_is_finite():
    """It is that of the two last layers alone, and so is its gradient."""
    network = Fusion(SEVERAL, 2, SMALL)
    batch = type(several())(*(torch.zeros_like(part) for part in several()))
    logits = network(batch)
    expected = network.fc2(network.fc1.bias.relu())
    near(logits, expected.expand(3, 2), 1e-5)
    logits.sum().backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in network.parameters())


def test_a_model_of_several_inputs_is_one_vector():
    """After ``load`` it says what another network with these weights says; gradients are in the one gradient."""
    one = FlatModel(Fusion(SEVERAL, 2, SMALL))
    other = FlatModel(Fusion(SEVERAL, 2, SMALL))
    x = several()
    before = one.module(x)
    one.load(other.vector)
    assert torch.equal(one.module(x), other.module(x)) and not torch.equal(
        one.module(x), before
    )
    one.module(x).square().sum().backward()
    for entry, parameter in zip(one.layout.parameters, one.parameters, strict=True):
        assert parameter.data_ptr() == one.vector[entry.start :].data_ptr()
        assert (
            parameter.grad.data_ptr() == one.gradient[entry.start :].data_ptr()
            and parameter.grad.any()
        ), entry.name


def test_crisis_mmd_with_ready_features():
    """A picture's vector is one step of the time that attention runs over, before the text's."""
    shape = (("image", (1280,)), ("text", (512, 40)))
    network = build("fedapm-image-text", shape, 8, ImageTextSettings(dropout=0.0))
    seen = []
    network.attention.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    batch = example(shape, 2)
    network(batch)
    assert seen[0].shape == (2, 41, 64)
    near(seen[0][:, 0], F.relu(network.image_fc[0](batch.image)), 1e-5)
