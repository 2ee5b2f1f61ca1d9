"""`silofl import` of DICOM: which picture of which study, its grey values, and that nobody's name is in any output."""

from __future__ import annotations

import logging
import subprocess
import sys
import traceback
import tracemalloc
from typing import Any

import numpy as np
import pydicom
import pytest
from failing import fails
from near import near
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from pydicom import Dataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.uid import ImplicitVRLittleEndian, JPEGLossless, JPEGLSLossless, RLELossless
from scans import SECRETS, accession, leaks, sample_at, study_uid, write_dicom
from taken import imported, refused, silofl, splits_of, write_lines

from partitions.importing.readers import dicom
from partitions.importing.readers.dicom_file import of_frame
from partitions.importing.readers.reader import pseudonym
from partitions.recipes.reading import ReadOptions
from partitions.silo_file import read_silo_file, write_silo_file

NAMED_FOLDER = "Zarathustra^Wilhelmine 19310417"  # as exports call them


def ten_studies(root, **attributes):
    """Studies 0 to 9 of one grey value each, 100 * study, and a csv that calls the even ones well."""
    for i in range(10):
        pixels = np.full((4, 6), 100 * i, np.uint16)
        write_dicom(
            root / NAMED_FOLDER / f"{i}" / "IM0",
            pixels,
            patient=f"PAT-{i}-UMPF",
            study=i,
            **attributes,
        )
    return root


CLASSES = ("ill", "well")


def labels(path, column="StudyInstanceUID", names=study_uid, n=10):
    path.write_text(
        f"{column};label\n"
        + "".join(f"{names(i)};{'ill' if i % 2 else 'well'}\n" for i in range(n))
    )
    return path


def shown(pixels, tmp_path, options=None, **attributes):
    """The picture that is made of one file, without its last axis where it is grey."""
    path = write_dicom(tmp_path / "IM", pixels, **attributes)
    form = dicom.READER.probe(sample_at(path), options or ReadOptions())
    picture = dicom.READER.read(sample_at(path), options or ReadOptions())
    assert picture.shape == (form.height, form.width, form.channels)
    assert picture.dtype == (np.float32 if form.deep else np.uint8)
    return picture[..., 0] if form.channels == 1 else picture


def samples(made):
    """(label, first pixel in thousandths) of all samples, sorted."""
    data = made.data
    parts = splits_of(data)
    pairs = [
        (int(y), x.reshape(-1)[0])
        for part in parts
        for x, y in zip(part.x, part.y, strict=True)
    ]
    return sorted((y, round(float(x) * 1000)) for y, x in pairs)


# Nobody is named


@pytest.mark.parametrize("column", ["StudyInstanceUID", "accession", "Patient ID"])
def test_nobody_is_named_in_any_output(tmp_path, capfd, caplog, column):
    """The whole command, on files that name their patient in every field and in their paths."""
    names = {"accession": accession, "Patient ID": lambda i: f"PAT-{i}-UMPF"}.get(
        column, study_uid
    )
    source = ten_studies(
        tmp_path / "export", BurnedInAnnotation="YES", PatientBirthTime="no time at all"
    )
    table, out = labels(tmp_path / "labels.csv", column, names), tmp_path / "ours.npz"
    caplog.set_level(logging.DEBUG)
    caplog.clear()  # of what was said when the files were made
    assert (
        silofl("import", source, "--labels-from", table, "--out", out, "--window=450,900") == 0
    )
    printed = capfd.readouterr()
    assert (
        "train 6, val 2, test 2 samples: pictures of 4 x 6, 1 channel, float32" in printed.out
    )
    assert "0 = ill\n1 = well" in printed.out
    assert "note: 10 of 10 pictures say that text is burnt into them" in printed.out
    assert leaks(printed.out, printed.err, caplog.text, files=(out,)) == []


def test_secrets_are_found_where_they_are(tmp_path):
    """The test above can fail: a name in a file's array, in UTF-32 as numpy has it, is found."""
    np.savez(tmp_path / "a.npz", label_names=np.array(["well", "Zarathustra"]))
    assert leaks(files=(tmp_path / "a.npz",)) == ["Zarathustra"] * SECRETS.count("Zarathustra")
    assert "Xylander" in leaks("of the XYLANDER family")
    raw = write_dicom(tmp_path / "IM").read_bytes().decode("latin-1")
    assert {*leaks(raw)} == {*SECRETS} - {"PAT-"}


@pytest.mark.parametrize(
    "damage, words",
    [
        (
            {"PhotometricInterpretation": "ZARATHUSTRA"},
            "file 4 of 10: its file cannot be read as DICOM (ValueError)",
        ),
        (
            {"WindowCenter": 1, "WindowWidth": 2, "VOILUTFunction": "XYLANDER"},
            "file 4 of 10: its file cannot be read",
        ),
        ({"Rows": 400}, "file 4 of 10: its file is cut short: "),
        ({"Rows": None}, "note: 1 of 10 files hold no DICOM picture: passed over"),
        ({"study": 2}, "file 4 of 10 is of another patient than the rest of its study"),
        (
            {"StudyInstanceUID": "Zarathustra", "AccessionNumber": "19310417" * 9},
            "note: 1 of 10 studies are not in",
        ),
    ],
)
def test_no_error_names_anybody(tmp_path, capfd, caplog, damage, words):
    source = ten_studies(tmp_path / "export")
    write_dicom(source / NAMED_FOLDER / "3/IM0", **({"study": 3} | damage))
    table, out = labels(tmp_path / "labels.csv"), tmp_path / "ours.npz"
    caplog.clear()  # of what was said when the files were made
    options = f"--labels ill,well --size 4 --labels-from {table} --out {out}"
    code = silofl("import", source, *options.split())
    printed = capfd.readouterr()
    assert leaks(printed.out, printed.err, caplog.text) == []
    assert words in (printed.err if code else printed.out) and out.exists() == (code == 0)


def test_a_csv_s_file_that_is_no_dicom_is_not_named_either(tmp_path):
    """Its name says what it is meant to be, and may say more."""
    (tmp_path / "Zarathustra.DCM").write_bytes(b"\0" * 200)
    (tmp_path / "l.csv").write_text("file,label\nZarathustra.DCM,0\n")
    said = fails(ValueError, None, imported, tmp_path / "l.csv")
    assert "line 2: its file cannot be read as DICOM (InvalidDicomError)" in said
    assert leaks(said) == []


def test_cut_files_name_nobody(tmp_path, capfd):
    """A file that ends anywhere is one line at most, in which nobody is named."""
    source = ten_studies(tmp_path / "export")
    path = source / NAMED_FOLDER / "3/IM0"
    whole = path.read_bytes()
    for length in range(140, len(whole), 97):
        path.write_bytes(whole[:length])
        from_csv = [
            "--labels-from",
            str(labels(tmp_path / "labels.csv")),
            "--labels",
            "ill,well",
        ]
        silofl("import", source, *from_csv, "--out", tmp_path / "ours.npz")
        printed = capfd.readouterr()
        assert leaks(printed.out, printed.err) == [], length
        assert "Traceback" not in printed.err


def test_a_traceback_names_nobody_either(tmp_path, monkeypatch):
    """SILOFL_TRACEBACK=1 shows no cause in a library's words."""
    path = write_dicom(tmp_path / "IM", PhotometricInterpretation="ZARATHUSTRA")
    monkeypatch.setenv("SILOFL_TRACEBACK", "1")
    with pytest.raises(ValueError) as caught:
        dicom.READER.read(sample_at(path), ReadOptions())
    assert "ZARATHUSTRA" not in "".join(traceback.format_exception(caught.value))
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_the_key_of_pseudonyms_is_this_process_s_own():
    """An attacker who has a log or a file cannot try out names; nothing of them is in either, but a dump may be."""
    code = (
        "from partitions.importing.readers.reader import pseudonym; print(pseudonym('PAT-1'))"
    )
    made = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
        for _ in range(2)
    }
    assert len(made) == 2
    assert (
        pseudonym("PAT-1") == pseudonym("PAT-1") != pseudonym("PAT-2") and pseudonym("") == ""
    )


# Which study, which series, which slice, whose label


@pytest.mark.parametrize("column", ["study", "accession_number", "PatientID"])
def test_labels_by_study_or_patient(tmp_path, column):
    names = {"accession_number": accession, "PatientID": lambda i: f"PAT-{i}-UMPF"}.get(
        column, study_uid
    )
    source = ten_studies(tmp_path / "export")
    labels(source / "labels.csv", column, names)  # the csv in the folder needs no option
    made = imported(source, window=(500, 1000))
    # ill is 0: the odd studies.
    assert made.label_names == ("ill", "well")
    assert samples(made) == [
        *((0, 100 * i) for i in (1, 3, 5, 7, 9)),
        *((1, 100 * i) for i in (0, 2, 4, 6, 8)),
    ]
    assert made.notes == ()


def test_what_finds_no_partner_is_counted(tmp_path):
    source = ten_studies(tmp_path / "export")
    table = labels(tmp_path / "labels.csv", "study", lambda i: study_uid(i + 3))
    made = imported(source, labels_from=table, labels=CLASSES, window=(500, 1000))
    assert len(samples(made)) == 7
    assert made.notes == (
        f"3 of 10 studies are not in {table}: left out",
        f"3 of 10 in column study of {table} have no DICOM files here",
    )
    nobody = labels(tmp_path / "nobody.csv", "patient", lambda i: f"X{i}")
    refused(source, "its column patient names none of the 10 studies", labels_from=nobody)


@pytest.mark.parametrize(
    "text, words",
    [
        ("name,label\nx,1\n", "has no column study, accession or patient"),
        ("study,grade\nx,1\n", "unknown column of"),
        ("study,label\n,1\n", "line 2 has no study"),
        ("study,label\nx,\n", "line 2 has no label"),
        (
            f"study,label\n{study_uid(1)},1\n{study_uid(1)},0\n",
            "line 3 says something else of the same study than",
        ),
        (f"study,label,split\n{study_uid(1)},1,tarin\n", "split is 'tarin'"),
    ],
)
def test_bad_labels(tmp_path, text, words):
    (tmp_path / "labels.csv").write_text(text)
    source = ten_studies(tmp_path / "export")
    refused(source, words, labels_from=tmp_path / "labels.csv")
    (tmp_path / "labels.csv").rename(source / "labels.csv")
    refused(source, words)


def test_a_column_of_names_is_no_label(tmp_path):
    """It would be written into the file as the names of classes."""
    source = ten_studies(tmp_path / "export")
    table = labels(tmp_path / "l.csv", "patient", lambda i: f"PAT-{i}-UMPF")
    refused(source, "it is no label", labels_from=table, label="patient")


def test_folders_are_classes_only_where_they_are_named(tmp_path):
    """Exports have a folder per patient: its name must not become a class."""
    source = tmp_path / "export"
    for i in range(10):
        pixels = np.full((4, 6), 100 * i, np.uint16)
        write_dicom(
            source / ("ill" if i % 2 else "well") / f"{i}" / "x",
            pixels,
            patient=f"P{i}",
            study=i,
        )
    refused(source, "and no csv: name their labels")
    made = imported(source, labels=("well", "ill"), window=(500, 1000))
    assert samples(made) == [
        *((0, 100 * i) for i in (0, 2, 4, 6, 8)),
        *((1, 100 * i) for i in (1, 3, 5, 7, 9)),
    ]
    write_dicom(source / "Zarathustra/x", study=99)
    refused(source, "outside its folders well, ill: 1 other folders", labels=("well", "ill"))


def test_a_patient_is_in_one_split_only(tmp_path):
    """30 studies of 10 patients, three each; the header says whose they are, the csv does not."""
    for i in range(30):
        write_dicom(
            tmp_path / "x" / f"{i}",
            np.full((4, 4), i, np.uint16),
            patient=f"PAT {i % 10}",
            study=i,
        )
    table = labels(tmp_path / "l.csv", "study", study_uid, 30)
    data = imported(
        tmp_path / "x", tmp_path / "a.npz", labels_from=table, window=(500, 1000)
    ).data
    patients = [
        {round(float(x.flat[0]) * 1000) % 10 for x in part.x} for part in splits_of(data)
    ]
    assert [len(p) for p in patients] == [6, 2, 2] and len(set.union(*patients)) == 10
    again = imported(tmp_path / "x", tmp_path / "b.npz", labels_from=table, window=(500, 1000))
    # Whatever the pseudonyms' key
    assert (tmp_path / "a.npz").read_bytes() == again.file.read_bytes()


def test_patients_without_names_need_a_column(tmp_path):
    """One PatientID in all files: nobody could be tested. The csv's own column says who is who."""
    source = tmp_path / "x"
    for i in range(10):
        write_dicom(
            source / f"{i}", np.full((4, 4), 100 * i, np.uint16), patient="ANONYMOUS", study=i
        )
    table = labels(tmp_path / "l.csv")
    refused(
        source,
        "no test samples; it has 10 samples in all, of 1 patients",
        labels_from=table,
        labels=CLASSES,
    )
    lines = table.read_text().splitlines()
    write_lines(
        table, lines[0] + ";patient", *(f"{line};P{i // 2}" for i, line in enumerate(lines[1:]))
    )
    data = imported(source, labels_from=table, labels=CLASSES, window=(500, 1000)).data
    patients = [{round(float(x.flat[0]) * 10) // 2 for x in part.x} for part in splits_of(data)]
    assert [len(p) for p in patients] == [3, 1, 1] and len(set.union(*patients)) == 5


def test_a_patient_in_two_given_splits_is_refused(tmp_path):
    """Of DICOM files that a csv names, and by a csv's own column patient."""
    lines = ["file,label,split"]
    for i in range(6):
        write_dicom(tmp_path / f"{i}.dcm", study=i, patient=f"PAT {i % 3}")
        lines.append(f"{i}.dcm,{i % 2},{('train', 'test')[i // 3]}")
    write_lines(tmp_path / "list.csv", *lines)
    refused(tmp_path / "list.csv", "3 patients are in more than one split")
    (tmp_path / "t.csv").write_text(
        "age,label,patient,split\n1,0,a,train\n2,1,a,test\n3,1,b,train\n"
    )
    refused(tmp_path / "t.csv", "1 patients are in more than one split")


def test_files_named_in_a_csv(tmp_path):
    """Beside a picture of 8 bits, which becomes float32 too."""
    lines = ["file,label"]
    for i in range(6):
        write_dicom(
            tmp_path / f"{i}.scan", np.full((4, 4), 100 * i, np.uint16), patient=f"P{i}"
        )
        lines.append(f"{i}.scan,{i}")
    Image.new("L", (4, 4), 51).save(tmp_path / "x.png")
    write_lines(tmp_path / "list.csv", *lines, "x.png,6")
    made = imported(tmp_path / "list.csv", window=(500, 1000))
    assert samples(made) == [*((i, 100 * i) for i in range(6)), (6, 200)]


def test_outlines_of_dicom_are_pictures(tmp_path):
    lines = ["file,mask"]
    for i in range(6):
        write_dicom(tmp_path / f"{i}", np.full((4, 6), 100 * i, np.uint16), patient=f"P{i}")
        Image.fromarray((np.indices((4, 6))[1] < i).astype(np.uint8)).save(
            tmp_path / f"{i}.png"
        )
        lines.append(f"{i},{i}.png")
    write_lines(tmp_path / "list.csv", *lines)
    data = imported(tmp_path / "list.csv", window=(500, 1000)).data
    assert data.task == "segmentation"
    for part in splits_of(data):
        assert_array_equal(part.y.sum(axis=(1, 2)), 4 * (part.x[:, 0, 0, 0] * 10).round())


def series_of(root, study, series, n, description):
    """n slices; their files and numbers are in another order than their places."""
    for i in range(n):
        plane = {
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "ImagePositionPatient": [0, 0, -5.0 * i],
        }
        pixels = np.full((4, 4), 1000 * series + 10 * i, np.uint16)
        name = f"{(i * 3) % n}-{series}"
        extra = {
            "SeriesDescription": description,
            "number": (i * 5) % n + 1,
            "patient": f"P{study}",
            **plane,
        }
        write_dicom(root / f"{study}" / name, pixels, study=study, series=series, **extra)


def test_the_middle_slice_of_the_longest_series(tmp_path):
    """By place: along the normal (0, 0, 1) slice i is at -5 i, so of 7 the middle one has i = 3, of 4 i = 1."""
    for study in range(5):
        series_of(tmp_path / "x", study, 1, 4, "T1 axial")
        series_of(tmp_path / "x", study, 2, 7, "T2 FLAIR")
    table = labels(tmp_path / "l.csv", "study", study_uid, 5)
    options = {"labels_from": table, "labels": CLASSES, "window": (5000, 10_000)}
    made = imported(tmp_path / "x", **options)
    assert {value for _, value in samples(made)} == {203}
    assert (
        made.notes[0]
        == "5 of 5 studies have several slices: the middle one is taken (--slices)"
    )
    made = imported(tmp_path / "x", series="t1", **options)
    assert {value for _, value in samples(made)} == {101}
    made = imported(tmp_path / "x", series="*flair", slices=3, **options)
    assert (
        sorted({value for _, value in samples(made)}) == [201, 203, 205]
        and len(samples(made)) == 15
    )
    refused(tmp_path / "x", "no study has a series like 'PD'", series="PD", **options)


def test_frames_of_one_file(tmp_path):
    """Five frames: the middle one; three of them with --slices 3, and the study stays in one split."""
    for study in range(5):
        frames = np.repeat(np.arange(5, dtype=np.uint16) * 100, 16).reshape(5, 4, 4)
        write_dicom(
            tmp_path / "x" / f"{study}",
            frames,
            study=study,
            patient=f"P{study}",
            NumberOfFrames=5,
        )
    table = labels(tmp_path / "l.csv", "study", study_uid, 5)
    options = {"labels_from": table, "labels": CLASSES, "window": (500, 1000)}
    made = imported(tmp_path / "x", **options)
    assert {value for _, value in samples(made)} == {200}
    assert (
        made.notes[0]
        == "5 of 5 studies have several slices: the middle one is taken (--slices)"
    )
    made = imported(tmp_path / "x", slices=3, **options)
    assert {value for _, value in samples(made)} == {0, 200, 400}
    assert [len(part) for part in splits_of(made.data)] == [9, 3, 3]


def test_files_of_other_kinds_are_passed_over(tmp_path):
    source = ten_studies(tmp_path / "export")
    (source / "notes.txt").write_text("DICM")
    write_dicom(source / "seg", study=1, Modality="SEG")
    table = labels(tmp_path / "l.csv")
    made = imported(source, labels_from=table)
    assert (
        made.notes[0] == "2 of 12 files hold no DICOM picture: passed over (1 .txt, 1 SEG)"
        and len(samples(made)) == 10
    )


# Grey values, worked out by hand


def test_rescaling_and_window(tmp_path):
    """Stored 0, 1, 2 with slope 100 and intercept -200: -200, -100, 0 HU; window -150..50 makes 0, 1/4, 3/4."""
    made = shown(
        [np.array([0, 1, 2], np.int16)],
        tmp_path,
        ReadOptions(window=(-50, 200)),
        RescaleSlope=100,
        RescaleIntercept=-200,
    )
    near(made, [[0, 0.25, 0.75]])


def test_the_header_s_window(tmp_path):
    """LINEAR, C.11.2.1.2: ((x - (c - 1/2)) / (w - 1) + 1/2); c = 100.5, w = 201: 0 at 0, 1/2 at 100, 1 at 200. Of two
    windows the first counts."""
    pixels = [np.array([0, 50, 100, 200, 300], np.uint16)]
    made = shown(pixels, tmp_path, WindowCenter=[100.5, 7], WindowWidth=[201, 9])
    near(made, [[0, 0.25, 0.5, 1, 1]])
    made = shown(pixels, tmp_path, WindowCenter=100, WindowWidth=200, VOILUTFunction="SIGMOID")
    near(made, [1 / (1 + np.exp(-4 * (pixels[0] - 100.0) / 200))], 1e-5)


def test_a_window_of_no_width_is_none(tmp_path):
    path = write_dicom(tmp_path / "IM", WindowCenter=100, WindowWidth=0)
    assert dicom.READER.probe(sample_at(path), ReadOptions()).notes == (dicom.NO_WINDOW,)
    assert dicom.READER.read(sample_at(path), ReadOptions())[..., 0].max() == 1


def test_without_a_window_from_lowest_to_highest(tmp_path):
    """Signed, and without the padding, which is black: -1000 to 1000."""
    pixels = [np.array([-2000, -1000, 0, 1000], np.int16)]
    assert_allclose(
        shown(pixels, tmp_path, PixelPaddingValue=-2000, BitsStored=16, HighBit=15),
        [[0, 0, 0.5, 1]],
    )
    assert_allclose(shown(np.full((2, 2), 7, np.uint16), tmp_path), 0)


@pytest.mark.parametrize("window", [None, (50.0, 100.0)])
def test_monochrome1_is_inverted(tmp_path, window):
    """0 is white there; padding stays black."""
    pixels = [np.array([0, 25, 100, 4000], np.uint16)]
    made = shown(
        pixels,
        tmp_path,
        ReadOptions(window=window),
        PhotometricInterpretation="MONOCHROME1",
        PixelPaddingValue=4000,
    )
    near(made, [[1, 0.75, 0, 0]])


def test_eight_bits_stay_eight(tmp_path):
    made = shown([np.array([0, 100, 255], np.uint8)], tmp_path)
    assert made.dtype == np.uint8 and made.tolist() == [[0, 100, 255]]


@pytest.mark.parametrize("entries", ["words", "bytes"])
def test_a_voi_table(tmp_path, entries):
    """1000 entries of 8 bits from 10 on: entry i is i // 4. pydicom 3.0's own lookup wraps around at 256 here."""
    item = Dataset()
    table = (np.arange(1000) // 4).astype(np.uint16)
    item.LUTDescriptor = [1000, 10, 8]
    if entries == "words":
        item.add_new("LUTData", "US", table.tolist())
    else:
        item.add_new("LUTData", "OW", table.tobytes())
    made = shown(
        [np.array([0, 10, 500, 4000], np.uint16)], tmp_path, VOILUTSequence=Sequence([item])
    )
    near(made * 255, [[0, 0, 490 // 4, 999 // 4]], 1e-4)


def test_a_modality_table(tmp_path):
    """Before the window: entry i is 1000 - i."""
    item = Dataset()
    item.LUTDescriptor = [1001, 0, 16]
    item.add_new("LUTData", "US", list(range(1000, -1, -1)))
    made = shown(
        [np.array([0, 250, 1000], np.uint16)],
        tmp_path,
        ReadOptions(window=(500, 1000)),
        ModalityLUTSequence=Sequence([item]),
    )
    near(made, [[1, 0.75, 0]])


def test_colours(tmp_path):
    """RGB of 8 and of 16 bits, YBR_FULL (C.7.6.3.1.2: red is Y 76, Cb 85, Cr 255), and a palette of 16 bits."""
    red = np.zeros((2, 2, 3), np.uint8)
    red[..., 0] = 255
    assert shown(red, tmp_path).tolist() == red.tolist()
    deep = shown(red.astype(np.uint16) * 257, tmp_path, BitsStored=16, HighBit=15)
    assert deep.tolist() == red.tolist()
    luma = np.broadcast_to(np.array([76, 85, 255], np.uint8), (2, 2, 3))
    assert (
        np.abs(
            shown(luma, tmp_path, PhotometricInterpretation="YBR_FULL").astype(int) - red
        ).max()
        <= 1
    )
    tables = {"Red": [0, 0, 0xFF00, 0], "Green": [0, 0, 0x8000, 0], "Blue": [0, 0x4000, 0, 0]}
    palette = {f"{n}PaletteColorLookupTableDescriptor": [4, 0, 16] for n in tables}
    data = {
        f"{n}PaletteColorLookupTableData": np.array(t, "<u2").tobytes()
        for n, t in tables.items()
    }
    made = shown(
        [np.array([0, 1, 2], np.uint8)],
        tmp_path,
        PhotometricInterpretation="PALETTE COLOR",
        **palette,
        **data,
    )
    assert made.tolist() == [[[0, 0, 0], [0, 0, 0x40], [0xFF, 0x80, 0]]]


def test_grey_and_colour_make_all_colour(tmp_path):
    for i in range(6):
        pixels = (
            np.full((4, 4, 3), 40 * i, np.uint8)
            if i % 2
            else np.full((4, 4), 100 * i, np.uint16)
        )
        write_dicom(tmp_path / "x" / f"{i}", pixels, study=i, patient=f"P{i}")
    made = imported(
        tmp_path / "x",
        labels_from=labels(tmp_path / "l.csv", n=6),
        labels=CLASSES,
        window=(500, 1000),
    )
    assert made.data.input_shape == (3, 4, 4) and made.data.train.x.dtype == np.float32
    assert [value for y, value in samples(made) if y == 0] == [
        round(40 * i / 0.255) for i in (1, 3, 5)
    ]


def test_pixels_become_square(tmp_path):
    """2 mm from row to row, 1 mm from column to column: twice as many rows. --spacing 2: half as many columns."""
    pixels = np.arange(24, dtype=np.uint16).reshape(4, 6)
    spacing = {"PixelSpacing": [2.0, 1.0]}
    assert shown(pixels, tmp_path, **spacing).shape == (8, 6)
    assert shown(pixels, tmp_path, ReadOptions(spacing=2), **spacing).shape == (4, 3)
    assert shown(pixels, tmp_path, ReadOptions(size=5), **spacing).shape == (5, 5)
    assert shown(pixels, tmp_path, PixelAspectRatio=[2, 1]).shape == (8, 6)
    assert shown(pixels, tmp_path, ImagerPixelSpacing=[1, 2]).shape == (4, 12)


def test_spacing_and_size_cut_and_widen(tmp_path):
    """8 x 12 pixels of 1 mm: at --size 6 the middle 6 x 6, at --size 16 a black frame around."""
    pixels = np.arange(96, dtype=np.uint16).reshape(8, 12) + 100
    options: dict[str, Any] = {"spacing": 1.0, "window": (500, 1000)}
    made = shown(pixels, tmp_path, ReadOptions(size=6, **options), PixelSpacing=[1, 1])
    near(made * 1000, pixels[1:7, 3:9], 1e-3)
    made = shown(pixels, tmp_path, ReadOptions(size=16, **options), PixelSpacing=[1, 1])
    near(made[4:12, 2:14] * 1000, pixels, 1e-3)
    assert made[:4].max() == made[:, 14:].max() == 0
    with pytest.raises(ValueError, match="here: it does not say how large its pixels are"):
        shown(pixels, tmp_path, ReadOptions(**options))
    with pytest.raises(ValueError, match="here: it would have 120000 pixels on a side"):
        shown(pixels, tmp_path, ReadOptions(spacing=1e-4), PixelSpacing=[1, 1])


def test_enhanced_files_have_it_in_groups(tmp_path):
    """Two frames: the second is doubled by its own rescaling; the spacing is shared."""

    def item(**values):
        made = Dataset()
        for keyword, value in values.items():
            setattr(made, keyword, value)
        return made

    shared = item(PixelMeasuresSequence=Sequence([item(PixelSpacing=[2.0, 1.0])]))
    frames = [
        item(
            PixelValueTransformationSequence=Sequence(
                [item(RescaleSlope=slope, RescaleIntercept=0)]
            )
        )
        for slope in (1, 2)
    ]
    groups = {
        "SharedFunctionalGroupsSequence": [shared],
        "PerFrameFunctionalGroupsSequence": frames,
    }
    pixels = np.full((2, 4, 6), 100, np.uint16)
    made = shown(pixels, tmp_path, ReadOptions(window=(500, 1000)), NumberOfFrames=2, **groups)
    assert made.shape == (8, 6)
    near(made, 0.2)


def test_a_frame_has_no_value_of_the_frame_before():
    dataset, group, window = Dataset(), Dataset(), Dataset()
    window.WindowCenter = 40.0
    group.FrameVOILUTSequence = Sequence([window])
    dataset.PerFrameFunctionalGroupsSequence = Sequence([group, Dataset()])
    assert of_frame(dataset, 0).WindowCenter == 40
    assert "WindowCenter" not in of_frame(dataset, 1)
    assert "WindowCenter" not in dataset


# How files are written


@pytest.mark.parametrize("uid", [ImplicitVRLittleEndian, RLELossless, JPEGLSLossless])
def test_transfer_syntaxes(tmp_path, uid):
    pixels = np.random.default_rng(0).integers(0, 4096, (16, 16)).astype(np.uint16)
    path = write_dicom(tmp_path / "IM", pixels)
    if uid == ImplicitVRLittleEndian:
        path = write_dicom(path, pixels, uid=uid)
    else:
        dataset = pydicom.dcmread(path)
        dataset.compress(uid)
        dataset.save_as(path)
    made = dicom.READER.read(sample_at(path), ReadOptions(window=(2048, 4096)))[..., 0]
    near(made * 4096, pixels, 0.1)


def test_what_cannot_be_unpacked_says_what_to_install(tmp_path):
    """Before anything is read. Nothing here unpacks the old lossless JPEG."""
    path = write_dicom(tmp_path / "IM")
    dataset = pydicom.dcmread(path)
    dataset.file_meta.TransferSyntaxUID = JPEGLossless
    dataset.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    dataset.save_as(path)
    with pytest.raises(
        ValueError, match=r"JPEG Lossless.*one more package: pip install python-gdcm"
    ):
        dicom.READER.probe(sample_at(path), ReadOptions())


def test_one_line_where_the_library_is_missing(tmp_path, monkeypatch):
    source, table = ten_studies(tmp_path / "export"), labels(tmp_path / "l.csv")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    refused(
        source,
        "DICOM is read with pydicom, which is not installed here: pip install pydicom",
        labels_from=table,
    )


# What the hospital must look at


@pytest.mark.parametrize(
    "attributes, note",
    [
        ({"BurnedInAnnotation": "YES"}, dicom.BURNT),
        ({"Modality": "US"}, dicom.MAYBE_BURNT),
        ({"ConversionType": "WSD"}, dicom.MAYBE_BURNT),
        ({"Modality": "US", "BurnedInAnnotation": "NO"}, None),
        ({"Modality": "CT"}, None),
    ],
)
def test_burnt_in_text_is_warned_of(tmp_path, attributes, note):
    form = dicom.READER.probe(
        sample_at(write_dicom(tmp_path / "IM", **attributes)), ReadOptions(window=(1, 2))
    )
    assert form.notes == (() if note is None else (note,))


def test_bad_options(tmp_path):
    source = ten_studies(tmp_path / "export")
    for words, options in (
        ("slices is 0", {"slices": 0}),
        ("the window's width is 0", {"window": (1, 0)}),
        ("spacing is -1", {"spacing": -1}),
    ):
        refused(source, words, **options)
    assert silofl("import", source, "--out", tmp_path / "a.npz", "--window", "40") == 2


def test_what_is_of_scans_alone(tmp_path):
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    (tmp_path / "l.csv").write_text("file,label\nx.png,0\n")
    refused(
        tmp_path / "l.csv",
        "x.png cannot be read (it does not say how large its pixels are",
        spacing=1.0,
    )
    for options in ({"window": (40, 400)}, {"slices": 2}, {"series": "T1"}):
        refused(
            tmp_path / "l.csv",
            "has no scans; --window, --slices and --series are of DICOM",
            **options,
        )


# One picture at a time


def test_pictures_are_never_all_in_memory(tmp_path):
    """32 pictures of 1 MB each as float32; no more than a few are held at once."""
    for i in range(32):
        write_dicom(
            tmp_path / "x" / f"{i}", np.full((512, 512), i, np.uint16), study=i, patient=f"P{i}"
        )
    table = labels(tmp_path / "l.csv", n=32)
    tracemalloc.start()
    imported(tmp_path / "x", tmp_path / "a.npz", labels_from=table, window=(500, 1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "a.npz").stat().st_size > 32e6 and peak < 16e6


def test_written_one_by_one_or_at_once_is_the_same_file(tmp_path):
    made = imported(
        ten_studies(tmp_path / "x"), tmp_path / "a.npz", labels_from=labels(tmp_path / "l.csv")
    )
    write_silo_file(tmp_path / "b.npz", read_silo_file(made.file))
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
