"""Files that become much larger than they are: each is refused, in one line, before it is decoded."""

from __future__ import annotations

import gzip
import tracemalloc
import zipfile
import zlib
from types import SimpleNamespace

import nibabel
import numpy as np
import pytest
from failing import fails
from PIL import Image
from pydicom.uid import DeflatedExplicitVRLittleEndian
from scans import sample_at, write_dicom, write_nifti
from taken import imported, silofl

from partitions import npz, stored
from partitions.common import sizes
from partitions.common.errors import DataError, UserError
from partitions.common.sizes import VARIABLE, check_room, check_size, largest
from partitions.datasets.pictures import read_idx
from partitions.importing.readers import dicom
from partitions.importing.readers.volumes import volume
from partitions.importing.tables import read_lines
from partitions.recipes.reading import ReadOptions
from partitions.silo_file import read_silo_file

MIB = 1 << 20


@pytest.fixture
def little_memory():
    """Whoever decodes what it should refuse allocates more than this."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * MIB, f"{peak / MIB:.0f} MiB were used"


def nifti_of(path, shape, version=1, order="<", offset=0):
    """A header that says so, and next to nothing behind it."""
    header = {1: nibabel.Nifti1Header, 2: nibabel.Nifti2Header}[version](endianness=order)
    header.set_data_shape(shape)
    header.set_data_dtype(np.uint8)
    header["magic"] = b"n+1" if version == 1 else header["magic"]
    header["vox_offset"] = offset or (352 if version == 1 else 544)
    path.write_bytes(gzip.compress(header.binaryblock + bytes(MIB)))
    return path


@pytest.mark.parametrize("version, order", [(1, "<"), (1, ">"), (2, "<")])
def test_a_volume_is_refused_by_its_header(tmp_path, little_memory, version, order):
    file = nifti_of(tmp_path / "a.nii.gz", (1024, 1024, 5000), version, order)
    with pytest.raises(
        ValueError,
        match=r"^row 1: its volume would take 41\.9 GB of memory, .* set SILOFL_LARGEST_FI",
    ):
        volume.volume_parts(file, "row 1", ReadOptions())


def test_so_are_extensions_of_a_header(tmp_path, little_memory):
    """nibabel reads them whole, as long as they say they are."""
    with pytest.raises(
        ValueError, match="row 1: its header says that the voxels begin after 64 MiB"
    ):
        volume.probe_volume(
            [nifti_of(tmp_path / "a.nii.gz", (4, 4, 4), offset=1 << 30)], "row 1", ReadOptions()
        )


def test_a_mask_is_refused_too(tmp_path, little_memory):
    own = write_nifti(tmp_path / "v.nii.gz", np.zeros((4, 4, 4), np.float32))
    with pytest.raises(ValueError, match="row 1: its volume would take"):
        volume.read_volume_mask(
            [own], [nifti_of(tmp_path / "m.nii.gz", (2000, 2000, 2000))], "row 1", ReadOptions()
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"Rows": 65535, "Columns": 65535}, "row 1: its picture would take 34.4 GB of memory"),
        ({"NumberOfFrames": 10**9}, "row 1: its file says that it has more than 100000 frames"),
    ],
)
def test_dicom_is_refused_by_its_header(tmp_path, little_memory, changes, words):
    pixels = np.zeros((4, 4) if "Rows" in changes else (1, 4, 4), np.uint16)
    file = write_dicom(tmp_path / "a.dcm", pixels, **changes)
    for read in (dicom.READER.probe, dicom.READER.read):
        fails(ValueError, f"^{words}", read, sample_at(file, where="row 1"), ReadOptions())
    fails(ValueError, f"^{words}", dicom.read_header, file, "row 1")


def test_a_deflated_dicom_file_is_unpacked_no_further_than_may_be(tmp_path, monkeypatch):
    file = write_dicom(
        tmp_path / "a.dcm",
        np.zeros((7000, 7000), np.uint16),
        uid=DeflatedExplicitVRLittleEndian,
    )
    assert file.stat().st_size < MIB
    monkeypatch.setenv(VARIABLE, "0.05")
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"row 1: its file, unpacked, would take 0\.1 GB"):
        dicom.read_header(file, "row 1")
    assert tracemalloc.get_traced_memory()[1] < 20 * MIB
    tracemalloc.stop()
    small = write_dicom(tmp_path / "b.dcm", uid=DeflatedExplicitVRLittleEndian)
    assert (
        dicom.read_header(small, "row 1") is not None
        and dicom.READER.probe(sample_at(small), ReadOptions()).height == 4
    )


def test_gzip_is_unpacked_no_further_than_may_be(tmp_path, monkeypatch, little_memory):
    bomb = zlib.compressobj(9, wbits=31)
    (tmp_path / "a.gz").write_bytes(
        b"".join(bomb.compress(bytes(MIB)) for _ in range(256)) + bomb.flush()
    )
    assert (tmp_path / "a.gz").stat().st_size < MIB
    monkeypatch.setenv(VARIABLE, "0.01")
    with pytest.raises(
        ValueError,
        match=r"its content, unpacked, would take 0\.0 GB of memory, and 0\.0 GB is the most",
    ):
        read_idx(tmp_path / "a.gz")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"\0\0\x08\x01\0\0\0\x03abc"))
    assert read_idx(tmp_path / "b.gz").tolist() == [97, 98, 99]
    (tmp_path / "c.gz").write_bytes((tmp_path / "b.gz").read_bytes()[:-9])
    fails(EOFError, "cut short", read_idx, tmp_path / "c.gz")


def test_a_csv_with_too_many_columns_is_not_parsed(tmp_path, monkeypatch, capsys):
    path = tmp_path / "wide.csv"
    path.write_text(
        ",".join(f"c{i}" for i in range(200_000)) + "\n" + ",".join(["1"] * 200_000) + "\n"
    )
    monkeypatch.setattr("csv.reader", None)
    assert silofl("import", path, "--out", tmp_path / "a.npz") == 2
    assert (
        capsys.readouterr().err
        == f"silofl import: {path} has 200000 columns, and 100000 are the most: leave some out\n"
    )


def test_a_csv_with_an_endless_line_or_too_many_cells(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n" + "1," * 3000 + "\n")
    fails(ValueError, r"a\.csv, line 2 has 3001 cells", read_lines, path)
    monkeypatch.setattr(sizes, "MOST_LINE", 5000)
    fails(ValueError, "has a line of more than 5000 characters", read_lines, path)
    path.write_text("a,b\n" + "1,2\n" * 2000)
    assert len(read_lines(path)) == 2000
    monkeypatch.setattr("partitions.importing.tables.BLOCK_CELLS", 100)
    monkeypatch.setenv(VARIABLE, "0.00001")
    fails(ValueError, r"cells or more, would take 0\.0 GB of memory", read_lines, path)


def test_what_would_not_fit_into_free_memory(tmp_path, monkeypatch):
    data = tmp_path / "data.npz"
    x, y = np.random.default_rng(0).random((1000, 30), np.float32), np.arange(1000) % 2
    np.savez_compressed(data, x=x, y=y)  # one that is not compressed stays on the disk
    read_silo_file(data)
    for module in (npz, sizes, stored):
        monkeypatch.setattr(module, "available", lambda: 100_000)
    with pytest.raises(
        ValueError, match=r"would take 0\.0 GB of memory, and 0\.0 GB is free here"
    ):
        read_silo_file(data)
    file = write_nifti(tmp_path / "v.nii.gz", np.zeros((40, 40, 40), np.float32))
    with pytest.raises(
        ValueError,
        match=r"row 1: its volume would take 0\.0 GB of memory, and 0\.0 GB is free here",
    ):
        volume.volume_parts(file, "row 1", ReadOptions())


def test_labels_of_a_public_set_are_no_larger_than_their_member(tmp_path):
    """The header of an array says how much memory is taken for it."""
    from partitions.datasets.medmnist import _labels

    with (
        zipfile.ZipFile(tmp_path / "a.npz", "w") as archive,
        archive.open("train_labels.npy", "w") as out,
    ):
        np.lib.format.write_array_header_1_0(
            out, {"descr": "<i8", "fortran_order": False, "shape": (1 << 50,)}
        )
    fails(
        ValueError, "more than there is", _labels, tmp_path / "a.npz", "train", "multiclass", 2
    )


def test_the_bound_can_be_raised(tmp_path, monkeypatch):
    fails(ValueError, r"SILOFL_LARGEST_FILE=3$", check_size, 3 << 30, "it")
    monkeypatch.setattr(sizes, "available", lambda: 1 << 40)
    monkeypatch.setenv(VARIABLE, "3")
    check_size(3 << 30, "it")
    for text in ("much", "0", "-1", "nan", "inf"):
        monkeypatch.setenv(VARIABLE, text)
        fails(ValueError, f"SILOFL_LARGEST_FILE={text} is no number of GiB above 0", largest)


def test_an_import_of_ordinary_files_is_as_before(tmp_path):
    (tmp_path / "a.csv").write_text(
        "a,b,label\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(40))
    )
    assert len(imported(tmp_path / "a.csv").data.train) > 20


def test_a_large_picture_is_read_without_a_word_and_a_larger_one_refused(tmp_path, monkeypatch):
    """Pillow's warning, from half of its bound on, was printed with the path of its own source."""
    for name in ("a", "b"):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(5):
            Image.fromarray(np.full((8, 8), number, np.uint8)).save(
                tmp_path / "in" / name / f"{number}.png"
            )
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40)
    # The suite turns warnings into errors
    made = imported(tmp_path / "in")
    assert len(made.data.train) + len(made.data.val) + len(made.data.test) == 10
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(
        DataError, match=r"0\.png cannot be read \(Image size \(64 pixels\) exceeds limit of 40"
    ):
        imported(tmp_path / "in", tmp_path / "other.npz")
    assert not (tmp_path / "other.npz").exists()


@pytest.mark.parametrize(
    ("memory", "disk", "lacks"), [(400, 800, ""), (399, 800, "memory"), (400, 799, "disk")]
)
def test_what_a_run_takes_is_said_and_refused_where_it_does_not_fit(
    monkeypatch, tmp_path, memory, disk, lacks
):
    mega = 10**6
    monkeypatch.setattr(sizes, "available", lambda: memory * mega)
    monkeypatch.setattr(
        sizes.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk * mega)
    )
    line = "a model of 100 MB takes at least 0.40 GB of memory (4 copies) and 0.80 GB of disk (8 copies) here"
    run = (100 * mega, 4, 8, tmp_path / "not/yet/there", "take another")
    if lacks:
        fails(
            UserError, f" GB of {lacks} is free: free more, or take another$", check_room, *run
        )
    else:
        assert check_room(*run) == line
