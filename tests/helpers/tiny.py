"""Tiny federations: silos of a few rows each, in files of their own, through the real grid, app and round loop.

The model is a linear layer (``mlp`` without hidden layers) on plain columns, so that every number can be worked out
beside the test: :func:`gradient` is its softmax regression in float64 numpy, and shares nothing with the package.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from gates import described
from near import near
from torch import Tensor

from client.app import app as client_app
from client.protocol.policy import PolicyRefusedError
from client.session import ClientSession
from client.site.message import SiteMessage
from client.site.release import release_reply
from client.site.rules.receipt import receipt_fault
from client.site.terms import read_terms
from models.initialisation import flat_model, initial_model
from server.results.history import Row
from server.results.run_directory import RunDirectory
from server.run.loop import RoundLoop
from server.simulation.engine import InProcessGrid, flower_identity
from server.simulation.simulate import simulate
from strategies import strategies
from strategies.base.client import SiloClient
from strategies.base.partial import PartialSettings
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.silo import Silo
from strategies.base.state import MODEL_OF, State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.payload import array_record, decode, tensor_of

Files = Mapping[str, Path]
Numbers = npt.NDArray[np.float64]

METHODS = ("local", "fedavg", "fedavg-ft", "fedprox", "fedprox-ft", "fedala", "apple")
# What every tiny run has in common: one full batch per epoch, no normalisation
PLAIN: dict[str, Any] = {
    "model": "mlp",
    "mlp.hidden": "",
    "normalization": "none",
    "batch-size": 1000,
    "learning-rate": 1.0,
    "min-metric-samples": 1,
    "threads": 1,
    "device": "cpu",
    "seed": 7,
}
# Some batches in some steps of some rounds
SHORT: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 4}


# ---------------------------------------------------------------------------------------------------------------------
# Data


def write_silo(
    path: Path, x: Sequence[Sequence[float]] | Numbers, y: Sequence[int], classes: int = 2
) -> Path:
    """A silo's file; its training rows are its validation and test rows too."""
    rows, labels = np.asarray(x, np.float32), np.asarray(y, np.int64)
    named: dict[str, Any] = {
        f"{kind}_{split}": v
        for split in ("train", "val", "test")
        for kind, v in (("x", rows), ("y", labels))
    }
    np.savez(path, classes=np.array(classes), **named)
    return path


def random_silos(
    folder: Path,
    sizes: Mapping[str, int] | Sequence[int],
    columns: int = 3,
    classes: int = 3,
    seed: int = 0,
) -> Files:
    """Silos of random rows, whose labels follow a linear rule that is turned a little from silo to silo.

    Without names they are a, b, c and so on.
    """
    named = (
        sizes if isinstance(sizes, Mapping) else dict(zip(ascii_lowercase, sizes, strict=False))
    )
    rng = np.random.default_rng(seed)
    rule = rng.normal(size=(columns, classes))
    files = {}
    for name, n in named.items():
        x = rng.normal(size=(n, columns))
        y = (x @ (rule + 0.7 * rng.normal(size=rule.shape))).argmax(1)
        files[name] = write_silo(folder / f"{name}.npz", x, y, classes)
    return files


def rows_of(file: Path) -> tuple[Numbers, npt.NDArray[np.int64]]:
    """A silo's training rows and labels."""
    with np.load(file, allow_pickle=False) as data:
        return data["x_train"].astype(np.float64), data["y_train"]


def gradient(w: Numbers, x: Numbers, y: npt.NDArray[np.int64]) -> Numbers:
    """Gradient of the mean cross-entropy of a linear layer; w = (weights row by row, biases).

    With p = softmax(W x + b): dL/dW = mean (p - e_y) xᵀ, dL/db = mean (p - e_y).
    """
    classes = len(w) // (x.shape[1] + 1)
    weights, bias = w[:-classes].reshape(classes, -1), w[-classes:]
    p = np.exp(x @ weights.T + bias)
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return np.concatenate([(p.T @ x).ravel(), p.sum(0)]) / len(y)


# ---------------------------------------------------------------------------------------------------------------------
# Running


def seen(reply: Message) -> Message:
    """A copy that keeps its vectors: the server drops a reply's as it reads them."""
    kept = copy(reply)
    if kept.has_content():
        kept.content = RecordDict({**kept.content})
    return kept


class TinyGrid(InProcessGrid):
    """The in-process grid with silos that have files of their own; it records all traffic and can disturb it."""

    def __init__(
        self,
        files: Files,
        settings: RunSettings,
        state_path: Path | None = None,
        state_dir: Path | None = None,
        policy: Any = "public",
    ) -> None:
        super().__init__(self.call, len(files), settings.flat(), state_path)  # type: ignore[arg-type]
        for context, (name, file) in zip(self.contexts.values(), files.items(), strict=True):
            config = {"name": name, "data": str(file), "policy": policy}
            config |= {"state-path": str(state_path)} if state_path else {}
            context.node_config = {
                **config,
                **({"state-dir": str(state_dir)} if state_dir else {}),
            }
        self.traffic: list[tuple[Message, Message]] = []
        self.before: Callable[[str, Message, Context], object] = lambda silo, message, context: (
            None
        )
        self.after: Callable[[str, Message, Message], Message] = lambda silo, message, reply: (
            reply
        )
        # (silo, round): its training fails before it begins
        self.absent: set[tuple[str, int]] = set()
        self.silent: set[tuple[str, int]] = set()  # (silo, round): it never answers

    def call(self, message: Message, context: Context) -> Message:
        silo = str(context.node_config["name"])
        if self.key_of(message) in self.absent and message.metadata.message_type == "train":
            return Message(Error(1, "the power is out"), reply_to=message)
        self.before(silo, message, context)
        reply = self.after(silo, message, client_app(message, context))
        self.traffic.append((message, seen(reply)))
        return reply

    def pull_messages(self, message_ids: Any) -> Any:
        kept = []
        for i in message_ids:
            message = self.sent.get(i)
            if message is None or self.key_of(message) not in self.silent:
                kept.append(i)
        return super().pull_messages(kept)

    def key_of(self, message: Message) -> tuple[str, int]:
        return self.name_of(message.metadata.dst_node_id), round_of(message)

    def name_of(self, node: int) -> str:
        return str(self.contexts[node].node_config["name"])

    def context_of(self, silo: str) -> Context:
        return next(c for c in self.contexts.values() if c.node_config["name"] == silo)

    def state(self, silo: str) -> State:
        """What the silo keeps in memory."""
        record = self.context_of(silo).state["arrays"]
        assert isinstance(record, ArrayRecord)
        return State({name: tensor_of(array) for name, array in record.items()})


def audited(grid: TinyGrid, *, takes_receipts: bool = False) -> None:
    """For ``prepare``: around each silo's app what the site's own process does, which writes down what leaves."""
    parsed: dict[str, SiteMessage] = {}

    def before(silo: str, message: Message, context: Context) -> None:
        terms = read_terms(context.node_config, context.run_config)
        parsed[silo] = described(message, context, terms)
        if takes_receipts and (fault := receipt_fault(parsed[silo])):
            raise PolicyRefusedError(f"{silo} refuses: {fault}")

    def after(silo: str, message: Message, reply: Message) -> Message:
        released: Message = release_reply(reply, parsed[silo])
        return released

    grid.before, grid.after = before, after


class Witness:
    """For ``prepare``: remembers every tensor of a message, a reply and a silo's state, with a copy of its values."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor, int]] = []

    def __call__(self, grid: TinyGrid) -> None:
        grid.before, grid.after = self.before, self.after

    def remember(self, *records: Any) -> None:
        for tensor in (tensor_of(array) for record in records for array in record.values()):
            self.seen.append((tensor, tensor.clone(), tensor._version))

    def before(self, silo: str, message: Message, context: Context) -> None:
        self.remember(*message.content.array_records.values())
        if "arrays" in context.state:
            self.remember(context.state["arrays"])

    def after(self, silo: str, message: Message, reply: Message) -> Message:
        self.remember(*reply.content.array_records.values())
        return reply

    def confirm(self, more_than: int) -> None:
        """Nothing has been written to any of them."""
        assert len(self.seen) > more_than
        for tensor, values, version in self.seen:
            assert torch.equal(tensor, values)
            assert tensor._version == version


def train_replies(grid: TinyGrid) -> Iterator[tuple[tuple[str, int], Message]]:
    """((silo, round), reply) of all training that went well."""
    for message, reply in grid.traffic:
        if message.metadata.message_type == "train" and not reply.has_error():
            yield grid.key_of(message), reply


def round_of(message: Message) -> int:
    config: Any = message.content.get("config", {}) if message.has_content() else {}
    return int(config.get("round", 0))


@dataclass
class Run:
    """A finished run and what it left."""

    settings: RunSettings
    federation: RoundLoop
    grid: TinyGrid
    strategy: PersonalizedStrategy

    @property
    def rows(self) -> list[Row]:
        return self.federation.history.rows

    @property
    def held(self) -> Any:
        """What the server keeps."""
        return self.strategy.state.arrays

    @property
    def shared(self) -> Tensor:
        """The server's model."""
        return self.strategy.state.arrays["global"]

    def kept(self, silo: str) -> Any:
        """What a silo keeps."""
        return self.grid.state(silo).arrays

    def start(self) -> Numbers:
        """The initial model of three columns and classes."""
        return initial(self.settings, 3, 3).double().numpy()

    def rejected(self) -> list[tuple[int, str]]:
        """(round, silo) of the replies that were left out."""
        return [(r.round, r.silo) for r in self.rows if r.metric == "rejected"]

    def values(
        self, metric: str, silo: str = "", snapshot: str = "", split: str = "test"
    ) -> list[float]:
        """A metric round by round."""
        split = split if snapshot else ""
        wanted = (silo, split, snapshot, metric)
        return [r.value for r in self.rows if (r.silo, r.split, r.snapshot, r.metric) == wanted]

    def personal(self, silo: str) -> Tensor:
        tensor: Tensor = self.kept(silo)["personal"]
        return tensor

    def ends_near(self, shared: Any, personal: Mapping[str, Any], within: float = 1e-6) -> None:
        """The server's model, and the silos' own ones, are these."""
        assert set(personal) == {self.grid.name_of(node) for node in self.grid.contexts}
        near(self.shared, shared, within)
        for silo, vector in personal.items():
            near(self.personal(silo), vector, within)

    def received(self, silo: str, server_round: int) -> Tensor:
        """The shared model of the message that this silo got in this round."""
        vector: Tensor = self.sent_to(silo, server_round)["global"].vector
        return vector

    def sent_to(self, silo: str, server_round: int) -> dict[str, Any]:
        """The models of the message that this silo got in this round, by name."""
        for message, _ in self.grid.traffic:
            known = self.grid.name_of(message.metadata.dst_node_id) == silo
            if (
                known
                and round_of(message) == server_round
                and message.metadata.message_type != "query"
            ):
                return {
                    key.removeprefix(MODEL_OF): m
                    for key, m in decode(message.content)[0].models.items()
                }
        raise AssertionError(f"nothing was sent to {silo} in round {server_round}")


def settings_of(files: Files, **changes: Any) -> RunSettings:
    """Settings of a tiny run. ``local_epochs=2`` is ``local-epochs``; ``apple__mu=1`` is ``apple.mu``."""
    given = {k.replace("__", ".").replace("_", "-"): v for k, v in changes.items()}
    return parse_settings({**PLAIN, "silos": len(files), **given})


def one_block(method: str) -> dict[str, Any]:
    """Settings with which a method runs on a network of one layer block: what it keeps in the silo is all of it."""
    if method == "fedxgb":
        return {"model": "trees", "trees__capacity": 60, "trees__depth": 1, "momentum": 0.0}
    own = issubclass(strategies()[method].Settings, PartialSettings)
    return {f"{method}__personal": "all"} if own else {}


def federate(
    files: Files,
    strategy: Any = "",
    *,
    directory: Any = None,
    state_dir: Any = None,
    policy: Any = "public",
    prepare: Any = None,
    before: Any = None,
    after: Any = None,
    absent: Any = (),
    watch: Any = None,
    **changes: Any,
) -> Run:
    """One run in a fresh engine; ``prepare`` may set up the grid, ``watch`` sees its rounds.

    ``before`` sees each silo, message and context; ``after`` silo, message and reply, and returns the reply. These
    (silo, round) are ``absent``: their training fails before it begins.

    With ``directory`` there is a run directory with checkpoints; with ``state_dir`` too, the silos keep their state
    as deployed ones do, in files only. ``policy``: the silos' policy, a file or ``public``.
    """
    forget_models()
    settings = settings_of(files, **changes | ({"strategy": strategy} if strategy else {}))
    run_directory, state_path = None, None
    with contextlib.ExitStack() as stack:
        if directory is not None:
            opened = RunDirectory.open(
                directory, settings.flat(), resume=settings.common.resume
            )
            run_directory = stack.enter_context(opened)
            state_path = (
                None if state_dir else run_directory.checkpoint(settings.run_key) / "silos"
            )
        grid = TinyGrid(files, settings, state_path, state_dir, policy)
        grid.absent.update(absent)
        grid.before, grid.after = before or grid.before, after or grid.after
        if prepare is not None:
            prepare(grid)
        federation = RoundLoop(grid, settings, run_directory, watch)
        stack.enter_context(flower_identity())
        return Run(settings, federation, grid, federation.run())


# w stays as it is
STILL: dict[str, Any] = {"fedala__max_epochs": 1, "fedala__eta": 0.0, "fedala__layers": 9}


def keep_weights_at(value: float, size: int = 12) -> Callable[[TinyGrid], None]:
    """For ``prepare``: sets ALA's W (size,) in the silos' states before every round; with η = 0 it stays there."""

    def before(silo: str, message: Message, context: Context) -> None:
        record: Any = context.state.get("arrays")
        if record is not None:
            record["weights"] = array_record({"w": torch.full((size,), value)})["w"]

    def prepare(grid: TinyGrid) -> None:
        grid.before = before

    return prepare


SIMULATED: dict[str, Any] = {
    "silos": 6,
    "partition": "iid",
    "model": "mlp",
    "mlp.hidden": "8",
    "threads": 1,
    "device": "cpu",
}


def simulated(
    files: Files | None = None, *, directory: Any = None, watch: Any = None, **changes: Any
) -> RoundLoop:
    """A run on ``digits``, or on files of the silos' own, through the grid as ``silofl simulate`` has it."""
    settings = parse_settings(
        {**SIMULATED, **{k.replace("_", "-"): v for k, v in changes.items()}}
    )
    run_directory = RunDirectory(directory) if directory else None
    states = run_directory.checkpoint(settings.run_key) / "silos" if run_directory else None
    grid = InProcessGrid(client_app, settings.common.silos, settings.flat(), states)
    for context, (name, file) in zip(
        grid.contexts.values(), (files or {}).items(), strict=False
    ):
        context.node_config = {"name": name, "data": str(file), "policy": "public"}
    federation = RoundLoop(grid, settings, run_directory, watch)
    with flower_identity():
        federation.run()
    return federation


def forget_models() -> None:
    """As in a fresh process: no network is left over from a run before."""
    flat_model.cache_clear()
    initial_model.cache_clear()


def initial(settings: RunSettings, columns: int, classes: int, purpose: str = "") -> Tensor:
    """The seeded initial model of that purpose."""
    name, options = settings.model_for((columns,))
    return initial_model(name, (columns,), classes, options, settings.common.seed)(
        purpose
    ).clone()


def session_of(settings: RunSettings, context: Context, **config: Any) -> ClientSession:
    """The session of a message with this config to a silo."""
    session = ClientSession(
        settings, context, read_terms(context.node_config, context.run_config)
    )
    session.config = config
    return session


def client_of(
    settings: RunSettings, silo: Silo, state: State | None = None, server_round: int = 1
) -> SiloClient:
    """A method's silo half, set to a round, as the app makes it."""
    client = settings.strategy.client(
        silo, settings.common, settings.method, state or State(), settings.strategy.info
    )
    client.round = server_round
    return client


def comparable(
    rows: Sequence[Row], *, without: Sequence[str] = ("round_seconds",)
) -> list[list[str]]:
    """Rows as the text of the file, without the method's name: two runs are the same when these are equal."""
    return [row.cells()[1:] for row in rows if row.metric not in without]


def history_without_seconds(run: Path) -> list[str]:
    """The lines of a run directory's history, but for how long rounds took."""
    return [
        line
        for line in (run / "history.csv").read_text().splitlines()
        if ",round_seconds," not in line
    ]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))


def json_of(file: Path) -> Any:
    return json.loads(file.read_text())


def summary_of(run: Path) -> Any:
    return json_of(run / "summary.json")


def events_of(run: Path) -> list[dict[str, Any]]:
    """What a run has written to its `progress.jsonl`."""
    return [json.loads(line) for line in (run / "progress.jsonl").read_text().splitlines()]


def notes(run: Path) -> list[str]:
    return [event["message"] for event in events_of(run) if event["event"] == "note"]


def small_study(out: Path, dataset: Any = "digits", **changes: Any) -> Path:
    """Two rounds of three silos as `silofl simulate` has them, without a word; its run directory."""
    given = {"dataset": str(dataset), "partition": "iid", "silos": 3, "rounds": 2, "threads": 1}
    own = {key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()}
    return simulate({**given, "out": str(out), **own}, quiet=True)


def split(w: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """A flat vector's parts of these shapes."""
    parts = torch.split(w, [int(np.prod(shape)) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
