"""A model as one vector: views, layer blocks, state dictionaries, buffers."""

from __future__ import annotations

import copy
import gc
import mmap
import weakref

import pytest
import torch
from failing import fails
from memory import own_memory
from near import near
from torch import nn
from torch.nn.functional import cross_entropy

from models.flat import FlatModel, gather, is_finite, scatter
from models.layout import Block, Entry
from models.optimizers import Sgd
from models.training import loss_gradient


class Net(nn.Module):
    """conv (3 channels in, 2 out, 1x1), norm, fc 2 -> 2: 6 + 2, 2 + 2, 4 + 2 = 18 parameters, 4 buffer scalars."""

    block_names = ("conv", "norm", "fc")

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Linear(2, 2)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).mean((2, 3)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return FlatModel(Net())


def test_layout_names_every_tensor_in_order(model):
    layout = model.layout
    assert layout.parameters == (
        Entry("conv.weight", (2, 3, 1, 1), 0, 6),
        Entry("conv.bias", (2,), 6, 8),
        Entry("norm.weight", (2,), 8, 10),
        Entry("norm.bias", (2,), 10, 12),
        Entry("fc.weight", (2, 2), 12, 16),
        Entry("fc.bias", (2,), 16, 18),
    )
    assert layout.buffers == (
        Entry("norm.running_mean", (2,), 0, 2),
        Entry("norm.running_var", (2,), 2, 4),
    )
    assert layout.blocks == (Block("conv", 0, 8), Block("norm", 8, 12), Block("fc", 12, 18))
    assert (layout.size, layout.buffer_size) == (18, 4)
    assert model.has_batch_norm


def test_the_vector_holds_what_the_module_was_built_with():
    module = Net()
    before = copy.deepcopy(module.state_dict())
    model = FlatModel(module)
    assert torch.equal(
        model.vector, torch.cat([before[e.name].flatten() for e in model.layout.parameters])
    )
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())


def test_parameters_and_gradients_are_views(model):
    """The same storage, both ways; and backward() writes into ``gradient`` without rebinding it."""
    storage = model.vector.untyped_storage().data_ptr()
    grads = model.gradient.untyped_storage().data_ptr()
    x = torch.randn(5, 3, 4, 4)
    model.module(x).square().sum().backward()
    for entry, parameter in zip(
        model.layout.parameters, model.module.parameters(), strict=True
    ):
        assert parameter.untyped_storage().data_ptr() == storage
        assert parameter.storage_offset() == entry.start
        assert parameter.grad is not None
        assert parameter.grad.untyped_storage().data_ptr() == grads
        assert parameter.grad.storage_offset() == entry.start
    model.vector.fill_(0.5)
    assert all(bool((p == 0.5).all()) for p in model.module.parameters())
    with torch.no_grad():
        model.module.fc.bias.fill_(3.0)
    assert model.vector[16:].tolist() == [3.0, 3.0]


def test_the_gradient_is_autograds():
    torch.manual_seed(1)
    model = FlatModel(Net())
    twin = copy.deepcopy(model.module)
    for parameter in twin.parameters():
        parameter.grad = None
    x = torch.randn(5, 3, 4, 4)
    model.module(x).square().sum().backward()
    twin(x).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None])
    assert torch.equal(model.gradient, expected)


def test_buffers_are_views_that_training_moves(model):
    """Running mean of BatchNorm after one batch: 0.9 · 0 + 0.1 · batch mean."""
    start = model.buffers.clone()
    x = torch.randn(6, 3, 4, 4)
    model.module(x)
    mean = model.module.conv(x).mean((0, 2, 3)).detach()
    near(model.buffers[:2], 0.1 * mean, 1e-5)
    model.reset_buffers()
    assert torch.equal(model.buffers, start)
    assert torch.equal(model.module.norm.running_mean, start[:2])


def test_load_copies(model):
    vector, buffers = torch.arange(18.0), torch.arange(4.0)
    model.load(vector, buffers)
    model.vector.add_(1)
    model.buffers.add_(1)
    assert vector.tolist() == list(range(18))
    assert buffers.tolist() == list(range(4))
    kept = model.buffers.clone()
    model.load(vector)
    assert torch.equal(model.vector, vector)
    assert torch.equal(model.buffers, kept)
    model.load(model.vector)  # its own vector: nothing to do
    fails(ValueError, "18 parameters cannot take 17", model.load, torch.zeros(17))


def test_state_dict_is_an_ordinary_one(model):
    """Loads with ``strict=True`` into a plain module, integer buffers included, and computes the same."""
    x = torch.randn(6, 3, 4, 4)
    model.module(x)
    plain = Net()
    plain.load_state_dict(model.state_dict(), strict=True)
    assert int(plain.norm.num_batches_tracked) == 1  # type: ignore[arg-type]
    assert torch.equal(plain.eval()(x), model.module.eval()(x))
    other = model.state_dict(torch.arange(18.0), torch.arange(4.0))
    assert other["fc.bias"].tolist() == [16, 17]
    assert other["norm.running_var"].tolist() == [2, 3]
    kept = {name: tensor.clone() for name, tensor in other.items()}
    model.vector.fill_(0)
    assert all(torch.equal(kept[n], t) for n, t in other.items())  # copies
    round_trip = FlatModel(Net())
    round_trip.module.load_state_dict(model.state_dict())
    assert torch.equal(round_trip.vector, model.vector)
    assert torch.equal(round_trip.buffers, model.buffers)


def test_outside_is_every_other_block(model):
    layout = model.layout
    assert layout.outside([slice(8, 12)]) == (slice(0, 8), slice(12, 18))
    assert layout.outside([slice(12, 18)]) == (slice(0, 12),)
    assert layout.outside([]) == (slice(0, 18),)
    assert layout.outside([slice(0, 18)]) == ()


def test_parts_by_name_join_neighbours(model):
    layout = model.layout
    assert layout.parts(["norm", "conv"]) == (slice(0, 12),)
    assert layout.parts(["fc", "conv"]) == (slice(0, 8), slice(12, 18))
    assert layout.parts([]) == ()
    fails(ValueError, "no layer block head; there are: conv, norm, fc", layout.parts, ["head"])


def test_gather_and_scatter():
    vector = torch.arange(6.0)
    parts = (slice(0, 1), slice(3, 5))
    assert gather(vector, parts).tolist() == [0, 3, 4]
    assert gather(vector, []).shape == (0,)
    assert scatter(vector, parts, torch.tensor([7.0, 8.0, 9.0])).tolist() == [7, 1, 2, 8, 9, 5]
    assert vector.tolist() == list(range(6))
    assert torch.equal(scatter(vector, parts, gather(vector, parts)), vector)


def test_without_block_names_every_leaf_is_one():
    model = FlatModel(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    assert [(b.name, b.start, b.stop) for b in model.layout.blocks] == [
        ("0", 0, 9),
        ("2", 9, 13),
    ]
    assert not model.has_batch_norm


def test_a_block_may_hold_several_layers():
    class Nested(nn.Module):
        block_names = ("body", "head")

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.head = nn.Linear(2, 1)

    assert [(b.start, b.stop) for b in FlatModel(Nested()).layout.blocks] == [(0, 12), (12, 15)]


def test_buffers_belong_to_the_block_they_lie_in():
    """Two BatchNorm layers of 2 and 3 channels (4 and 6 scalars) and one without weights (2), which is in no block."""

    class Net(nn.Module):
        block_names = ("body", "b", "head")

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            self.free = nn.BatchNorm1d(1, affine=False)
            self.b = nn.BatchNorm1d(3)
            self.head = nn.Linear(2, 1)

    layout = FlatModel(Net()).layout
    assert layout.buffer_size == 12

    def of(*names):
        return layout.buffer_parts(layout.parts(names))

    assert of() == of("head") == ()
    assert of("body") == of("body", "head") == (slice(0, 4),)
    assert of("b") == (slice(6, 12),)
    assert of("body", "b") == (slice(0, 4), slice(6, 12))
    assert of("body", "b", "head") == (slice(0, 12),)


def test_normalisation_layers_are_found_by_their_type():
    """Whatever they are called, inside of a block or not, with weights or without."""

    class Net(nn.Module):
        block_names = ("body", "head")

        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(
                nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
            )
            self.free = nn.BatchNorm1d(1, affine=False)
            self.head = nn.Linear(2, 1)
            self.batch_norm_like = nn.ReLU()

    layout = FlatModel(Net()).layout
    assert layout.norms == ("body.1.1", "free")
    assert layout.norm_parts() == (slice(12, 16),)
    assert layout.norm_parts(False) == (slice(0, 12), slice(16, 19))
    assert layout.norm_buffers() == (slice(0, 6),)
    assert FlatModel(nn.Linear(2, 3)).layout.norms == ()


@pytest.mark.parametrize("names", [("conv", "fc"), ("norm", "conv", "fc"), ("conv", "norm")])
def test_blocks_that_do_not_cover_the_parameters_are_refused(names):
    net = Net()
    net.block_names = names
    fails(ValueError, "do not cover the parameters", FlatModel, net)


def test_freeze_takes_parts_out_of_the_backward_pass(model):
    x = torch.randn(5, 3, 4, 4)

    def grads():
        model.gradient.zero_()
        model.module(x).square().sum().backward()
        return model.gradient.clone()

    whole = grads()
    model.freeze(slice(0, 12))
    upper = grads()
    assert not upper[:12].any()
    near(upper[12:], whole[12:], 1e-5)
    model.freeze(slice(0, 8), slice(12, 18))
    middle = grads()
    assert not middle[:8].any() and not middle[12:].any()
    near(middle[8:12], whole[8:12], 1e-5)
    model.freeze()
    near(grads(), whole, 1e-5)


def test_integer_buffers_are_not_in_the_vectors(model):
    model.module(torch.randn(4, 3, 2, 2))
    model.module(torch.randn(4, 3, 2, 2))
    assert "norm.num_batches_tracked" not in {e.name for e in model.layout.buffers}
    assert int(model.state_dict()["norm.num_batches_tracked"]) == 2


def test_unflatten_gives_views(model):
    vector = torch.arange(18.0)
    named = model.layout.unflatten(vector, torch.arange(4.0))
    assert set(named) == set(model.state_dict()) - {"norm.num_batches_tracked"}
    assert named["conv.weight"].shape == (2, 3, 1, 1)
    named["fc.bias"].zero_()
    assert vector[16:].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_one_bad_element_is_found_wherever_it_is(bad):
    for place in (0, 17, 999):
        vector = torch.ones(1000)
        vector[place] = bad
        assert not is_finite(vector)


def test_infinities_that_cancel_and_sums_that_overflow():
    assert not is_finite(torch.tensor([float("inf"), float("-inf")]))
    assert is_finite(torch.full((4,), torch.finfo(torch.float32).max))
    assert is_finite(torch.empty(0))


def test_of_an_embedding_only_the_rows_that_were_looked_up_are_added():
    """Rows 1 (twice) and 3 of five, 0 is padding: in the one gradient, in place, and the numbers are the dense ones."""
    layers = [nn.Embedding(5, 2, padding_idx=0), nn.Flatten(), nn.Linear(8, 3)]
    model, dense = FlatModel(nn.Sequential(*copy.deepcopy(layers))), nn.Sequential(*layers)
    assert list(model.embeddings) == ["0.weight"]
    x = torch.tensor([[1, 3, 1, 0]], dtype=torch.int32)
    place = model.gradient.data_ptr()
    for _ in range(2):  # twice: gradients add up, as without
        dense(x).square().sum().backward()
        model.module(x).square().sum().backward()
        expected = torch.cat(
            [p.grad.flatten() for p in dense.parameters() if p.grad is not None]
        )
        near(model.gradient, expected, 1e-5)
    assert model.gradient.data_ptr() == place == model.parameters[0].grad.data_ptr()  # type: ignore[union-attr]
    assert [bool(row.any()) for row in model.gradient[:10].view(5, 2)] == [
        False,
        True,
        False,
        True,
        False,
    ]


def test_an_embedding_that_is_frozen_is_none_of_the_models():
    network = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 3))
    network[0].requires_grad_(False)
    assert not FlatModel(network).embeddings


def test_steps_on_the_rows_with_a_gradient_are_the_dense_ones_bit_for_bit():
    """40 steps of plain SGD on batches that look up a few of 300 rows, some of them twice, beside dense ones.

    In between somebody else writes to the gradient, and the last layer's gradient alone is taken: all that counts is
    what the gradient holds.
    """
    layers = [
        nn.Linear(3, 3),
        nn.Embedding(300, 5, padding_idx=0),
        nn.Flatten(),
        nn.Linear(20, 3),
    ]

    class Net(nn.Module):
        block_names = ("a", "b", "c")

        def __init__(self):
            super().__init__()
            self.a, self.b, _, self.c = copy.deepcopy(layers)

        def forward(self, x):
            return self.a(self.c(self.b(x).flatten(1)))

    ours, dense = FlatModel(Net()), FlatModel(Net())
    y, sparse_steps = torch.tensor([0, 1, 2, 0, 1, 2]), 0
    for step in range(40):
        x = torch.randint(0, 9 + step, (6, 4), dtype=torch.int32)
        loss_gradient(ours, x, y, cross_entropy)
        dense.gradient.zero_()
        cross_entropy(dense.module(x), y).backward()
        if step % 7 == 3:
            for model in (ours, dense):
                model.gradient.add_(model.vector, alpha=0.1)
        if step % 7 == 5:
            loss_gradient(ours, torch.ones(6, 3), y, cross_entropy, ours.module.a)  # type: ignore[arg-type]
            dense.gradient.zero_()
            cross_entropy(dense.module.a(torch.ones(6, 3)), y).backward()  # type: ignore[operator]
        assert torch.equal(ours.gradient, dense.gradient)
        sparse_steps += ours.rows_with_gradient() is not None
        ours.step(Sgd(0.3).step)
        Sgd(0.3).step(dense.vector, dense.gradient)
        assert torch.equal(ours.vector, dense.vector)
    assert sparse_steps == 40 - 6


def test_what_is_outside_of_a_part_of_a_block():
    """FedBN's newcomer trains the norm of a stage and not its convolution: only that is left in the backward pass."""
    stages = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)), nn.Flatten(), nn.Linear(2, 2)
    )
    made = FlatModel(stages)
    norms = made.layout.norm_parts()
    assert norms == (slice(8, 12),) and made.layout.outside(norms) == (
        slice(0, 8),
        slice(12, 18),
    )
    made.freeze(*made.layout.outside(norms))
    assert [p.requires_grad for p in made.parameters] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    loss_gradient(made, torch.ones(4, 3, 1, 1), torch.tensor([0, 1, 0, 1]), cross_entropy)
    assert made.gradient[:8].eq(0).all()


def test_a_network_with_an_embedding_is_gone_with_its_last_reference():
    """Its hook on the embedding's gradient would keep a large one until Python's next search for cycles."""
    gc.disable()
    try:
        model = FlatModel(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 2)))
        kept = weakref.ref(model)
        del model
        assert kept() is None
    finally:
        gc.enable()


def test_after_its_release_a_gradient_is_zeros_and_takes_no_memory_and_the_next_one_is_the_same():
    model = FlatModel(nn.Sequential(nn.Linear(500, 4000), nn.Linear(4000, 2)))
    x, y = torch.ones(1, 500), torch.zeros(1, dtype=torch.long)
    loss_gradient(model, x, y, cross_entropy)
    before, held = model.gradient.clone(), own_memory()
    model.release_training()
    assert own_memory() < held - model.gradient.nbytes // 2
    edges = 2 * mmap.PAGESIZE // 4  # of pages that other tensors may share
    assert not model.gradient[edges:-edges].any()
    loss_gradient(model, x, y, cross_entropy)
    assert torch.equal(model.gradient, before)
