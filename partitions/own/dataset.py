"""A hospital's own data set: a function that returns, per split, a map-style ``torch`` Dataset and an index.

    def ours():
        index = {"label": [0, 1, ...], "patient": ["P1", "P2", ...]}      # also subgroup, digest
        return {"train": (dataset, index), "val": ..., "test": ..., "classes": 2}

``dataset[i]`` is (input, label), or a mapping with ``image`` and ``label``, as MONAI and TorchIO have it. An input is
as networks take it: (c, h, w), (c, d, h, w), (c, t) or (columns,), bytes or numbers. Of outlines the label is a mask,
which the index does not have.

Samples are read when a batch needs them. What a sample draws at random is drawn from torch, NumPy, ``random`` and
MONAI's transforms, all of which are seeded: by run, silo, round, epoch and sample in training, by the sample elsewhere.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.memory import is_out_of_memory
from partitions.common.names import words_in
from partitions.common.own_code import NAME, by_entry_point, code_sum, load_function, put_back
from partitions.schema import tidy
from partitions.splits import SPLITS, Array, Arrays, Shape
from partitions.stored import OnDisk

GROUP = "silofl.datasets"  # of entry points
INDEX = ("label", "patient", "subgroup", "digest")
ABOUT = words_in("task classes label_names unlabelled cohort")  # beside the splits
KINDS = (np.uint8, np.int16, np.float16, np.float32)
IMAGE, LABEL = "image", "label"


class OwnFault(DataError):
    """A fault of a data set, without a value of a sample; ``at_home``: more, for this machine's own log."""

    def __init__(self, text: str, at_home: str = "") -> None:
        super().__init__(text)
        if at_home:
            logging.getLogger("silofl").error("%s: %s", text, at_home)


def resolve_name(text: str) -> str:
    """Return MODULE:FUNCTION of an own data set, as it is or of an entry point; "" for any other text."""
    if NAME.fullmatch(text):
        return text
    return by_entry_point(GROUP, text) if text.isidentifier() else ""


@dataclass(eq=False)
class OwnPart:
    """One split of an own data set: the Dataset, its index, and the last rows that were read."""

    name: str
    split: str
    dataset: Any
    index: Arrays
    count: int
    shape: Shape = ()  # of a sample in the stored form
    dtype: np.dtype[Any] = field(default_factory=lambda: np.dtype(np.float32))
    unlabelled: Sequence[int] = ()  # classes that no mask has
    last: tuple[Any, Any] = (None, None)

    def fault(self, what: str, error: BaseException | None = None, row: int = -1) -> OwnFault:
        """Return a fault of this split; the row and the error's text stay at home."""
        kind = f" ({type(error).__name__})" if error else ""
        more = f"sample {row}" * (row >= 0) + f": {error}" * (error is not None)
        return OwnFault(f"{self.name}: {self.split} {what}{kind}", more)

    def read(self, rows: Array, seed: int | None) -> tuple[Array, Array]:
        """Return inputs in the stored form (n, ..., c), and labels (n, ...), of these rows; the last ones are kept."""
        key = rows.tobytes(), seed
        if self.last[0] != key:
            if length_of(self.name, self.split, self.dataset) != self.count:
                raise self.fault("has another length than its index")
            pairs = [self.sample(int(row), seed) for row in rows]
            xs, ys = zip(*pairs, strict=True) if pairs else ((), ())
            self.last = key, (np.stack(xs), np.stack(ys)) if pairs else self.empty()
        return self.last[1]  # type: ignore[no-any-return]

    def empty(self) -> tuple[Array, Array]:
        mask = "label" not in self.index
        y = np.empty((0, *self.shape[:-1]) if mask else (0,), np.uint8)
        return np.empty((0, *self.shape), self.dtype), y

    def sample(self, row: int, seed: int | None) -> tuple[Array, Array]:
        """Read one sample, and check it against the index and the first sample."""
        labels = self.index.get("label")
        try:
            with seed_sample(self.dataset, seed, row):
                x, y = pair_of(self.dataset[row])
            y = mask_of(y) if labels is None else y.astype(np.float32).ravel()
        except (Exception, SystemExit) as error:
            if is_out_of_memory(error):
                raise
            raise self.fault("has a sample that cannot be read", error, row) from None
        x = np.moveaxis(x, 0, -1) if x.ndim > 1 else x
        if x.dtype not in KINDS or not 1 <= x.ndim <= 4:
            raise self.fault(f"has an input of {x.dtype} with {x.ndim} axes", row=row)
        if self.shape and (x.shape, x.dtype) != (self.shape, self.dtype):
            raise self.fault("has inputs of different shapes or types", row=row)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise self.fault("has an input with a value that is no finite number", row=row)
        if labels is None and (y.shape != x.shape[:-1] or y.dtype != np.uint8):
            raise self.fault(
                "has a mask of another size, or with values that are no classes", row=row
            )
        if labels is None and self.unlabelled and np.isin(y, self.unlabelled).any():
            raise self.fault("has a mask with a class that is unlabelled", row=row)
        if labels is not None and not np.array_equal(y, labels[row].astype(np.float32).ravel()):
            raise self.fault("has a sample with another label than its index", row=row)
        return x, y


class OwnSamples(OnDisk):
    """Inputs, or masks (``which`` = 1), of rows of an own data set; ``seed``: of what samples draw."""

    def __init__(
        self, part: OwnPart, which: int = 0, rows: Array | None = None, seed: int | None = None
    ) -> None:
        self.own, self.which, self.seed = part, which, seed
        self.rows = np.arange(part.count) if rows is None else rows
        shape, dtype = (part.shape[:-1], np.uint8) if which else (part.shape, part.dtype)
        self.shape, self.dtype = (len(self.rows), *shape), np.dtype(dtype)

    def __getitem__(self, index: Any) -> Array:
        return self.own.read(self.rows[index], self.seed)[self.which].astype(self.dtype)

    def cut(self, row: int, place: tuple[slice, ...]) -> Array:
        read: Array = self[[row]][0][place]
        return read

    def part(self, rows: Array) -> OwnSamples:
        return OwnSamples(self.own, self.which, self.rows[rows], self.seed)

    def seed_draws(self, seed: int) -> OwnSamples:
        """Return the same samples, whose random changes are drawn from ``seed``."""
        return OwnSamples(self.own, self.which, self.rows, seed)

    @property
    def stays(self) -> bool:
        return True

    @property
    def digests(self) -> Array | None:
        """The samples' digests in the index, uint64 (n,); None where it has none."""
        digests = self.own.index.get("digest")
        return None if digests is None else digests[self.rows]


def pair_of(item: Any) -> tuple[Array, Array]:
    """Return input and label of a Dataset's item. Raises TypeError or KeyError."""
    if isinstance(item, Mapping):
        x, y = item[IMAGE], item[LABEL]
    elif isinstance(item, Sequence) and len(item) == 2:
        x, y = item
    else:
        raise TypeError("an item is (input, label), or a mapping with image and label")
    return array_of(x), array_of(y)


def array_of(value: Any) -> Array:
    """Return a tensor, a TorchIO image, an array or a number as an array; float64 as float32."""
    data = value if isinstance(value, np.ndarray) else getattr(value, "data", value)
    array = np.asarray(data.detach().cpu() if hasattr(data, "detach") else data)
    return array.astype(np.float32) if array.dtype == np.float64 and array.ndim else array


def mask_of(y: Array) -> Array:
    """Return a mask (1, [d,] h, w) or ([d,] h, w) of classes as uint8 ([d,] h, w); others as they are."""
    y = y[0] if y.ndim > 2 and len(y) == 1 else y
    with np.errstate(invalid="ignore"):
        whole = y.astype(np.uint8)
    return whole if np.array_equal(whole, y) else y


@contextmanager
def seed_sample(dataset: Any, seed: int | None, row: int) -> Iterator[None]:
    """Context in which all that a sample draws at random follows from ``seed`` and its row; nothing outside does."""
    import torch

    state = np.random.SeedSequence([seed or 0, row]).generate_state(1)[0]
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(int(state))
    np.random.seed(state)
    torch.default_generator.manual_seed(int(state))
    # MONAI's transforms have generators of their own.
    for drawing in (dataset, getattr(dataset, "transform", None)):
        if set_state := getattr(drawing, "set_random_state", None):
            set_state(seed=int(state))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


@dataclass(frozen=True)
class OwnDataset:
    """An own data set as its function returns it; ``about``: task and classes; ``code``: its source's SHA-256."""

    name: str
    parts: Mapping[str, OwnPart]
    about: Mapping[str, Any]
    code: str


@lru_cache(maxsize=2)
def open_own(name: str) -> OwnDataset:
    """Call the function, once per process. Raises UserError or DataError, one line, where it cannot be used."""
    function = load_function("dataset", name, "")
    try:
        with put_back():
            returned = function()
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        text = f"{name}() does not return ({type(error).__name__})"
        raise OwnFault(text, str(error)) from None
    known = f"train, val, test, and {', '.join(ABOUT)}"
    if not isinstance(returned, Mapping) or not {"train", "test"} <= set(returned):
        raise OwnFault(
            f"{name}() must return a mapping with train and test: it may have {known}"
        )
    if strange := sorted(map(str, set(returned) - {*SPLITS, *ABOUT})):
        raise OwnFault(f"{name}() returns {strange[0]!r}, which is none of {known}")
    parts = {
        split: own_part(name, split, returned[split]) for split in SPLITS if split in returned
    }
    about = {key: returned[key] for key in ABOUT if key in returned}
    first, _ = parts["train"].sample(0, None)
    if first.ndim > 2 and first.shape[-1] > 4 >= first.shape[-2]:
        raise OwnFault(
            f"{name}: an input has its channels last; give (c, h, w) or (c, d, h, w)"
        )
    names, lacking = (
        [tidy(str(label)) for label in about.get(key, ())]
        for key in ("label_names", "unlabelled")
    )
    for part in parts.values():
        part.shape, part.dtype = first.shape, first.dtype
        part.unlabelled = [names.index(label) for label in lacking if label in names]
    return OwnDataset(name, parts, about, code_sum(function))


def own_part(name: str, split: str, value: Any) -> OwnPart:
    """Return a split as it was returned: a Dataset and its index. Raises DataError."""
    if not isinstance(value, Sequence) or len(value) != 2 or not isinstance(value[1], Mapping):
        raise OwnFault(
            f"{name}: {split} must be a Dataset and its index, (dataset, {{'label': ...}})"
        )
    dataset, index = value
    if strange := sorted(map(str, set(index) - {*INDEX})):
        raise OwnFault(
            f"{name}: {split} has an index of {strange[0]!r}; it has {', '.join(INDEX)}"
        )
    columns = {key: np.asarray(index[key]) for key in INDEX if index.get(key) is not None}
    count = length_of(name, split, dataset)
    if not count and split == "train":
        raise OwnFault(f"{name}: {split} has no samples")
    for key, column in columns.items():
        if column.ndim == 0 or len(column) != count:
            raise OwnFault(
                f"{name}: {split} has another number of samples than of {key} in its index"
            )
    if columns.get("label", np.zeros(0)).dtype.kind not in "biuf":
        raise OwnFault(
            f"{name}: {split} has labels in its index that are no numbers: 0, 1, ... are classes"
        )
    if "digest" in columns:
        columns["digest"] = as_digests(columns["digest"])
    return OwnPart(name, split, dataset, columns, count)


def length_of(name: str, split: str, dataset: Any) -> int:
    """Return how many samples a Dataset has. Raises DataError."""
    try:
        return len(dataset)
    except Exception as error:
        text = f"{name}: {split} is no map-style Dataset: it has no length ({type(error).__name__})"
        raise OwnFault(text, str(error)) from None


def as_digests(column: Array) -> Array:
    """Return digests as uint64 (n,): whole numbers as they are, of texts the first 64 bits of their SHA-256."""
    if column.dtype.kind in "iu":
        return column.astype(np.uint64)
    digests = [hashlib.sha256(str(text).encode()).digest()[:8] for text in column]
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
