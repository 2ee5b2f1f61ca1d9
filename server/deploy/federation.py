"""Federation file `federation.yaml`: the silos, their devices and their data.

    name: demo
    server: {address: 127.0.0.1, fleet-port: 9092, control-port: 8000}   # a port left out or 0: a free one
    demo: {dataset: digits, partition: dirichlet, seed: 42, parts: 12}   # data of silos with `data: demo`
    silos:
      - {name: hospital-01, device: cpu, data: demo}
      - {name: hospital-02, device: "cuda:0", data: /data/hospital-02.npz, memory: 4g, policy: hospital-02.toml}
      - {name: hospital-03, data: /data/hospital-03.npz, samples: 800}     # its weight as a number of training samples
      - {name: hospital-04, data: /data/hospital-04.npz, role: held-out}   # evaluated, and never trained on
    agreed: {shape: [13], classes: 2, samples: {clinic-13: 500}}           # also for remote hospitals
    run: {min-silos: 9, lost-silo: resend}                                 # default settings of every run
    schema: schema.toml                                                    # or an inline schema: partitions/schema.py

Read by `silofl up` and `silofl compose`, and by `silofl run` for `agreed` and `run`. Relative paths start at the file's
directory.
"""

import json
import os
import re
import reprlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from client.site.errors import SiteError
from client.site.trust.policy import PUBLIC, read_policy
from partitions.common.errors import UserError
from partitions.common.names import SILO, unknown_name
from partitions.schema import NO_SCHEMA, Schema, load_schema, parse_schema

NAME = SILO
SHORT = reprlib.Repr()  # short text of a value, whose size YAML aliases can make unlimited
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 2, 80, 80
shown = SHORT.repr
KEYS = ("name", "device", "data", "memory", "policy", "samples", "role")  # of a silo
ROLES = (TRAIN, HELD_OUT) = ("train", "held-out")
DEVICE = re.compile(r"cpu|cuda:\d{1,3}")
MEMORY = re.compile(r"[1-9]\d*(\.\d+)?[kmg]b?", re.IGNORECASE)
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?|::1?")
LARGEST, DEEPEST = 1 << 20, 20  # maximum characters and levels of a file; a federation has four levels
OF_A_RUN = (
    "dataset",
    "partition",
    "data-dir",
    "silos",
    "agreed",
    "resume",
    "out",
    "hold-out",
)  # settings that the section `run` must not contain
TAKEN = ("default", "local", "supergrid")  # entries of Flower's own configuration


@dataclass(frozen=True)
class Server:
    """Address of the server for silos; port 0: choose a free one."""

    address: str = "127.0.0.1"
    fleet_port: int = 0
    control_port: int = 0


@dataclass(frozen=True)
class Demo:
    """Data set that is split over the silos with `data: demo`.

    `parts`: number of parts; extra parts are for later silos. 0: keep the existing number, initially one per silo.
    `settings`: of the partition (`dirichlet.beta`), and `validation`; others have their defaults.
    """

    dataset: str = "digits"
    partition: str = "dirichlet"
    seed: int = 42
    parts: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def split(self) -> dict[str, Any]:
        """The entries that determine the parts, apart from their number."""
        made = {"dataset": self.dataset, "partition": self.partition, "seed": self.seed}
        return made | ({"settings": dict(self.settings)} if self.settings else {})


@dataclass(frozen=True)
class SiloEntry:
    """One silo; `data` is None for a silo with a part of the demo data."""

    name: str
    device: str = "cpu"
    data: Path | None = None
    memory: str = ""
    policy: str = ""  # a file, `public`, or nothing, which means the defaults
    samples: int = 0  # its weight as a number of training samples; 0: the reported number, within bounds
    role: str = TRAIN


@dataclass(frozen=True)
class Federation:
    """Checked content of a federation file."""

    path: Path
    name: str
    server: Server
    demo: Demo | None
    silos: tuple[SiloEntry, ...]
    agreed: str = ""  # the schema and sample counts of the silos' data, as the setting `agreed`
    run: Mapping[str, Any] = field(default_factory=dict)  # default settings of its runs
    schema: Schema = NO_SCHEMA  # required columns and labels of every silo's data file

    @property
    def held_out(self) -> tuple[str, ...]:
        """The silos that never take part in training."""
        return tuple(silo.name for silo in self.silos if silo.role == HELD_OUT)

    @property
    def demo_silos(self) -> tuple[SiloEntry, ...]:
        """The silos with demo data, in the file's order."""
        return tuple(silo for silo in self.silos if silo.data is None)


def read_federation(path: Path, *, check_data: bool = True) -> Federation:
    """Read and check a federation file.

    `check_data`: also check that the silos' data files exist.

    Raises UserError with one line: the fault, its place, and the fix.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no {path}: write one, or name another file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    content = _parsed(text, path)
    known = ("name", "server", "demo", "silos", "agreed", "run", "schema")
    top = _mapping(content, f"{path}", known, required=("name", "silos"))
    name = _name(top["name"], f"{path}: name")
    if name in TAKEN:
        raise UserError(f"{path}: name: {shown(name)} is an entry of Flower's own configuration; choose another name")
    server = _server(top.get("server"), path)
    demo = _demo(top.get("demo"), path)
    if not isinstance(top["silos"], list) or not top["silos"]:
        raise UserError(f"{path}: silos: needs a list of at least one silo, each with a `name`")
    silos = tuple(_silo(item, number, path, check_data) for number, item in enumerate(top["silos"], start=1))
    names = [silo.name for silo in silos]
    for silo, times in Counter(names).items():
        if times > 1:
            raise UserError(f"{path}: silos: the name {silo!r} is there {times} times; each needs its own")
    users = [silo.name for silo in silos if silo.data is None]
    if all(silo.role == HELD_OUT for silo in silos):
        raise UserError(f"{path}: silos: all have `role: held-out`; none would be left to train")
    if users and demo is None:
        raise UserError(
            f"{path}: silo {users[0]} has `data: demo` but there is no `demo` section; "
            "add one such as `demo: {dataset: digits, partition: dirichlet, seed: 42}`"
        )
    if demo is not None and 0 < demo.parts < len(users):
        raise UserError(f"{path}: demo.parts: {demo.parts} parts are too few for {len(users)} silos with `data: demo`")
    schema = _schema(top.get("schema"), path)
    agreed, run = _agreed(top.get("agreed"), silos, schema, path), _run(top.get("run"), path)
    return Federation(path, name, server, demo, silos, agreed, run, schema)


def _schema(content: Any, path: Path) -> Schema:
    """Return the schema of the section `schema`, or of the file that it names."""
    if content is None:
        return NO_SCHEMA
    try:
        if isinstance(content, str):
            return load_schema(_file(content, f"{path}: schema", path))
        return parse_schema(content)
    except ValueError as error:
        raise UserError(f"{path}: schema: {error}") from None


def _agreed(content: Any, silos: Sequence[SiloEntry], schema: Schema, path: Path) -> str:
    """Return the section `agreed`, the silos' `samples` and the schema as one JSON text."""
    fields = dict(_mapping(content or {}, f"{path}: agreed", ("task", "shape", "classes", "samples")))
    samples = {silo.name: silo.samples for silo in silos if silo.samples}
    if samples:
        fields["samples"] = {**_mapping_of(fields.get("samples") or {}, f"{path}: agreed.samples"), **samples}
    fields |= {"schema": schema.bare.content} if schema.bare.content else {}
    if not fields:
        return ""
    from strategies.base.schema.data_summary import read_agreed

    try:
        read_agreed(text := json.dumps(fields, sort_keys=True, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None
    return text


def _run(content: Any, path: Path) -> Mapping[str, Any]:
    """Return the checked section `run`; the number of silos is set by each run."""
    from strategies.base.run_settings import defaults, parse_settings
    from strategies.base.settings import MOST_SILOS

    run = _mapping(content or {}, f"{path}: run", tuple(key for key in defaults() if key not in OF_A_RUN))
    try:
        parse_settings({**run, "silos": MOST_SILOS})
    except ValueError as error:
        raise UserError(f"{path}: run: {error}") from None
    return run


def _mapping_of(content: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(content, dict):
        raise UserError(f"{where}: needs a number for each silo, got {shown(content)}")
    return content


def _parsed(text: str, path: Path) -> Any:
    if len(text) > LARGEST:
        raise UserError(f"{path} has {len(text)} characters: a federation file has at most {LARGEST}")
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    except Exception as error:  # PyYAML raises at least six types for a value that does not fit its tag
        raise UserError(f"{path}: not valid YAML: a value does not fit its tag ({error})") from None


class Loader(yaml.SafeLoader):
    """Loader of plain values with a limited depth."""

    level = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.level += 1
        if self.level > DEEPEST:
            raise yaml.YAMLError("nested too deep")
        node = super().compose_node(parent, index)
        self.level -= 1
        return node


def _server(content: Any, path: Path) -> Server:
    if content is None:
        return Server()
    where = f"{path}: server"
    fields = _mapping(content, where, ("address", "fleet-port", "control-port"))
    address = fields.get("address", Server.address)
    if not isinstance(address, str) or not HOST.fullmatch(address):
        raise UserError(f"{where}.address: {shown(address)} is neither a host name nor an IP address")
    ports = {}
    for key in ("fleet-port", "control-port"):
        port = fields.get(key, 0)
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise UserError(f"{where}.{key}: {shown(port)} is not a port; use 1 to 65535, or 0 for a free one")
        ports[key] = port
    if ports["fleet-port"] and ports["fleet-port"] == ports["control-port"]:
        raise UserError(f"{where}: fleet-port and control-port are both {ports['fleet-port']}; they must differ")
    return Server(address, ports["fleet-port"], ports["control-port"])


def _demo(content: Any, path: Path) -> Demo | None:
    if content is None:
        return None
    from partitions.datasets.registry import DATASETS
    from partitions.schemes.registry import PARTITIONS

    where = f"{path}: demo"
    fields = _mapping(content, where, ("dataset", "partition", "seed", "parts", "settings"))
    seed = fields.get("seed", Demo.seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"{where}.seed: {shown(seed)} is not a whole number of at least 0")
    parts = fields.get("parts", Demo.parts)
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < ("parts" in fields):
        raise UserError(f"{where}.parts: {shown(parts)} is not a whole number of at least 1")
    demo = Demo(fields.get("dataset", Demo.dataset), fields.get("partition", Demo.partition), seed, parts)
    for kind, name, known in (("dataset", demo.dataset, DATASETS), ("partition", demo.partition, PARTITIONS)):
        word = name if isinstance(name, str) else shown(name)
        if word not in known:
            raise UserError(f"{where}.{kind}: {unknown_name(kind, word, known)}")
    return replace(demo, settings=_split_settings(fields.get("settings"), demo.partition, f"{where}.settings"))


def _split_settings(content: Any, partition: str, where: str) -> Mapping[str, Any]:
    """Return the checked section `demo.settings`: settings of the partition, and `validation`."""
    from strategies.base.run_settings import defaults, parse_settings

    known = tuple(key for key in defaults() if key == "validation" or key.startswith(f"{partition}."))
    settings = _mapping(content or {}, where, known)
    try:
        parse_settings({**settings, "partition": partition})
    except ValueError as error:
        raise UserError(f"{where}: {error}") from None
    return settings


def _silo(content: Any, number: int, path: Path, check_data: bool) -> SiloEntry:
    where = f"{path}: silo {number}"
    fields = _mapping(content, where, KEYS, required=("name", "data"))
    name = _name(fields["name"], f"{where}: name")
    where = f"{path}: silo {name}"
    device = fields.get("device", "cpu")
    if not isinstance(device, str) or not DEVICE.fullmatch(device):
        raise UserError(f"{where}: device: {shown(device)} is no device; use `cpu`, or `cuda:0` and so on")
    memory = fields.get("memory", "")
    if memory != "" and not (isinstance(memory, str) and MEMORY.fullmatch(memory)):
        raise UserError(f"{where}: memory: {shown(memory)} is no amount of memory; write for example `2g` or `512m`")
    policy = _policy(fields.get("policy"), f"{where}: policy", path)
    samples = fields.get("samples", 0)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < ("samples" in fields):
        raise UserError(
            f"{where}: samples: {shown(samples)} is no number of training samples; use a whole one from 1 on"
        )
    role = fields.get("role", TRAIN)
    if role not in ROLES:
        raise UserError(f"{where}: role: {shown(role)} is none; use `train`, or `held-out`")
    data = fields["data"]
    if not isinstance(data, str) or not data:
        raise UserError(f"{where}: data: {shown(data)} is neither `demo` nor the path of an .npz file")
    if data == "demo":
        return SiloEntry(name, device, None, memory, policy or PUBLIC, samples, role)  # public data
    file = _file(data, f"{where}: data", path)
    if check_data and not os.path.isfile(file):  # False also for a name that is too long
        raise UserError(f"{where}: data: there is no file {file}; give the path of an .npz file, or `demo`")
    return SiloEntry(name, device, file, memory, policy, samples, role)


def _policy(named: Any, where: str, path: Path) -> str:
    """Return a silo's policy. A policy file is checked now, because a silo does not start with an unreadable one."""
    if named in (None, PUBLIC):
        return named or ""
    if not isinstance(named, str) or not named:
        raise UserError(f"{where}: {shown(named)} is neither the path of a policy.toml nor `public`")
    file = str(_file(named, where, path))
    try:
        read_policy(file)
    except SiteError as error:
        raise UserError(f"{where}: {error}") from None
    return file


def _file(named: str, where: str, path: Path) -> Path:
    if "\0" in named or any("\ud800" <= character <= "\udfff" for character in named):
        raise UserError(f"{where}: {shown(named)} is no path: no file name has such a character")
    try:
        return (path.parent / Path(named).expanduser()).absolute()
    except RuntimeError:
        raise UserError(f"{where}: there is no home directory of the user in {shown(named)}") from None


def _mapping(content: Any, where: str, known: tuple[str, ...], *, required: tuple[str, ...] = ()) -> Mapping[str, Any]:
    """Return the mapping if it has all required keys and no unknown one."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: needs keys and values ({', '.join(known)}), got {shown(content)}")
    for key in content:
        if key not in known:
            raise UserError(f"{where}: {unknown_name('key', key[:80] if isinstance(key, str) else shown(key), known)}")
    for key in required:
        if content.get(key) is None:
            raise UserError(f"{where}: the key {key!r} is missing")
    return content


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise UserError(
            f"{where}: {shown(value)} is no name: use 1 to 63 lower-case letters, digits and hyphens, a letter first"
        )
    return value
