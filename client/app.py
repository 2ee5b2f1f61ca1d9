"""The ClientApp: one message in, one reply out, the same in process, under Ray and deployed."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from logging import DEBUG, ERROR
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import log

from client.outgoing import release, release_card
from client.silo import data_card, device_of, model_card, open_data, open_silo, silo_name, silo_policy
from client.site.flower import internal
from client.site.leaving import let_out, own_build, runs_alone, task_of
from client.site.policy import PolicyRefusedError, check_message
from client.store import StateStore
from models.threads import use_threads
from partitions.disk import keep_private
from strategies.base.payload import decode
from strategies.base.run_settings import RunSettings, parse_settings
from strategies.base.silo import SiloClient

app = ClientApp()  # no annotation: Flower finds the app by reading this line
ALONE = runs_alone()  # a SuperNode of Flower's own started it: what the site's process does otherwise is done here
if ALONE:
    keep_private()
# What a silo assumes where the server's round loop does not say: Flower's own ``Strategy.start``.
UNTOLD = {"run": "", "run_id": "", "save": True, "min_metric_samples": 10}
Handler = Callable[[Message, Context, RunSettings], RecordDict]


@functools.lru_cache(maxsize=4)
def settings_of(run_config: tuple[tuple[str, type, Any], ...]) -> RunSettings:
    """The run's settings, parsed once for all its messages. (With the types, for True equals 1.)"""
    return parse_settings({key: value for key, _, value in run_config})


def answer(handler: Handler) -> Callable[[Message, Context], Message]:
    """Turn whatever goes wrong in a silo into an error reply with its reason: the federation goes on without it."""

    @functools.wraps(handler)
    def handle(message: Message, context: Context) -> Message:
        reply = reply_of(message, context)
        if ALONE:
            reply = let_out(reply, task_of(message, context, own_build(Path(__file__))), message)
        return reply

    def reply_of(message: Message, context: Context) -> Message:
        try:
            check_message(message, context)  # as the site's own process did before this app was there
            settings = settings_of(tuple((k, type(v), v) for k, v in context.run_config.items()))
            use_threads(settings.common.threads)
            return Message(handler(message, context, settings), reply_to=message)
        except Exception as error:
            log(ERROR, "%s", error)
            log(DEBUG, "%s", traceback.format_exc())
            code = internal("ErrorCode").CLIENT_APP_RAISED_EXCEPTION
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            return Message(Error(code, f"{kind}{error}"), reply_to=message)

    return handle


@app.query()
@answer
def query(message: Message, context: Context, settings: RunSettings) -> RecordDict:
    """The silo's data card."""
    check_floor(settings, context)
    return release_card(data_card(settings, context))


@app.train()
@answer
def train(message: Message, context: Context, settings: RunSettings) -> RecordDict:
    """One round of the run's method in this silo; its state is saved before the reply leaves."""
    check_floor(settings, context)
    client, parameters, config = open_client(message, context, settings)
    vectors, _, metrics = client.fit(parameters, config)
    describe(client, model_card(settings, context, config), metrics)
    store(context, settings, config).save(client.state, client.round, to_disk=config["save"])
    return release(client, vectors, metrics, min_samples=config["min_metric_samples"], policy=silo_policy(context))


@app.evaluate()
@answer
def evaluate(message: Message, context: Context, settings: RunSettings) -> RecordDict:
    """Metrics without training; the silo's state stays as it is."""
    client, parameters, config = open_client(message, context, settings)
    _, _, metrics = client.evaluate(parameters, config)
    return release(client, [], metrics, min_samples=config["min_metric_samples"], policy=silo_policy(context))


def check_floor(settings: RunSettings, context: Context) -> None:
    """Raise PolicyRefusedError where a method sends what it learns here, and there are too few samples behind it."""
    samples, policy = len(open_data(settings, context).train), silo_policy(context)
    if settings.client.uploads and samples < policy.floor:
        raise PolicyRefusedError(
            f"{silo_name(context)} refuses: its policy has {policy.says('floor')}, it has {samples} training samples"
        )


def describe(client: SiloClient, card: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Add to the silo's state what its personal models, the last and the best, are and came to."""
    numbers, own = client.state.numbers, "personal."
    numbers["model"] = card
    numbers["metrics"] = {k.removeprefix(own): float(v) for k, v in metrics.items() if k.startswith(own)}
    if numbers["best_round"] == client.round:
        numbers["best_metrics"] = numbers["metrics"]


def open_client(
    message: Message, context: Context, settings: RunSettings
) -> tuple[SiloClient, list[Any], dict[str, Any]]:
    """The method's silo half with its state loaded, and the arguments for ``fit`` or ``evaluate``."""
    payload, config = decode(message.content, device_of(settings, context))
    classes = open_data(settings, context).classes
    sent = {**UNTOLD, "classes": classes, **config}
    rich: dict[str, Any] = {**sent, "models": payload.models, "numbers": payload.numbers}
    state = store(context, settings, rich).load(rich["round"])
    silo = open_silo(settings, context, rich)
    state.arrays = {name: tensor.to(silo.model.device) for name, tensor in state.arrays.items()}
    client = settings.client(silo, settings.common, settings.method, state)
    return client, [m.vector for m in payload.models.values()], rich


def store(context: Context, settings: RunSettings, config: dict[str, Any]) -> StateStore:
    return StateStore(context, config["run"], settings.run_key, config["run_id"])
