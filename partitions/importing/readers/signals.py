"""What readers of signals share: WFDB, EDF and DICOM waveforms are described from their headers, and read as float32.

All signals (steps, channels) of a source have the same channels, in the order of ``--channels`` or else of the first
file, found by name. A signal at another rate than the requested one is resampled by a polyphase filter, which removes
what the new rate cannot carry. A signal that is longer than the requested seconds is cut, and a shorter one is followed
by zeros; notes count both.

Names of channels lose what only one format writes: "Lead I (Einthoven)" and "ECG I" are "I". Volts are converted to mV.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.common.sizes import check_picture
from partitions.importing.readers.reader import (
    FileSummary,
    ImageInfo,
    ScanError,
    hash_text,
    pseudonym,
    redacted_errors,
)
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.schema import few
from partitions.splits import Array, Shape

MILLIVOLTS = {"V": 1000.0, "mV": 1.0, "uV": 1e-3, "\u00b5V": 1e-3, "\u03bcV": 1e-3, "nV": 1e-6}
PREFIX = re.compile(r"^(lead|ecg|ekg)[ _]+", re.IGNORECASE)
LONGEST = 40  # characters of a channel's name or unit


@dataclass(frozen=True)
class Recording:
    """A recording from its header: a name, unit, rate in Hz and number of steps for each channel.

    * ``values``: reads channels by their places, each float64 (steps,), at most so many steps of the slowest.
    * ``patient``: its identifier in the header, "" without one; ``scales``: what a value is multiplied by.
    """

    format: str
    names: Names
    units: Names
    scales: tuple[float, ...]
    rates: tuple[float, ...]
    steps: Shape
    values: Callable[[Sequence[int], float], list[Array]]
    patient: str = ""
    notes: Names = ()


def make_recording(
    kind: str, channels: Sequence[tuple[str, str, float, int]], values: Any, **more: Any
) -> Recording:
    """Return the recording of channels, each a name, unit, rate and number of steps. Raises ScanError."""
    if not channels:
        raise ScanError("its file has no channels")
    names, units, rates, steps = zip(*channels, strict=True)
    if not all(0 < rate < np.inf for rate in rates) or min(steps) < 1:
        raise ScanError("its header has a channel without a rate, or without values")
    for text in (*names, *units):
        if len(text) > LONGEST or not text.isprintable():
            raise ScanError(f"a channel has a name or unit of more than {LONGEST} characters")
    check_picture((sum(steps),), "its signal")
    scales = tuple(MILLIVOLTS.get(unit, 1.0) for unit in units)
    units = tuple("mV" if unit in MILLIVOLTS else unit for unit in units)
    short = tuple(PREFIX.sub("", re.split(r"[,(]", name)[0].strip()) for name in names)
    return Recording(kind, short, units, scales, rates, steps, values, **more)


KIND = "a signal"
MOST_RATIO = 1000  # of two rates, as a fraction


@dataclass(frozen=True)
class ChosenChannels:
    """The channels of a recording to be read: their places, the rate, the steps to be made and those that are there."""

    places: Shape
    rate: float
    steps: int
    there: int


def choose(recording: Recording, reading: ReadOptions) -> ChosenChannels:
    """Return the requested channels of a recording, or all. Raises ScanError where one is missing or there twice."""
    known = [name.casefold() for name in recording.names]
    wanted = [name.casefold() for name in reading.channels] or known
    if missing := [name for name in reading.channels if name.casefold() not in known]:
        raise ScanError(f"it has no channel {few(missing)}; it has {few(recording.names, 30)}")
    if twice := sorted({name for name in wanted if known.count(name) > 1}):
        raise ScanError(f"it has channel {few(twice)} twice; name others with --channels")
    places = tuple(known.index(name) for name in wanted)
    rates = {recording.rates[i] for i in places}
    if len(rates) > 1 and not reading.rate:
        each = few([f"{rate:g}" for rate in sorted(rates)], 8)
        raise ScanError(f"its channels have rates of {each} Hz; use --rate, or --channels")
    rate = reading.rate or rates.pop()
    there = min(round(recording.steps[i] * rate / recording.rates[i]) for i in places)
    return ChosenChannels(
        places, rate, round(reading.seconds * rate) if reading.seconds else there, there
    )


@dataclass(frozen=True)
class SignalReader:
    """Reader of signals. ``open``: reads the header of a recording; it raises ScanError, or what its library raises."""

    open: Callable[[Path], Recording]
    recognises: Callable[[bytes], bool]
    endings: Names = ()
    name: str = "signal"

    def probe(
        self, path: Path, where: str, reading: ReadOptions, part: int | None = None
    ) -> ImageInfo:
        """Return the info of a signal from its header: ``height`` steps of ``channels`` channels."""
        check_signal_options(where, reading)
        with redacted_errors(where, KIND):
            recording = self.open(path)
            chosen = choose(recording, reading)
            check_picture((chosen.steps, len(chosen.places)), "its signal")
            of: Any = recording
            names, units, rates = (
                tuple(values[i] for i in chosen.places)
                for values in (of.names, of.units, of.rates)
            )
            notes = list(recording.notes)
            if chosen.there != chosen.steps:
                longer = chosen.there > chosen.steps
                notes.append(
                    f"are {'longer' if longer else 'shorter'} than {reading.seconds:g} s: "
                    + ("the beginning is taken" if longer else "zeros follow")
                )
            if set(rates) != {chosen.rate}:
                notes.append(f"have other rates: resampled to {chosen.rate:g} Hz")
            taken = Acquisition(recording.format, rate=min(rates), channels=names, units=units)
            whose = recording.patient
            return ImageInfo(
                *(chosen.steps, 1, len(names), True, pseudonym(whose), tuple(notes), taken),
                spelling=hash_text(whose),
                rate=chosen.rate,
            )

    def read(
        self, path: Path, where: str, reading: ReadOptions, part: int | None = None
    ) -> Array:
        """Read a signal, float32 (steps, channels). Raises DataError where a value is missing."""
        with redacted_errors(where, KIND):
            recording = self.open(path)
            chosen = choose(recording, reading)
            signal = np.zeros((chosen.steps, len(chosen.places)), np.float32)
            channels = recording.values(chosen.places, reading.seconds or 0.0)
            for column, (place, values) in enumerate(zip(chosen.places, channels, strict=True)):
                if missing := int((~np.isfinite(values)).sum()):
                    name = recording.names[place]
                    raise ScanError(f"its channel {name} has {missing} steps without a value")
                scaled = resample_channel(
                    values * recording.scales[place], recording.rates[place], chosen.rate
                )
                kept = scaled[: chosen.steps]
                signal[: len(kept), column] = kept
            return signal

    def describe(self, path: Path, where: str) -> FileSummary:
        """Return format, channels, units, rate and length of a signal."""
        with redacted_errors(where, KIND):
            recording = self.open(path)
            rates = recording.rates
            seconds = max(n / rate for n, rate in zip(recording.steps, rates, strict=True))
            values = (
                ("format", recording.format),
                ("channels", ", ".join(recording.names)),
                ("units", ", ".join(unit or "none" for unit in sorted(set(recording.units)))),
                ("rate", ", ".join(f"{rate:g}" for rate in sorted(set(rates))) + " Hz"),
                ("length", f"{seconds:g} s"),
            )
            return FileSummary("signals", values, {"patient": pseudonym(recording.patient)})


def check_signal_options(where: str, reading: ReadOptions) -> None:
    """Raise DataError for options of pictures and scans."""
    of_pictures = {
        "--size": reading.size,
        "--window": reading.window,
        "--spacing": reading.spacing or reading.voxel,
        "--slices": reading.slices > 1,
        "--volume": reading.volume,
    }
    if option := next((name for name, value in of_pictures.items() if value), ""):
        raise DataError(f"{where}: its file is a signal, and {option} is of pictures and scans")


def resample_channel(values: Array, present: float, rate: float) -> Array:
    """Return a channel of ``present`` Hz at another rate; beyond its ends it follows the line through both."""
    if present == rate:
        return values
    from scipy.signal import resample_poly

    ratio = Fraction(rate / present).limit_denominator(MOST_RATIO)
    if not ratio or abs(float(ratio) * present / rate - 1) > 1e-6:
        raise ScanError(f"its rate of {present:g} Hz has no simple ratio to {rate:g} Hz")
    return np.asarray(resample_poly(values, ratio.numerator, ratio.denominator, padtype="line"))


def check_signals_alike(places: Sequence[str], infos: Sequence[ImageInfo]) -> None:
    """Raise DataError for the first signal with other channels, units, rate or length than the first."""
    first = infos[0]
    names = sorted(map(str.casefold, first.acquired.channels))
    units = dict(
        zip(map(str.casefold, first.acquired.channels), first.acquired.units, strict=True)
    )
    for where, info in zip(places, infos, strict=True):
        taken = info.acquired
        unit_of = dict(zip(map(str.casefold, taken.channels), taken.units, strict=True))
        if sorted(unit_of) != names:
            raise DataError(
                f"{where}: its file has channels {few(taken.channels, 30)}, the first one has "
                f"{few(first.acquired.channels, 30)}; use --channels"
            )
        if other := [name for name in names if unit_of[name] != units[name]]:
            raise DataError(
                f"{where}: its channel {other[0]} is in {unit_of[other[0]] or 'no unit'}, the first file's in "
                f"{units[other[0]] or 'no unit'}; convert one of them"
            )
        if info.rate != first.rate:
            raise DataError(
                f"{where}: its file has {info.rate:g} Hz, the first one {first.rate:g}; use --rate"
            )
        if info.height != first.height:
            raise DataError(
                f"{where}: its file has {info.height} steps ({info.height / info.rate:g} s), the first one "
                f"{first.height}; use --seconds"
            )
