"""The settings of a hospital's silo.

Environment of a silo's container: `SILOFL_NAME`, `SILOFL_SERVER` (host:port), `SILOFL_DEVICE`,
`SILOFL_ALLOWED_APPS` (see `trust.pins`), `SILOFL_POLICY` (see `trust.policy`), `SILOFL_WEIGHTS` (a folder of
files that runs start from) and `SILOFL_FLWR` (the server's version of Flower). `Site.from_environment` defines where
its files are.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from partitions.common.errors import UserError


@dataclass(frozen=True)
class Site:
    """Settings of a silo: its name, its server, its key, its data, its state."""

    name: str
    server: str  # host:port
    ca_certificate: Path
    node_key: Path
    data: Path
    state: Path
    device: str = "cpu"
    allowed_apps: str = ""  # SHA-256 sums, or a file of them; empty: every app that the server sends
    policy: str = ""  # the file with the rules for what may leave (policy.py), or `public`; empty: the defaults
    flwr: str = ""  # the server's version of Flower; empty: unknown
    schema: Path | None = None  # the file with the federation's schema, if it declares one

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Site":
        """Return the silo of a container. Raises UserError if a variable is missing."""
        for key in ("SILOFL_NAME", "SILOFL_SERVER"):
            if not environment.get(key):
                raise UserError(f"{key} is not set: name a bundle, or run this in a silo's container")
        return cls(
            name=environment["SILOFL_NAME"],
            server=environment["SILOFL_SERVER"],
            ca_certificate=Path("/site/ca.crt"),
            node_key=Path("/site/node.key"),
            data=Path("/data/data.npz"),
            state=Path("/state"),
            device=environment.get("SILOFL_DEVICE") or "cpu",
            allowed_apps=environment.get("SILOFL_ALLOWED_APPS", ""),
            policy=environment.get("SILOFL_POLICY", ""),
            flwr=environment.get("SILOFL_FLWR", ""),
            schema=Path("/site/schema.json"),
        )

    @property
    def node_config(self) -> dict[str, str]:
        """Return the node config that the app gets."""
        return {"name": self.name, "data": str(self.data), "device": self.device, "state-dir": str(self.state)}
