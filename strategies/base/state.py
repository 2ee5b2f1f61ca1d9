"""State as a small record of arrays and numbers: what is kept, checkpointed and compared by tests is one thing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from partitions.disk import write_atomically


@dataclass
class State:
    """Arrays and numbers by name. A silo's (kept by the silo) or the server's."""

    arrays: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)  # whatever JSON can hold

    def save(self, path: Path) -> None:
        """Atomically, as safetensors with the numbers in its header."""
        arrays = {name: tensor.detach().cpu().contiguous() for name, tensor in self.arrays.items()}
        data = safetensors.torch.save(_unshared(arrays), metadata={"numbers": json.dumps(self.numbers)})
        write_atomically(path, data)

    @classmethod
    def load(cls, path: Path) -> State:
        """Raises ValueError naming the file where it cannot be read."""
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                numbers = json.loads((file.metadata() or {}).get("numbers", "{}"))
                # Copies: a view into the file is aligned otherwise than memory is, and sums then end in other bits.
                return cls({name: file.get_tensor(name).clone() for name in file.keys()}, numbers)  # noqa: SIM118
        except (OSError, safetensors.SafetensorError, json.JSONDecodeError) as error:
            raise ValueError(f"the state file {path} cannot be read: {error}") from error

    def copy(self) -> State:
        return State(dict(self.arrays), json.loads(json.dumps(self.numbers)))


def _unshared(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses two names for one storage; a personal model and its best are often the same tensor."""
    seen: set[int] = set()
    result = {}
    for name, tensor in arrays.items():
        key = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if key in seen else tensor
        seen.add(key)
    return result
