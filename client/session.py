"""The objects of one silo that a message needs: a :class:`ClientSession`, built once per message.

It holds settings, policy, data, device, statistics, network and state. Each is created at its first use and cached.
Data, policy and settings are checked first: a silo where they do not fit refuses before it decodes the message.
Data, samples on the device and networks are cached across the messages of a process (``local_data.py``,
``models.initialisation``).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, cached_property
from logging import INFO
from typing import Any

import torch
from flwr.app import Context, Message, MessageType
from flwr.common import log
from torch import Tensor

from client.local_data import (
    agreed_classes,
    agreed_data,
    agreed_schema,
    columns_in,
    device_of,
    embedded_on,
    group_of,
    is_own_file,
    open_data,
    pool_silos,
    samples_on,
    silo_name,
    weights_file,
)
from client.privacy.checks import (
    check_floor,
    check_records,
    check_statistics,
    claim_statistics,
    released_moments,
)
from client.privacy.private_round import add_cost, noise_key, private_round, units_of
from client.protocol.code import digest_of_code
from client.protocol.policy import Policy, PolicyRefusedError, public_policy
from client.protocol.secure import COUNTED, OWN
from client.reported import note_terms
from client.site.counts import run_number
from client.site.message import log_folder
from client.site.terms import Terms
from client.store import StateStore
from models.initialisation import flat_model, initial_model
from models.parallel.group import Group
from models.shapes import columns as table_columns
from models.standardisation import Columns, standardisation
from models.tasks import task_of
from models.tasks.patches import Window
from models.trainable import Part
from partitions.common.errors import UserError
from partitions.common.own_code import load_function
from partitions.common.sizes import check_room
from partitions.common.source_sum import read_once
from partitions.splits import SiloData
from strategies.base.client import SiloClient
from strategies.base.evaluation import asks_for_models, input_digest
from strategies.base.newcomers import ANY, NEWCOMER
from strategies.base.run_settings import RunSettings
from strategies.base.settings.training import patches_of, seen_shape
from strategies.base.silo import Silo
from strategies.base.state import State
from strategies.base.transport.payload import decode

# A silo's defaults for values that the server's round loop sends, and Flower's own ``Strategy.start`` does not.
DEFAULTS = {
    "run": "",
    "run_id": "",
    "save": True,
    "min_metric_samples": 10,
    "state_lost": sys.maxsize,
}
# Of a model, at the peak: in SuperNode and app (docs/tables/bench-held.csv); the kept states' two models, and new ones
COPIES = 4, 6
Statistics = tuple[tuple[Columns, Columns], tuple[Columns, Columns]]


class ClientSession:
    """One silo and one message.

    ``config``: what the server agreed on (classes, statistics, ...) and what the message contains; a query has none.
    """

    def __init__(self, settings: RunSettings, context: Context, terms: Terms) -> None:
        self.settings, self.context, self.terms = settings, context, terms
        self.study = terms.study
        self.config: Mapping[str, Any] = {}
        self.group: Group | None = None  # in a training on several devices
        self.info = settings.strategy.info
        self.name = silo_name(context)
        self.state_dir = str(context.node_config.get("state-dir", ""))  # empty: none

    # -- what the silo has ----------------------------------------------------------------------------------------

    @cached_property
    def policy(self) -> Policy:
        """Return the stricter of policy and study; a simulation's data are public, or of the user who runs it."""
        return self.terms.rules if is_own_file(self.context) else public_policy()

    @cached_property
    def device(self) -> torch.device:
        return device_of(self.settings, self.context)

    @cached_property
    def data(self) -> SiloData:
        """Return the silo's data as read from their source."""
        return open_data(self.settings, self.context)

    def check_floor(self) -> None:
        """Raise PolicyRefusedError if there are too few samples to train with, or too few patients for what is sent."""
        sends = bool(self.info.uploads) or not self.info.trains or self.sends_own_model
        people = self.data.measured("train")
        check_floor(self.name, self.data.train, people, self.policy, sends=sends)

    @property
    def sends_own_model(self) -> bool:
        """Return whether the run has the silo send its own model at its end."""
        return asks_for_models(self.info, self.settings.common)

    def check_code(self) -> None:
        """Raise PolicyRefusedError if the trainer in this process is another than the study's, or than on the disk."""
        if not (name := self.settings.common.trainer):
            return
        load_function("trainer", name, "task")
        digest, study = read_once(name.partition(":")[0]), self.terms.study
        if digest and digest not in {digest_of_code(name)} & {
            study.trainer if study else digest
        }:
            raise PolicyRefusedError(
                f"{self.name} refuses: the code of trainer = {name} has changed since it was read"
            )

    def check_trains(self) -> None:
        """Raise UserError if the run only evaluates, or holds this silo out, and a message starts training."""
        if self.name in (held := self.settings.common.held_out):
            raise UserError(
                f"{self.name} refuses: the run has hold-out = {','.join(held)}, and a message asks it to train"
            )
        if not self.info.trains:
            raise UserError(
                f"{self.name} refuses: the run has strategy = {self.info.name}, and a message asks it to train"
                + (" or to evaluate" if self.info.role.asks == "survey" else "")
            )

    def check_role(self, *, newcomer: bool) -> None:
        """Raise UserError if the message and the run's settings disagree about whether this silo is held out."""
        if newcomer != (self.name in self.settings.common.held_out):
            held = self.settings.common.hold_out
            role = "as a newcomer" if newcomer else "as one that takes part"
            raise UserError(
                f"{self.name} refuses: the run has hold-out = {held!r}, and a message takes it {role}"
            )

    def first_round(self) -> int:
        """Return the round in which this silo joined the run; 1 for a silo that was there from the start.

        Raises UserError if the run's settings lack this late joiner: its own model may start from the server's.
        """
        if (late := self.config.get("late")) is None:
            return 1
        common = self.settings.common
        joins = common.late_joiners == ANY or self.name in common.late
        if not (
            joins
            and isinstance(late, int)
            and common.late.get(self.name, 1) <= late <= self.config["round"]
        ):
            raise UserError(
                f"{self.name} refuses: the run has late-joiners = {common.late_joiners!r}, and a message of round "
                f"{self.config['round']} takes it as one that joined in round {late!r:.20}"
            )
        return late

    @property
    def min_samples(self) -> float:
        """Return the smallest number of samples over which a metric may leave.

        With ``dp = true`` no metric may leave, since metrics are computed without noise; simulations of public data are
        exempt.
        """
        private = self.settings.privacy is not None and is_own_file(self.context)
        return math.inf if private else self.config["min_metric_samples"]

    # -- what the server agreed on, with what the silo has --------------------------------------------------------

    @cached_property
    def own_data(self) -> SiloData:
        """Return the silo's data with columns and labels in the agreed order."""
        return agreed_data(self.data, self.context, self.config)

    @cached_property
    def used_data(self) -> SiloData:
        """Return the data to train and evaluate on: the silo's own, or all silos' for a method that pools them."""
        if not self.info.role.pooled:
            return self.own_data
        return agreed_data(
            pool_silos(self.data, self.settings, self.context), self.context, self.config
        )

    @cached_property
    def classes(self) -> int:
        return agreed_classes(self.config, self.own_data)

    @cached_property
    def statistics(self) -> Statistics:
        """Return (mean, standard deviation) of the inputs, and of measured labels: the agreed ones, or the silo's own.

        Empty: nothing is standardised.
        """
        columns = columns_in(self.used_data)
        if columns is None:
            return ((), ()), ((), ())
        alone = self.name in self.config.get("own_statistics", ())
        by = "silo" if alone else self.settings.common.normalization
        mean, std = standardisation(columns, by, self.config)
        # A given model has its own statistics
        agreed = self.settings.common.normalization == "agreed"
        if agreed and self.study is not None and self.info.trains:
            place = self.name, self.state_dir, int(self.context.run_id)
            if alone:
                claim_statistics((), (), *place)
            else:
                check_statistics(columns, mean, std, self.study, *place)
        d = table_columns(self.own_data.input_shape)
        return (mean[:d], std[:d]), (mean[d:], std[d:])

    @cached_property
    def part(self) -> Part:
        """Return the part of the network that is trained. Raises UserError if this silo lacks the run's weights.

        A deployed silo never opens a path that the server sends. It reads the site's file of that name and compares its
        SHA-256 with the server's.
        """
        part = self.settings.part(weights_file(self.settings, self.context))
        agreed = self.config.get("weights")
        if (
            self.study is not None
            and part.weights is not None
            and part.weights.sha256 != self.study.weights
        ):
            raise PolicyRefusedError(
                f"{self.name} refuses: the study {self.study.name} has weights = {self.study.weights[:16]}..., and "
                f"{part.weights.file} has SHA-256 {part.weights.sha256[:16]}..."
            )
        if part.weights is not None and part.weights.sha256 != agreed:
            raise UserError(
                f"{self.name} has other weights than the server in {part.weights.file}: SHA-256 "
                f"{part.weights.sha256[:16]}..., not {str(agreed)[:16]}..."
            )
        return part

    @cached_property
    def seen_shape(self) -> Any:
        """Return the shape of what the network sees of a sample: all of it, or a patch."""
        return seen_shape(self.settings.common, self.data.input_shape, self.data.task)

    @cached_property
    def network(self) -> tuple[str, Any]:
        """Return the architecture and its settings."""
        return self.settings.model_for(self.seen_shape, self.own_data.task)

    @cached_property
    def silo(self) -> Silo:
        """Return what the method works with: the data on the device, one network, seeded initial models."""
        data, settings = self.used_data, self.settings
        classes, device = self.classes, self.device
        inputs, labels = self.statistics
        patches, shape = patches_of(settings.common), self.seen_shape
        window = None if patches is None else Window(patches.sides)
        (train, val, test), known = samples_on(data, device, inputs, labels, window)
        name, options = self.network
        head = settings.head
        model = flat_model(name, shape, classes, options, str(device), head, self.part)
        initial = initial_model(
            name, shape, classes, options, settings.common.seed, head, self.part
        )
        augment = settings.augmentation_for(shape)
        if head is None and augment is None:
            which = (name, shape, classes, options, str(device), self.part)
            train, val, test = embedded_on(model, which, (train, val, test), self)
        return Silo(
            name=self.name,
            train=train,
            val=val,
            test=test,
            model=model,
            initial=lambda purpose: initial(purpose).to(device),
            task=task_of(data.task, *labels, data.schema.unlabelled_numbers),
            classes=classes,
            known=known,
            augment=augment,
            patches=patches,
            min_batch_size=self.policy.min_batch_size,
            max_decay=self.policy.max_decay,
            max_step=math.inf if self.study is None else self.study.step,
            min_cell=self.policy.min_cell,
            units=data.train.units,
            moments=None
            if self.policy.public or NEWCOMER in self.config
            else cache(lambda: released_moments(self)),
            inputs="" if self.info.trains else self.input_digest(),
            group=self.group,
        )

    def input_digest(self) -> str:
        """Return the digest of the statistics in use, whatever their source, and of the message's schema."""
        (mean, std), (label_mean, label_std) = self.statistics
        return input_digest(mean + label_mean, std + label_std, agreed_schema(self.config))

    @cached_property
    def store(self) -> StateStore:
        return StateStore(
            self.context, self.config["run"], self.settings.run_key, self.config["run_id"]
        )

    def open_client(self, message: Message) -> SiloClient:
        """Decode the message into ``config``; return the method's client with its state loaded."""
        if (
            message.metadata.message_type == MessageType.TRAIN
            or self.info.role.asks == "survey"
        ):
            self.check_trains()
            self.check_code()
        if message.metadata.message_type == MessageType.TRAIN:
            self.group = group_of(self.context)
        payload, sent = decode(message.content, self.device)
        brought = {"models": payload.models, "numbers": payload.numbers}
        self.config = {**DEFAULTS, "classes": self.data.classes, **sent, **brought}
        newcomer = NEWCOMER in self.config
        self.check_schema()
        self.check_role(newcomer=newcomer)
        state, first = State(), self.first_round()
        if not newcomer and self.info.trains:
            state = self.load_state(message.metadata.message_type, first)
            if not state.numbers and self.store.folder and not self.store.in_memory:
                room = 4 * self.silo.model.vector.numel(), *COPIES, self.store.folder
                log(INFO, "%s", check_room(*room, "take a smaller network (--set model=...)"))
            study = self.study.digest if self.study else ""
            number = run_number(int(self.context.run_id))
            note_terms(state, study, number, may_leave=self.sends_own_model)
        silo, settings, common = self.silo, self.settings, self.settings.common
        if newcomer:
            common = replace(common, local_epochs=common.hold_out_epochs, local_steps=0)
        state.arrays = {
            name: tensor.to(silo.model.device) for name, tensor in state.arrays.items()
        }
        client = settings.client(silo, common, settings.method, state, self.info)
        client.written_at_once = not self.store.in_memory and self.device.type == "cpu"
        if settings.privacy is not None and self.info.training.dp != "nothing":
            check_records(settings, self.data, self.name)
            key = noise_key(self.context, settings.common.seed, self.config["run_id"])
            units = units_of(settings.privacy, self.used_data.train)
            private_round(client, settings.privacy, units, key, self.config, self.network)
        return client

    def load_state(self, kind: str, first: int) -> State:
        """Return the state to go on from: the newest. In masked training, that after the last sum that it is in."""
        lost, sums = self.config["state_lost"], None
        if kind == MessageType.TRAIN and OWN in self.config:
            sums = self.config[COUNTED].split()
        state = self.store.load(self.config["round"], lost, first, sums)
        if sums is not None:
            self.config = {**self.config, COUNTED: state.numbers.get("round")}
        return state

    @property
    def parameters(self) -> list[Tensor]:
        """Return the vectors (Σ,) of the message, as Flower's ``fit`` and ``evaluate`` take them."""
        return [model.vector for model in self.config["models"].values()]

    def check_schema(self) -> None:
        """Raise PolicyRefusedError if the run's schema is not the one that the message's study was approved for."""
        wanted = self.study.schema_digest if self.study is not None else ""
        if wanted and not (agreed := agreed_schema(self.config)).matches(wanted):
            raise PolicyRefusedError(
                f"{self.name} refuses: the study {self.study.name if self.study else ''} has schema = "
                f"{wanted[:16]}..., and the run's has SHA-256 {agreed.digest[:16]}..."
            )

    def add_cost(self, client: SiloClient) -> dict[str, float]:
        """Add this round's privacy cost to the silo's state; return the run's cost so far."""
        if client.privacy is None:
            return {}
        public = self.policy.public
        ledger = None if public else log_folder(self.context.node_config).parent
        return add_cost(
            client.privacy.plan, client.state.numbers, ledger, self.config["run_id"], self.name
        )
