"""`silofl import` of signals: WFDB, EDF and DICOM waveforms, written by wfdb, edfio and pydicom themselves."""

from __future__ import annotations

import shutil
import warnings
from typing import Any

import numpy as np
import pytest
from failing import fails
from near import near
from numpy.testing import assert_array_equal
from taken import imported, silofl, splits_of, write_lines

from partitions.common.errors import DataError
from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.recipes.pictures import load_any

edfio, pydicom = pytest.importorskip("edfio"), pytest.importorskip("pydicom")
with warnings.catch_warnings():  # its own import warns with newer pandas
    warnings.simplefilter("ignore")
    wfdb = pytest.importorskip("wfdb")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*inplace"),  # wfdb's, of pandas
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # edfio writes so
]
RATE, LEADS = 100.0, ("I", "V1")


def wave(seed, steps=200, channels=2):
    """Millivolts as an ECG has them, on the grid of thousandths that all three formats keep exactly."""
    drawn = np.random.default_rng(seed).integers(-1500, 1500, (steps, channels))
    return drawn / 1000


def write_wfdb(path, values, names=LEADS, unit="mV", rate=RATE):
    """A record of wfdb.wrsamp, with a gain of 1000 for each unit."""
    count = len(names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wfdb.wrsamp(
            path.name,
            fs=rate,
            units=[unit] * count,
            sig_name=list(names),
            p_signal=values,
            fmt=["16"] * count,
            adc_gain=[1000.0] * count,
            baseline=[0] * count,
            write_dir=str(path.parent),
        )
    return path.with_name(f"{path.name}.hea")


def write_edf(path, values, names=LEADS, patient="X", rates=None):
    """A file of edfio, whose digital values are microvolts."""
    signals = [
        edfio.EdfSignal(
            column,
            rate,
            label=f"ECG {name}",
            physical_dimension="uV",
            physical_range=(-32768, 32767),
        )
        for column, name, rate in zip(
            np.moveaxis(np.asarray(values) * 1000, -1, 0),
            names,
            rates or [RATE] * len(names),
            strict=True,
        )
    ]
    edfio.Edf(signals, patient=edfio.Patient(code=patient)).write(path)
    return path


def write_dicom(path, values, patient="P1", study=1):
    """The library's own 12-lead ECG, with two channels of these values in microvolts, at 100 Hz."""
    from pydicom.data import get_testdata_file

    made = pydicom.dcmread(str(get_testdata_file("waveform_ecg.dcm")))
    group = made.WaveformSequence[0]
    del made.WaveformSequence[1:]
    made.PatientID, made.StudyInstanceUID = patient, f"1.2.826.0.1.3680043.8.498.{study}"
    made.SeriesInstanceUID = f"{made.StudyInstanceUID}.1"
    group.ChannelDefinitionSequence = [group.ChannelDefinitionSequence[i] for i in (0, 6)]
    for channel in group.ChannelDefinitionSequence:
        channel.ChannelSensitivity, channel.ChannelBaseline = 2, 500
        channel.ChannelSensitivityCorrectionFactor = 0.5
    group.NumberOfWaveformChannels, group.SamplingFrequency = values.shape[1], RATE
    group.NumberOfWaveformSamples = len(values)
    group.WaveformData = np.rint(values * 1000 - 500).astype("<i2").tobytes()
    made.save_as(path)
    return path


def ten(root, kind, **more):
    """Ten signals of one kind with a csv that lists them; those of odd numbers have label 1."""
    write: dict[str, Any] = {"wfdb": write_wfdb, "edf": write_edf, "dicom": write_dicom}
    lines = ["file,label,patient"]
    for i in range(10):
        ending = {"wfdb": "", "edf": ".edf", "dicom": ".dcm"}[kind]
        write[kind](root / f"zarathustra-{i}{ending}", wave(i), **more)
        lines.append(f"zarathustra-{i}{ending},{i % 2},p{i}")
    write_lines(root / "list.csv", *lines)
    return root / "list.csv"


def samples(made):
    """The samples of all parts, in any order."""
    return sorted(
        (own for part in splits_of(made.data) for own in part.x), key=lambda own: own.tobytes()
    )


def expected():
    return sorted((wave(i).astype(np.float32) for i in range(10)), key=lambda o: o.tobytes())


@pytest.mark.parametrize("kind", ["wfdb", "edf", "dicom"])
def test_values_are_those_that_were_written(tmp_path, kind):
    """Every value of every sample, in mV, channels as they were, patients by the csv; the file has (n, c, t)."""
    made = imported(ten(tmp_path, kind), tmp_path / "ours.npz")
    for own, other in zip(samples(made), expected(), strict=True):
        near(own, other, 2e-7)
    with np.load(tmp_path / "ours.npz") as file:
        assert file["x_train"].shape[1:] == (2, 200) and file["x_train"].dtype == np.float32
    assert made.pictures.kind == "signals"
    assert (
        made.pictures.pictures.channels == LEADS and made.pictures.expected.units == ("mV",) * 2
    )
    assert made.data.train.patient is not None


def test_a_wfdb_record_that_edfio_wrote_again_is_the_same(tmp_path):
    """A recipe of WFDB refuses EDF until it is allowed, and then reads the same values."""
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    first = imported(ten(tmp_path / "a", "wfdb"))
    recipe = first.pictures
    other = ten(tmp_path / "b", "edf")
    with pytest.raises(DataError, match="its format is edf, where the recipe has wfdb"):
        imported(other, tmp_path / "b.npz", pictures=recipe)
    allowed = recipe.expected.model_copy(update={"formats": ("edf", "wfdb")})
    recipe = recipe.model_copy(update={"expected": allowed})
    second = imported(other, tmp_path / "b.npz", pictures=recipe)
    for own, there in zip(samples(second), samples(first), strict=True):
        near(own, there, 2e-7)


def test_channels_are_found_by_name(tmp_path):
    """One file has its channels in another order; --channels takes some, in its own order."""
    table = ten(tmp_path, "wfdb")
    write_wfdb(tmp_path / "zarathustra-3", wave(3)[:, ::-1], ("v1", "Lead I"))
    made = imported(table)
    for own, other in zip(samples(made), expected(), strict=True):
        near(own, other, 2e-7)
    one = imported(table, channels=("V1",))
    near(
        sorted(float(own[0, 0]) for own in samples(one)),
        sorted(wave(i)[0, 1] for i in range(10)),
    )


def test_another_rate_is_resampled_and_counted(tmp_path):
    """A sine at 200 Hz becomes the sine at 100 Hz; a length is cut, or zeros follow."""
    table = ten(tmp_path, "wfdb")
    sine = np.sin(2 * np.pi * 2 * np.arange(600) / 200)[:, None] * [1, 0.5]
    write_wfdb(tmp_path / "zarathustra-0", sine, rate=200.0)
    write_wfdb(tmp_path / "zarathustra-1", wave(1, 150))
    options = ImportOptions(rate=100.0, seconds=2.0)
    made = import_source(table, tmp_path / "ours.npz", options)
    assert "1 of 10 signals have other rates: resampled to 100 Hz" in made.notes
    assert "1 of 10 signals are longer than 2 s: the beginning is taken" in made.notes
    assert "1 of 10 signals are shorter than 2 s: zeros follow" in made.notes
    wanted = np.sin(2 * np.pi * 2 * np.arange(200) / 100)
    errors = [np.abs(own[20:180, 0] - wanted[20:180]).max() for own in samples(made)]
    assert min(errors) < 2e-3
    short = [own for own in samples(made) if not own[150:].any()]
    assert len(short) == 1 and np.allclose(short[0][:150], wave(1, 150), atol=1e-6)


def test_channels_of_several_rates_need_one(tmp_path):
    """EDF allows a rate per channel."""
    path, lines = tmp_path / "a.edf", "file,label\na.edf,0"
    slow = edfio.EdfSignal(np.zeros(20), 10, label="Resp", physical_range=(-1, 1))
    fast = edfio.EdfSignal(np.zeros(200), 100, label="I", physical_range=(-1, 1))
    edfio.Edf([fast, slow]).write(path)
    (tmp_path / "list.csv").write_text(lines)
    with pytest.raises(DataError, match="its channels have rates of 10, 100 Hz; use --rate"):
        imported(tmp_path / "list.csv")


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"names": ("I", "V2")}, "has channels I, V2, the first one has I, V1; use --channels"),
        ({"rate": 200.0}, "has 200 Hz, the first one 100; use --rate"),
        (
            {"values": wave(3, 150)},
            r"has 150 steps \(1.5 s\), the first one 200; use --seconds",
        ),
        ({"unit": "mmHg"}, "its channel i is in mmHg, the first file's in mV"),
        ({"names": ("I", "i")}, "it has channel i twice"),
    ],
)
def test_what_differs_is_refused(tmp_path, change, reason):
    """Each refusal names the line, the difference, and the option that mends it."""
    table = ten(tmp_path, "wfdb")
    write_wfdb(tmp_path / "zarathustra-3", **{"values": wave(3), **change})
    said = fails(DataError, reason, imported, table, tmp_path / "ours.npz")
    assert "line 5" in said and not (tmp_path / "ours.npz").exists()


def cut(path):
    path.write_bytes(path.read_bytes()[:-300])


def interrupt(folder):
    """Its second record begins after five seconds, and not after one."""
    path = folder / "zarathustra-3.edf"
    edf = edfio.read_edf(path)
    edf.set_annotations([edfio.EdfAnnotation(0, None, "begins")])
    edf.write(path)
    content = path.read_bytes()
    assert content.count(b"+1\x14\x14") == 1
    path.write_bytes(content.replace(b"+1\x14\x14", b"+5\x14\x14"))


def dial(folder):
    made = pydicom.dcmread(folder / "zarathustra-3.dcm")
    made.WaveformSequence[0].WaveformSampleInterpretation = "MB"  # mu-law
    made.save_as(folder / "zarathustra-3.dcm")


@pytest.mark.parametrize(
    "kind, damage, reason",
    [
        ("wfdb", lambda p: cut(p / "zarathustra-3.dat"), "cannot be read as a signal"),
        (
            "wfdb",
            lambda p: (p / "zarathustra-3.dat").unlink(),
            "names a file that is not there",
        ),
        (
            "edf",
            lambda p: cut(p / "zarathustra-3.edf"),
            "counts 2 data records, and its file has 1",
        ),
        ("dicom", lambda p: cut(p / "zarathustra-3.dcm"), "cannot be read as a signal"),
        ("edf", interrupt, r"has interruptions \(EDF\+D\): save its parts one by one"),
        ("dicom", dial, "its values are telephone codes, no numbers; export them as numbers"),
    ],
)
def test_damaged_files_are_named(tmp_path, kind, damage, reason):
    """A file that is cut short is refused, not read in part; --skip-bad leaves it out. No name of a file is shown."""
    table = ten(tmp_path, kind)
    damage(tmp_path)
    said = fails(DataError, reason, imported, table, tmp_path / "ours.npz")
    assert "zarathustra" not in said
    from partitions.importing.files import Faults

    made = imported(table, tmp_path / "ours.npz", faults=Faults(True))
    assert len(samples(made)) == 9


def test_missing_values_are_refused(tmp_path):
    """WFDB has a code for a missing value, which is read as no number."""
    table = ten(tmp_path, "wfdb")
    values = wave(3)
    values[5, 1] = np.nan
    write_wfdb(tmp_path / "zarathustra-3", values)
    fails(DataError, "its channel V1 has 1 steps without a value", imported, table)


def test_a_header_may_not_lead_out_of_a_folder(tmp_path):
    """A record's header names its files; a link out of the folder that was named is refused."""
    inside = tmp_path / "in"
    inside.mkdir()
    ten(inside, "wfdb")
    shutil.move(inside / "zarathustra-3.dat", tmp_path / "elsewhere.dat")
    (inside / "zarathustra-3.dat").symlink_to(tmp_path / "elsewhere.dat")
    fails(DataError, "names a file outside its folder", imported, inside)


def test_folders_and_studies(tmp_path):
    """Folders of classes need --labels, as scans do; DICOM waveforms are joined by study, and tell patients apart."""
    for i in range(10):
        (tmp_path / "c" / "AB"[i % 2]).mkdir(parents=True, exist_ok=True)
        write_edf(tmp_path / "c" / "AB"[i % 2] / f"{i}.edf", wave(i), patient=f"P{i // 2}")
    fails(
        DataError, "holds signals and no csv", imported, tmp_path / "c", tmp_path / "ours.npz"
    )
    options = ImportOptions(labels=("A", "B"))
    made = import_source(tmp_path / "c", tmp_path / "ours.npz", options)
    parts = splits_of(made.data)
    assert sum(part.people for part in parts) == 5
    (tmp_path / "d").mkdir()
    lines = ["study,label"]
    for i in range(10):
        write_dicom(tmp_path / "d" / f"{i}.dcm", wave(i), patient=f"P{i}", study=i + 1)
        lines.append(f"1.2.826.0.1.3680043.8.498.{i + 1},{i % 2}")
    write_lines(tmp_path / "labels.csv", *lines)
    options = ImportOptions(labels_from=tmp_path / "labels.csv")
    made = import_source(tmp_path / "d", tmp_path / "theirs.npz", options)
    for own, other in zip(samples(made), expected(), strict=True):
        near(own, other, 2e-7)


def test_options_of_others_are_refused(tmp_path):
    table = ten(tmp_path, "edf")
    for options, reason in (
        (ImportOptions(size=64), "--size is of pictures and scans"),
        (ImportOptions(channels=("V9",)), "it has no channel V9; it has I, V1"),
    ):
        fails(DataError, reason, import_source, table, tmp_path / "ours.npz", options)
    (tmp_path / "t.csv").write_text("a,label\n" + "\n".join(f"{i},{i % 2}" for i in range(20)))
    with pytest.raises(DataError, match="samples that are no signals"):
        imported(tmp_path / "t.csv", tmp_path / "ours.npz", rate=100.0)


def test_the_command_proposes_imports_and_repeats(tmp_path, capsys):
    """--propose describes and asks; the recipe that the import writes reads the next signals the same way."""
    table = ten(tmp_path, "wfdb")
    write_wfdb(tmp_path / "zarathustra-9", wave(9, 400))
    assert silofl("import", table, "--propose") == 0
    draft = capsys.readouterr().out
    assert "10 signals" in draft and 'kind = "signals"' in draft and "seconds:" in draft
    assert "zarathustra" not in draft
    out = tmp_path / "ours.npz"
    assert silofl("import", table, "--seconds", "2", "--out", out) == 0
    assert "signals of 2 channels, 200 steps, float32" in capsys.readouterr().out
    recipe = load_any(tmp_path / "ours.recipe.toml")
    assert recipe.pictures.shape == (200, 2) and recipe.pictures.seconds == 2  # type: ignore[union-attr]
    again = tmp_path / "again.npz"
    command = ["import", str(table), "--recipe", str(tmp_path / "ours.recipe.toml")]
    assert silofl(*command, "--out", again) == 0
    with np.load(out) as first, np.load(again) as second:
        assert_array_equal(first["x_train"], second["x_train"])
    text = (tmp_path / "ours.recipe.toml").read_text()
    (tmp_path / "draft.toml").write_text(text.replace("shape = [200, 2]", "shape = [200, 3]"))
    assert silofl("import", table, "--recipe", tmp_path / "draft.toml", "--out", "x.npz") == 2
    assert "3 channels by its shape" in capsys.readouterr().err
