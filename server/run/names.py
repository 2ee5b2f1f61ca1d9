"""A silo's name belongs to a key.

A silo says itself what it is called, in its data card. What it may be called is known to the SuperLink, where its
operator has registered the name with the node's public key (`silofl up`, `setup`, `silofl add-silo`), and which lets
nobody speak for a node without its private key. Flower's `Grid.get_nodes` (1.39) tells both to the ServerApp, so no
silo has a hand in this table. A run remembers its silos' keys in its checkpoint: who resumes under a name has that key.

Where nobody registers names (a simulation; a SuperLink without node keys) there is nothing to hold a name against.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.common import log

from client.site.keys import fingerprint


class ImpostorError(ValueError):
    """A silo that calls itself by a name that is not its own."""


class Names:
    """Which node may have which name. ``known``: the keys of a resumed run's silos."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.known = dict(known or {})
        self.nodes: dict[int, Any] = {}  # Flower's NodeInfo by node id: name and public key as registered
        self.warned = False

    def update(self, nodes: Iterable[Any]) -> list[int]:
        """Take up who is online now; their numbers."""
        self.nodes = {node.node_id: node for node in nodes}
        if self.registered and not self.named and not self.warned:
            log(WARNING, "the silos' keys are registered without names: a silo may call itself what it likes")
            self.warned = True
        return sorted(self.nodes)

    @property
    def named(self) -> bool:
        """Whether names are registered here."""
        return any(node.name for node in self.nodes.values())

    @property
    def registered(self) -> bool:
        """Whether nodes are processes with keys, which come and go; a simulation's are not."""
        return any(node.public_key.startswith(b"-----BEGIN") for node in self.nodes.values())

    def called(self, node_id: int) -> str:
        """The name that a node's key is registered with, or the node's number."""
        node = self.nodes.get(node_id)
        return str(node.name) if node and node.name else f"node {node_id}"

    def key(self, node_id: int) -> str:
        """The fingerprint of a node's key; empty where it is registered without a name: such keys come and go."""
        node = self.nodes[node_id]
        return fingerprint(node.public_key) if node.name else ""

    def check(self, node_id: int, name: str) -> None:
        """Raise ImpostorError, with one line, unless the node may be called so."""
        registered = self.nodes[node_id].name
        if registered and registered != name:
            raise ImpostorError(f"node {node_id} calls itself {name}, and its key is registered as {registered}")
        if not registered and (self.named or self.known.get(name)):
            raise ImpostorError(
                f"node {node_id} calls itself {name}, and its key is registered without a name: remove it and "
                f"`silofl add-silo {name}`"
            )
        before = self.known.get(name, "")
        if before and before != self.key(node_id):
            raise ImpostorError(
                f"node {node_id} calls itself {name}, whose key was another one when this run began ({before}, now "
                f"{self.key(node_id)}): it takes part in new runs only"
            )
