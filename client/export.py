"""A silo's model as a file of its own, and its use: ``silofl export`` and ``silofl predict``.

An exported model is an ordinary ``state_dict`` in safetensors, for ``safetensors.torch.load_file`` and
``nn.Module.load_state_dict`` of the architecture that its card names (where it names a ``head``, with that method's
head in place of the last layer). The card ``FILE.json`` says what is needed to use it: architecture, input, classes,
normalisation. Both come from the silo's own state, so that a hospital exports without the server.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client.evidence.temperature import temperature_for
from client.find_states import find_states
from client.reported import CANDIDATE, REPORTED, array_of
from client.tables.new_samples import about_recipe, answers_csv, read_asked
from models.flat import FlatModel
from models.initialisation import Head, flat_model
from models.networks.heads import with_head
from models.networks.registry import build, spec_of
from models.samples import BYTE_MEAN, BYTE_STD, Samples
from models.shapes import read_shape
from models.tasks import task_of
from models.trainable import WHOLE, Part
from models.training import predict as logits_of
from models.weights import Weights
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.labels import ONE_CLASS
from partitions.npz import write_npz
from partitions.recipes.recipe import parse_recipe
from partitions.reorder import reorder_columns
from partitions.schema import Schema, difference, few, moved, order_of, parse_schema
from partitions.splits import Array, dtype_of, input_shape
from strategies import strategies
from strategies.base.state import State, read_sealed, write_sealed

CARD = "card"  # the text in a model's header that is the SHA-256 of its card
BATCH = 512


def card_file(model: Path) -> Path:
    """``model.safetensors.json`` of ``model.safetensors``."""
    return model.with_name(f"{model.name}.json")


# ---------------------------------------------------------------------------------------------------------------------
# Export


@dataclass(frozen=True)
class Which:
    """A model in a silo's state: its arrays' name, the snapshot, its round, and its metrics on the silo's own data."""

    array: str
    snapshot: str
    round: int
    metrics: Mapping[str, float]


def export_model(
    source: Path,
    silo: str,
    which: str,
    out: Path,
    strategy: str | None = None,
    seed: int | None = None,
    run_id: str = "",
    round: int | None = None,
    recipe: bool = True,
    temperature: Path | None = None,
) -> dict[str, Any]:
    """Save one of a silo's models; returns its card.

    ``which``: the personal model that was ``best`` on the silo's validation data, or the ``last`` one; or the model
    whose score the report prints (``reported``), of the ``round`` that the report names. ``source`` is a run directory
    or a silo's state directory; ``strategy`` and ``seed`` choose where it holds several runs, and the beginning of a
    ``run_id`` where several of them have the same name. ``recipe``: whether the card holds the recipe of the silo's
    table, where there is one. ``temperature``: a data file whose validation part scales the probabilities. Raises
    UserError where there is no such model, more than one, or a state that cannot be used.
    """
    if which not in ("best", "last", "reported"):
        raise UserError(f"--which {which}: best, last or reported is wanted here")
    if round is not None and which != "reported":
        raise UserError(f"--round {round}: only of the reported model there are several rounds; leave it away")
    folder = find_states(source, silo, strategy, seed, run_id)
    state, chosen, about = choose(folder, source, which, round)
    if about.get("networks", 1) > 1:
        raise UserError(f"the personal model of {about['method']} is {about['networks']} networks here: no file of one")
    card = card_of(state, chosen, about, which)
    card |= about_recipe(about.get("recipe", "")) if recipe else {}
    vector, buffers = state.arrays[chosen.array], state.arrays.get(f"{chosen.array}.buffers")
    if temperature is not None:
        net = trained_network(card)
        net.load(vector, buffers)
        card["temperature"] = temperature_for(card, net, temperature)
    write_model(out, card, vector, buffers)
    return card


def card_of(state: State, chosen: Which, about: Mapping[str, Any], which: str) -> dict[str, Any]:
    """The card of a model of a silo's state, without a recipe."""
    return {
        "method": about["method"],
        "paper": about["paper"],
        "seed": about["seed"],
        "silo": about["silo"],
        "run": state.numbers.get("run_id", ""),
        "which": which,
        "snapshot": chosen.snapshot,
        "round": chosen.round,
        "when": when(chosen.snapshot, chosen.round, about.get("rounds", chosen.round)),
        "metrics": {k: v if math.isfinite(v) else None for k, v in chosen.metrics.items()},
        "samples": about["samples"],
        "model": about["model"],
        "input": about["input"],
        "task": about.get("task", "multiclass"),
        "classes": about["classes"],
        "schema": about.get("schema", {}),
        "normalisation": about["normalisation"],
        "labels": about.get("labels"),
        "silofl": version("silofl"),
    }


def write_model(out: Path, card: Mapping[str, Any], vector: Tensor, buffers: Tensor | None) -> None:
    """Write the model (Σ,) and its card. Raises UserError where ``out`` is a directory."""
    tensors = trained_network(card).state_dict(vector, buffers)
    if out.is_dir():
        raise UserError(f"{out} is a directory: give --out a file")
    text = (json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    write_sealed(out, tensors, {"format": "pt", CARD: hashlib.sha256(text).hexdigest()})
    write_atomically(card_file(out), text)


def when(snapshot: str, round: int, rounds: int) -> str:
    """When a model was evaluated, in words: what is received in the closing exchange is the model after all rounds."""
    if round > rounds:
        return f"received after round {rounds}, the last"
    return f"received at the start of round {round}" if snapshot == "received" else f"after training in round {round}"


def choose(folder: Path, source: Path, which: str, round: int | None) -> tuple[State, Which, dict[str, Any]]:
    """The state that holds the model, which of its models it is, and what the state says of it."""
    files = sorted(folder.glob("round-*.safetensors"), reverse=True)
    newest = State.load(files[0])
    about = newest.numbers.get("model")
    if about is None:
        raise UserError(f"{files[0]} does not say what model it holds: it is not a silo's state of this version")
    numbers = newest.numbers
    if which != "reported":
        if "best_round" not in numbers:
            raise UserError(f"{about['silo']} has not trained in this run, so it has no personal model; see --which")
        rounds = {"best": "best_round", "last": "round"}
        metrics = {"best": "best_metrics", "last": "metrics"}
        array = "best" if which == "best" else "personal"
        return newest, Which(array, "personal", numbers[rounds[which]], numbers.get(metrics[which], {})), about
    wanted = reported_round(source, about, round)
    kept: dict[int, tuple[State, Which]] = {}
    for state in [newest, *(State.load(file) for file in files[1:] if wanted is not None)]:
        for entry in (REPORTED, CANDIDATE):
            if entry in state.numbers:
                of, metrics_of = state.numbers[entry]["round"], state.numbers[entry]["metrics"]
                snapshot = about["reports"]
                kept.setdefault(of, (state, Which(array_of(entry, snapshot), snapshot, of, metrics_of)))
    if not kept:
        raise UserError(
            f"{files[0]} holds no model that a report shows: no round was evaluated, or an earlier version wrote it; "
            "--which best and --which last are there"
        )
    known = " and ".join(map(str, sorted(kept)))
    if wanted is None and len(kept) > 1:
        raise UserError(f"the report shows one of the models of rounds {known} of {about['silo']}: name it by --round")
    if wanted is not None and wanted not in kept:
        raise UserError(
            f"{about['silo']} kept no model of round {wanted}, but of {known}: a later reply of it did not count"
        )
    return *kept[next(iter(kept)) if wanted is None else wanted], about


def reported_round(source: Path, about: Mapping[str, Any], round: int | None) -> int | None:
    """The round of this silo's model that the report shows: as ``summary.json`` has it, where ``source`` is the run."""
    found = None
    if (source / "summary.json").is_file():
        try:
            runs = json.loads((source / "summary.json").read_text())["runs"]
            run = next((r for r in runs if (r["strategy"], r["seed"]) == (about["method"], about["seed"])), None)
            found = run and run["per_silo"].get(about["silo"], {}).get("round")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{source / 'summary.json'} cannot be read: {error!r}; make the run again") from None
    if round is not None and found not in (None, round):
        raise UserError(f"--round {round}: the report of {source} shows {about['silo']} at round {found}")
    return found if round is None else round


# ---------------------------------------------------------------------------------------------------------------------
# Predict


def trained_network(card: Mapping[str, Any]) -> FlatModel:
    """The network as the run trained it: with what was frozen, which a silo's state does not hold."""
    name, shape, settings, head = described(card)
    saved = dict(card["model"].get("part", {}))
    weights = Weights(**saved.pop("weights")) if saved.get("weights") else None
    part = Part(**saved | {"weights": weights})
    part = WHOLE if part.whole else part  # nothing is frozen: the state holds all
    return flat_model(name, shape, card["classes"], settings, "cpu", head, part)


def network(card: Mapping[str, Any]) -> FlatModel:
    """The network that a card describes, not yet with its weights."""
    name, shape, settings, head = described(card)
    return FlatModel(with_head(build(name, shape, card["classes"], settings), head))


def described(card: Mapping[str, Any]) -> tuple[str, tuple[int, ...], Any, Head]:
    """Name, shape of an input, settings and a method's own head of the network that a card describes."""
    shape = read_shape(card["input"]["shape"])
    name, own = card["model"]["name"], spec_of(card["model"]["name"]).settings
    settings = own(**card["model"]["settings"]) if own else None
    head = card["model"].get("head")
    return name, shape, settings, strategies()[head].head if head else None


def predict_file(
    model: Path, data: Path, masks: Path | None = None, recipe: Path | None = None, as_gaps: bool = False
) -> str:
    """What an exported model says of each sample as CSV; ``masks``: where to write outlines, uint8 (n, [d,] h, w).

    Of classes ``index,label,p_0,...`` with softmax probabilities and the likeliest class, by their names where they
    have some; of other tasks what ``Task.answers`` says. ``data``: a data file, whose test part or, where it has none,
    all of ``x`` counts, or a csv, which goes through the ``recipe``, or else the card's. Labels are not needed. In the
    place of ``index``, which counts from 0, a csv's rows have their patient. Raises UserError where model and data
    cannot be read or do not fit each other.
    """
    card, net = read_model(model)
    asked = read_asked(data, card, recipe, as_gaps)
    x, vocabulary, own = asked.x, asked.vocabulary, asked.schema
    shape, dtype = read_shape(card["input"]["shape"]), card["input"]["dtype"]
    here, kind = input_shape(x, vocabulary), dtype_of(x)
    if here != shape or dtype not in (None, kind):  # None: a shared model takes what each silo has
        raise UserError(
            f"{data} holds {kind} samples of shape {here}; {model} takes {dtype or 'samples'} of shape {shape}"
        )
    x = reorder_columns(x, check_schema(own, card, data, model))
    scale = card["normalisation"]
    if dtype is None and kind == "uint8":
        scale = {"mean": BYTE_MEAN, "std": BYTE_STD}
    mean, std = (torch.tensor(scale["mean"]), torch.tensor(scale["std"])) if scale else (None, None)
    labels = card.get("labels") or {"mean": (), "std": ()}
    task = task_of(card.get("task", "multiclass"), labels["mean"], labels["std"])
    if masks is not None and not task.per_pixel:
        raise UserError(f"{model} draws no outlines: it is for {task.name}")
    rows: list[list[float]] = []
    drawn: list[Array] = []
    names: list[str] = []
    for i in range(0, len(x), BATCH):
        part = x[i : i + BATCH]
        part = part.astype(np.float32) if part.dtype == np.uint8 else part  # the card says how they are scaled
        outputs = logits_of(net, Samples(part, np.zeros(len(part), np.int64), "cpu", mean, std))
        names, found = task.answers(outputs / card.get("temperature", {}).get("T", 1.0))
        rows += found
        drawn += [outputs.argmax(1).numpy().astype(np.uint8)] if task.per_pixel else []
    if masks is not None:
        write_npz(masks, {"masks": np.concatenate(drawn)})
    return answers_csv(asked, names, rows, parse_schema(card.get("schema", {})).labels)


def check_schema(own: Schema, card: Mapping[str, Any], data: Path, model: Path) -> list[int]:
    """For each column that a model takes its place in the data file, by name; empty where the order is the same.

    A line on standard error says what is mapped, or cannot be compared. Raises UserError where the names do not fit.
    """
    agreed = parse_schema(card.get("schema", {}))
    one = card.get("task", "multiclass") in (*ONE_CLASS, "segmentation")
    if reason := difference(own, agreed, "the model has", subset=one, mend="rename them in the data file"):
        raise UserError(f"{data} has {reason}")
    if agreed.names and not own.names:
        print(f"note: {data} names no columns: they are taken to be {few(agreed.names, 8)}", file=sys.stderr)
    if what := moved(own, agreed):
        print(f"note: {data} has its {' and '.join(what)} in another order: mapped by name", file=sys.stderr)
    return order_of(own.names, agreed.names)


def read_model(file: Path) -> tuple[dict[str, Any], FlatModel]:
    """An exported model with its card. Raises UserError where one of the two is missing, damaged or another's."""
    try:
        tensors, texts = read_sealed(file, ("format",))
    except FileNotFoundError:
        raise UserError(f"there is no model {file}: silofl export makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is no exported model, or damaged ({error}); export it again") from None
    beside = card_file(file)
    try:
        text = beside.read_bytes()
        card: dict[str, Any] = json.loads(text)
        net = network(card)
        net.module.load_state_dict(tensors)
        parse_schema(card.get("schema", {}))
        if card.get("recipe"):
            parse_recipe(card["recipe"])
    except FileNotFoundError:
        raise UserError(f"{file} lacks its card {beside.name}, which silofl export writes beside it") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"the card {beside} cannot be used ({error!r}); export the model again") from None
    except RuntimeError:  # torch lists every tensor that does not fit, over many lines
        raise UserError(f"the card {beside} is of another model than {file.name}; export it again") from None
    if texts.get(CARD, own := hashlib.sha256(text).hexdigest()) != own:
        raise UserError(f"the card {beside} is damaged, or not the one that {file.name} came with; export it again")
    return card, net
