"""A hospital's own data set: the same runs as a data file's, an index that holds, the libraries that give such sets."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import fails
from numpy.testing import assert_array_equal
from representatives import seldom
from study_text import study_text
from taken import silofl
from tiny import federate
from torchvision_here import whole_or_skip

from client.protocol.code import code_of_data, digest_of_code
from client.protocol.study import parse_study
from client.site.message import data_sha256
from client.site.trust.code import dataset_faults
from models.samples import Samples
from partitions.common.errors import DataError
from partitions.own import dataset as own_datasets
from partitions.own.index import make_index, write_index
from partitions.silo_file import check_silo_file, read_silo_file
from partitions.units import describe_units
from server.deploy.federation import read_federation
from server.deploy.local.demo_data import split_demo

SOURCE = """
import random
import numpy as np, torch
from torch.utils.data import Dataset

RNG = np.random.default_rng(0)
X = {s: RNG.random((n, 1, 8, 8), np.float32) for s, n in (("train", 12), ("val", 4), ("test", 6))}
Y = {s: np.arange(len(x)) % 2 for s, x in X.items()}
WHO = {s: [f"{s}-{i // 2}" for i in range(len(x))] for s, x in X.items()}

class Pictures(Dataset):
    change = staticmethod(lambda x: x)
    def __init__(self, split):
        self.split, self.reads = split, 0
    def __len__(self):
        return len(Y[self.split])
    def __getitem__(self, i):
        self.reads += 1
        return self.change(torch.from_numpy(X[self.split][i])), int(Y[self.split][i])

def sets(kind, **more):
    return {s: (kind(s), {"label": Y[s], "patient": WHO[s], **more}) for s in X} | {"classes": 2}

def plain():
    return sets(Pictures)

class Noisy(Pictures):
    @staticmethod
    def change(x):
        return x + torch.randn(()) + np.float32(np.random.rand()) + random.random()

def noisy():
    return sets(Noisy)

class Wild(Pictures):
    def __getitem__(self, i):
        return torch.full((1, 8, 8), float(self.reads)), super().__getitem__(i)[1]

def wild():
    return sets(Wild)

class Masks(Pictures):
    def __getitem__(self, i):
        x = torch.from_numpy(X[self.split][i])
        return {"image": x, "label": (x > 0.5).to(torch.uint8)}

def outlines():
    return {s: (Masks(s), {"patient": WHO[s]}) for s in X} | {"task": "segmentation"}

class Breaks(Pictures):
    def __getitem__(self, i):
        raise FileNotFoundError("/archive/Zarathustra.dcm")

def breaks():
    return sets(Breaks)

def short():
    return {s: (Pictures(s), {"label": Y[s][1:]}) for s in X}

def nothing():
    return []

def other_key():
    return {**plain(), "trian": 1}

class Ragged(Pictures):
    def __getitem__(self, i):
        return torch.zeros(1, 8, 8 + i % 2), int(Y[self.split][i])

def ragged():
    return sets(Ragged)

class Last(Pictures):
    change = staticmethod(lambda x: torch.zeros(8, 8, 3))

def last():
    return sets(Last)

class Infinite(Pictures):
    change = staticmethod(lambda x: x / 0)

def infinite():
    return sets(Infinite)

def mislabelled():
    return {s: (Pictures(s), {"label": 1 - Y[s]}) for s in X}

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield 0

def stream():
    return {s: (Stream(), {"label": Y[s]}) for s in X}

class Crops(Masks):
    def __getitem__(self, i):
        return [super().__getitem__(i)] * 2

def crops():
    return {s: (Crops(s), {}) for s in X} | {"task": "segmentation"}

class TextMasks(Masks):
    def __getitem__(self, i):
        return X[self.split][i], np.full((8, 8), "ill")

def text_masks():
    return {s: (TextMasks(s), {}) for s in X} | {"task": "segmentation"}

class NoNumbers(Masks):
    def __getitem__(self, i):
        return X[self.split][i], np.full((8, 8), np.nan)

def no_numbers():
    return {s: (NoNumbers(s), {}) for s in X} | {"task": "segmentation"}

class Leaves(Pictures):
    def __getitem__(self, i):
        raise SystemExit("Zarathustra")

def leaves():
    return sets(Leaves)

class TextLabels(Pictures):
    def __getitem__(self, i):
        return X[self.split][i], "ill"

def text_labels():
    return sets(TextLabels)

def text_index():
    return {s: (Pictures(s), {"label": ["ill"] * len(Y[s])}) for s in X}

def nobody():
    return {s: (Pictures(s), {"label": Y[s], "patient": [None] * len(Y[s])}) for s in X}

class Unmounted(Pictures):
    def __len__(self):
        raise OSError("Zarathustra")

def unmounted():
    return sets(Unmounted)

def none_to_train():
    return {**plain(), "train": ([], {"label": []})}

class Measured(Pictures):
    def __getitem__(self, i):
        return X[self.split][i], torch.tensor(0.1)

def measured():
    return {s: (Measured(s), {"label": [0.1] * len(Y[s])}) for s in X} | {"task": "regression"}
"""


@pytest.fixture
def ward(tmp_path, monkeypatch):
    """The hospital's module, importable."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/ward_data.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path / "code")
    own_datasets.open_own.cache_clear()
    yield importlib.import_module("ward_data")
    sys.modules.pop("ward_data")
    own_datasets.open_own.cache_clear()


def as_file(ward, path):
    """The same samples as a data file."""
    numbers: dict[str, int] = {}
    arrays: dict[str, Any] = {"classes": np.array(2)}
    for split, x in ward.X.items():
        arrays |= {f"x_{split}": x, f"y_{split}": ward.Y[split]}
        whose = [numbers.setdefault(who, len(numbers)) for who in ward.WHO[split]]
        arrays[f"patient_{split}"] = np.array(whose)
    np.savez(path, **arrays)
    return path


def index_of(name, tmp_path):
    """The index file of a set of the hospital's module."""
    path = tmp_path / f"{name}.npz"
    write_index(f"ward_data:{name}", path)
    return path


@pytest.mark.parametrize("method", ["fedavg", "fedala", "apple"])
def test_a_run_is_that_of_the_data_file_bit_for_bit(ward, tmp_path, method):
    """The same batches in the same order: histories are equal, number by number."""
    runs = []
    for kind in ("file", "own"):
        files = {
            "north": as_file(ward, tmp_path / "north.npz"),
            "south": as_file(ward, tmp_path / "south.npz"),
        }
        if kind == "own":
            files["north"] = index_of("plain", tmp_path)
        runs.append(federate(files, method, rounds=2, batch_size=5, model="small-cnn"))
    first, second = ([r for r in run.rows if "seconds" not in r.metric] for run in runs)
    assert first == second and len(first) > 20


def test_the_index_has_what_the_policy_counts_and_no_sample(ward, tmp_path):
    """Patients are numbers, the digests are the samples' own, and the audit log gets the file's SHA-256."""
    path, same = index_of("plain", tmp_path), as_file(ward, tmp_path / "same.npz")
    with np.load(path) as index:
        assert (
            not any(key.startswith("x") for key in index)
            and index["dataset"] == "ward_data:plain"
        )
        assert index["patient_train"].tolist() == [i // 2 for i in range(12)]
    one, other = describe_units(path), describe_units(same)
    assert one == other and one["patients"] == 6
    node = {"data": str(path), "state-dir": str(tmp_path / "state")}
    before = data_sha256(node)
    assert len(before) == 64
    ward.Y["train"] = ward.Y["train"][::-1].copy()
    own_datasets.open_own.cache_clear()
    path.unlink()
    assert data_sha256({**node, "data": str(index_of("plain", tmp_path))}) != before


@pytest.mark.parametrize("what", ["label", "patient", "length", "code"])
def test_a_data_set_that_changes_is_refused(ward, tmp_path, what):
    """Between the index and a message, whatever changes is one line without a value, and how to mend it."""
    path = index_of("plain", tmp_path)
    read_silo_file(path)
    own_datasets.open_own.cache_clear()
    if what == "label":
        ward.Y["train"] = ward.Y["train"][::-1].copy()
    elif what == "patient":
        ward.WHO["test"][0] = "another"
    elif what == "length":
        ward.X["val"], ward.Y["val"], ward.WHO["val"] = (
            ward.X["val"][1:],
            ward.Y["val"][1:],
            ward.WHO["val"][1:],
        )
    else:
        Path(ward.__file__).write_text(SOURCE + "\n# changed")
    with pytest.raises(
        DataError, match=r"(differs from|another than) .*index.*; make its index again"
    ):
        read_silo_file(path)


@pytest.mark.parametrize(
    "change, reason",
    [
        (
            lambda ward: ward.Y["train"].__setitem__(3, 1 - ward.Y["train"][3]),
            "another label than its index",
        ),
        (
            lambda ward: ward.Y.__setitem__("train", ward.Y["train"][1:]),
            "another length than its index",
        ),
        (lambda ward: ward.X["train"].__setitem__(3, np.nan), "no finite number"),
    ],
)
def test_a_change_within_a_process_is_found_when_it_is_read(ward, tmp_path, change, reason):
    """Between two messages of one process the data set is the same object: each batch is compared."""
    data = read_silo_file(index_of("plain", tmp_path))
    ward.Y["train"] = ward.Y["train"].copy()
    change(ward)
    with pytest.raises(DataError, match=reason) as caught:
        data.train.x[np.arange(len(data.train))]
    assert "3" not in str(caught.value)


@pytest.mark.parametrize(
    "name, reason",
    [
        ("wild", "reads a sample differently the second time"),
        ("breaks", r"has a sample that cannot be read \(FileNotFoundError\)"),
        ("short", "train has another number of samples than of label"),
        ("nothing", "must return a mapping with train and test"),
        ("other_key", "returns 'trian', which is none of train, val, test"),
        ("ragged", "has inputs of different shapes or types"),
        ("last", "an input has its channels last"),
        ("infinite", "has an input with a value that is no finite number"),
        ("mislabelled", "has a sample with another label than its index"),
        ("stream", "is no map-style Dataset: it has no length"),
        ("crops", r"has a sample that cannot be read \(TypeError\)"),
        ("text_masks", r"has a sample that cannot be read \(ValueError\)"),
        ("no_numbers", "with values that are no classes"),
        ("leaves", r"has a sample that cannot be read \(SystemExit\)"),
        ("text_labels", r"has a sample that cannot be read \(ValueError\)"),
        ("text_index", "has labels in its index that are no numbers"),
        ("nobody", "has a sample without a patient in its index"),
        ("unmounted", r"it has no length \(OSError\)"),
        ("none_to_train", "train has no samples"),
    ],
)
def test_what_cannot_be_used_is_one_line(ward, name, reason, caplog):
    """No text of the hospital's code is in the line, which a server may get; it is in the log here."""
    said = fails(DataError, reason, make_index, f"ward_data:{name}")
    assert "Zarathustra" not in said
    assert name != "breaks" or "Zarathustra" in caplog.text


def test_measurements_are_compared_as_float32(ward, tmp_path):
    """0.1 is another number in float64, which a list in the index has, than in a tensor."""
    assert read_silo_file(index_of("measured", tmp_path)).task == "regression"


def test_what_a_sample_draws_follows_from_run_round_and_sample(ward, tmp_path):
    """torch, NumPy and random: the same for a seed, in any order of reading; another for another seed."""
    x = read_silo_file(index_of("noisy", tmp_path)).train
    samples = Samples(x.x, x.y)
    orders = [[torch.tensor([3, 1])], [torch.tensor([1]), torch.tensor([3])]]

    def read(order, draws):
        return (
            torch.cat([batch for batch, _ in samples.batches(order, draws)]).flatten(1).sum(1)
        )

    state = torch.get_rng_state()
    first, turned, other = read(orders[0], 7), read(orders[1], 7), read(orders[0], 8)
    assert torch.equal(first, turned.flip(0)) and not torch.isclose(first, other).any()
    assert torch.equal(samples.take(torch.tensor([3]))[0], samples.take(torch.tensor([3]))[0])
    assert torch.equal(state, torch.get_rng_state())
    files = {"north": tmp_path / "noisy.npz", "south": as_file(ward, tmp_path / "south.npz")}
    runs = [
        federate(files, "fedavg", rounds=2, model="small-cnn", batch_size=4) for _ in range(2)
    ]
    first, second = (run.personal("north") for run in runs)
    assert torch.equal(first, second)


def test_outlines_are_read_with_their_inputs(ward, tmp_path):
    """A mask is the second half of the pair; the index has the number of classes, and no mask."""
    data = read_silo_file(index_of("outlines", tmp_path))
    assert data.task == "segmentation" and data.classes == 2
    rows = np.array([4, 2])
    expected = ward.X["train"][rows][:, 0] > 0.5
    assert_array_equal(data.train.y[rows], expected)
    files = {"north": tmp_path / "outlines.npz", "south": index_of("outlines", tmp_path)}
    run = federate(files, "fedavg", rounds=1, model="unet", unet__width=4, unet__levels=1)
    assert run.values("dice", "north", "received")


def test_the_commands_take_it(ward, tmp_path, capsys, monkeypatch):
    """check-data checks and writes the index; simulate divides the samples; a federation file names it."""
    monkeypatch.chdir(tmp_path)
    assert silofl("check-data", "ward_data:plain", "--out", "ours.npz") == 0
    out = capsys.readouterr().out
    assert "ok    inputs: pictures of 8 x 8, 1 channel, float32" in out and "ours.npz" in out
    assert silofl("check-data", "ward_data:breaks") == 2
    assert "cannot be read (FileNotFoundError)" in capsys.readouterr().err
    assert silofl("check-data", "ours.npz") == 0
    command = "simulate --data ward_data:plain --silos 2 --partition iid --strategy fedavg"
    assert silofl(*command.split(), "--rounds", "1", "--out", "run") == 0
    (tmp_path / "federation.yaml").write_text(
        "name: demo\nsilos:\n  - {name: north, data: {dataset: 'ward_data:plain'}}\n"
    )
    lines: list[str] = []
    for _ in range(2):
        files = split_demo(
            read_federation(tmp_path / "federation.yaml", check_data=False),
            tmp_path,
            lines.append,
        )
    assert files["north"] == tmp_path / "ward_data.plain.index.npz" and len(lines) == 1
    assert all(check.ok for check in check_silo_file(files["north"]))


def test_the_doctor_takes_it(ward, monkeypatch, capsys):
    """In a silo's container here, whose server is not there; the data set's fault is named as a file's is."""
    monkeypatch.setenv("SILOFL_SERVER", "127.0.0.1:1")
    monkeypatch.setenv("SILOFL_NAME", "north")
    assert silofl("doctor", "--data", "ward_data:plain") == 2
    assert "ok    data: " in capsys.readouterr().out
    assert silofl("doctor", "--data", "ward_data:breaks") == 2
    assert "cannot be read (FileNotFoundError)" in capsys.readouterr().err


def test_a_study_fixes_its_code(ward, tmp_path):
    """The gate reads it from the index, without any import; a data file has none."""
    write_index("ward_data:plain", tmp_path / "a.npz")
    code = digest_of_code("ward_data:plain")
    assert code_of_data(tmp_path / "a.npz") == code and len(code) == 64
    np.savez(tmp_path / "file.npz", x=np.zeros((3, 2), np.float32), y=np.arange(3))
    study = parse_study(f'{study_text()}queries = 9\n[datasets]\nnorth = "{code}"\n', "f")
    fields: dict[str, Any] = {"study": study.name, "datasets": study.datasets}

    def fault(silo, data):
        return "".join(dataset_faults(**fields, silo=silo, data=tmp_path / data))

    assert not fault("north", "a.npz") and not fault("south", "file.npz")
    assert fault("north", "file.npz").endswith("and the data here are a data file")
    assert fault("north", "nothing.npz") and "[datasets] no south" in fault("south", "a.npz")
    assert not dataset_faults("heart", {}, "south", tmp_path / "a.npz")
    source = tmp_path / "code/ward_data.py"
    source.write_text(SOURCE + "# changed\n")
    assert digest_of_code("ward_data:plain") != code


class OfPackage:
    name, value = "ward", "ward_data:plain"


def test_an_installed_package_s_set_has_a_name(monkeypatch):
    """An entry point in the group silofl.datasets stands for MODULE:FUNCTION."""
    found = {"group": "silofl.datasets", "name": "ward"}
    monkeypatch.setattr(
        "partitions.common.own_code.entry_points",
        lambda **asked: [OfPackage] if asked == found else [],
    )
    assert own_datasets.resolve_name("ward") == "ward_data:plain"
    assert (
        own_datasets.resolve_name("other") == ""
        and own_datasets.resolve_name("a.b:c") == "a.b:c"
    )


# The libraries


MONAI = """
import numpy as np, torch
from monai.data import Dataset, PersistentDataset
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandFlipd, RandGaussianNoised, ScaleIntensityd
import os

FOLDER = os.environ["WARD"]

def files(n, start):
    return [{"image": f"{FOLDER}/{i}.npy", "label": i % 2} for i in range(start, start + n)]

FIXED = [LoadImaged("image"), EnsureChannelFirstd("image", channel_dim="no_channel"), ScaleIntensityd("image")]
DRAWN = [RandFlipd("image", prob=0.5, spatial_axis=0), RandGaussianNoised("image", prob=1.0)]

def ours():
    made = {}
    for split, items in (("train", files(6, 0)), ("test", files(4, 6))):
        change = Compose(FIXED + DRAWN if split == "train" else FIXED)
        kept = PersistentDataset(items, change, cache_dir=f"{FOLDER}/cache")
        made[split] = kept, {"label": [item["label"] for item in items]}
    return made
"""
TORCHIO = """
import torch, torchio
from torch.utils.data import Dataset

class Scans(Dataset):
    def __init__(self, n, change):
        self.subjects = torchio.SubjectsDataset([
            torchio.Subject(image=torchio.ScalarImage(tensor=torch.full((1, 4, 5, 6), float(i))),
                            label=torchio.LabelMap(tensor=torch.ones(1, 4, 5, 6, dtype=torch.uint8)))
            for i in range(n)], transform=change)
    def __len__(self):
        return len(self.subjects)
    def __getitem__(self, i):
        subject = self.subjects[i]
        return subject["image"].data, subject["label"].data

def ours():
    change = torchio.Compose([torchio.RandomNoise(std=1.0), torchio.RandomFlip(axes=0)])
    return {"train": (Scans(5, change), {}), "test": (Scans(3, None), {}), "classes": 2}
"""
VISION = """
import numpy as np, torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

class Pictures(Dataset):
    def __init__(self, n, change):
        self.n, self.change = n, change
    def __len__(self):
        return self.n
    def __getitem__(self, i):
        return self.change(torch.full((3, 8, 8), i, dtype=torch.uint8)), i % 2

def ours():
    train = v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.ToDtype(torch.float32, scale=True)])
    fixed = v2.ToDtype(torch.float32, scale=True)
    return {s: (Pictures(n, c), {"label": np.arange(n) % 2}) for s, n, c in (("train", 6, train), ("test", 4, fixed))}
"""


@pytest.mark.filterwarnings("ignore")  # of their own imports
@pytest.mark.parametrize(
    "library, source, shape",
    [
        # They take long to import
        seldom("monai.transforms", MONAI, (1, 8, 8)),
        seldom("torchio", TORCHIO, (1, 4, 5, 6)),
        ("torchvision.transforms.v2", VISION, (3, 8, 8)),
    ],
)
def test_the_libraries_own_sets_work(tmp_path, monkeypatch, library, source, shape):
    """Their random transforms repeat for a seed and differ for another, and their fixed ones are never seeded away."""
    if library.startswith("torchvision"):
        whole_or_skip()
    try:
        with warnings.catch_warnings():  # those of their own imports
            warnings.simplefilter("ignore")
            importlib.import_module(library)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{library} cannot be imported here: {error}")
    (tmp_path / "library_data.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WARD", str(tmp_path))
    for i in range(10):
        np.save(tmp_path / f"{i}.npy", np.random.default_rng(i).random((8, 8), np.float32))
    own_datasets.open_own.cache_clear()
    try:
        write_index("library_data:ours", tmp_path / "ours.npz")
        data = read_silo_file(tmp_path / "ours.npz")
        assert data.input_shape == shape
        samples = Samples(data.train.x, data.train.y)
        order = [torch.tensor([2, 0]), torch.tensor([1])]
        first, again, other = (
            torch.cat([x for x, _ in samples.batches(order, draws)]) for draws in (1, 1, 2)
        )
        assert torch.equal(first, again) and not torch.equal(first, other)
        test = Samples(data.test.x, data.test.y)
        one, two = (next(test.batches([torch.tensor([1])], draws))[0] for draws in (1, 2))
        assert torch.equal(one, two)
    finally:
        sys.modules.pop("library_data", None)
        own_datasets.open_own.cache_clear()
