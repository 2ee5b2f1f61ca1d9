"""Federation file `federation.yaml`: the silos, their devices and their data.

    name: demo
    server: {address: 127.0.0.1, fleet-port: 9092, control-port: 8000}   # a port left out or 0: a free one
    # server.public: fl.example.org:443                                  # what bundles have, of a proxy in front
    demo: {dataset: digits, partition: dirichlet, seed: 42, parts: 12}   # data of silos with `data: demo`
    silos:
      - {name: hospital-01, device: cpu, data: demo}
      - {name: hospital-02, device: "cuda:0", data: /data/hospital-02.npz, memory: 4g, policy: hospital-02.toml}
      - {name: hospital-03, data: /data/hospital-03.npz, samples: 800}     # its weight as a number of training samples
      - {name: hospital-04, data: /data/hospital-04.npz, role: held-out}   # evaluated, and never trained on
      - {name: hospital-05, data: {dataset: "ward.data:ours"}}             # a data set of one's own (docs/own-data.md)
    agreed: {shape: [13], classes: 2, samples: {clinic-13: 500}}           # also for remote hospitals
    run: {min-silos: 9, lost-silo: go-on}                                  # default settings of every run
    runs: 1                                                                # runs at a time; the others wait
    operators: [{name: alice, role: owner, key: "SHA256:..."}]             # who may call the server
    schema: schema.toml                                                    # or an inline schema: partitions/schema.py

Read by `silofl up` and `silofl compose`, and by `silofl run` for `agreed` and `run`. Relative paths start at the file's
directory.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from functools import cached_property
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)

from client.link.route import bracket_host
from client.protocol.bundle_files import DEVICE
from client.protocol.policy import PUBLIC, read_policy
from partitions.common.errors import UserError
from partitions.common.files import file_fault
from partitions.common.names import SILO, nearest, unknown_name
from partitions.common.parsed import Frozen, match_pattern, parse_values, read_text, shorten
from partitions.common.plain_yaml import load_yaml
from partitions.schema import NO_SCHEMA, Schema, load_schema, parse_schema
from server.deploy.access.operators import Operator, check_operators

# Maximum characters of a file
TAKEN = ("default", "local", "supergrid")  # entries of Flower's own configuration
# Not in `run`
OF_A_RUN = {"dataset", "partition", "data-dir", "silos", "agreed", "resume", "out", "hold-out"}
HYPHENS = ConfigDict(alias_generator=lambda name: name.replace("_", "-"))

Name = Annotated[
    str,
    match_pattern(
        SILO.pattern, "use 1 to 63 lower-case letters, digits and hyphens, a letter first"
    ),
]
Port = Annotated[int, Field(ge=0, le=65535)]


def _is_ip(address: str) -> bool:
    try:
        return bool(ip_address(address))
    except ValueError:
        return False


class Server(Frozen):
    """Address of the server for silos; port 0: choose a free one.

    `public`: HOST:PORT that hospitals elsewhere use instead, of a proxy in front of the Fleet port.
    """

    model_config = HYPHENS

    address: Annotated[
        str,
        match_pattern(
            r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?|::1?",
            "use a host name or an IP address, without brackets and interface",
        ),
    ] = "127.0.0.1"
    fleet_port: Port = 0
    control_port: Port = 0
    public: Annotated[
        str,
        match_pattern(
            r"|([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[1-9]\d{0,4}",
            "use HOST:PORT, as in fl.example.org:443",
        ),
    ] = ""

    @property
    def public_host(self) -> str:
        """Host by which hospitals reach the server."""
        return self.public.rpartition(":")[0].strip("[]") or self.address

    def reached_at(self, fleet_port: int) -> str:
        """Return HOST:PORT by which hospitals reach the server that listens on this Fleet port."""
        return self.public or f"{bracket_host(self.address)}:{fleet_port}"

    @model_validator(mode="after")
    def ports_differ(self) -> Self:
        if self.fleet_port and self.fleet_port == self.control_port:
            raise UserError("fleet-port and control-port must differ")
        if ":" in self.address and not _is_ip(self.address):
            raise UserError(
                f"address = {self.address}: a host name or an IP address is needed here; fleet-port is the port"
            )
        if self.public and int(self.public.rpartition(":")[2]) > 65535:
            raise UserError(f"public = {self.public}: a port is at most 65535")
        return self


class Demo(Frozen):
    """Data set that is split over the silos with `data: demo`.

    `parts`: number of parts; extra parts are for later silos. None: keep the existing number, initially one per silo.
    `settings`: of the partition (`dirichlet.beta`), and `validation`; others have their defaults.
    """

    dataset: str = "digits"
    partition: str = "dirichlet"
    seed: Annotated[int, Field(ge=0)] = 42
    parts: Annotated[int, Field(ge=1)] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def exists(self) -> Self:
        from partitions.datasets.registry import DATASETS
        from partitions.schemes.registry import PARTITIONS

        for kind, name, known in (
            ("dataset", self.dataset, DATASETS),
            ("partition", self.partition, PARTITIONS),
        ):
            if name not in known:
                raise unknown_name(kind, name, known)
        check_settings(
            self.settings,
            lambda key: key == "validation" or key.startswith(f"{self.partition}."),
            partition=self.partition,
        )
        return self


def check_settings(
    values: Mapping[str, Any], allowed: Callable[[str], bool], **others: object
) -> None:
    """Raise UserError unless all keys are settings that are allowed here, and the values can go with the others."""
    from strategies.base.run_settings import defaults, parse_settings

    known = [key for key in defaults() if allowed(key)]
    if wrong := next((key for key in values if key not in known), ""):
        raise UserError(f"unknown setting {shorten(wrong)}{nearest(wrong, known)}")
    parse_settings({**values, **others})


class FederationPlace(NamedTuple):
    """Folder of a federation file, and whether its data files must exist."""

    folder: Path
    check_data: bool


def named_file(named: object, info: ValidationInfo[FederationPlace]) -> Path:
    """Return the path of a file that is named in the federation file."""
    if not isinstance(named, str) or not named:
        raise UserError("must be the path of a file")
    if "\0" in named or any("\ud800" <= character <= "\udfff" for character in named):
        raise UserError("no file name has such a character")
    try:
        return Path(info.context.folder, Path(named).expanduser()).absolute()
    except RuntimeError:
        raise UserError("there is no home directory of that user") from None


def data_file(named: object, info: ValidationInfo[FederationPlace]) -> Path | None:
    if named == "demo":
        return None
    if isinstance(named, dict):
        return own_dataset(named, info.context.folder)
    file = named_file(named, info)
    if info.context.check_data and (fault := file_fault(file)):
        raise UserError(f"{fault}; give the path of an .npz file, or `demo`")
    return file


def own_dataset(content: dict[object, object], folder: Path) -> Path:
    """Return where `silofl up` makes the index of a data set of one's own, beside the federation file."""
    from partitions.own.dataset import resolve_name
    from partitions.own.index import index_file

    name = resolve_name(str(content.get("dataset", "")))
    if set(content) != {"dataset"} or not name:
        raise UserError("must be a path, `demo`, or {dataset: MODULE:FUNCTION}")
    return index_file(folder.absolute(), name)


def policy_file(named: object, info: ValidationInfo[FederationPlace]) -> str:
    """Return a silo's policy. A policy file is checked now, because a silo does not start with an unreadable one."""
    if named in (None, PUBLIC):
        # Demo data are public
        return PUBLIC if named or info.data.get("data", "") is None else ""
    read_policy(file := str(named_file(named, info)))
    return file


def join_devices(content: object) -> object:
    """Return a list of devices as a text, as everywhere else."""
    return ",".join(map(str, content)) if isinstance(content, list) else content


class SiloEntry(Frozen):
    """One silo; `data` is None for a silo with a part of the demo data."""

    model_config = HYPHENS
    name: Name
    device: Annotated[
        str,
        match_pattern(
            DEVICE, "use cpu, cuda:0 and so on, a list of these, MIG-UUID, or 0:1 of MIG"
        ),
        BeforeValidator(join_devices),
    ] = "cpu"
    data: Annotated[Path | None, PlainValidator(data_file)]
    memory: Annotated[
        str, match_pattern(r"|[1-9]\d*(\.\d+)?[kmgKMG][bB]?", "write for example 2g or 512m")
    ] = ""
    # The share of its GPU's memory; None: all that it gets
    gpu_share: Annotated[float, Field(gt=0, le=1)] | None = None
    # a file, `public`, or nothing, which means the defaults
    policy: Annotated[Any, PlainValidator(policy_file)] = Field(None, validate_default=True)
    # Its weight as a number of training samples; None: as reported
    samples: Annotated[int, Field(ge=1)] | None = None
    role: Literal["train", "held-out"] = "train"


def declared_schema(content: object, info: ValidationInfo[FederationPlace]) -> Schema:
    """Return the schema of the section `schema`, or of the file that it names."""
    return (
        load_schema(named_file(content, info))
        if isinstance(content, str)
        else parse_schema(content)
    )


# An empty section
Section = BeforeValidator(lambda content: {} if content is None else content)


class Content(Frozen):
    """Sections of a federation file."""

    name: Name
    server: Annotated[Server, Section] = Server()
    demo: Demo | None = None
    # None: every hospital has a bundle
    silos: Annotated[tuple[SiloEntry, ...], Field(strict=False)]
    agreed_values: Annotated[dict[str, Any], Section] = Field(
        default_factory=dict, alias="agreed"
    )
    run: Annotated[dict[str, Any], Section] = Field(default_factory=dict)
    # At a time; the others wait
    runs: Annotated[int, Field(ge=1, le=100)] = 1
    # None: every call that reaches the control port is answered
    operators: Annotated[tuple[Operator, ...], Field(strict=False)] = ()
    declared: Annotated[Any, PlainValidator(declared_schema)] = Field(NO_SCHEMA, alias="schema")

    @field_validator("run")
    @classmethod
    def can_run(cls, run: dict[str, Any]) -> dict[str, Any]:
        from strategies.base.settings import MOST_SILOS

        # Each run sets their number
        check_settings(run, lambda key: key not in OF_A_RUN, silos=MOST_SILOS)
        return run

    @model_validator(mode="after")
    def fit_together(self) -> Self:
        from strategies.base.transport.data_summary import read_agreed

        read_agreed(self.agreed)
        check_operators(self.operators)
        names = [silo.name for silo in self.silos]
        if self.name in TAKEN:
            raise UserError(
                f"name = {self.name}: is an entry of Flower's own configuration; choose another name"
            )
        if twice := [name for name in names if names.count(name) > 1]:
            raise UserError(
                f"silos: the name {twice[0]} is there {len(twice)} times; each needs its own"
            )
        if self.silos and all(silo.role == "held-out" for silo in self.silos):
            raise UserError("silos: all have `role: held-out`; none would be left to train")
        users = [silo.name for silo in self.silos if silo.data is None]
        if users and self.demo is None:
            raise UserError(
                f"silo {users[0]} has `data: demo` but there is no `demo` section; "
                "add one such as `demo: {dataset: digits, partition: dirichlet, seed: 42}`"
            )
        if self.demo and self.demo.parts and self.demo.parts < len(users):
            raise UserError(
                f"demo.parts = {self.demo.parts}: too few for {len(users)} silos with `data: demo`"
            )
        return self

    @cached_property
    def agreed(self) -> str:
        """The section `agreed`, the silos' `samples` and the schema, as the setting `agreed`."""
        fields = dict(self.agreed_values)
        samples = {silo.name: silo.samples for silo in self.silos if silo.samples}
        if samples and isinstance(elsewhere := fields.get("samples", {}), dict):
            fields["samples"] = elsewhere | samples
        fields |= {"schema": schema} if (schema := self.declared.bare.content) else {}
        return json.dumps(fields, sort_keys=True, default=str) if fields else ""


class Federation(Content):
    """A federation file that was read. ``demo`` is None also where no silo has demo data."""

    path: Path

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a run that does not say else: of the demo data, and of the section `run`."""
        demo = self.demo.model_dump(include={"dataset", "partition"}) if self.demo else {}
        return {**demo, **(self.demo.settings if self.demo else {}), **self.run}

    @property
    def flower_command(self) -> str:
        """The command that trains with Flower's own tool, which does not read the section `run` itself."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in self.run.items())
        settings = f" --run-config {shlex.quote(pairs)}" if pairs else ""
        return f"flwr run . {self.name} --stream{settings}"

    def held_out(self, strategy: object = None) -> tuple[str, ...]:
        """The silos that never take part in training; where nothing is trained, all silos are alike."""
        from strategies.base.evaluation import EVALUATE
        from strategies.base.survey import SURVEY

        trains = strategy not in (EVALUATE, SURVEY)
        return tuple(silo.name for silo in self.silos if trains and silo.role == "held-out")

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
        text = read_text(path)
    except FileNotFoundError:
        raise UserError(f"there is no {path}: write one, or name another file") from None
    place = FederationPlace(path.parent, check_data)
    content = parse_values(
        Content, parse_yaml(text, path), path, "docs/deployment.md describes the file", place
    )
    demo = content.demo if any(silo.data is None for silo in content.silos) else None
    fields = {name: getattr(content, name) for name in Content.model_fields}
    return Federation.model_construct(**fields | {"demo": demo}, path=path)


def parse_yaml(text: str, path: Path) -> Any:
    """Return the content of a YAML file. Raises UserError, one line."""
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{path}{line}: not valid YAML: {problem}") from None
    # PyYAML raises at least six types for a value that does not fit its tag
    except Exception as error:
        raise UserError(
            f"{path}: not valid YAML: a value does not fit its tag ({error})"
        ) from None
