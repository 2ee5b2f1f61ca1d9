"""YAML as data: plain values, of a limited depth, each key once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

DEEPEST = 20  # levels; real files have four


def load_yaml(text: str) -> Any:
    """Return the content of a YAML text. Raises yaml.YAMLError, also for a key that stands twice in one mapping."""
    return yaml.load(text, _PlainLoader)


class _PlainLoader(yaml.SafeLoader):
    level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.level += 1
        if self.level > DEEPEST:
            raise yaml.YAMLError("nested too deep")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen and isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    problem=f"the key {key.value!r} stands here a second time",
                    problem_mark=key.start_mark,
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)
