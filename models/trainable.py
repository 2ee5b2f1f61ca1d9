"""The trained part of a network: the model that methods train, send, mix and store.

The rest is frozen as initialised from the run's seed in every process, and never sent. Frozen batch normalisation
uses its running statistics in training too, and does not update them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from models.layout import block_names, frozen_modules
from models.weights import Weights
from partitions.common.errors import UserError


@dataclass(frozen=True)
class Part:
    """The trained part of a network, and the initial values of the frozen part.

    * ``trainable`` as in the settings: ``all``, or ``head`` and patterns of parameters' names, separated by commas.
    * ``seed``: the run's, from which frozen parameters are initialised; unused where nothing is frozen.
    * ``weights``: the file that the whole network starts from.
    * ``lora_rank``: frozen linear layers learn a change of this rank (models/lora.py); 0: none.
    """

    trainable: str = "all"
    seed: int = 0
    weights: Weights | None = None
    lora_rank: int = 0
    lora_alpha: float = 0.0
    lora_residual: bool = False  # whether such a change has a residual beside its factors

    @property
    def whole(self) -> bool:
        return self.trainable == "all"


WHOLE = Part()


def describe_network(network: tuple[str, Any], head: str, part: Part) -> dict[str, Any]:
    """Return what a model card has of a network: its name and settings, a method's head, and the trained part."""
    name, options = network
    description: dict[str, Any] = {"name": name, "settings": {}}
    if options is not None:
        description["settings"] = asdict(options)
    if head:
        description["head"] = head
    if part != WHOLE:
        description["part"] = asdict(part)
    return description


def freeze(network: nn.Module, part: Part) -> nn.Module:
    """Freeze all parameters of the network that are not in ``part``.

    Raises UserError, one line, where a pattern matches nothing, or the last layer block is not trained.
    """
    if part.whole:
        return network
    head = getattr(network, "head_name", block_names(network)[-1])
    # Tied tensors under each name
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    trained: set[str] = set()
    for word in filter(None, (word.strip() for word in part.trainable.split(","))):
        pattern = f"{head}.*" if word == "head" else word
        matching = {name for name in names if fnmatchcase(name, pattern)}
        if not matching:
            raise UserError(
                f"trainable = {part.trainable[:200]!r}: no parameter is called like {word[:80]!r}; they are called "
                f"{names[0]}, ..., {names[-1]}, in the layer blocks {', '.join(block_names(network))}"
            )
        trained |= matching
    if left_out := [
        name for name in names if name.startswith(f"{head}.") and name not in trained
    ]:
        raise UserError(
            f"trainable = {part.trainable[:200]!r} leaves out {', '.join(left_out)}: add head, for the last layer is "
            "always trained"
        )
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    for name in trained:
        network.get_parameter(name).requires_grad_(True)
    for name in frozen_modules(network):
        layer = network.get_submodule(name)
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(_by_its_statistics)
    return network


def _by_its_statistics(layer: nn.Module, _: Any) -> None:
    layer.training = False
