"""The export of a silo's model to a file of its own: ``silofl export``; ``client/prediction`` uses it.

An exported model is an ordinary ``state_dict`` in safetensors, for ``safetensors.torch.load_file``. It fits
``nn.Module.load_state_dict`` of the architecture in its card; if the card has a ``head``, that method's head is in
place of the last layer. The card ``FILE.json`` contains what is needed to use it: architecture, input, classes,
normalisation. Both come from the silo's own state, so a hospital exports without the server.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from client.exporting.calibration import calibrate_card
from client.exporting.lineage import lineage_of
from client.exporting.model_card import Card, Onnx, checked_card, note_export, parse_card
from client.exporting.onnx import onnx_of
from client.reported import CANDIDATE, REPORTED, array_of
from client.store import find_states
from models.flat import FlatModel
from models.initialisation import flat_model
from models.networks.blocks import Make, with_method
from models.networks.custom import CustomSettings, is_custom
from models.networks.registry import build, spec_of
from models.trainable import WHOLE, Part
from models.weights import Weights
from partitions.common.errors import DataError, UserError
from partitions.common.files import check_replaced, write_atomically
from partitions.common.settings import build_settings, keys_of
from strategies.base.run_settings import head_named
from strategies.base.state import Parts, State, model_in, read_sealed, write_sealed

CARD = "card"  # the key in a model's header for the SHA-256 of its card
BATCH = 512
# What a card has of the silo's own description (ClientSession.model_card)
OF_SILO = {field.alias or name for name, field in Card.model_fields.items()} - {
    "recipe",
    "lineage",
}


def card_file(model: Path) -> Path:
    """Return ``model.safetensors.json`` for ``model.safetensors``."""
    return model.with_name(f"{model.name}.json")


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
    conformal: Path | None = None,
    coverage: float = 0.9,
    onnx: bool = False,
) -> Card:
    """Save one of a silo's models; return its card.

    ``which``: the personal model that was ``best`` on the silo's validation data, or the ``last`` one; or the model
    whose score the report prints (``reported``), of the ``round`` that the report names. ``source``: a run directory
    or a silo's state directory. ``strategy`` and ``seed`` select one of several runs, and the beginning of a
    ``run_id`` one of several with the same name. ``recipe``: whether the card contains the recipe of the silo's
    table, if it has one. ``temperature``: a data file whose validation part calibrates the probabilities.
    ``conformal``: one whose test part gives sets or intervals of this ``coverage``. ``onnx``: also write that file.
    Raises UserError if there is no such model, more than one, or a state that cannot be used.
    """
    if which not in ("best", "last", "reported"):
        raise UserError(f"--which {which}: best, last or reported is needed here")
    if round is not None and which != "reported":
        raise UserError(
            f"--round {round}: only of the reported model there are several rounds; leave it away"
        )
    folder = find_states(source, silo, strategy, seed, run_id)
    state, chosen, about = choose(folder, source, which, round)
    if why := about.get("no_file"):
        raise UserError(
            f"the personal model of {about['method']} goes into no file of one network: {why}"
        )
    more = {"recipe": json.loads(about["recipe"])} if recipe and about.get("recipe") else {}
    more |= lineage_of(folder, about, chosen.round)
    card = checked_card(describe(state, chosen, about, which) | more, folder)
    parts = model_in(state.arrays, chosen.array)
    if parts[0] is None:
        raise UserError(f"the state in {folder} lacks its model {chosen.array}: it is damaged")
    if temperature is not None or conformal is not None:
        net = trained_network(card)
        net.load(parts[0], *parts[1:])
        card = calibrate_card(card, net, temperature, conformal, coverage)
    return write_model(out, card, parts, onnx)


def describe(
    state: State, chosen: Which, about: Mapping[str, Any], which: str
) -> dict[str, Any]:
    """Return the content of a card of a model in a silo's state, without a recipe."""
    kept = {key: value for key, value in about.items() if key in OF_SILO}
    return kept | {
        "run": state.numbers.get("run_id", ""),
        "which": which,
        "snapshot": chosen.snapshot,
        "round": chosen.round,
        "when": when(chosen.snapshot, chosen.round, about.get("rounds", chosen.round)),
        "metrics": {k: v if math.isfinite(v) else None for k, v in chosen.metrics.items()},
        "silofl": version("silofl"),
    }


def write_model(out: Path, card: Card, parts: Parts, onnx: bool = False) -> Card:
    """Write the model (vector, buffers, integers) and its card, which is returned.

    ``onnx``: also :func:`onnx_file`, with its check.

    Raises UserError if ``out`` is a directory, if one of the files is there and of another kind, or if the network
    cannot be written as ONNX: then nothing is written.
    """
    tensors = trained_network(card).state_dict(*parts)
    if out.is_dir():
        raise UserError(f"{out} is a directory: give --out a file")
    check_replaced(out, "model", lambda file: file.read(10)[8:] == b'{"')
    check_replaced(card_file(out), "model's card", lambda file: b'"method": ' in file.read(16))
    if onnx:
        if onnx_file(out) == out:
            raise UserError(
                f"--out {out}: the model itself is a .safetensors file; --onnx writes the .onnx beside it"
            )
        check_replaced(onnx_file(out), "ONNX model", lambda file: b"pytorch" in file.read(32))
        whole = network(card)
        whole.module.load_state_dict(tensors)
        content, apart = onnx_of(card, whole)
        exported = Onnx(
            file=onnx_file(out).name, sha256=hashlib.sha256(content).hexdigest(), apart=apart
        )
        card = card.model_copy(update={"onnx": exported})
        write_atomically(onnx_file(out), content)
    text = card.text
    write_sealed(out, tensors, {"format": "pt", CARD: hashlib.sha256(text).hexdigest()})
    write_atomically(card_file(out), text)
    if is_custom(card.model.name):
        note_export(text)
    return card


def onnx_file(model: Path) -> Path:
    """Return ``model.onnx`` for ``model.safetensors``."""
    return model.with_suffix(".onnx")


def when(snapshot: str, round: int, rounds: int) -> str:
    """Describe when a model was evaluated; the one received in the closing exchange is from after all rounds."""
    if round > rounds:
        return f"received after round {rounds}, the last"
    return (
        f"received at the start of round {round}"
        if snapshot == "received"
        else f"after training in round {round}"
    )


def choose(
    folder: Path, source: Path, which: str, round: int | None
) -> tuple[State, Which, dict[str, Any]]:
    """Return the state with the model, which of its models that is, and its description in the state."""
    files = sorted(folder.glob("round-*.safetensors"), reverse=True)
    newest = State.load(files[0])
    about = newest.numbers.get("model")
    if about is None:
        raise UserError(
            f"{files[0]} does not say what model it holds: it is not a silo's state of this version"
        )
    numbers = newest.numbers
    if which != "reported":
        if "best_round" not in numbers:
            raise UserError(
                f"{about['silo']} has not trained in this run, so it has no personal model; see --which"
            )
        array, of = ("best", "best_") if which == "best" else ("personal", "")
        return (
            newest,
            Which(array, "personal", numbers[f"{of}round"], numbers.get(f"{of}metrics", {})),
            about,
        )
    wanted = reported_round(source, about, round)
    kept: dict[int, tuple[State, Which]] = {}
    for state in [newest, *(State.load(file) for file in files[1:] if wanted is not None)]:
        for entry in (REPORTED, CANDIDATE):
            if entry in state.numbers:
                of, metrics_of = state.numbers[entry]["round"], state.numbers[entry]["metrics"]
                snapshot = about["reports"]
                kept.setdefault(
                    of, (state, Which(array_of(entry, snapshot), snapshot, of, metrics_of))
                )
    if not kept:
        raise UserError(
            f"{files[0]} holds no model that a report shows: no round was evaluated; "
            "--which best and --which last are there"
        )
    known = " and ".join(map(str, sorted(kept)))
    if wanted is None and len(kept) > 1:
        raise UserError(
            f"the report shows one of the models of rounds {known} of {about['silo']}: name it by --round"
        )
    if wanted is not None and wanted not in kept:
        raise UserError(
            f"{about['silo']} kept no model of round {wanted}, but of {known}: a later reply of it did not count"
        )
    return *kept[next(iter(kept)) if wanted is None else wanted], about


def reported_round(source: Path, about: Mapping[str, Any], round: int | None) -> int | None:
    """Return the round of this silo's model in the report, from ``summary.json`` if ``source`` is the run."""
    best = None
    if (source / "summary.json").is_file():
        try:
            runs = json.loads((source / "summary.json").read_text())["runs"]
            run = next(
                (
                    r
                    for r in runs
                    if (r["strategy"], r["seed"]) == (about["method"], about["seed"])
                ),
                None,
            )
            best = run and run["per_silo"].get(about["silo"], {}).get("round")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{source / 'summary.json'} cannot be read: {error!r}; make the run again"
            ) from None
    if round is not None and best not in (None, round):
        raise UserError(
            f"--round {round}: the report of {source} shows {about['silo']} at round {best}"
        )
    return best if round is None else round


def trained_network(card: Card) -> FlatModel:
    """Return the network as trained in the run, with its frozen part, which a silo's state does not contain."""
    name, shape, settings, head = describe_network(card)
    saved = dict(card.model.part or {})
    weights = Weights(**saved.pop("weights")) if saved.get("weights") else None
    part = Part(**saved | {"weights": weights})
    part = WHOLE if part.whole else part  # nothing is frozen: the state contains everything
    return flat_model(name, shape, card.classes, settings, "cpu", head, part)


def network(card: Card) -> FlatModel:
    """Return the network that a card describes, without its weights."""
    name, shape, settings, head = describe_network(card)
    return FlatModel(
        with_method(head, shape, lambda: build(name, shape, card.classes, settings))
    )


def describe_network(card: Card) -> tuple[str, tuple[int, ...], Any, Make]:
    """Return name, input shape, settings and the method's own head of the network that a card describes."""
    shape = card.shape
    name, of_card, head = card.model.name, card.model.settings, card.model.head
    names = spec_of(name).settings
    settings: Any = None
    if is_custom(name):
        settings = CustomSettings(**of_card)
    elif names:
        settings = build_settings(
            names, {key: of_card[f.name] for key, f in keys_of(names, name).items()}, name
        )
    return name, shape, settings, head_named(head or "")


def read_model(file: Path, allowed: str = "") -> tuple[Card, FlatModel]:
    """Return an exported model with its card. ``allowed``: the network of one's own that the user has named.

    Raises UserError if one is missing, damaged or does not match.
    """
    try:
        tensors, texts = read_sealed(file)
    except FileNotFoundError:
        raise UserError(f"there is no model {file}: silofl export makes one") from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} is no exported model, or damaged ({getattr(error, 'strerror', None) or error}); export it again"
        ) from None
    beside = card_file(file)
    try:
        text = beside.read_bytes()
        card = parse_card(text, beside, allowed)
        net = network(card)
        net.module.load_state_dict(tensors)
    except FileNotFoundError:
        raise UserError(
            f"{file} lacks its card {beside.name}, which silofl export writes beside it"
        ) from None
    except UserError:
        raise
    except DataError as error:
        raise UserError(str(error)) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"the card {beside} cannot be used ({error!r}); export the model again"
        ) from None
    except RuntimeError:  # torch lists every tensor that does not fit, over many lines
        raise UserError(
            f"the card {beside} is of another model than {file.name}; export it again"
        ) from None
    if texts.get(CARD, digest := hashlib.sha256(text).hexdigest()) != digest:
        raise UserError(
            f"the card {beside} is damaged, or not the one that {file.name} came with; export it again"
        )
    return card, net
