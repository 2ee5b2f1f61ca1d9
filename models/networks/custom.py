"""A user's own network: ``model = "package.module:factory"``.

``factory(input_shape, outputs)`` returns an ``nn.Module`` that maps float32 (batch, *input_shape) to (batch, outputs),
or to (batch, outputs, h, w) for outputs per pixel. models/shapes.py describes batches of texts and of several inputs.
Its weights must come from torch's global generator. The properties that methods rely on are checked before the first
use, once per process. Layer blocks are its ``block_names``, or else its children.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from models.flat import FlatModel
from models.layout import block_names, check_tensors
from models.networks.outputs import (
    gives_several,
    has_several,
    join_answers,
    only_in_training,
    put_in_order,
)
from models.shapes import Shape, example
from partitions.common.errors import UserError
from partitions.common.own_code import NAME, line_of, load_function, put_back

Factory = Callable[[Shape, int], Any]
PART = 1 << 20  # numbers that are compared at a time
STEP = 0.01  # of the step that tries a network, relative to its weights
HIDDEN = (
    "what training changes has to be a parameter or a buffer, and what is drawn at random, too"
)


@dataclass(frozen=True)
class CustomSettings:
    """Requirements of the task."""

    per_pixel: bool = False


def is_custom(name: str) -> bool:
    """Return whether this names a user's own network. Raises UserError for a name with a colon in another form."""
    if ":" in name and not NAME.fullmatch(name):
        raise UserError(
            f"model = {name[:80]!r}: package.module:factory is needed here, or the name of a network"
        )
    return ":" in name


def check_trainer(name: str) -> None:
    """Raise UserError for a trainer's name in another form; empty: silofl's own training."""
    if name and not NAME.fullmatch(name):
        raise UserError(f"trainer = {name[:80]!r}: package.module:function is needed here")


def custom_network(
    name: str, shape: Shape, outputs: int, settings: CustomSettings
) -> nn.Module:
    """Return the network, freshly initialised. Raises UserError, one line, where it cannot be made or used."""
    behaviour = _check_factory(name, shape, outputs, settings.per_pixel)
    with _name_errors(name, shape):
        network = _make_network(name, shape, outputs)
    if behaviour.drops:
        network.has_dropout = True  # type: ignore[assignment]
    if behaviour.several:
        put_in_order(network, behaviour.several)
        names = [name for name in block_names(network) if name not in behaviour.aside]
        network.block_names, network.aside = tuple(names), behaviour.aside  # type: ignore[assignment]
    return network


def factory_of(name: str) -> Factory:
    """Return the function of this name. The module must define it: one that it only imports is refused."""
    return load_function("model", name, "input_shape, outputs")


@contextmanager
def _name_errors(name: str, shape: Shape) -> Iterator[None]:
    """Context in which a UserError gets the name of the network and the shape of its inputs."""
    try:
        yield
    except UserError as error:
        text = str(error)
        if not text.startswith("model = "):
            text = f"model = {name!r} for inputs of shape {shape}: {text}"
        raise UserError(text) from None


@contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    """Context in which an error is a UserError with these words before it."""
    try:
        yield
    except Exception as error:
        raise UserError(f"{what}{line_of(error)}") from None


def _make_network(name: str, shape: Shape, outputs: int) -> nn.Module:
    factory = factory_of(name)
    with _explain_errors(""), put_back():
        network = factory(shape, outputs)
    if not isinstance(network, nn.Module):
        raise UserError(f"it gives {type(network).__name__}, not an nn.Module")
    if any(name.rpartition(".")[2] == "_orig_mod" for name, _ in network.named_modules()):
        raise UserError(
            "torch.compile(...) around it renames its weights (_orig_mod.): compile in place, network.compile(...)"
        )
    if not hasattr(network, "block_names"):
        alone, children = find_blocks(network)
        if alone and not children:
            raise UserError(
                f"its parameter {alone[0]} is in no child module: give it one, or block_names"
            )
        network.block_names = (*alone, *children)  # type: ignore[assignment]
    return network


def find_blocks(network: nn.Module) -> tuple[list[str], list[str]]:
    """Return the layer blocks: parameters of the network's own, and its children with parameters.

    Where its only part is one child, they are that child's parts, and so on.
    """
    around, above = network, ""
    while True:
        alone = [name for name, _ in around.named_parameters(recurse=False)]
        children = children_of(around)
        deeper = dict(around.named_children())[children[0]] if len(children) == 1 else None
        if alone or deeper is None or not children_of(deeper):
            return [above + name for name in alone], [above + name for name in children]
        around, above = deeper, f"{above}{children[0]}."


def children_of(module: nn.Module) -> list[str]:
    """Return the children with layers of their own: not one that only lists layers of those before it."""
    names: list[str] = []
    known: set[nn.Module] = set()
    for name, child in module.named_children():
        layers = {m for m in child.modules() if [*m.parameters(recurse=False)]}
        if layers - known:
            names.append(name)
        known |= layers
    return names


@dataclass(frozen=True)
class InTraining:
    """What a network does in training: ``drops``: it draws random numbers; ``several``: the axes of its answers.

    ``aside``: the last blocks, which only further answers have. ``several`` is 0 for one answer.
    """

    drops: bool
    several: int = 0
    aside: tuple[str, ...] = ()


@lru_cache(maxsize=8)
def _check_factory(name: str, shape: Shape, outputs: int, per_pixel: bool) -> InTraining:
    with torch.random.fork_rng(devices=[]):
        factory_of(name)  # first, because the import may draw numbers, too
    return check_network(
        name, shape, outputs, per_pixel, lambda: _make_network(name, shape, outputs)
    )


def check_network(
    name: str, shape: Shape, outputs: int, per_pixel: bool, make: Callable[[], nn.Module]
) -> InTraining:
    """Raise UserError where methods cannot use the network; return what it does in training."""
    with torch.random.fork_rng(devices=[]), _name_errors(name, shape):
        network, other = _make_two(make)
        with _explain_errors("its layer blocks cannot be used: "):
            flat = FlatModel(network)
        x = example(shape, 2)
        wanted = (2, outputs, *(shape[1:] if per_pixel else ()))
        with _explain_errors("it takes no inputs of this shape: "):
            several = _put_in_order(network, other, x, wanted)
            trained = [_output_of(network, x, seed) for seed in (1, 2)]
            flat.reset_buffers()
            seen = [_output_of(network.eval(), x, seed) for seed in (1, 2)]
            start = flat.vector.clone()
            flat.vector.add_(0.1)
            moved = _output_of(network, x, 1)
            flat.load(start)
            del start
        _check_shapes(() if several else trained, wanted)
        _check_shapes(seen, wanted, " in evaluation")
        said = torch.stack(seen)
        if not torch.isfinite(said).all():
            raise UserError(
                "its outputs of finite inputs are no finite numbers, before any training"
            )
        if outputs > 1 and said.min() >= 0 and ((said.sum(2) - 1).abs() < 1e-5).all():
            raise UserError(
                "its outputs are probabilities, which add up to 1: end it without a softmax, for losses take logits"
            )
        if not torch.equal(*seen):
            raise UserError(
                "in evaluation it says two things of the same input: it must not draw numbers there"
            )
        if torch.equal(moved, seen[0]):
            raise UserError("its outputs stay the same whatever its parameters are")
        with torch.enable_grad():
            # A model like the other: sums over tensors that lie elsewhere in memory may round otherwise
            spare = FlatModel(other)
            spare.release_training()
            _find_lost(flat, spare, x)
            aside = only_in_training(flat, x) if several else ()
        return InTraining(not torch.equal(*trained), several, aside)


def _make_two(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return networks of two seeds. A third one is compared and gone: a large network's copies fill a machine."""

    def seeded(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        network = make()
        check_tensors(network)
        return network

    network = seeded(0)
    if faults := [*_in_numbers(network, seeded(0))]:
        raise UserError(faults[0])
    other = seeded(1)
    if faults := [*_drawn(network, other)]:
        raise UserError(faults[0])
    return network, other


def _put_in_order(network: nn.Module, other: nn.Module, x: Any, wanted: tuple[int, ...]) -> int:
    """Put several answers in training in order; return how many axes each has, 0 for one answer."""
    with torch.no_grad():
        answers = network.train()(x)
    if not gives_several(answers, wanted):
        return 0
    for each in (network, other):
        put_in_order(each, len(wanted))
    return len(wanted)


def _check_shapes(outputs: Iterable[Any], wanted: tuple[int, ...], when: str = "") -> None:
    for output in outputs:
        form, tip = type(output).__name__, ": let it return one answer"
        if isinstance(output, Tensor):
            if output.shape == wanted:
                continue
            form, tip = str(tuple(output.shape)), ""
        raise UserError(
            f"of two inputs it makes {form}, where outputs of shape {wanted} are wanted{when}{tip}"
        )


def _find_lost(flat: FlatModel, spare: FlatModel, x: Any) -> None:
    """Train a step, and raise UserError for what a file of the model would lose of it; ``spare`` takes the model.

    The step is done twice from one state: what the module keeps elsewhere makes the second one another.
    """
    start, first = flat.vector.clone(), list[Tensor]()
    _check_replaced(flat)
    before = [flat.buffers.clone(), flat.integers.clone()]
    _output_of(flat.module.eval(), x, 1)
    if not all(map(torch.equal, before, (flat.buffers, flat.integers))):
        raise UserError(
            "in evaluation its forward changes its buffers: let it do so in training only"
        )
    for _ in range(2):
        flat.load(start)
        flat.reset_buffers()
        torch.manual_seed(1)
        with _explain_errors("it cannot be trained: "), flat.one_gradient():
            outputs = join_answers(flat.module.train()(x))
            outputs.square().mean().backward()  # type: ignore[no-untyped-call]
        _check_replaced(flat)
        rate = STEP * float(start.norm()) / max(float(flat.gradient.norm()), 1e-12)
        flat.vector.sub_(flat.gradient, alpha=rate)
        end = outputs.detach(), flat.buffers, flat.integers
        if not first:
            first = [part.clone() for part in end]
            with _explain_errors("its saved state cannot be loaded: "):
                spare.load(flat.vector)  # a clone would be the fifth vector of its size
    del start
    if not all(map(_alike, (*first, spare.vector), (*end, flat.vector))):
        raise UserError(
            f"a step of training from the same state is another the second time: {HIDDEN}"
        )
    spare.vector.add_(0.1)  # it must not have what it is to load
    flat.release_training()
    _check_copy(flat, spare.module, x)
    flat.load(flat.vector, *first[1:])
    answers = _output_of(flat.module.eval(), x, 1)
    flat.load(flat.vector, None, before[1])
    if not _alike(answers, _output_of(flat.module, x, 1)):
        raise UserError(
            "its answers depend on an integer buffer that training changes, and integers are in no model that "
            "hospitals share: let it be float32"
        )


def _check_copy(flat: FlatModel, other: nn.Module, x: Any) -> None:
    """Raise UserError if another network that has loaded the model's saved state is not its copy."""
    with _explain_errors("its saved state cannot be loaded: "):
        _output_of(other.eval(), x, 3)  # which may draw what a forward pass draws once
        other.load_state_dict(flat.state_dict())
    for mode in (True, False):
        ours, theirs = (_output_of(module.train(mode), x, 1) for module in (flat.module, other))
        if not _alike(ours, theirs):
            raise UserError(
                f"a copy that has loaded its saved state gives other outputs: {HIDDEN}"
            )


def _check_replaced(flat: FlatModel) -> None:
    if replaced := flat.find_replaced():
        raise UserError(
            f"its forward sets {replaced[0]} anew: change it in place, as copy_ or add_ does"
        )


def _alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors agree up to the order of sums; integers must be equal."""
    pairs = zip(*(torch.split(whole.flatten(), PART) for whole in (first, second)), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in pairs)


def _in_numbers(network: nn.Module, again: nn.Module) -> Iterator[str]:
    """Yield the faults of two networks that were made under the same seed."""
    parameters = dict(network.named_parameters())
    if not parameters:
        yield "it has no parameters"
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            yield f"its parameter {name} is frozen, which is the setting trainable's to say"
    if any(p is q for p, q in zip(network.parameters(), again.parameters(), strict=False)):
        yield "it gives the same module twice: it has to make a new one"
    state, same = network.state_dict(), again.state_dict()
    if state.keys() != same.keys() or not all(
        torch.equal(state[key], same[key]) for key in state
    ):
        yield "made twice under one seed it differs: its weights may come from torch's generator alone"


def _drawn(network: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the integer buffers in which two networks of different seeds differ, as faults."""
    state, others = network.state_dict(), other.state_dict()
    for key in state.keys() & others.keys():
        if not state[key].is_floating_point() and not torch.equal(state[key], others[key]):
            yield f"its integer buffer {key} is drawn at random, and hospitals do not exchange it: fix it"


@torch.no_grad()
def _output_of(network: nn.Module, x: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    output = network(x)
    if network.training and has_several(network):
        return join_answers(output)
    return output.clone() if isinstance(output, Tensor) else output
