"""All settings of a run, from one flat mapping of keys (``--set``, ``--run-config``, a TOML file) to typed records.

The methods by name: importing a file of the folder ``strategies`` registers the methods in it.

Other packages' methods come as entry points of the group ``silofl.strategies``, each a class with an ``info``.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from models.augmentation import Augmentation, read_augmentation
from models.networks.custom import CustomSettings, check_trainer, is_custom
from models.networks.registry import MODELS, model_settings, resolve
from models.networks.trees import TREES
from models.networks.trees import check_task as check_boosted
from models.shapes import kind_of
from models.tasks import Task, task_of
from models.trainable import Part
from models.weights import weights_of
from partitions.common.errors import UserError
from partitions.common.names import nearest
from partitions.common.own_code import STRATEGIES, import_file, plugins
from partitions.common.settings import build_settings, defaults_of, values_of
from partitions.datasets.registry import DATASETS
from partitions.own.dataset import resolve_name as own_named
from partitions.schemes.registry import PARTITIONS, partition_settings
from partitions.simulated import Division, parse_source
from strategies.base import evaluation, survey
from strategies.base.aggregation.bounded import check_robust
from strategies.base.aggregation.secure import check_secure
from strategies.base.client import SiloClient
from strategies.base.evaluation import EVALUATE, EvaluateSettings, check_keep
from strategies.base.info import MethodInfo, check_wire
from strategies.base.newcomers import check_hold_out, check_late
from strategies.base.privacy import Privacy, check_privacy
from strategies.base.settings import Common, Value, choose
from strategies.base.settings.training import check_patches
from strategies.base.strategy import _EVALUATIONS, _REGISTRY, PersonalizedStrategy
from strategies.base.trainer.loop import with_boosting
from strategies.base.transport.data_summary import read_agreed


@functools.cache
def _import_all() -> None:
    folder = Path(__file__).resolve().parents[1]
    for module in pkgutil.iter_modules([str(folder)]):
        import_file(f"{folder.name}.{module.name}", folder / f"{module.name}.py")
    built_in = dict(_REGISTRY)
    for name, package, plugin in plugins(STRATEGIES):
        changed = [key for key, method in built_in.items() if _REGISTRY[key] is not method]
        if changed or _REGISTRY.get(name) is not plugin:
            _REGISTRY.update(built_in)
            what = (
                f"takes the name {changed[0]!r} of a method of silofl"
                if changed
                else "is no method of that name"
            )
            raise UserError(
                f"{name} of {package} ({STRATEGIES}) {what}; update {package}, or uninstall it"
            )


def strategies() -> dict[str, type[PersonalizedStrategy]]:
    """Return every method by its name on the command line."""
    _import_all()
    return dict(sorted(_REGISTRY.items()))


def method_named(name: str) -> type[PersonalizedStrategy]:
    """Return the class that the setting ``strategy`` names; raise KeyError if there is none."""
    _import_all()
    return _REGISTRY[name] if name in _REGISTRY else _EVALUATIONS[name]


def runnable() -> dict[str, type[PersonalizedStrategy]]:
    """Return all values of the setting ``strategy``: the methods, the evaluation of given models, and a survey."""
    return {
        **strategies(),
        **{name: _EVALUATIONS[name] for name in (evaluation.EVALUATE, survey.SURVEY)},
    }


@functools.lru_cache(maxsize=64)
def head_named(name: str) -> Any:
    """Return a method's own part of the network by ``METHOD``, or ``METHOD:SIZE``; None for no name.

    Raises UserError where there is none of that name and size.
    """
    if not name:
        return None
    method, _, size = name.partition(":")
    choose("method", method, strategies())
    strategy = strategies()[method]
    if strategy.head is None or bool(size) != bool(strategy.head_size):
        raise UserError(f"{name[:80]!r} is no network's head")
    if not size:
        return strategy.head
    settings = build_settings(
        strategy.Settings, {f"{method}.{strategy.head_size}": size}, method
    )
    return functools.partial(strategy.head, size=getattr(settings, strategy.head_size))


DP = "dp"  # the common setting, and the prefix of its own keys


@dataclass(frozen=True)
class RunSettings:
    """The settings of one run: common, the method's own, the partition's and the model's; a frozen dataclass each.

    ``partition`` is None for a partition without settings. ``models`` holds the chosen model's settings by its name;
    with ``model = "auto"``, the settings of each model that may be chosen.
    """

    common: Common
    method: Any
    partition: Any
    models: Mapping[str, Any]
    ala: Any = None  # settings of the method that ``ala = true`` adds
    privacy: Privacy | None = None  # settings of ``dp = true``

    @property
    def strategy(self) -> type[PersonalizedStrategy]:
        return method_named(self.common.strategy)

    @property
    def head_name(self) -> str:
        """The name of the method's own part of the network, for :func:`head_named`; "": none."""
        if self.common.strategy == EVALUATE:
            return str(self.method.method)
        size = self.strategy.head_size
        suffix = f":{getattr(self.method, size)}" if size else ""
        return f"{self.common.strategy}{suffix}" if self.strategy.head else ""

    @property
    def head(self) -> Any:
        """A method's own part of the network, or None; in an evaluation that of the model's method."""
        return head_named(self.head_name)

    @property
    def client(self) -> type[SiloClient]:
        """The method's silo half."""
        client: type[SiloClient] = self.strategy.client
        if self.common.model == TREES:
            client = with_boosting(client)
        elif self.ala is not None:
            client = cast(Any, method_added()).added_to(client, self.ala)
        return client

    @property
    def run_key(self) -> str:
        """The key that distinguishes this run from others of the same study: ``apple-42``."""
        return f"{self.common.strategy}-{self.common.seed}"

    @property
    def label(self) -> str:
        """The run's key and the hospitals that it holds out: ``apple-42 without hospital-03``."""
        held = ", ".join(self.common.held_out)
        return f"{self.run_key} without {held}" if held else self.run_key

    @property
    def division(self) -> Division:
        """The division of a simulation's data over the silos."""
        c = self.common
        return Division(
            c.dataset,
            c.data_dir,
            c.partition,
            c.silos,
            c.seed,
            c.validation,
            self.partition,
            c.task,
        )

    def flat(self) -> dict[str, Value]:
        """Return every key that affects this run, with its value."""
        c = self.common
        values = values_of(c) | values_of(self.method, c.strategy)
        if self.ala is not None:
            values |= values_of(self.ala, method_added().info.name)
        values |= values_of(self.privacy, DP) | values_of(self.partition, c.partition)
        for name, settings in self.models.items():
            values |= values_of(settings, name)
        return values

    def part(self, file: Path | None = None) -> Part:
        """Return the part of the network that is trained, and the weights that the network starts from.

        ``file``: the path of ``init-weights``, if not the setting's own path. Raises ValueError if it is missing.
        """
        c = self.common
        weights = weights_of(file or Path(c.init_weights)) if c.init_weights else None
        trainable = "head" if c.lora_rank and c.trainable == "all" else c.trainable
        lora = (c.lora_rank, c.lora_alpha, self.strategy.lora_residual) if c.lora_rank else ()
        return Part(trainable, 0 if trainable == "all" else c.seed, weights, *lora)

    def model_for(self, shape: tuple[int, ...], task: str = "multiclass") -> tuple[str, Any]:
        """Return the architecture for inputs of this shape and this task, with its settings for ``build``.

        Raises UserError if the setting ``model`` names one that does not fit this task, or the method these inputs.
        """
        info = self.strategy.info
        if info.training.inputs and (kind := kind_of(shape)) not in info.training.inputs:
            raise UserError(
                f"{info.name} takes a {', '.join(info.training.inputs)}, not {kind}: {info.training.not_inputs}"
            )
        per_pixel = task_of(task).per_pixel
        name = resolve(self.common.model, shape, per_pixel=per_pixel)
        if is_custom(name):
            return name, CustomSettings(per_pixel)
        if MODELS[name].per_pixel != per_pixel:
            fitting = ", ".join(n for n, spec in MODELS.items() if spec.per_pixel == per_pixel)
            raise UserError(f"model {name!r} is not for {task}: take {fitting}, or auto")
        return name, self.models.get(name)

    def check_task(self, task: Task, outputs: int) -> None:
        """Raise UserError if the method, the loss or the number of outputs does not fit this task."""
        info, c = self.strategy.info, self.common
        if info.training.needs_classes and not task.single_label:
            raise UserError(
                f"{info.name} works on samples that have one class each, which {task.name} has not"
            )
        task.check_outputs(outputs)
        check_boosted(c.model, task, outputs)
        task.loss(c.loss, c.focal_gamma, c.label_smoothing)
        c.check_task(task)

    def augmentation_for(self, shape: tuple[int, ...]) -> Augmentation | None:
        """Return the augmentation of samples of this shape; raise UserError if it does not fit the shape."""
        augmentation = read_augmentation(self.common.augment)
        if augmentation is not None:
            augmentation.check(shape)
        return augmentation


def check_patience(common: Common) -> None:
    """Raise UserError if early stopping could never happen."""
    if common.patience and not common.evaluate_every:
        raise UserError(
            f"patience = {common.patience}: nothing is evaluated with evaluate-every = 0; set evaluate-every = 1"
        )
    if common.min_delta and not common.patience:
        raise UserError(
            f"min-delta = {common.min_delta:g} is of early stopping: it needs patience = 1 or more"
        )


def method_added() -> type[PersonalizedStrategy]:
    """Return the method that the common setting ``ala`` adds to others."""
    return next(s for s in strategies().values() if s.info.role.adds == "ala")


def owners() -> dict[str, type[Any]]:
    """Return settings dataclasses by the prefix of their keys: methods, partitions, models."""
    methods = {name: s.Settings for name, s in runnable().items()}
    return {**methods, DP: Privacy, **partition_settings(), **model_settings()}


def defaults() -> dict[str, Value]:
    """Return every key with its default: the content of ``[tool.flwr.app.config]``."""
    values = defaults_of(Common)
    for owner, cls in sorted(owners().items()):
        values |= defaults_of(cls, owner)
    return values


def parse_settings(values: Mapping[str, object]) -> RunSettings:
    """Return typed, checked settings; raise UserError for an unknown key or name, a wrong type, or an invalid value."""
    _check_keys(values)
    common = build_settings(Common, values)
    _check_names(common)
    info = method_named(common.strategy).info
    if info.training.trees == "only" and common.model == "auto":
        common = replace(common, model=TREES)
    _check_common(common, info)
    every = {owner: build_settings(cls, values, owner) for owner, cls in owners().items()}
    method = every[common.strategy]
    _check_method(info, common, method)
    if info.trains:
        every[TREES].check(common, info, getattr(method, "epochs", 0))
    chosen = MODELS if common.model == "auto" else [common.model]
    models = {name: every[name] for name in chosen if name in every}
    ala = every[method_added().info.name] if common.ala else None
    privacy = every[DP] if common.dp else None
    return RunSettings(common, method, every.get(common.partition), models, ala, privacy)


def _check_keys(values: Mapping[str, object]) -> None:
    known = defaults()
    for key in values:
        if key not in known:
            raise UserError(
                f"unknown setting {key[:80]!r}{nearest(key, known)}; docs/settings.md lists them all"
            )


def _check_names(common: Common) -> None:
    """Raise UserError for an unknown method, data set, partition or model."""
    if common.strategy not in runnable():
        choose("strategy", common.strategy, strategies())
    try:
        source = parse_source(common.dataset)
        if not is_custom(common.model):
            choose("model", common.model, ["auto", *MODELS])
        check_trainer(common.trainer)
    except ValueError as error:
        raise UserError(str(error)) from None
    # The search for an entry point reads the metadata of every installed package
    if not source.is_path and source.name not in DATASETS and not own_named(source.name):
        choose("data set", source.name, DATASETS)
    choose("partition", common.partition, PARTITIONS)


def _check_common(common: Common, info: MethodInfo) -> None:
    """Raise UserError if common settings contradict each other, or the newcomer settings do not fit the method."""
    if -1 < common.validation < 0:
        raise UserError(
            f"validation = {common.validation}: a share, or -1 for the partition's own, is needed here"
        )
    if common.min_silos > common.silos:
        raise UserError(
            f"min-silos = {common.min_silos} is more than silos = {common.silos}: it could never be met"
        )
    check_hold_out(common, info)
    check_late(common, info)
    if common.min_batch_size > common.batch_size:
        raise UserError(
            f"min-batch-size = {common.min_batch_size} is more than batch-size = {common.batch_size}"
        )
    if 0 < common.weight_cap < 1:
        raise UserError(
            f"weight-cap = {common.weight_cap:g}: at least 1, or 0 for none, is needed here"
        )
    check_patience(common)
    common.check_rates(info.name, info.training.block_rates if info.trains else True)
    read_agreed(common.agreed)
    read_augmentation(common.augment)


def _check_method(info: MethodInfo, common: Common, settings: Any) -> None:
    """Raise UserError for a capability that the method does not declare. ``own``: the method's settings."""
    check_patches(common, info.name, info.training.whole_samples)
    if common.ala and not info.training.ala:
        raise UserError(
            f"ala = true: {common.strategy} has no received model to mix, or mixes it already"
        )
    if common.ala and getattr(settings, "start", "received") == "own":
        raise UserError(
            f"ala = true mixes a received model: it needs {common.strategy}.start = received"
        )
    if common.local_steps and not info.training.local_steps:
        raise UserError(
            f"local-steps = {common.local_steps}: {info.name} counts its local training in epochs; set local-epochs"
        )
    check_robust(info, common)
    if info.trains and not info.training.plain_loss:
        common.check_passes(info.name)
    if common.trainer:
        if not info.training.trainer:
            raise UserError(
                f"trainer = {common.trainer}: not with {info.name}: {info.training.trainer}"
            )
        common.check_trainer()
    check_wire(info, common)
    check_secure(info, common, settings)
    check_evaluation(common, settings)
    check_privacy(info, common)


def check_evaluation(common: Common, settings: Any) -> None:
    """Raise UserError if a run requests models that it cannot get, or an evaluation has settings that do not fit it."""
    check_keep(common)
    if isinstance(settings, survey.SurveySettings):
        settings.check(common)
    if not isinstance(settings, EvaluateSettings):
        return
    if common.rounds != len(settings.entries):
        raise UserError(
            f"rounds = {common.rounds}: there are {len(settings.entries)} models, and each has its round"
        )
    if common.wire_dtype != "float32":
        raise UserError(
            f"wire-dtype = {common.wire_dtype}: models are evaluated as they are, in float32"
        )
    if settings.method:
        head_named(settings.method)
