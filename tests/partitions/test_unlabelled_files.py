"""What a hospital's file, table or data set says that nobody there looked for."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from failing import fails
from hospitals import LABELS, partly_labelled
from PIL import Image
from taken import silofl

from partitions.common.errors import DataError
from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.own.index import write_index
from partitions.schema import NO_SCHEMA, Schema, parse_shared_schema, read_schema
from partitions.silo_file import read_silo_file, write_silo_file

MISTAKES = {
    "a name of no label": ("loops", "'loops' unlabelled, which is no name in label_names"),
    "all labels": ("odd,large,loop", "all labels unlabelled; one at least"),
    "a label that samples have": ("odd", "'odd' unlabelled, and samples of all are labelled"),
    "of outlines the background": ("background", "label_names after the background"),
    "an outline that is drawn": ("disc", "'disc' unlabelled, and samples of all are labelled"),
}


def changed(file, **arrays):
    np.savez(file, **{**np.load(file), **arrays})
    return file


def test_it_is_read_written_and_sent_and_is_no_part_of_the_digest(tmp_path):
    for task, names in LABELS.items():
        data = read_silo_file(partly_labelled(tmp_path, task)["south"])
        assert data.schema.unlabelled == names[2:] and data.schema.unlabelled_numbers == (2,)
        write_silo_file(tmp_path / "again.npz", data)
        assert read_silo_file(tmp_path / "again.npz").schema == data.schema
        assert read_schema(data.schema.text) == data.schema
        whole = read_silo_file(partly_labelled(tmp_path, task)["north"]).schema
        assert whole.digest == data.schema.digest and not whole.unlabelled
        assert f"unlabelled here {names[2]}" in str(data.schema)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(mistake, tmp_path):
    names, line = MISTAKES[mistake]
    outlines = names in ("background", "disc")
    file = partly_labelled(tmp_path, "segmentation" if outlines else "multilabel")["north"]
    fails(DataError, line, read_silo_file, changed(file, unlabelled=np.array(names.split(","))))


def test_other_tasks_have_no_such_labels(tmp_path):
    file = tmp_path / "a.npz"
    x, y = np.arange(20, dtype=np.float32)[:, None], np.arange(20) % 2
    names = np.array(["well", "ill"])
    np.savez(file, x=x, y=y, label_names=names, unlabelled=np.array(["ill"]))
    fails(
        DataError, "its task is multiclass; a hospital may lack labels of", read_silo_file, file
    )
    fails(
        DataError,
        r"unlabelled b are not among its labels",
        Schema,
        labels=("a",),
        unlabelled=("b",),
    )
    content = {"labels": ["a", "b"], "unlabelled": ["b"]}
    fails(DataError, "one hospital's own", parse_shared_schema, content)
    assert NO_SCHEMA.unlabelled_numbers == ()


def findings(folder):
    lines = [f"{i},{i % 7},{i % 2},{i // 3 % 2}" for i in range(40)]
    (folder / "ward.csv").write_text("\n".join(["patient,age,oedema,mass", *lines]))
    return folder / "ward.csv"


def test_a_table_without_a_finding(tmp_path):
    source, out, no = findings(tmp_path), tmp_path / "ward.npz", tmp_path / "no.npz"
    take = ImportOptions(label="oedema,mass", unlabelled=("effusion",))
    data = import_source(source, out, take).data
    assert data.schema.labels == ("oedema", "mass", "effusion") and data.classes == 3
    assert data.schema.unlabelled == ("effusion",) and (data.train.y[:, 2] == -1).all()
    plain = import_source(source, tmp_path / "two.npz", ImportOptions(label="oedema,mass")).data
    np.testing.assert_array_equal(plain.train.y, data.train.y[:, :2])
    again = ImportOptions(label="oedema,mass", unlabelled=("mass",))
    fails(
        DataError,
        "--unlabelled mass: samples are labelled with it",
        import_source,
        source,
        tmp_path / "no.npz",
        again,
    )
    one = ImportOptions(label="oedema", unlabelled=("mass",))
    fails(
        DataError,
        "--unlabelled mass: it is of findings and of outlines",
        import_source,
        source,
        tmp_path / "no.npz",
        one,
    )
    assert not no.exists()


def test_a_table_of_the_federations_schema_without_a_finding(tmp_path, capsys):
    """North makes the schema of all; south has no column of one finding, or of all but one."""
    source = findings(tmp_path)
    silofl("import", source, "--label", "oedema,mass", "--out", tmp_path / "north.npz")
    silofl("schema", tmp_path / "north.recipe.toml", "--out", tmp_path / "schema.toml")
    (tmp_path / "south.csv").write_text(source.read_text().replace(",mass", ",weight"))
    out = tmp_path / "south.npz"
    shared = [
        "import",
        tmp_path / "south.csv",
        "--schema",
        tmp_path / "schema.toml",
        "--out",
        out,
    ]
    assert silofl(*shared) == 2
    assert "has no column mass" in capsys.readouterr().err
    silofl(*shared, "--unlabelled", "mass")
    data, north = read_silo_file(out), read_silo_file(tmp_path / "north.npz")
    assert data.task == "multilabel" and data.schema.unlabelled == ("mass",)
    assert set(data.schema.labels) == set(north.schema.labels)
    assert data.schema.digest == north.schema.digest


def test_outlines_without_an_organ(tmp_path):
    rng = np.random.default_rng(0)
    for i in range(12):
        picture = rng.integers(0, 200, (8, 8)).astype(np.uint8)
        mask = np.zeros((8, 8), np.uint8)
        mask[2:5, 2:5] = 1
        Image.fromarray(picture).save(tmp_path / f"p{i}.png")
        Image.fromarray(mask).save(tmp_path / f"m{i}.png")
    lines = [f"p{i}.png,m{i}.png,{i}" for i in range(12)]
    (tmp_path / "scans.csv").write_text("\n".join(["file,mask,patient", *lines]))
    names, scans = ("background", "liver"), tmp_path / "scans.csv"
    for labels in (names, (*names, "spleen")):
        take = ImportOptions(labels=labels, unlabelled=("spleen",), overwrite=True)
        data = import_source(scans, tmp_path / "scans.npz", take).data
        assert data.schema.labels == (*names, "spleen") and data.classes == 3
        assert data.schema.unlabelled_numbers == (2,)
    drawn = ImportOptions(labels=names, unlabelled=("liver",))
    fails(
        DataError,
        "--unlabelled liver: samples are labelled",
        import_source,
        scans,
        tmp_path / "no.npz",
        drawn,
    )


OWN = """
import numpy as np
from torch.utils.data import Dataset

class Scans(Dataset):
    def __init__(self, drawn=1):
        self.drawn = drawn
    def __len__(self):
        return 12
    def __getitem__(self, i):
        mask = np.zeros((8, 8), np.uint8)
        mask[2:5, 2:5] = self.drawn if i == 9 else 1
        return {"image": np.full((1, 8, 8), i, np.float32), "label": mask}

def sets(drawn):
    return {s: (Scans(drawn), {"patient": [f"{s}{i}" for i in range(12)]}) for s in ("train", "test")} | {
        "task": "segmentation", "classes": 3,
        "label_names": ["background", "liver", "spleen"], "unlabelled": ["spleen"],
    }

def ours():
    return sets(1)

def drawn():
    return sets(2)
"""


def test_an_own_data_set_without_an_organ(tmp_path, monkeypatch):
    (tmp_path / "ward_outlines.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    write_index("ward_outlines:ours", tmp_path / "ours.npz")
    data = read_silo_file(tmp_path / "ours.npz")
    assert data.schema.unlabelled_numbers == (2,) and data.classes == 3
    line = "train has a mask with a class that is unlabelled"
    fails(DataError, line, write_index, "ward_outlines:drawn", tmp_path / "no.npz")
    sys.modules.pop("ward_outlines")
