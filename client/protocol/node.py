"""The settings of a hospital's silo.

Environment of a silo's container: `SILOFL_NAME`, `SILOFL_SERVER` (host:port), `SILOFL_DEVICE`,
`SILOFL_ALLOWED_APPS` (`site/trust/code.py`), `SILOFL_POLICY` (`policy.py`), `SILOFL_WEIGHTS` (a folder of
files that runs start from), `SILOFL_FLWR` (the server's version of Flower) and `SILOFL_VIA` (the server's relay, if
the silo goes over a link). `Site.from_environment` defines where
its files are.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ours import errors

# Names that a bundle's .env may set. Docker Compose reads the file too: COMPOSE_FILE would start another file.
VARIABLES = (
    *(
        "SILOFL_NAME",
        "SILOFL_SERVER",
        "SILOFL_DATA",
        "SILOFL_USER",
        "SILOFL_DEVICE",
        "SILOFL_RESIDENT_MINUTES",
    ),
    *("SILOFL_IMAGE", "SILOFL_FLWR", "SILOFL_KEY", "SILOFL_VIA"),
)

VARIABLE = re.compile(
    r"""(?P<key>[A-Z][A-Z0-9_]*)=(?P<quote>["']?)(?P<value>[^'"$`\\#]*)(?P=quote) *"""
)

PAIR = re.compile(r"""(\S+?)=('[^']*'|"[^"]*"|\S+)""")  # of a `--node-config`
MIG = "MIG-"  # how the name of a part of a GPU starts (nvidia-smi -L)
FIRST_GPU = "cuda:0"


def on_cpu(device: str) -> bool:
    """Return whether a silo's devices, such as `cpu,cpu` or `cuda:0,cuda:1`, are the CPU."""
    return device.startswith("cpu")


def devices_in(node_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a silo's devices, one for each process of its app; of most silos there is one."""
    return tuple(str(node_config.get("device", "auto")).split(","))


def gpu_environment(device: str, share: float | None = None) -> dict[str, str]:
    """Return the variables by which a silo sees its MIG device alone, as its first GPU, and takes its share of one."""
    seen = {"CUDA_VISIBLE_DEVICES": device} if device.startswith(MIG) else {}
    return seen | ({} if share is None else {"SILOFL_GPU_SHARE": f"{share:g}"})


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
    # SHA-256 sums, or a file of them; empty: every app that the server sends
    allowed_apps: str = ""
    policy: str = ""  # the file with the rules for what may leave (policy.py), or `public`; empty: the defaults
    flwr: str = ""  # the server's version of Flower; empty: unknown
    schema: Path | None = None  # the file with the federation's schema, if it declares one

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Site":
        """Return the silo of a container. Raises UserError if a variable is missing."""
        for key in ("SILOFL_NAME", "SILOFL_SERVER"):
            if not environment.get(key):
                raise errors.UserError(
                    f"{key} is not set: name a bundle, or run this in a silo's container"
                )
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
        return {
            "name": self.name,
            "data": str(self.data),
            "device": FIRST_GPU if self.device.startswith(MIG) else self.device,
            "state-dir": str(self.state),
        }


def read_variables(text: str) -> dict[str, str]:
    """Return the `KEY=value` lines of a bundle's `.env`, which silofl and Docker Compose must read alike.

    Raises UserError, one line, for any other line: Compose parses `export`, quotes, `$` and its own line ends
    differently from the signature's check.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.isprintable() and (not line.strip() or line.startswith("#")):
            continue
        match = VARIABLE.fullmatch(line) if line.isprintable() else None
        if match is None:
            raise errors.UserError(
                f"the bundle's .env, line {number} is {line[:60]!r}: write KEY=value, without `export`, and in the "
                "value none of $ ` \\ # nor a quote inside it"
            )
        key, value = match["key"], match["value"].strip()
        if key not in VARIABLES:
            raise errors.UserError(
                f"the bundle's .env, line {number} sets {key}; it may set {', '.join(VARIABLES)}"
            )
        if key in variables:
            raise errors.UserError(
                f"the bundle's .env, line {number} sets {key} a second time: leave one line of them"
            )
        variables[key] = value
    return variables


def variables_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the variables of a bundle. Raises UserError as :func:`read_variables` does."""
    try:
        return read_variables(files[".env"].decode())
    except UnicodeDecodeError:
        raise errors.UserError(
            "the bundle's .env is not in UTF-8: save it as a plain text file"
        ) from None


def supernode_command(
    site: Site, *, program: Sequence[str] = ("flower-supernode",)
) -> list[str]:
    """Return the command line of a silo's SuperNode, which opens no port."""
    return [
        *program,
        *("--superlink", site.server),
        *("--root-certificates", str(site.ca_certificate)),
        *("--auth-supernode-private-key", str(site.node_key)),
        *("--node-config", node_config(site.node_config)),
    ]


def read_node_config(text: str) -> dict[str, Any]:
    """Return the pairs of a `--node-config`, as Flower's parser does. Raises UserError."""
    try:
        values = tomllib.loads("\n".join(f"{k} = {v}" for k, v in PAIR.findall(text)))
    except ValueError as error:
        raise errors.UserError(f"--node-config {text!r}: {error}") from None
    if PAIR.sub("", text).strip():
        raise errors.UserError(f"--node-config {text!r}: write KEY='VALUE' pairs")
    return values


def node_config(values: Mapping[str, str]) -> str:
    """Return the value of `--node-config`: `key='value'` pairs, in which no quote is escaped."""
    pairs = []
    for key, value in values.items():
        if "'" not in value:
            pairs.append(f"{key}='{value}'")
        elif not set('"\\') & set(value):
            pairs.append(f'{key}="{value}"')
        else:
            raise errors.UserError(
                f"{key}: {value!r} has quotes that Flower's --node-config cannot carry; rename it"
            )
    return " ".join(pairs)
