"""Three hospitals' data files for each task, from data that are built in, or drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_diabetes, load_digits

from partitions.npz import write_npz

NAMES = ("north", "south", "west")
SIZES = (60, 45, 30)
SMALL_FUSION = {
    "fedapm_signals__width": 16,
    "fedapm_signals__filters": 8,
    "fedapm_signals__dropout": 0.0,
    "optimizer": "adam",
    "learning_rate": 0.01,
}
NETWORKS: dict[str, dict[str, Any]] = {  # as keyword arguments of `tiny.federate`
    "multilabel": {"model": "small-cnn"},
    "ordinal": {"model": "mlp", "mlp__hidden": "16"},
    "regression": {"model": "mlp", "mlp__hidden": "16"},
    "survival": {"model": "mlp", "mlp__hidden": ""},
    "segmentation": {"model": "auto", "unet__levels": 2, "unet__width": 4},
    "balls": {"model": "auto", "unet__levels": 2, "unet__width": 4},
    "nodules": {"model": "auto"},
    "notes": {"model": "auto", "fasttext__mean": "words"},
    "pulses": {"model": "auto", **SMALL_FUSION},
    "stays": {"model": "auto", **SMALL_FUSION},
}
OUTPUTS = {  # of each task's network
    "multilabel": 3,
    "ordinal": 4,
    "regression": 2,
    "survival": 1,
    "segmentation": 2,
}
Arrays = dict[str, npt.NDArray[Any]]


def findings(rng: np.random.Generator) -> Arrays:
    """Handwritten digits: is it even, at least five, has it a closed loop?"""
    digits = load_digits()
    y = digits.target
    several = np.stack([y % 2 == 0, y >= 5, np.isin(y, (0, 6, 8, 9))], 1)
    return {"x": (digits.images * 15).astype(np.uint8), "y": several.astype(np.uint8)}


def grades(rng: np.random.Generator) -> Arrays:
    """The progression of diabetes in quarters."""
    table = load_diabetes(scaled=False)
    return {
        "x": table.data.astype(np.float32),
        "y": np.searchsorted(np.quantile(table.target, (0.25, 0.5, 0.75)), table.target),
        "task": np.array("ordinal"),
    }


def measurements(rng: np.random.Generator) -> Arrays:
    """The progression of diabetes, and the blood pressure, which is a column, too."""
    table = load_diabetes(scaled=False)
    y = np.stack([table.target, table.data[:, 3]], 1)
    return {"x": table.data.astype(np.float32), "y": y.astype(np.float32)}


def survival(rng: np.random.Generator) -> Arrays:
    """Times that a hazard of exp(x_0 - x_1) gives, with half of the patients censored."""
    x = rng.normal(size=(300, 4)).astype(np.float32)
    time, last = rng.exponential(np.exp(x[:, 1] - x[:, 0])), rng.exponential(1.0, 300)
    return {
        "x": x,
        "time": np.minimum(time, last).astype(np.float32),
        "event": (time <= last).astype(np.uint8),
    }


def outlines(rng: np.random.Generator) -> Arrays:
    """Bright discs on noise."""
    yy, xx = np.mgrid[:16, :16]
    centre, radius = rng.uniform(4, 12, (200, 2)), rng.uniform(2, 4, 200)
    y = (yy - centre[:, :1, None]) ** 2 + (xx - centre[:, 1:, None]) ** 2 < radius[
        :, None, None
    ] ** 2
    x = rng.normal(60, 25, (200, 16, 16)) + 120 * y
    return {"x": np.clip(x, 0, 255).astype(np.uint8), "y": y.astype(np.uint8)}


def balls(rng: np.random.Generator) -> Arrays:
    """Bright balls on noise, in volumes."""
    places = np.moveaxis(np.indices((8, 10, 12)), 0, -1)
    centre, radius = rng.uniform(2, 6, (200, 3)), rng.uniform(2, 3, 200)
    y = ((places - centre[:, None, None, None]) ** 2).sum(-1) < radius[:, None, None, None] ** 2
    x = rng.normal(60, 25, y.shape) + 120 * y
    return {"x": np.clip(x, 0, 255).astype(np.uint8)[..., np.newaxis], "y": y.astype(np.uint8)}


def nodules(rng: np.random.Generator) -> Arrays:
    """Is there a ball? Volumes of numbers, with two channels."""
    made = balls(rng)
    x, y = (made["x"].astype(np.float32) - 60) / 60, np.arange(200) % 2
    x[y == 0] = rng.normal(0, 0.4, x[y == 0].shape)
    return {
        "x": np.concatenate([x, -x], -1).transpose(0, 4, 1, 2, 3).astype(np.float32),
        "y": y,
    }


def notes(rng: np.random.Generator) -> Arrays:
    """Texts of 3 to 8 words out of 39: does word 1 or 2 occur? It does in half of them."""
    x, y = rng.integers(3, 40, (200, 8)), np.arange(200) % 2
    x[y == 1, rng.integers(0, 3, 100)] = rng.integers(1, 3, 100)
    return {
        "x": x * (np.arange(8) < rng.integers(3, 9, (200, 1))),
        "y": y,
        "vocabulary": np.array(40),
    }


def pulses(rng: np.random.Generator) -> Arrays:
    """Signals of two channels that swing about -2 or about 2."""
    y, phase = np.arange(200) % 2, rng.uniform(0, 6, (200, 1, 1))
    swing = np.sin(np.arange(24) + phase) + (4 * y - 2)[:, None, None]
    return {"x": (swing + rng.normal(0, 0.3, (200, 2, 24))).astype(np.float32), "y": y}


def stays(rng: np.random.Generator) -> Arrays:
    """Several inputs of which each says a little; every fifth sample lacks its scan, every seventh its notes."""
    text, signal = notes(rng), pulses(rng)
    y, rows = text["y"], np.arange(200)
    scan = np.clip(rng.normal(90, 30, (200, 8, 8)) + 40 * y[:, None, None], 1, 255).astype(
        np.uint8
    )
    blood = (rng.normal(size=(200, 3)) + 2 * y[:, None]).astype(np.float32)
    scan[rows % 5 == 0], text["x"][rows % 7 == 0] = 0, 0
    inputs = {"x_scan": scan, "x_notes": text["x"], "x_pulse": signal["x"], "x_blood": blood}
    return {**inputs, "y": y, "vocabulary": np.array(40)}


MADE: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "multilabel": findings,
    "ordinal": grades,
    "regression": measurements,
    "survival": survival,
    "segmentation": outlines,
}
VOLUMES: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "balls": balls,
    "nodules": nodules,
}
INPUTS: dict[str, Callable[[np.random.Generator], Arrays]] = {
    "notes": notes,
    "pulses": pulses,
    "stays": stays,
}
ALL = {**MADE, **VOLUMES, **INPUTS}
# Else their name
TASK_OF = {
    "balls": "segmentation",
    "nodules": "multiclass",
    **dict.fromkeys(INPUTS, "multiclass"),
}


def one_file(folder: Path, task: str) -> Path:
    """All of it in one file, for simulations."""
    whole = ALL[task](np.random.default_rng(3))
    rows = np.random.default_rng(4).permutation(samples(whole))[:200]
    write_npz(
        folder / "whole.npz", {key: a if a.ndim == 0 else a[rows] for key, a in whole.items()}
    )
    return folder / "whole.npz"


def samples(whole: Arrays) -> int:
    return len(whole["y" if "y" in whole else "time"])


LABELS = {
    "multilabel": ("odd", "large", "loop"),
    "segmentation": ("background", "disc", "ring"),
}


def partly_labelled(folder: Path, task: str) -> dict[str, Path]:
    """Hospital files, of which south does not label the last finding or outline; its rings are background to it."""
    files = hospital_files(folder, task)
    for name, file in files.items():
        arrays = dict(np.load(file))
        y = arrays["y"].astype(np.int8)
        if task == "segmentation":  # the upper half of each disc is another organ
            y = np.where((y > 0) & (np.arange(16)[:, None] < 8), 2, y).astype(np.uint8)
        if name == "south":
            y = np.where(y == 2, 0, y) if task == "segmentation" else y
            if task == "multilabel":
                y[:, 2] = -1
            arrays["unlabelled"] = np.array(LABELS[task][2:])
        more = {"classes": np.array(3)} if task == "segmentation" else {}
        write_npz(file, {**arrays, **more, "y": y, "label_names": np.array(LABELS[task])})
    return files


def hospital_files(folder: Path, task: str) -> dict[str, Path]:
    """One file for each hospital, divided by nobody yet."""
    rng = np.random.default_rng(3)
    whole = ALL[task](rng)
    order, start = rng.permutation(samples(whole)), 0
    files = {}
    for name, size in zip(NAMES, SIZES, strict=True):
        rows = order[start : start + size]
        files[name] = folder / f"{name}.npz"
        write_npz(files[name], {key: a if a.ndim == 0 else a[rows] for key, a in whole.items()})
        start += size
    return files
