"""A silo's personal model as a file of its own, and its use: ``silofl export`` and ``silofl predict``.

An exported model is an ordinary ``state_dict`` in safetensors, for ``safetensors.torch.load_file`` and
``nn.Module.load_state_dict`` of the architecture that its card names (where it names a ``head``, with that method's
head in place of the last layer). The card ``FILE.json`` says what is needed to use it: architecture, input, classes,
normalisation. Both come from the silo's own state, so that a hospital exports without the server.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from client.store import RUN_FOLDER, silo_folder
from models.architectures import build, spec_of, with_head
from models.flat import FlatModel
from models.initial import Head, flat_model
from models.shapes import read_shape
from models.tasks import task_of
from models.trainable import WHOLE, Part
from models.training import Samples
from models.training import predict as logits_of
from models.weights import Weights
from partitions.disk import write_atomically
from partitions.inputs import read_vocabulary
from partitions.labels import Fault
from partitions.names import unknown_name
from partitions.silo_file import EXTRA_NAMES, known_names, names_of, read_arrays, read_x, write_npz
from partitions.splits import Array, dtype_of, input_shape
from strategies import strategies
from strategies.base.settings import UserError
from strategies.base.state import State, read_sealed, write_sealed

# Where a silo's states lie: below a run directory; below a silo's state-dir, or one run, method or silo of it.
FOLDERS = ("checkpoint/*/silos/*", "*/*/*/*", "*/*/*", "*/*", "*", ".")
CARD = "card"  # the text in a model's header that is the SHA-256 of its card
BATCH = 512
TO_PREDICT = ("test", "all")  # the first of these parts that a file has


def card_file(model: Path) -> Path:
    """``model.safetensors.json`` of ``model.safetensors``."""
    return model.with_name(f"{model.name}.json")


# ---------------------------------------------------------------------------------------------------------------------
# Export


def export_model(
    source: Path,
    silo: str,
    which: str,
    out: Path,
    strategy: str | None = None,
    seed: int | None = None,
    run_id: str = "",
) -> dict[str, Any]:
    """Save a silo's personal model, the ``best`` on its validation data or the ``last``; returns its card.

    ``source`` is a run directory or a silo's state directory; ``strategy`` and ``seed`` choose where it holds several
    runs, and the beginning of a ``run_id`` where several of them have the same name. Raises UserError where there is
    no such model, more than one, or a state that cannot be used.
    """
    folder = find_states(source, silo, strategy, seed, run_id)
    file = max(folder.glob("round-*.safetensors"))
    state = State.load(file)
    about = state.numbers.get("model")
    if about is None or which not in ("best", "last"):
        raise UserError(f"{file} does not say what model it holds: it is not a silo's state of this version")
    arrays = "best" if which == "best" else "personal"
    metrics = state.numbers["best_metrics" if which == "best" else "metrics"]
    card = {
        "method": about["method"],
        "paper": about["paper"],
        "seed": about["seed"],
        "silo": about["silo"],
        "run": state.numbers.get("run_id", ""),
        "which": which,
        "round": state.numbers["best_round" if which == "best" else "round"],
        "metrics": {k: v if math.isfinite(v) else None for k, v in metrics.items()},
        "samples": about["samples"],
        "model": about["model"],
        "input": about["input"],
        "task": about.get("task", "multiclass"),
        "classes": about["classes"],
        "normalisation": about["normalisation"],
        "labels": about.get("labels"),
        "silofl": version("silofl"),
    }
    model = trained_network(card)
    tensors = model.state_dict(state.arrays[arrays], state.arrays.get(f"{arrays}.buffers"))
    if out.is_dir():
        raise UserError(f"{out} is a directory: give --out a file")
    text = (json.dumps(card, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()
    write_sealed(out, tensors, {"format": "pt", CARD: hashlib.sha256(text).hexdigest()})
    write_atomically(card_file(out), text)
    return card


def find_states(source: Path, silo: str, strategy: str | None, seed: int | None, run_id: str = "") -> Path:
    """The one folder below ``source`` that holds this silo's states, ``.../STRATEGY-SEED/[silos/]NAME[/run-ID]``."""
    if not source.is_dir():
        raise UserError(f"there is no directory {source}: name a run directory, or a silo's state directory")
    root = source.resolve()
    found = {file.parent for pattern in FOLDERS for file in root.glob(f"{pattern}/round-*.safetensors")}
    if not found:
        raise UserError(f"{source} holds no silo's state: name a run directory, or a silo's state directory")
    of_silo = sorted(folder for folder in found if silo_folder(folder).name == silo)
    if not of_silo:
        known = {silo_folder(folder).name for folder in found}
        raise UserError(str(unknown_name(f"silo in {source}:", silo, known)))
    chosen = [folder for folder in of_silo if matches(run_key(folder), strategy, seed) and of_run(folder, run_id)]
    if len(chosen) == 1:
        return chosen[0]
    twins = Counter(run_label(folder, root) for folder in (chosen or of_silo))
    names = ", ".join(told_apart(folder, root, twins) for folder in (chosen or of_silo))
    if chosen:
        how = "--run-id" if len(twins) == 1 else "--strategy and --seed, or name one run's directory"
        raise UserError(f"{source} holds several models of {silo}: {names}; choose with {how}")
    asked = (strategy, None if seed is None else f"seed {seed}", f"run-id {run_id}" if run_id else None)
    wanted = " ".join(str(v) for v in asked if v is not None)
    raise UserError(f"{source} holds no model of {silo} by {wanted}; there are: {names}")


def run_key(folder: Path) -> str:
    """``STRATEGY-SEED`` of a folder of states."""
    above = silo_folder(folder).parent
    return (above.parent if above.name == "silos" else above).name


def run_label(folder: Path, root: Path) -> str:
    """How a folder of states is called in a message: ``RUN/STRATEGY-SEED``, RUN only where it is below ``root``."""
    above = silo_folder(folder).parent
    parts = above.relative_to(root).parts if above.is_relative_to(root) else ()
    return "/".join(part for part in parts if part not in ("checkpoint", "silos")) or run_key(folder)


def told_apart(folder: Path, root: Path, twins: Mapping[str, int]) -> str:
    """The label; of several runs of the same name also the id, and when its last state was written."""
    label = run_label(folder, root)
    if twins[label] == 1:
        return label
    last = max(file.stat().st_mtime for file in folder.glob("round-*.safetensors"))
    own = folder.name if RUN_FOLDER.fullmatch(folder.name) else "an earlier version's"
    return f"{label} ({own}, {time.strftime('%Y-%m-%d %H:%M', time.localtime(last))})"


def of_run(folder: Path, run_id: str) -> bool:
    """Whether a folder of states is that of the run whose id begins so."""
    return not run_id or folder.name.startswith(f"run-{run_id.removeprefix('run-')}")


def matches(key: str, strategy: str | None, seed: int | None) -> bool:
    """Whether ``STRATEGY-SEED`` is what was asked for."""
    name, _, number = key.rpartition("-")
    return strategy in (None, name) and (seed is None or str(seed) == number)


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


def predict_file(model: Path, data: Path, masks: Path | None = None) -> str:
    """What an exported model says of each sample as CSV; ``masks``: where to write outlines, uint8 (n, [d,] h, w).

    Of classes ``index,label,p_0,...`` with softmax probabilities and the likeliest class, of other tasks what
    ``Task.answers`` says. Of the file's test part or, where it has none, of all of ``x``; labels are not needed.
    ``index`` counts from 0. Raises UserError where model and data cannot be read or do not fit each other.
    """
    card, net = read_model(model)
    x, vocabulary = read_samples(data)
    shape, dtype = read_shape(card["input"]["shape"]), card["input"]["dtype"]
    here, kind = input_shape(x, vocabulary), dtype_of(x)
    if (here, kind) != (shape, dtype):
        raise UserError(f"{data} holds {kind} samples of shape {here}; {model} takes {dtype} of shape {shape}")
    scale = card["normalisation"]
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
        names, found = task.answers(outputs)
        rows += found
        drawn += [outputs.argmax(1).numpy().astype(np.uint8)] if task.per_pixel else []
    lines = [",".join(["index", *names])]
    lines += [",".join([str(index), *(f"{value:.6g}" for value in row)]) for index, row in enumerate(rows)]
    if masks is not None:
        write_npz(masks, {"masks": np.concatenate(drawn)})
    return "\n".join(lines) + "\n"


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
    except FileNotFoundError:
        raise UserError(f"{file} lacks its card {beside.name}, which silofl export writes beside it") from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"the card {beside} cannot be used ({error!r}); export the model again") from None
    except RuntimeError:  # torch lists every tensor that does not fit, over many lines
        raise UserError(f"the card {beside} is of another model than {file.name}; export it again") from None
    if texts.get(CARD, own := hashlib.sha256(text).hexdigest()) != own:
        raise UserError(f"the card {beside} is damaged, or not the one that {file.name} came with; export it again")
    return card, net


def read_samples(file: Path) -> tuple[Array, int]:
    """The samples to predict, in one array as partitions/inputs.py keeps them, and how many tokens there are."""
    try:
        arrays = read_arrays(file)
        vocabulary = read_vocabulary(arrays)
        found = {
            meaning: arrays[key]
            for key, meaning in reversed(known_names(arrays).items())  # of two names the first one counts
            if key in arrays and meaning[0] != "y"
        }
        part = next((part for part in TO_PREDICT if part in (split for _, split in found)), None)
        if part is None:
            names = ", ".join(key for key in arrays if key not in EXTRA_NAMES) or "nothing"
            raise Fault(f"has no samples to predict, but {names}", "name them x_test or test_images or x")
        for (kind, split), x in found.items():
            if split == part and (x.ndim == 0 or not len(x)):
                raise Fault(f"{names_of(split, kind, arrays)} holds no samples", "save an array of n samples")
        if len({len(x) for (_, split), x in found.items() if split == part}) > 1:
            raise Fault("has inputs of different numbers of samples", "save one row of each for each sample")
        return read_x(part, found, arrays, vocabulary), vocabulary
    except Fault as fault:
        raise UserError(f"{file}: {fault.detail}; {fault.fix}") from None
