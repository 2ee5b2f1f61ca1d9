"""Who may do what at the Control API: operators with keys and roles, and the log of what they did.

`silofl up` and `setup` write `operators.json` from the federation file; the SuperLink reads it at every call. Each call
is signed with the operator's own key, over path, time and body. Where the file names no operators, every call that
reaches the loopback port is answered, as before. `flwr` itself signs nothing, so it is refused where it does.

`gate.py` decides.
"""

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from client.protocol.chain import Chain
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import load_key, new_key, write_key
from partitions.common.errors import UserError
from partitions.common.files import state_home, write_atomically
from partitions.common.names import SILO
from partitions.common.parsed import Frozen, match_pattern

SERVICE = "operator.key"  # of the server's own processes, beside its certificate
KEY, FILE, LOG = "SILOFL_OPERATOR_KEY", "SILOFL_OPERATORS", "SILOFL_ACTIONS"


class Operator(Frozen):
    """A person, or the server's own processes. ``key``: the fingerprint of the public key."""

    name: Annotated[str, match_pattern(SILO.pattern, "use lower-case letters, digits, hyphens")]
    role: Literal["viewer", "operator", "owner"]
    key: Annotated[str, match_pattern("SHA256:[0-9a-f]{64}", "silofl operator add prints it")]


class Operators(Frozen):
    """The content of `operators.json`."""

    operators: tuple[Operator, ...] = ()


class Actions(Chain):
    """What was asked of the server: a chain of lines, on the disk before the server acts."""

    kind: ClassVar[str] = "actions"
    required: ClassVar[frozenset[str]] = frozenset(
        {"name", "role", "action", "digest", "outcome"}
    )


def check_operators(operators: tuple[Operator, ...]) -> None:
    """Raise UserError for two operators with a name or key, or none that could change anything."""
    for field in ("name", "key"):
        values = [getattr(operator, field) for operator in operators]
        if twice := [value for value in values if values.count(value) > 1]:
            raise UserError(f"operators: the {field} {twice[0]} is there twice")
    if operators and not any(operator.role == "owner" for operator in operators):
        raise UserError("operators: no one has `role: owner`; no silo could be added")


def write_operators(folder: Path, credentials: Path, operators: tuple[Operator, ...]) -> None:
    """Write `operators.json`, with the key of the server's own processes where there are operators."""
    if operators:
        key = make_key(credentials / SERVICE)
        operators = (*operators, Operator(name="server", role="owner", key=key))
    content = Operators(operators=operators).model_dump_json(indent=1)
    write_atomically(folder / "operators.json", content + "\n", mode=0o600)


def make_key(path: Path) -> str:
    """Return the fingerprint of a key; a missing one is made."""
    if not path.exists():
        write_key(path, new_key())
    return fingerprint(public_pem(load_operator_key(path)))


def load_operator_key(path: Path) -> EllipticCurvePrivateKey:
    """Return this person's key, or the key of the server's own processes. Raises UserError."""
    add = "run `silofl operator add NAME`, and put its new line into federation.yaml"
    return load_key(path, add if path == key_file() else "run `silofl up`")


def key_file() -> Path:
    """Return the file of this person's key."""
    return Path(os.environ.get(KEY) or state_home() / "silofl-operator.key")


def log_of(federation: str) -> Actions:
    """Return the log of a server of `silofl up`."""
    return Actions(state_home() / "silofl" / federation / "actions")
