"""What readers of signals share: WFDB, EDF and DICOM waveforms are described from their headers, and read as float32.

All signals (steps, channels) of a source have the same channels, in the order of ``--channels`` or else of the first
file, found by name. A signal at another rate than the requested one is resampled by a polyphase filter, which removes
what the new rate cannot carry. A signal that is longer than the requested seconds is cut, and a shorter one is followed
by zeros; notes count both.

Names of channels lose what only one format writes: "Lead I (Einthoven)" and "ECG I" are "I". Volts are converted to mV.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from partitions.common.errors import DataError
from partitions.common.names import Names
from partitions.common.sizes import check_picture
from partitions.importing.readers.reader import (
    FileSummary,
    ImageInfo,
    Reader,
    SampleSource,
    ScanError,
    hash_text,
    pseudonym,
    redacted_errors,
)
from partitions.recipes.reading import Acquisition, ReadOptions
from partitions.schema import few
from partitions.splits import Array

MILLIVOLTS = {"V": 1000.0, "mV": 1.0, "uV": 1e-3, "\u00b5V": 1e-3, "\u03bcV": 1e-3, "nV": 1e-6}
PREFIX = re.compile(r"^(lead|ecg|ekg)[ _]+", re.IGNORECASE)
LONGEST = 40  # characters of a channel's name or unit


class Channel(NamedTuple):
    """A channel: its name, unit, rate in Hz, number of steps, and what a value is multiplied by."""

    name: str
    unit: str
    rate: float
    steps: int
    scale: float = 1.0


@dataclass(frozen=True)
class Recording:
    """A recording from its header.

    * ``values``: reads channels by their places, each float64 (steps,), at most so many seconds; 0: all.
    * ``patient``: its identifier in the header, "" without one.
    """

    format: str
    channels: tuple[Channel, ...]
    values: Callable[[Sequence[int], float], list[Array]]
    patient: str = ""
    notes: Names = ()


def make_recording(
    kind: str, channels: Sequence[tuple[str, str, float, int]], values: Any, **more: Any
) -> Recording:
    """Return the recording of channels, each a name, unit, rate and number of steps. Raises ScanError."""
    if not channels:
        raise ScanError("its file has no channels")
    read = list[Channel]()
    for name, unit, rate, steps in channels:
        if not 0 < rate < np.inf or steps < 1:
            raise ScanError("its header has a channel without a rate, or without values")
        if max(len(name), len(unit)) > LONGEST or not (name + unit).isprintable():
            raise ScanError(f"a channel has a name or unit of more than {LONGEST} characters")
        short = PREFIX.sub("", re.split(r"[,(]", name)[0].strip())
        scale = MILLIVOLTS.get(unit)
        read.append(Channel(short, "mV" if scale else unit, rate, steps, scale or 1.0))
    check_picture((sum(channel.steps for channel in read),), "its signal")
    return Recording(kind, tuple(read), values, **more)


KIND = "a signal"
Opener = Callable[[Path], Recording]  # reads the header of a recording
MOST_RATIO = 1000  # of two rates, as a fraction


@dataclass(frozen=True)
class ChosenChannels:
    """The channels of a recording to be read, by place; the rate, the steps to be made and those that are there."""

    channels: Mapping[int, Channel]
    rate: float
    steps: int
    there: int


def choose(recording: Recording, reading: ReadOptions) -> ChosenChannels:
    """Return the requested channels of a recording, or all. Raises ScanError where one is missing or there twice."""
    names = [channel.name for channel in recording.channels]
    known = [name.casefold() for name in names]
    wanted = [name.casefold() for name in reading.channels] or known
    if missing := [name for name in reading.channels if name.casefold() not in known]:
        raise ScanError(f"it has no channel {few(missing)}; it has {few(names, 30)}")
    if twice := sorted({name for name in wanted if known.count(name) > 1}):
        raise ScanError(f"it has channel {few(twice)} twice; name others with --channels")
    channels = {i: recording.channels[i] for i in map(known.index, wanted)}
    rates = {channel.rate for channel in channels.values()}
    if len(rates) > 1 and not reading.rate:
        each = few([f"{rate:g}" for rate in sorted(rates)], 8)
        raise ScanError(f"its channels have rates of {each} Hz; use --rate, or --channels")
    rate = reading.rate or rates.pop()
    there = min(round(channel.steps * rate / channel.rate) for channel in channels.values())
    steps = round(reading.seconds * rate) if reading.seconds else there
    return ChosenChannels(channels, rate, steps, there)


def _probe(open_file: Opener, sample: SampleSource, reading: ReadOptions) -> ImageInfo:
    """Return the info of a signal from its header: ``height`` steps of ``channels`` channels."""
    check_signal_options(sample.where, reading)
    with redacted_errors(sample.where, KIND):
        recording = open_file(sample.path)
        chosen = choose(recording, reading)
        check_picture((chosen.steps, len(chosen.channels)), "its signal")
        names, units, rates, *_ = zip(*chosen.channels.values(), strict=True)
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


def _read(open_file: Opener, sample: SampleSource, reading: ReadOptions) -> Array:
    """Read a signal, float32 (steps, channels). Raises DataError where a value is missing."""
    with redacted_errors(sample.where, KIND):
        recording = open_file(sample.path)
        chosen = choose(recording, reading)
        signal = np.zeros((chosen.steps, len(chosen.channels)), np.float32)
        read = recording.values([*chosen.channels], reading.seconds or 0.0)
        channels = zip(signal.T, chosen.channels.values(), read, strict=True)
        for column, channel, values in channels:
            if missing := int((~np.isfinite(values)).sum()):
                raise ScanError(
                    f"its channel {channel.name} has {missing} steps without a value"
                )
            scaled = resample_channel(values * channel.scale, channel.rate, chosen.rate)
            kept = scaled[: chosen.steps]
            column[: len(kept)] = kept
        return signal


def _describe(open_file: Opener, path: Path, where: str) -> FileSummary:
    """Return format, channels, units, rate and length of a signal."""
    with redacted_errors(where, KIND):
        recording = open_file(path)
        names, units, rates, steps, _ = zip(*recording.channels, strict=True)
        seconds = max(map(operator.truediv, steps, rates))
        values = (
            ("format", recording.format),
            ("channels", ", ".join(names)),
            ("units", ", ".join(unit or "none" for unit in sorted(set(units)))),
            ("rate", ", ".join(f"{rate:g}" for rate in sorted(set(rates))) + " Hz"),
            ("length", f"{seconds:g} s"),
        )
        return FileSummary("signals", values, {"patient": pseudonym(recording.patient)})


def signal_reader(
    open_file: Opener, recognises: Callable[[bytes], bool], endings: Names = ()
) -> Reader:
    """Return a reader of signals. ``open_file``: raises ScanError, or what its library raises."""
    probe, read = partial(_probe, open_file), partial(_read, open_file)
    return Reader("signal", endings, recognises, probe, read, partial(_describe, open_file))


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
    for where, info in zip(places, infos, strict=True):
        (units, other), (taken, here) = (
            (
                dict(zip(map(str.casefold, known.channels), known.units, strict=True)),
                known.channels,
            )
            for known in (first.acquired, info.acquired)
        )
        if taken.keys() != units.keys():
            raise DataError(
                f"{where}: its file has channels {few(here, 30)}, the first one has {few(other, 30)}; use --channels"
            )
        for name in sorted(units):
            if taken[name] != units[name]:
                raise DataError(
                    f"{where}: its channel {name} is in {taken[name] or 'no unit'}, the first file's in "
                    f"{units[name] or 'no unit'}; convert one of them"
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
