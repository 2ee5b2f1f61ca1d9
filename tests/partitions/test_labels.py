"""Labels of every task in data files: what is read, what is refused, and what is written again."""

from __future__ import annotations

import numpy as np
import pytest
from failing import fails
from hospitals import MADE, NAMES, hospital_files
from PIL import Image
from taken import imported, splits_of

from models import tasks
from partitions import labels
from partitions.silo_file import check_silo_file, read_silo_file, write_silo_file

X = np.arange(60, dtype=np.float32).reshape(20, 3)
PICTURES = np.arange(20 * 64, dtype=np.uint8).reshape(20, 8, 8)
VOLUMES = (np.arange(20 * 210) % 251).astype(np.uint8).reshape(20, 5, 6, 7, 1)


def write(path, x=X, **arrays):
    np.savez(path, x=x, **arrays)
    return path


def test_tasks_and_what_they_declare_are_those_of_the_models():
    """The folder of partitions knows no PyTorch, so the list stands there a second time."""
    assert tuple(tasks.TASKS) == labels.TASKS
    assert {name for name, task in tasks.TASKS.items() if task.single_label} == set(
        labels.ONE_CLASS
    )
    assert labels.VOID == tasks.VOID


@pytest.mark.parametrize(
    "arrays, task, classes",
    [
        ({"y": np.arange(20) % 3}, "multiclass", 3),
        ({"y": (np.arange(20) % 3).astype(float)}, "multiclass", 3),
        ({"y": np.arange(20)[:, None] % 2}, "multiclass", 2),
        ({"y": np.arange(20) % 3, "task": "ordinal"}, "ordinal", 3),
        ({"y": np.arange(60).reshape(20, 3) % 2}, "multilabel", 3),
        ({"y": np.arange(40).reshape(20, 2) % 3 - 1}, "multilabel", 2),
        ({"y": np.arange(20)[:, None] % 2, "task": "multilabel"}, "multilabel", 1),
        ({"y": np.arange(20) / 3}, "regression", 1),
        ({"y": np.arange(20), "task": "regression"}, "regression", 1),
        ({"y": np.arange(40).reshape(20, 2) / 3}, "regression", 2),
        ({"time": np.arange(20) / 2, "event": np.arange(20) % 2}, "survival", 1),
        ({"x": PICTURES, "y": PICTURES % 3}, "segmentation", 3),
        ({"x": PICTURES, "y": PICTURES * 0, "classes": 2}, "segmentation", 2),
        ({"x": PICTURES, "y": PICTURES % 3 * 2, "classes": 5}, "segmentation", 5),
        ({"x": PICTURES, "y": np.where(PICTURES > 200, 255, 1)}, "segmentation", 2),
        ({"x": VOLUMES, "y": VOLUMES[..., 0] % 3}, "segmentation", 3),
        (
            {"x": np.moveaxis(VOLUMES, -1, 1).astype(np.float32), "y": VOLUMES[..., 0] % 4},
            "segmentation",
            4,
        ),
        ({"x": VOLUMES, "y": np.arange(20) % 3}, "multiclass", 3),
    ],
)
def test_what_labels_look_like(tmp_path, arrays, task, classes):
    data = read_silo_file(write(tmp_path / "a.npz", **arrays))
    assert (data.task, data.classes) == (task, classes)


@pytest.mark.parametrize(
    "arrays, detail",
    [
        (
            {"y": np.arange(20) / 3, "task": "multiclass"},
            "y has labels that are no whole numbers",
        ),
        (
            {"y": np.arange(60).reshape(20, 3), "task": "multilabel"},
            "y has labels besides 0, 1 and -1",
        ),
        (
            {"y": np.full((20, 2), np.inf)},
            "y has a label that is no finite number, first in sample 0",
        ),
        (
            {"y": np.full(20, 1e39), "task": "regression"},
            "y has a label beyond what float32 holds",
        ),
        ({"y": np.arange(20) % 2, "task": "survival"}, r"y is \(20, 1\)"),
        (
            {"y": np.arange(20) % 2, "task": "surviva"},
            "task is 'surviva', none of multiclass, .*did you mean",
        ),
        ({"y": np.arange(20) % 2, "task": 3}, r"task is '\?', none of multiclass"),
        ({"x": PICTURES, "y": PICTURES * 0}, "has masks of 0 alone"),
        (
            {"x": PICTURES, "y": PICTURES % 2 * 255},
            "has masks of 0 and 255 alone, and 255 does not count",
        ),
        (
            {"x": PICTURES, "y": np.array([0, 1, 2, 4])[PICTURES % 4]},
            "masks with values 0, 1, 2, 4, but no 3; number",
        ),
        ({"time": np.arange(20.0)}, "has time, but no event"),
        ({"event": np.arange(20) % 2}, "has event, but no time"),
        ({"time": np.arange(20.0), "event": np.arange(20)}, "event is not of 0 and 1"),
        (
            {"time": np.arange(20.0) - 1, "event": np.ones(20)},
            "time is not of finite numbers from 0 on",
        ),
        (
            {"time": np.arange(20.0), "event": np.ones(19)},
            "time holds 20 times, event 19 events",
        ),
        (
            {"time": np.arange(20.0), "event": np.ones(20), "y": np.ones(20)},
            "has both y and time",
        ),
        ({"y": PICTURES % 3}, r"y is \(20, 8, 8\)"),
        ({"x": PICTURES, "y": PICTURES[:, :4] % 3}, r"y is \(20, 4, 8\)"),
        (
            {"x": VOLUMES, "y": PICTURES % 3},
            r"y is \(20, 8, 8\); a mask .* picture: \(20, 5, 6, 7\) here",
        ),
        (
            {"x": VOLUMES[..., 0], "y": VOLUMES[..., 0] % 3},
            r"\(20, 5, 6\) here; volumes have channels, too: save x as",
        ),
        (
            {"y": PICTURES % 3, "task": "segmentation"},
            "the samples are a table, which has no outlines",
        ),
        (
            {"x": PICTURES, "y": PICTURES.astype(float), "task": "segmentation"},
            "y is float64, or has values",
        ),
        (
            {"x": PICTURES, "y": PICTURES % 3, "classes": 2},
            "all has a label 2 where classes is 2",
        ),
        (
            {"y": np.arange(60).reshape(20, 3) % 2, "classes": 4},
            "classes is 4, where each sample has 3 labels",
        ),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, arrays, detail):
    file = write(tmp_path / "a.npz", **arrays)
    fails(ValueError, detail, read_silo_file, file)
    assert not check_silo_file(file)[-1].ok


def test_whoever_reads_a_file_may_say_what_it_does_not(tmp_path):
    file = write(tmp_path / "a.npz", y=np.arange(20) % 3)
    assert read_silo_file(file, "ordinal").task == "ordinal"
    assert read_silo_file(file, "regression").train.y.dtype == np.float32
    stated = write(tmp_path / "b.npz", y=np.arange(20) % 3, task="ordinal")
    with pytest.raises(
        ValueError,
        match="says that its task is ordinal, and not regression; run with task=ordinal",
    ):
        read_silo_file(stated, "regression")


@pytest.mark.parametrize("task", MADE)
def test_what_is_written_is_read_again(tmp_path, task):
    data = read_silo_file(hospital_files(tmp_path, task)["north"])
    write_silo_file(tmp_path / "again.npz", data)
    again = read_silo_file(tmp_path / "again.npz")
    assert (again.task, again.classes) == (data.task, data.classes) == (task, data.classes)
    for one, other in (
        (data.train, again.train),
        (data.val, again.val),
        (data.test, again.test),
    ):
        assert (
            np.array_equal(one.x, other.x)
            and np.array_equal(one.y, other.y)
            and one.y.dtype == other.y.dtype
        )


@pytest.mark.parametrize("task", MADE)
def test_a_hospital_is_told_what_its_labels_are(tmp_path, task):
    checks = {
        check.name: check for check in check_silo_file(hospital_files(tmp_path, task)[NAMES[0]])
    }
    assert all(check.ok for check in checks.values()) and f"({task})" in checks["labels"].detail


# Import


def table(path, header, rows):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_import_of_several_labels_times_and_measurements(tmp_path):
    rows = [f"{i},{i % 7},{i % 2},{(i + 1) % 2},{i / 3:.3f},{i % 5 + 1}" for i in range(30)]
    source = table(tmp_path / "a.csv", "age,dose,oedema,effusion,volume,days", rows)
    for options, task, classes, columns in (
        ({"label": "oedema,effusion"}, "multilabel", 2, 4),
        ({"label": "volume"}, "regression", 1, 5),
        ({"survival": ("days", "oedema")}, "survival", 1, 4),
        ({"label": "dose", "task": "ordinal"}, "ordinal", 7, 5),
    ):
        made = imported(source, **options)
        data = read_silo_file(made.file)
        assert (data.task, data.classes, len(made.feature_names)) == (task, classes, columns)
        assert len(data.train) + len(data.val) + len(data.test) == 30
        if task == "multilabel":
            assert made.label_names == ("oedema", "effusion")
            assert any("exactly one of the labels" in note for note in made.notes)
            assert "2 findings (multilabel); samples with each: train" in str(made)
        if task == "survival":
            assert made.feature_names == ("age", "dose", "effusion", "volume")


def test_a_column_whose_name_has_commas_is_one(tmp_path):
    source = table(
        tmp_path / "a.csv",
        'age,"carcinoma, NOS",seen',
        [f"{i},{i % 2},{i % 3}" for i in range(20)],
    )
    made = imported(source, label="carcinoma, NOS")
    assert (made.data.task, made.feature_names) == ("multiclass", ("age", "seen"))
    made = imported(source, label="age, seen")
    assert (made.data.task, made.label_names) == ("regression", ("age", "seen"))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"label": "oedema,volumes"}, "volumes"),
        (
            {"label": "oedema", "task": "survival"},
            "task = survival needs columns of time and event",
        ),
        (
            {"label": "oedema", "task": "segmentation"},
            "task = segmentation needs a column mask",
        ),
        (
            {"label": "oedema,age", "task": "multiclass"},
            "task = multiclass needs one label column",
        ),
        ({"label": "word,oedema"}, "line 2: word is 'x', no number"),
        (
            {"label": "oedema,age", "task": "multilabel"},
            "oedema, age: the label has labels besides 0, 1 and -1",
        ),
        ({"survival": ("oedema", "age")}, "oedema, age: event is not of 0 and 1"),
    ],
)
def test_import_says_what_is_missing(tmp_path, options, message):
    word = "x" if "word" in options.get("label", "") else "1"
    source = table(
        tmp_path / "a.csv", "age,oedema,word", [f"{i},{i % 2},{word}" for i in range(20)]
    )
    fails(ValueError, message, imported, source, tmp_path / "a.npz", **options)
    assert not (tmp_path / "a.npz").exists()


def test_import_of_outlines(tmp_path):
    rows = []
    for i in range(12):
        picture = np.full((10, 12), 20 * i, np.uint8)
        Image.fromarray(picture).save(tmp_path / f"{i}.png")
        Image.fromarray((picture * 0 + (np.arange(12) < i)).astype(np.uint8)).save(
            tmp_path / f"{i}-mask.png"
        )
        rows.append(f"{i}.png,{i}-mask.png,p{i // 2}")
    source = table(tmp_path / "list.csv", "file,mask,patient", rows)
    made = imported(source, tmp_path / "a.npz")
    data = read_silo_file(tmp_path / "a.npz")
    assert (made.data.task, data.task, data.classes) == ("segmentation", "segmentation", 2)
    for split in splits_of(data):
        assert (split.y.reshape(len(split), -1).sum(1) // 10 * 20 == split.x[:, 0, 0, 0]).all()
    made = imported(source, size=8)
    assert made.data.train.y.shape[1:] == (8, 8) and made.data.train.y.max() == 1
    Image.fromarray(np.zeros((3, 3), np.uint8)).save(tmp_path / "4-mask.png")
    fails(
        ValueError, r"line 6: 4-mask.png has another size", imported, source, tmp_path / "c.npz"
    )
    (tmp_path / "4-mask.png").unlink()
    with pytest.raises(
        ValueError, match=r"line 6: 4-mask.png cannot be read \(there is no such file\)"
    ):
        imported(source, tmp_path / "c.npz")
