"""`silofl import`: folders of pictures and csv tables become silo data files; faults name file and line."""

from __future__ import annotations

import numpy as np
import pytest
from failing import fails
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image
from taken import all_x, imported, refused, splits_of

from partitions.silo_file import check_silo_file, read_silo_file


def write_picture(path, value=0, size=(6, 4), mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value).save(path)


def class_folders(root, n=10, classes=("normal", "sick")):
    """n grey pictures per class, all pixels of picture i of class c being 100 c + i."""
    for c, name in enumerate(classes):
        for i in range(n):
            write_picture(root / name / f"{i:02d}.png", 100 * c + i)
    return root


def write(path, text):
    path.write_text(text)
    return path


def all_samples(data):
    return (all_x(data), np.concatenate([data.train.y, data.val.y, data.test.y]))


# Pictures


def test_one_folder_per_class(tmp_path):
    """20 pictures: 4 for testing, ceil(16 / 5) = 4 for validation; labels in alphabetical order."""
    out = tmp_path / "out.npz"
    made = imported(class_folders(tmp_path / "source"), out)
    assert made.label_names == ("normal", "sick")
    assert str(made).splitlines() == [
        "train 12, val 4, test 4 samples: pictures of 4 x 6, 1 channel, uint8",
        "2 classes",
        "0 = normal",
        "1 = sick",
    ]
    data = read_silo_file(out)
    assert (len(data.train), len(data.val), len(data.test)) == (12, 4, 4)
    assert (
        data.input_shape == (1, 4, 6) and data.classes == 2 and data.train.x.dtype == np.uint8
    )
    x, y = all_samples(data)
    assert sorted(x[:, 0, 0, 0]) == [*range(10), *range(100, 110)]
    assert_array_equal(y, x[:, 3, 5, 0] // 100)
    assert all(check.ok for check in check_silo_file(out))


def test_the_seed_decides_who_is_tested(tmp_path):
    source = class_folders(tmp_path / "source")
    tested = [imported(source, seed=seed).data.test.x for seed in (1, 1, 2)]
    assert_array_equal(tested[0], tested[1])
    assert (tested[0] != tested[2]).any()


def test_train_val_and_test_folders(tmp_path):
    for split, n in (("train", 5), ("valid", 2), ("test", 3)):
        class_folders(tmp_path / "source" / split, n)
    data = imported(tmp_path / "source").data
    assert (len(data.train), len(data.val), len(data.test)) == (10, 4, 6)


def test_validation_when_only_train_and_test_are_given(tmp_path):
    """15 % of 20 training pictures."""
    for split, n in (("train", 10), ("test", 3)):
        class_folders(tmp_path / "source" / split, n)
    data = imported(tmp_path / "source").data
    assert (len(data.train), len(data.val), len(data.test)) == (17, 3, 6)


def test_other_files_are_passed_over(tmp_path):
    source = class_folders(tmp_path / "source")
    write(source / "normal/notes.txt", "")
    write(source / "sick/.hidden.png", "")
    assert len(imported(source).data.train) == 12


def test_pictures_listed_in_a_csv(tmp_path):
    source = tmp_path / "source"
    for i in range(4):
        write_picture(source / "png" / f"{i}.png", i)
    write(
        source / "list.csv",
        "file,label,split\npng/0.png,2,train\npng/1.png,0,test\npng/2.png,1,train\npng/3.png,0,val\n",
    )
    for given in (source, source / "list.csv"):
        made = imported(given)
        data = made.data
        assert made.label_names == () and data.classes == 3
        assert data.train.x[:, 0, 0, 0].tolist() == [0, 2] and data.train.y.tolist() == [2, 1]
        assert data.val.x[:, 0, 0, 0].tolist() == [3] and data.test.x[:, 0, 0, 0].tolist() == [
            1
        ]


def test_no_patient_is_on_two_sides(tmp_path):
    """30 pictures of 10 patients: 2 patients for testing, 2 of the other 8 for validation (1.6, rounded up)."""
    source = tmp_path / "source"
    lines = ["file,label,patient"]
    for i in range(30):
        write_picture(source / f"{i}.png", i)
        lines.append(f"{i}.png,{i % 2},P{i % 10}")
    write(source / "list.csv", "\n".join(lines))
    data = imported(source).data
    patients = [set(split.x[:, 0, 0, 0] % 10) for split in splits_of(data)]
    assert [len(p) for p in patients] == [6, 2, 2]
    assert len(patients[0] | patients[1] | patients[2]) == 10
    assert (len(data.train), len(data.val), len(data.test)) == (18, 6, 6)


def test_size_resizes(tmp_path):
    """A picture half black, half white, 8 x 8: at 2 x 2 the halves stay apart."""
    source = class_folders(tmp_path / "source")
    half = np.zeros((8, 8), np.uint8)
    half[:, 4:] = 255
    Image.fromarray(half).save(source / "sick/half.png")
    x, _ = all_samples(imported(source, size=2).data)
    assert x.shape == (21, 2, 2, 1)
    resized = next(picture for picture in x if picture.max() > 120)[..., 0]
    assert (resized[:, 0] < 40).all() and (resized[:, 1] > 215).all()


def test_one_colour_picture_makes_all_colour(tmp_path):
    source = class_folders(tmp_path / "source")
    write_picture(source / "sick/colour.png", (250, 20, 30), mode="RGB")
    x, _ = all_samples(imported(source).data)
    assert x.shape == (21, 4, 6, 3)
    coloured = [picture[0, 0].tolist() for picture in x if len(set(picture[0, 0])) > 1]
    assert coloured == [[250, 20, 30]]


@pytest.mark.parametrize(
    "mode, value, pixel",
    [
        ("1", 1, [255]),
        ("LA", (7, 0), [7]),
        ("RGBA", (1, 2, 3, 0), [1, 2, 3]),
        ("CMYK", (0, 0, 0, 0), [255] * 3),
    ],
)
def test_kinds_of_8_bit_pictures(tmp_path, mode, value, pixel):
    for i in range(4):
        write_picture(
            tmp_path / "source/0" / f"{i}.{'tif' if mode == 'CMYK' else 'png'}",
            value,
            mode=mode,
        )
    data = imported(tmp_path / "source", labels=("0", "1")).data
    assert data.train.x[0, 0, 0].tolist() == pixel and data.train.x.dtype == np.uint8


@pytest.mark.parametrize("size", [None, 3])
def test_16_bit_pictures_keep_their_depth(tmp_path, size):
    """Grey values 0 .. 65535 become 0 .. 1: 13107 is exactly a fifth."""
    (tmp_path / "source/0").mkdir(parents=True)
    for i in range(4):
        Image.fromarray(np.full((4, 6), 13107, np.uint16)).save(
            tmp_path / "source/0" / f"{i}.png"
        )
    imported(tmp_path / "source", tmp_path / "out.npz", size=size, labels=("0", "1"))
    x = read_silo_file(tmp_path / "out.npz").train.x
    assert x.dtype == np.float32 and x.shape[1:] == ((3, 3, 1) if size else (4, 6, 1))
    assert_allclose(x, 0.2, rtol=1e-6)


def test_labels_fix_the_numbering(tmp_path):
    """A hospital without a single normal picture still calls sick 1."""
    source = class_folders(tmp_path / "source", classes=("sick",))
    made = imported(source, labels=("normal", "sick"))
    assert set(made.data.train.y) == {1} and made.data.classes == 2
    assert made.label_names == ("normal", "sick")


# Tables


def rows(n, separator=","):
    return "\n".join(
        separator.join([str(i), f"{i / 2}", "sick" if i % 3 else "well"]) for i in range(n)
    )


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_csv_table(tmp_path, separator, mark):
    source = write(
        tmp_path / "t.csv",
        mark + separator.join(["age", "dose", "state"]) + "\n" + rows(10, separator),
    )
    made = imported(source, tmp_path / "out.npz", label="state", labels=["sick", "well"])
    assert made.feature_names == ("age", "dose") and made.label_names == ("sick", "well")
    data = read_silo_file(tmp_path / "out.npz")
    assert (len(data.train), len(data.val), len(data.test)) == (6, 2, 2)
    x, y = all_samples(data)
    assert sorted(x[:, 0]) == list(range(10))
    assert_array_equal(x[:, 1], x[:, 0] / 2)
    assert_array_equal(y, x[:, 0] % 3 == 0)
    with np.load(tmp_path / "out.npz") as npz:
        assert npz["feature_names"].tolist() == ["age", "dose"]
        assert npz["label_names"].tolist() == ["sick", "well"]


def test_label_column_by_name(tmp_path):
    text = "label,age,grade\n" + "\n".join(f"{i % 2},{i},{i % 4}" for i in range(8))
    source = write(tmp_path / "t.csv", text)
    assert imported(source).feature_names == ("age", "grade")
    made = imported(source, label="grade")
    assert made.feature_names == ("label", "age") and made.data.classes == 4


def test_table_without_a_header(tmp_path):
    source = write(tmp_path / "t.csv", "\n".join(f"{i},{i * 2},{i % 2}" for i in range(8)))
    made = imported(source, label="column3")
    assert made.feature_names == ("column1", "column2")
    x, y = all_samples(made.data)
    assert sorted(x[:, 1]) == list(range(0, 16, 2))
    assert_array_equal(y, x[:, 0] % 2)


# Faults

HEADER = "age,dose,label\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        (HEADER, "has a header but no rows"),
        (HEADER + "1,2,0\n3,0\n", "line 3 has 2 cells, the header 3"),
        (
            HEADER + "1,2,0\n\n3,<5,1\n4,3,1\n",
            "line 4: dose is '<5', no number; write a number in its place",
        ),
        (HEADER + "1,1e99,0\n", "line 2: dose is '1e99', no number"),
        (HEADER + "1,2,\n", "line 2 has no label"),
        (HEADER + "1,2,100000\n", "line 2: the label is 100000; labels are class numbers"),
        ("age,age,label\n1,2,0\n", "two columns named 'age'"),
        (",age,label\n0,2,0\n", "a column has no name in the first line"),
        ("63,?,0\n64,1,1\n", "a column has no name in the first line"),
        ("label\n1\n", "no column besides the label"),
        (
            "age,split,label\n1,tarin,0\n",
            "line 2: split is 'tarin'; it must be train, val or test",
        ),
        ("age,split,label\n1,train,0\n2,,1\n", "line 3 has no split, others have"),
        (
            "age,split,label\n1,train,0\n2,train,1\n",
            "gives no test samples; it has 2 samples in all",
        ),
        (
            "age,patient,label\n1,A,0\n2,A,1\n",
            "gives no test samples; it has 2 samples in all, of 1 patients",
        ),
        ("file,label\n,0\n", "line 2 names no file"),
        ("file,label\nx\0.png,0\n", "t.csv, line 2 has a zero byte: the file is damaged"),
        ("file,label\nx.png,0\n", "line 2: x.png cannot be read (there is no such file)"),
        ("file,lable\nx.png,0\n", "unknown column of"),
    ],
)
def test_bad_tables(tmp_path, text, words):
    refused(write(tmp_path / "t.csv", text), words)


def test_bad_label_column(tmp_path):
    refused(write(tmp_path / "t.csv", HEADER + "1,2,0\n"), "did you mean 'dose'?", label="doze")


def test_bad_labels(tmp_path):
    source = write(tmp_path / "t.csv", HEADER + "1,2,well\n1,2,sik\n")
    refused(source, "t.csv, line 3: 'sik' (did you mean 'sick'?)", labels=("well", "sick"))
    refused(source, "names a class twice", labels=("well", "well"))


def test_bytes_that_are_no_text(tmp_path):
    source = tmp_path / "t.csv"
    source.write_bytes(b"age,label\n\xff\x81,0\n")
    refused(
        source,
        "t.csv cannot be read: it is no text in utf-8-sig or cp1252; name its --encoding",
    )


def test_pictures_of_several_sizes(tmp_path):
    source = class_folders(tmp_path / "source")
    write_picture(source / "sick/z.png", size=(7, 4))
    refused(source, "z.png is 7 x 4, those before it 6 x 4; use --size")


def test_a_damaged_picture(tmp_path):
    source = class_folders(tmp_path / "source")
    path = source / "sick/03.png"
    path.write_bytes(path.read_bytes()[:40])
    refused(source, "03.png cannot be read")


def test_8_and_16_bit_pictures_do_not_mix(tmp_path):
    source = class_folders(tmp_path / "source")
    Image.fromarray(np.zeros((4, 6), np.uint16)).save(source / "sick/z.png")
    refused(source, "z.png mixes 8-bit and 16-bit pictures")


def test_32_bit_pictures(tmp_path):
    (tmp_path / "source/a").mkdir(parents=True)
    Image.fromarray(np.zeros((4, 6), np.float32)).save(tmp_path / "source/a/z.tif")
    refused(tmp_path / "source", "z.tif cannot be read (its pixels are 32-bit (F)")


def test_sources_that_are_none(tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no csv file and no folders of pictures")
    refused(tmp_path / "nothing", "there is no")
    two = tmp_path / "two"
    two.mkdir()
    write(two / "a.csv", "")
    write(two / "b.csv", "")
    refused(two, "several csv files (a.csv, b.csv)")


def test_bad_options(tmp_path):
    source = class_folders(tmp_path / "source")
    refused(source, "size is 0", size=0)
    fails(ValueError, r"out.csv does not end in .npz", imported, source, tmp_path / "out.csv")
