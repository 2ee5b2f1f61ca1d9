"""Identity registry: each silo name is bound to a key.

A silo sends its name in its data summary. The operator has registered the name with the node's public key at the
SuperLink (`silofl up`, `setup`, `silofl add-silo`). The SuperLink authenticates nodes by their private keys. Flower's
`Grid.get_nodes` (1.39) returns names and public keys to the ServerApp, so no silo can change this table. A checkpoint
holds the silos' keys, so a silo needs the same key in a resumed run.

Without registered names (a simulation; a SuperLink without node keys) names are not checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from logging import WARNING
from typing import Any

from flwr.common import log

from client.site.trust.keys import fingerprint
from partitions.common.errors import UserError


class ImpostorError(UserError):
    """Error: a silo uses a name that is registered for another key."""


class IdentityRegistry:
    """Registry of node names and keys. ``known``: the keys of a resumed run's silos."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.known = dict(known or {})
        self.nodes: dict[int, Any] = {}  # Flower's NodeInfo by node id: name and public key as registered
        self.warned = False

    def update(self, nodes: Iterable[Any]) -> list[int]:
        """Set the nodes that are online, and return their ids."""
        self.nodes = {node.node_id: node for node in nodes}
        if self.has_keys and not self.has_names and not self.warned:
            log(WARNING, "the silos' keys are registered without names: a silo may call itself what it likes")
            self.warned = True
        return sorted(self.nodes)

    @property
    def has_names(self) -> bool:
        """Whether names are registered here."""
        return any(node.name for node in self.nodes.values())

    @property
    def has_keys(self) -> bool:
        """Whether nodes have keys; the nodes of a simulation have none."""
        return any(node.public_key.startswith(b"-----BEGIN") for node in self.nodes.values())

    def registered_name(self, node_id: int) -> str:
        """Return the name registered for a node's key, or the node's id."""
        node = self.nodes.get(node_id)
        return str(node.name) if node and node.name else f"node {node_id}"

    def key(self, node_id: int) -> str:
        """Return the fingerprint of a node's key; empty if it is registered without a name."""
        node = self.nodes[node_id]
        return fingerprint(node.public_key) if node.name else ""

    def check(self, node_id: int, name: str) -> None:
        """Raise ImpostorError unless the node may use this name."""
        registered = self.nodes[node_id].name
        if registered and registered != name:
            raise ImpostorError(f"node {node_id} calls itself {name}, and its key is registered as {registered}")
        if not registered and (self.has_names or self.known.get(name)):
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
