"""FLamby's federations: their own centres, columns and test parts."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose
from PIL import Image
from public_data import DATA, cannot_load, load, needs
from scans import write_nifti

from partitions.datasets import flamby, registry
from partitions.datasets.registry import DATASETS, Source
from partitions.importing.readers.volumes import nifti_file
from partitions.schemes.registry import partition
from partitions.splits import take

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
IXI = Source("ixi-tiny", "", DATASETS["ixi-tiny"])

# Heart disease


@needs("heart_disease")
def test_heart_as_flamby_has_it():
    """What FLamby states (its README and dataset.py): sizes, the 13 columns, and counts rebuilt with its own code."""
    data = load("heart-flamby", DATA)
    assert (data.classes, data.task, data.input_shape, data.own_test) == (
        2,
        "multiclass",
        (13,),
        True,
    )
    silos = partition(data, "natural", silos=4, seed=0, validation=0.0)
    assert [silo.origin for silo in silos] == ["cleveland", "hungarian", "switzerland", "va"]
    assert [(len(silo.train), len(silo.test)) for silo in silos] == [
        (199, 104),
        (172, 89),
        (30, 16),
        (85, 45),
    ]
    ill = [(data.labels[silo.train].sum(), data.labels[silo.test].sum()) for silo in silos]
    assert ill == [(91, 48), (65, 33), (30, 15), (66, 35)]


def rows(hospital):
    """Nine patients of each hospital; chest pain 1 to 4 and ECG 0 to 2, but no hospital has all of them."""
    one = "{age},1,{pain},120,230,0,{ecg},150,0,1.5,?,?,?,{label}"
    return [
        one.format(
            age=50 + i,
            pain=1 + (hospital + i) % 3,
            ecg=(hospital + i) % 2 + hospital // 3,
            label=i % 3,
        )
        for i in range(9)
    ]


def test_columns_of_chest_pain_and_ecg_are_those_of_all_hospitals(tmp_path):
    """Patient 50 of the second hospital: pain 2, ECG 1. Pains 2, 3 and ECGs 1, 2 have a column each, 1 and 0 none."""
    for i, hospital in enumerate(HOSPITALS):
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(rows(i)) + "\n")
    data = load("heart-flamby", tmp_path)
    x = np.concatenate([data.train.x, data.test.x])
    assert x.shape == (36, 8 + 2 + 2) and data.groups is not None
    hungarian = x[data.groups["hungarian"]]
    first = hungarian[hungarian[:, 0] == 50][0]
    assert_allclose(first, [50, 1, 120, 230, 0, 150, 0, 1.5, 1, 0, 1, 0])
    # 34 % of 9 is 3.06, rounded up; 3 of 9 patients are well: 4/3 of the 4 tested ones, so one of them.
    tested = {
        name: data.labels[group[group >= len(data.train)]].tolist()
        for name, group in data.groups.items()
    }
    assert [sorted(labels) for labels in tested.values()] == [[0, 1, 1, 1]] * 4


def test_a_hospital_of_one_class_is_split_without_classes(tmp_path):
    for i, hospital in enumerate(HOSPITALS):
        lines = rows(i) if i else [line[:-1] + "2" for line in rows(i)]
        (tmp_path / f"processed.{hospital}.data").write_text("\n".join(lines) + "\n")
    data = load("heart-flamby", tmp_path)
    assert data.groups is not None and (data.labels[data.groups["cleveland"]] == 1).all()
    assert (data.groups["cleveland"] >= len(data.train)).sum() == 4


# Skin lesions


def isic(root, folder="ISIC_2019_Training_Input_preprocessed", n=4):
    """FLamby's list with n pictures of each of six centres, the last one for testing, and the pictures: 224 x 300, the
    middle 200 x 200 pixels of one grey value, 10 * centre + i, the rest black.
    """
    lines = ["image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC,UNK,target,center,fold,fold2"]
    (root / folder).mkdir(parents=True)
    for i in range(n):
        for centre in range(6):
            name = f"ISIC_00{centre}{i}"
            label = (centre + i) % 8
            part = "test" if i == n - 1 else "train"
            one_hot = ",".join("1.0" if k == label else "0.0" for k in range(9))
            lines.append(
                f"{name},{one_hot},{label},{centre},{'train' if centre else 'test'},{part}_{centre}"
            )
            picture = np.zeros((300, 224, 3), np.uint8)
            picture[50:250, 12:212] = 10 * centre + i
            Image.fromarray(picture).save(root / folder / f"{name}.jpg", quality=100)
    (root / "train_test_split").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    """Decoded pictures go to a cache of the test's own; nothing is found elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_isic_keeps_its_centres_and_their_test_parts(tmp_path, monkeypatch):
    """``fold2`` counts, not ``fold``. The second time the pictures come out of the cache."""
    monkeypatch.delenv("SILOFL_DATA", raising=False)
    isic(tmp_path / "isic2019")
    for _ in range(2):
        data = load("isic2019", tmp_path)
        assert (data.classes, data.input_shape) == (
            8,
            (3, 200, 200),
        ) and data.train.x.dtype == np.uint8
        assert (len(data.train), len(data.test)) == (18, 6)
        silos = partition(data, "natural", silos=6, seed=0, validation=0.0)
        assert [silo.origin for silo in silos][::2] == ["BCN", "HAM_vidir_modern", "MSK"]
        for centre, silo in enumerate(silos):
            assert (len(silo.train), len(silo.test)) == (3, 1)
            x = take(data, np.concatenate([silo.train, silo.test])).x
            # JPEG
            assert (
                np.abs(x.mean(axis=(1, 2, 3)) - [10 * centre + i for i in range(4)]).max() < 1
            )
            assert data.labels[silo.train].tolist() == [(centre + i) % 8 for i in range(3)]
        registry._load.cache_clear()
        monkeypatch.setattr(flamby, "read_isic", None)


def test_isic_as_the_challenge_has_it(tmp_path):
    """448 x 672 pixels become 224 x 336, of which 200 x 200 stay; grey stays grey, reddish light is taken away."""
    root = isic(tmp_path / "isic2019")
    (root / "ISIC_2019_Training_Input_preprocessed").rename(root / "ISIC_2019_Training_Input")
    for path in sorted((root / "ISIC_2019_Training_Input").iterdir()):
        Image.new("RGB", (672, 448), (200, 100, 100)).save(path, quality=100)
    x = load("isic2019", tmp_path).train.x
    # |e| / sqrt(3) = sqrt((200^2 + 2 * 100^2) / 3) = 141.4 in each channel.
    assert x.shape[1:] == (200, 200, 3) and np.abs(x.astype(int) - 141).max() <= 2


def test_shades_of_grey():
    """Two pixels, by hand with p = 1: e = (30, 15, 15), |e| / sqrt(3) = sqrt(450) = 21.2; red by .707, the others by
    1.414. A picture of one grey stays; white does not overflow; a channel without light leaves all as they are.
    """
    picture = np.array([[[20, 10, 30], [40, 20, 0]]], np.uint8)
    assert flamby.shades_of_grey(picture, 1).tolist() == [[[14, 14, 42], [28, 28, 0]]]
    grey = np.full((3, 3, 3), 77, np.uint8)
    assert np.abs(flamby.shades_of_grey(grey).astype(int) - 77).max() <= 1
    bright = np.array([[[255, 255, 0], [255, 0, 60]]], np.uint8)
    assert flamby.shades_of_grey(bright)[0, 0, 1] == flamby.shades_of_grey(bright)[0, 0].max()
    dark = np.array([[[9, 0, 1]]], np.uint8)
    assert flamby.shades_of_grey(dark).tolist() == dark.tolist()


@pytest.mark.parametrize(
    "old, new, words",
    [
        ("train_0", "val_0", "line 2, cannot be read (a picture ISIC_0000 in val_0)"),
        ("train_0", "train_6", "line 2, cannot be read (class 0 of centre 6)"),
        ("fold2", "fold3", "line 2, cannot be read ('fold2')"),
        ("ISIC_0000", "../x", "line 2, cannot be read (a picture ../x in"),
        ("ISIC_0000", "ISIC_1", "1 of 24 pictures are missing, first"),
    ],
)
def test_bad_isic_lists(tmp_path, old, new, words):
    table = isic(tmp_path / "isic2019") / "train_test_split"
    table.write_text(table.read_text().replace(old, new))
    said = cannot_load("isic2019", tmp_path, None)
    assert words in said


def test_what_is_missing_of_isic_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("SILOFL_DATA", raising=False)
    cannot_load("isic2019", tmp_path, "isic2019: there is no train_test_split; it is in FLamby")
    root = isic(tmp_path / "isic2019")
    pictures = root / "ISIC_2019_Training_Input_preprocessed"
    Image.new("RGB", (300, 199)).save(pictures / "ISIC_0000.jpg")
    cannot_load(
        "isic2019", tmp_path, r"ISIC_0000\.jpg is 300 x 199, less than 200 pixels on a side"
    )
    (pictures / "ISIC_0000.jpg").write_bytes(b"")
    cannot_load("isic2019", tmp_path, r"ISIC_0000\.jpg cannot be read")
    pictures.rename(root / "elsewhere")
    cannot_load(
        "isic2019", tmp_path, r"unpack the challenge's ISIC_2019_Training_Input.zip there"
    )


# Brains


def subject(number, centre):
    return f"IXI{number:03d}-{centre}-{number + 700:04d}"


def ixi(root, n=5):
    """n subjects of each centre, volumes of 8 x 6 x 4 whose mean says whose they are; the last one is for testing."""
    lines = ["Patient ID,Manufacturer,Split"]
    for k in range(3 * n):
        centre = ("Guys", "HH", "IOP")[k % 3]
        folder = root / "7kd5wj7v7p-3/IXI_sample" / subject(k + 2, centre)
        values = np.zeros((8, 6, 4), np.float32)
        values[0] = k + 1
        write_nifti(folder / "T1" / f"{folder.name}_image.nii.gz", values)
        write_nifti(
            folder / "label" / f"{folder.name}_label.nii.gz", (values > 0).astype(np.uint8)
        )
        write_nifti(folder / "T2" / f"{folder.name}_image.nii.gz", values)
        lines.append(f"{k + 2},{k % 3},{'test' if k >= 3 * (n - 1) else 'train'}")
    (root / "7kd5wj7v7p-3/metadata_tiny.csv").write_text("\n".join(lines) + "\n")
    return root / "7kd5wj7v7p-3/IXI_sample"


def test_ixi_keeps_its_centres_and_their_test_parts(tmp_path, monkeypatch):
    """8 -> 48 along the first axis: the first sixth is the front plane, standardised; the mask is that sixth."""
    ixi(tmp_path / "ixi-tiny")
    for _ in range(2):
        data = load("ixi-tiny", tmp_path)
        assert (data.task, data.classes, data.own_test) == ("segmentation", 2, True)
        assert data.train.x.shape == (12, 48, 60, 48, 1) and data.train.x.dtype == np.float32
        assert data.test.y.shape == (3, 48, 60, 48) and data.test.y.dtype == np.uint8
        assert data.groups is not None and list(data.groups) == ["Guys", "HH", "IOP"]
        assert [(group >= 12).sum() for group in data.groups.values()] == [1, 1, 1]
        for x, y in ((data.train.x, data.train.y), (data.test.x, data.test.y)):
            assert (y[:, :6] == 1).all() and (y[:, 6:] == 0).all()
            # Of two values in the shares 1/8 and 7/8 the standardised ones are sqrt(7) and -1 / sqrt(7).
            assert_allclose(x[:, :6], 7**0.5, rtol=1e-5)
            assert_allclose(x[:, 6:], -(7**-0.5), rtol=1e-5)
        registry._load.cache_clear()
        monkeypatch.setattr(nifti_file, "read_stored", None)


def test_ixi_test_parts_are_drawn_as_flamby_does(tmp_path):
    """Of all 566 subjects, without the list. As FLamby's metadata_tiny.csv begins: of Guys the subjects 2, 17, 24 and
    27 of the first twelve (2, 16, 17, 19 to 27), of HH 12, 15, 34, 49 (12 to 15, 33, 34, 39, 48, 49), of IOP 231, 238,
    291 (35, 230 to 234, 238, 290, 291).
    """
    subjects = [
        subject(k, centre) for centre, n in IXI.about["sizes"].items() for k in range(n)
    ]
    tested = flamby.ixi_test(IXI, tmp_path / "IXI_sample", subjects)
    places = {
        centre: [int(s[3:6]) for s in sorted(tested) if flamby.centre_of(s) == centre]
        for centre in IXI.about["centres"]
    }
    assert {centre: len(parts) for centre, parts in places.items()} == {
        "Guys": 62,
        "HH": 36,
        "IOP": 15,
    }
    assert [place for place in places["Guys"] if place < 12] == [0, 2, 8, 11]
    assert [place for place in places["HH"] if place < 9] == [0, 3, 5, 8]
    assert [place for place in places["IOP"] if place < 9] == [2, 6, 8]


def test_what_is_missing_of_ixi_is_one_line(tmp_path, monkeypatch):
    monkeypatch.delenv("SILOFL_DATA", raising=False)
    cannot_load(
        "ixi-tiny", tmp_path, "ixi-tiny: there is no folder IXI_sample; unpack the archive"
    )
    root = ixi(tmp_path / "ixi-tiny", 2)
    table = root.parent / "metadata_tiny.csv"
    whole = table.read_text()
    table.write_text(whole.replace("3,1,train", "3,1,"))
    cannot_load("ixi-tiny", tmp_path, "says neither train nor test of IXI003-HH-0703")
    table.unlink()
    cannot_load(
        "ixi-tiny",
        tmp_path,
        "has 2 of the 181 subjects of HH; unpack the whole archive, or put FLamby's",
    )
    table.write_text(whole)
    volume = root / subject(2, "Guys") / "T1" / f"{subject(2, 'Guys')}_image.nii.gz"
    volume.write_bytes(b"")
    cannot_load("ixi-tiny", tmp_path, r"_image.nii.gz: its file cannot be read as NIfTI")
    volume.unlink()
    cannot_load(
        "ixi-tiny", tmp_path, r"T1 has 0 files \*.nii.gz, not one; unpack the archive again"
    )
    ixi(tmp_path / "ixi-tiny", 2)
    monkeypatch.setitem(sys.modules, "nibabel", None)
    cannot_load(
        "ixi-tiny", tmp_path, "a volume is read with nibabel, which is not installed here"
    )
