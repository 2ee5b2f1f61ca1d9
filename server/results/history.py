"""The history of a study, ``history.csv``: one row per strategy, seed, round, silo, split, snapshot and metric.

Beyond :data:`LARGE` bytes it is ``history.csv.gz``: the same text, and each round is added as a gzip member of its own.
So a program that expects all rows in ``history.csv`` fails instead of reading a part of them.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from partitions.common.adding import added
from partitions.common.errors import DataError
from partitions.common.files import append, write_atomically
from partitions.common.names import guard_formula, unguard_formula


class Row(NamedTuple):
    """One value of the history, empty if withheld. Rows of a whole round have no silo, split, snapshot and n."""

    strategy: str
    seed: int
    round: int
    silo: str
    split: str
    snapshot: str
    metric: str
    value: float
    n: int | None

    @property
    def which(self) -> tuple[str, int]:
        """Method and seed of the run."""
        return self.strategy, self.seed

    def cells(self) -> list[str]:
        *texts, _, n = self
        return [
            *(guard_formula(str(text)) for text in texts),
            "" if math.isnan(self.value) else repr(float(self.value)),
            "" if n is None else str(n),
        ]


JOINED = "joined"  # metric of the row that records that a silo joined in this round


def joined_in(rows: Iterable[Row]) -> dict[str, int]:
    """Return from a run's rows the silos that joined during the run, each with its first round."""
    return {r.silo: r.round for r in rows if r.metric == JOINED and not r.snapshot}


HEADER = [*Row._fields]
LARGE = 32_000_000  # bytes


def history_file(path: Path) -> Path:
    """Return the file that holds the history ``path``: the compressed one beside it, if it is there."""
    return packed if (packed := compressed_file(path)).exists() else path


def compressed_file(path: Path) -> Path:
    """Return the file of the history ``path`` when it has been compressed."""
    return path.with_name(f"{path.name}.gz")


def _load(file: Path) -> str:
    """Return the whole lines of a history. What a crash has cut off at its end is left out."""
    content = bytearray()
    try:
        if file.suffix == ".gz":
            with suppress(EOFError), gzip.open(file) as packed:
                while block := packed.read1(LARGE):
                    content += block
        else:
            content += file.read_bytes()
        return content[: content.rfind(b"\n") + 1].decode()
    except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error):
        raise DataError(f"{file} is damaged: it is not all text") from None


def _read(text: str, path: Path) -> list[Row]:
    rows, reader = list[Row](), csv.reader(io.StringIO(text))
    try:
        next(reader, None)  # the header
        for strategy, seed, round, silo, split, snapshot, metric, value, n in reader:
            texts = map(unguard_formula, (silo, split, snapshot, metric))
            values: Any = (*texts, float(value or "nan"), int(n) if n else None)
            rows.append(Row(unguard_formula(strategy), int(seed), int(round), *values))
    except (ValueError, csv.Error):
        raise DataError(f"{path}, line {reader.line_num}: no row of a history") from None
    return rows


def csv_text(rows: Iterable[Sequence[Any]]) -> str:
    """Return lines of cells as the text of a csv file."""
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue()


def _text(rows: Iterable[Row]) -> str:
    return csv_text(row.cells() for row in rows)


def write_history(path: Path, rows: Iterable[Row]) -> None:
    """Write the whole file atomically. A history that was compressed remains so."""
    file, text = history_file(path), ",".join(HEADER) + "\n" + _text(rows)
    if file == path:
        write_atomically(file, text)
        _compress_large(file)
    else:
        write_atomically(file, gzip.compress(text.encode(), mtime=0))
        path.unlink(missing_ok=True)  # left by a crash


def _compress_large(file: Path) -> None:
    """Compress a history that has become large. A reader sees either file, never none."""
    if file.suffix != ".gz" and file.stat().st_size > LARGE:
        write_atomically(compressed_file(file), gzip.compress(file.read_bytes(), mtime=0))
        file.unlink()


def stored_rows(path: Path) -> list[Row] | None:
    """Return the rows of the history ``path``, None if there is none. A run may compress it meanwhile."""
    packed = compressed_file(path)
    for file in (packed, path, packed):
        with suppress(FileNotFoundError):
            return _read(_load(file), file)
    return None


class History:
    """Rows in memory and, with a path, in a file, which grows by one write per round."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.rows: list[Row] = []
        # (strategy, seed) -> running SHA-256 of the run's rows
        self._sums: dict[tuple[str, int], Any] = {}
        if path is not None and (rows := stored_rows(path)) is not None:
            self.rows = rows
        elif path is not None:
            self._write()

    @classmethod
    def stored(cls, path: Path) -> History:
        """Return a history for a reader: an empty one where there is none, which is not made."""
        history = cls()
        history.rows = stored_rows(path) or []
        return history

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of one run. They are on the disk when this returns, because a checkpoint depends on them."""
        new = list(rows)
        self.rows += new
        text = _text(new)
        if new and (digest := self._sums.get((new[0].strategy, new[0].seed))):
            digest.update(text.encode())
        if self.path is not None:
            file = history_file(self.path)
            append(file, gzip.compress(text.encode()) if file != self.path else text)
            _compress_large(file)

    def forget(self, strategy: str, seed: int, after: int) -> None:
        """Drop the rows of one run from rounds later than ``after``, which will be repeated.

        The run's other rows move to the end, where the new ones will follow. So a run's rows stay together in the order
        of rounds, and the runs in the order of the study, even after interruptions.
        """
        kept = [r for r in self.of(strategy, seed) if r.round <= after]
        self.rows = [r for r in self.rows if r.which != (strategy, seed)] + kept
        self._write()

    def drop(self, silo: str) -> bool:
        """Drop all rows of a silo; return whether there were any."""
        before = len(self.rows)
        self.rows = [r for r in self.rows if r.silo != silo]
        if dropped := len(self.rows) < before:
            self._write()
        return dropped

    def missing_rounds(self, strategy: str, seed: int, rounds: int) -> list[int]:
        """Return the rounds from 1 to ``rounds`` without rows."""
        return sorted({*range(1, rounds + 1)} - {r.round for r in self.of(strategy, seed)})

    def digest(self, strategy: str, seed: int) -> str:
        """Return the SHA-256 of a run's rows, as they are written."""
        key = (strategy, seed)
        if key not in self._sums:
            self._sums[key] = hashlib.sha256(_text(self.of(*key)).encode())
        return str(self._sums[key].hexdigest())

    def _write(self) -> None:
        self._sums.clear()
        if self.path is not None:
            write_history(self.path, self.rows)

    def of(self, strategy: str, seed: int) -> list[Row]:
        return [r for r in self.rows if r.which == (strategy, seed)]

    def runs(self) -> list[tuple[str, int]]:
        """Return method and seed of the runs that have rows."""
        return list(dict.fromkeys(row.which for row in self.rows))


@dataclass(frozen=True)
class SiloCost:
    """Epsilon, delta and noised steps of one silo in one run."""

    epsilon: float
    delta: float
    steps: int


def spent_by_silo(rows: Iterable[Row]) -> dict[str, SiloCost]:
    """Return each silo's cost in a run, from its last reply. Empty without differential privacy."""
    # PyTorch comes with it
    from strategies.base.transport.reporting import DELTA, EPSILON, STEPS

    last: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.silo and not row.split and row.metric in (EPSILON, DELTA, STEPS):
            last[row.silo][row.metric] = row.value
    return {
        silo: SiloCost(values[EPSILON], values[DELTA], int(values[STEPS]))
        for silo, values in sorted(last.items())
        if values.keys() >= {EPSILON, DELTA, STEPS}
    }


def budgets_of(history: History, unit: str) -> list[dict[str, Any]]:
    """Return each silo's total cost over the runs of a study: epsilons and deltas add up.

    ``unit``: the privacy unit of the runs. ``budget`` is None: only the sites hold budgets.
    """
    runs: dict[str, list[tuple[str, SiloCost]]] = defaultdict(list)
    for strategy, seed in history.runs():
        for silo, cost in spent_by_silo(history.of(strategy, seed)).items():
            runs[silo].append((f"{strategy}-{seed}", cost))
    return [
        {
            "cohort": silo,
            "unit": unit,
            "delta": sum(cost.delta for _, cost in costs),
            "spent": sum(cost.epsilon for _, cost in costs),
            "budget": None,
            "left": None,
            "runs": [
                {"run": run, "epsilon": cost.epsilon, "steps": cost.steps}
                for run, cost in costs
            ],
        }
        for silo, costs in sorted(runs.items())
    ]


@dataclass
class Chosen:
    """The round with the best mean validation score; without validation data, the last tested round.

    The result equals that of :func:`server.results.summary.run_summary` on the whole history. It is updated round by
    round, so that the time per round does not grow. A silo that misses a round keeps its last earlier score, or else
    has its first one. A round is better if its mean is higher by more than ``min_delta``.
    """

    snapshot: str
    score: str
    min_delta: float = 0.0
    round: int = 0  # 0: nothing is evaluated yet
    evaluated: int = 0  # the last evaluated round

    def __post_init__(self) -> None:
        self.rounds: dict[str, int] = {}  # silo -> the round of its score
        self._last: dict[str, int] = {}
        self._values: dict[str, float] = {}
        self._best: dict[str, float] = {}

    def add(self, rows: Iterable[Row]) -> None:
        """Add the history's rows of the next round."""
        known = [
            r
            for r in rows
            if (r.snapshot, r.metric) == (self.snapshot, self.score)
            and r.split in ("val", "test")
            and not math.isnan(r.value)
        ]
        if not known:
            return
        self.evaluated = number = known[0].round
        validation = {r.silo: r.value for r in known if r.split == "val"}
        for silo in {r.silo for r in known}:
            if silo not in self._last:  # its first score also applies to earlier rounds
                self.rounds[silo] = number
                self._best |= {silo: validation[silo]} if silo in validation else {}
            self._last[silo] = number
            self._values.pop(silo, None)
        self._values |= validation
        if (
            mean(self._values) > mean(self._best) + self.min_delta
            or not self._best
            or not self.round
        ):
            self.round = number
            self.rounds = dict(self._last)
            self._best = dict(self._values)

    @property
    def best(self) -> dict[str, float]:
        """The silos' validation scores at the chosen round; empty if there are none."""
        return dict(self._best)

    @property
    def validated(self) -> bool:
        """Whether a silo has reported a validation score."""
        return bool(self._best)

    def of(self, silos: Iterable[str]) -> dict[str, int]:
        """Return each silo's round, or the chosen one if its scores are withheld; empty before the first score."""
        return {silo: self.rounds.get(silo, self.round) for silo in silos} if self.round else {}


def mean(values: Mapping[str, float]) -> float:
    """Return the mean over silos; -inf if empty. The sum runs in the order of the names, for equal last bits."""
    return added(values[name] for name in sorted(values)) / len(values) if values else -math.inf
