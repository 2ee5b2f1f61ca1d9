"""Patches of volumes: what is drawn, whole volumes in evaluation and prediction, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import fails
from near import near
from representatives import seldom
from tiny import comparable, federate
from two_layers import replies_of

from client.export import export_model
from client.prediction.predict import predict_file
from client.protocol.policy import Policy
from client.site.trust.message_rules import setting_faults
from models.initialisation import flat_model
from models.samples import Samples
from models.tasks import segmentation, task_of
from models.tasks.patches import Patches, Window, read_sides
from partitions.common.errors import UserError
from partitions.npz import write_npz
from partitions.own.dataset import open_own
from partitions.own.index import write_index
from partitions.silo_file import read_silo_file
from partitions.stored import OnDisk
from server.results.history import History
from server.simulation.evaluate import evaluate
from server.simulation.simulate import simulate
from strategies.base.run_settings import parse_settings
from strategies.base.settings.training import seen_shape

pytestmark = pytest.mark.filterwarnings("ignore")  # MONAI's own imports


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def volumes(path, sides, n=6, seed=0):
    """A silo's file of volumes with a bright block each, which is class 1."""
    path.parent.mkdir(exist_ok=True)
    numbers = np.random.default_rng(seed)
    x = numbers.normal(0, 0.1, (n, 1, *sides)).astype(np.float32)
    y = np.zeros((n, *sides), np.uint8)
    for i in range(n):
        at = [int(numbers.integers(0, side - 4)) for side in sides]
        block = tuple(slice(a, a + 4) for a in at)
        y[i][block] = 1
        x[i, 0][block] += 2
    parts = {"train": slice(0, n - 2), "val": slice(n - 2, n - 1), "test": slice(n - 1, n)}
    arrays: dict[str, Any] = {
        f"{k}_{s}": v[p] for s, p in parts.items() for k, v in (("x", x), ("y", y))
    }
    np.savez(path, task=np.array("segmentation"), classes=np.array(2), **arrays)
    return path


RUN: dict[str, Any] = {
    "strategy": "fedavg",
    "model": "unet",
    "unet__levels": 1,
    "unet__width": 4,
    "batch_size": 2,
    "learning_rate": 0.1,
    "patch": "8,8,8",
}


def drawn(patches, x, y, seed=0):
    """The patches of one batch of all samples, which are the same from memory and from disk."""
    place, order = partial(patches.place, rng=rng(seed)), [torch.arange(len(x))]
    found = next(Samples(x, y).cuts(order, place))
    on_disk = Samples(OnDisk([x], x.dtype), OnDisk([y], y.dtype))
    again = next(on_disk.cuts(order, partial(patches.place, rng=rng(seed))))
    assert all(map(torch.equal, found, again)) and found[0].stride() == again[0].stride()
    return found


def test_a_patch_is_a_part_of_its_sample_and_of_its_mask():
    """Wherever it lies, and the same for a seed; every place can be drawn."""
    y = np.arange(5 * 6 * 7, dtype=np.uint8).reshape(1, 5, 6, 7)
    x = y[..., None].astype(np.float32)
    patches = Patches((2, 3, 4), 1, 0.0)
    seen = set()
    for seed in range(600):
        own_x, own_y = drawn(patches, x, y, seed)
        assert own_x.shape == (1, 1, 2, 3, 4) and torch.equal(own_x[:, 0].long(), own_y)
        d, h, w = (int(own_y.min()) // n % m for n, m in ((42, 5), (7, 6), (1, 7)))
        assert np.array_equal(own_y[0], y[0, d : d + 2, h : h + 3, w : w + 4])
        seen.add((d, h, w))
    assert len(seen) == 4 * 4 * 4


def test_foreground_share_says_how_many_lie_about_the_foreground():
    """A single pixel in 4,096, and 255, which is none: with share 1 it is in every patch, with 0.5 in half of them."""
    y = np.zeros((1, 16, 16, 16), np.uint8)
    y[0, 15, 0, 7] = 1
    y[0, :2] = 255
    x = np.zeros((1, 16, 16, 16, 1), np.float32)

    def hits(share):
        patches = Patches((4, 4, 4), 1, share)
        return sum(int((drawn(patches, x, y, i)[1] == 1).any()) for i in range(200))

    assert hits(1.0) == 200 and hits(0.0) < 20 and 75 < hits(0.5) < 130
    nothing = np.zeros((1, 16, 16, 16), np.uint8)
    assert drawn(Patches((4, 4, 4), 1, 1.0), x, nothing)[1].shape == (1, 4, 4, 4)


def test_an_epoch_has_a_patch_of_each_sample_in_each_pass(tmp_path):
    """4 volumes, batches of 2 and 3 passes: 6 steps; a run repeats bit for bit, other passes train otherwise."""
    files = {
        n: volumes(tmp_path / f"{n}.npz", (12, 12, 12), seed=i) for i, n in enumerate("ab")
    }
    runs = [federate(files, rounds=1, patches_per_volume=3, **RUN) for _ in range(2)]
    first, second = (run.personal("a") for run in runs)
    assert torch.equal(first, second)
    assert not torch.equal(first, federate(files, rounds=1, **RUN).personal("a"))


def test_fednova_counts_the_steps_of_all_passes(tmp_path):
    """4 volumes, batches of 2, 3 passes and 2 epochs: 12 steps, which the server expects."""
    files = {
        n: volumes(tmp_path / f"{n}.npz", (12, 12, 12), seed=i) for i, n in enumerate("ab")
    }
    run = federate(
        files, rounds=1, patches_per_volume=3, local_epochs=2, **RUN | {"strategy": "fednova"}
    )
    assert [p.numbers["steps"] for _, _, p, _ in replies_of(run)] == [12, 12]
    assert not [r for r in run.rows if r.metric == "rejected"]


def test_dice_is_of_whole_volumes_of_hospitals_of_different_sizes(tmp_path):
    """A hospital of 12 x 10 x 9 and one of 16 x 16 x 16 share a model; each Dice is MONAI's window over its volume."""
    from monai.inferers import sliding_window_inference

    sides = {"north": (12, 10, 9), "south": (16, 16, 16)}
    files = {name: volumes(tmp_path / f"{name}.npz", own) for name, own in sides.items()}
    run = federate(files, rounds=2, patches_per_volume=4, local_epochs=5, **RUN)
    settings = run.settings
    name, options = settings.model_for((1, 8, 8, 8), "segmentation")
    model = flat_model(name, (1, 8, 8, 8), 2, options, "cpu", settings.head, settings.part())
    for silo, file in files.items():
        model.load(run.personal(silo))
        test = read_silo_file(file).test
        x = torch.from_numpy(np.moveaxis(np.asarray(test.x), -1, 1).copy())
        with torch.no_grad():
            outputs: Any = sliding_window_inference(
                x, (8, 8, 8), 64, model.module.eval(), overlap=0.5, mode="gaussian"
            )
        assert outputs.shape == (1, 2, *sides[silo])
        dice = task_of("segmentation").measure(
            outputs, torch.from_numpy(np.asarray(test.y)).long()
        )["dice"]
        near(run.values("dice", silo, "personal")[-1], dice)
    assert np.mean(run.values("dice", "south", "personal")[-1:]) > 0.3


def test_an_exported_model_draws_whole_volumes(tmp_path):
    """Its card says that a window slides; masks have the volume's size, also of one that no hospital had."""
    files = {
        n: volumes(tmp_path / f"{n}.npz", (12, 12, 12), seed=i) for i, n in enumerate("ab")
    }
    federate(files, rounds=1, directory=tmp_path / "run", **RUN)
    out = tmp_path / "a.safetensors"
    export_model(tmp_path / "run", "a", "last", out)
    new = volumes(tmp_path / "new.npz", (20, 9, 14), seed=5)
    table = predict_file(out, new, tmp_path / "masks.npz")
    with np.load(tmp_path / "masks.npz") as masks:
        assert masks["masks"].shape == (1, 20, 9, 14)
    counts = table.splitlines()[1].split(",")[1:3]
    assert sum(map(float, counts)) == 20 * 9 * 14


def test_a_runs_models_are_evaluated_on_whole_volumes(tmp_path):
    """The shared model's and each silo's own, by their cards alone: the numbers of the run."""
    for i, name in enumerate("ab"):
        volumes(tmp_path / "data" / f"{name}.npz", (12, 12, 12), seed=i)
    given = {key.replace("__", ".").replace("_", "-"): value for key, value in RUN.items()}
    given |= {"dataset": str(tmp_path / "data"), "partition": "natural", "silos": 2}
    given |= {"rounds": 1, "threads": 1, "out": str(tmp_path / "run")}
    simulate(given, quiet=True)
    history = History(tmp_path / "run/history.csv").rows
    last = [r for r in history if (r.metric, r.split) == ("dice", "test") and r.round]
    dice = {(r.snapshot, r.silo): r.value for r in last}
    evaluate(tmp_path / "run", tmp_path / "out", "all")
    rows = [line.split(",") for line in (tmp_path / "out/matrix.csv").read_text().splitlines()]
    found = {(r[0], r[1]): float(r[4]) for r in rows if r[2:4] == ["test", "dice"]}
    for silo in "ab":
        # FedAvg reports the shared model
        assert found["shared", silo] == found[silo, silo] == dice["received", silo]
    shared = tmp_path / "out/models/shared.safetensors"
    assert predict_file(shared, volumes(tmp_path / "new.npz", (20, 9, 14)))


OWN = """
import os
from pathlib import Path
import numpy as np
from torch.utils.data import Dataset

FOLDER = Path(os.environ["WARD"])

class Scans(Dataset):
    def __init__(self, items):
        self.items = items
    def __len__(self):
        return len(self.items)
    def __getitem__(self, i):
        image, label = (np.load(self.items[i][key]) for key in ("image", "label"))
        return image[None], label

def ours(silo, make=Scans):
    made = {}
    for split, rows in (("train", range(4)), ("val", [4]), ("test", [5])):
        names = [FOLDER / f"{silo}{i}" for i in rows]
        items = [{"image": f"{name}.npy", "label": f"{name}-mask.npy"} for name in names]
        made[split] = make(items), {"patient": [name.name for name in names]}
    return made | {"task": "segmentation", "classes": 2}

def north():
    return ours("a")

def south():
    return ours("b")
"""
OWN_MONAI = """
from monai.data import PersistentDataset
from monai.transforms import Compose, EnsureChannelFirstd, LoadImaged, RandFlipd
KEYS = ["image", "label"]
FIXED = [LoadImaged(KEYS), EnsureChannelFirstd(KEYS, channel_dim="no_channel")]

def kept(items, *drawn):
    return PersistentDataset(items, Compose([*FIXED, *drawn]), cache_dir=FOLDER / "cache")

def north():
    return ours("a", kept)

def flipped():
    made = ours("a", lambda items: kept(items, RandFlipd(KEYS, prob=0.5, spatial_axis=0)))
    return {**north(), "train": made["train"]}
"""


@pytest.mark.parametrize("source", [OWN, seldom(OWN + OWN_MONAI)])
def test_own_datasets_of_volumes_are_read_by_patches(source, tmp_path, monkeypatch):
    """The bits of data files of the same volumes: patches about the foreground, whole volumes' Dice, prediction."""
    files = {
        n: volumes(tmp_path / f"{n}.npz", (12, 10, 12), seed=i) for i, n in enumerate("ab")
    }
    for name, file in files.items():
        with np.load(file) as arrays:
            x, y = (
                np.concatenate([arrays[f"{k}_{s}"] for s in ("train", "val", "test")])
                for k in "xy"
            )
        for i in range(6):
            np.save(tmp_path / f"{name}{i}.npy", x[i, 0])
            np.save(tmp_path / f"{name}{i}-mask.npy", y[i])
    (tmp_path / "ward_scans.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("WARD", str(tmp_path))
    functions = ["north", "south", *(["flipped"] if source != OWN else [])]
    for function in functions:
        write_index(f"ward_scans:{function}", tmp_path / f"{function}.npz")
    given = {**RUN, "rounds": 2, "patches_per_volume": 3, "foreground_share": 0.5}

    def go(north, **more):
        return federate({"a": north, "b": tmp_path / "south.npz"}, **given, **more)

    own, kept = go(tmp_path / "north.npz", directory=tmp_path / "run"), federate(files, **given)
    assert comparable(own.rows) == comparable(kept.rows)
    export_model(tmp_path / "run", "a", "last", tmp_path / "a.safetensors")
    tables = [
        predict_file(tmp_path / "a.safetensors", data)
        for data in (files["a"], tmp_path / "north.npz")
    ]
    assert tables[0] == tables[1]
    if "flipped" in functions:
        runs = [go(tmp_path / "flipped.npz").personal("a") for _ in range(2)]
        assert torch.equal(*runs) and not torch.equal(runs[0], own.personal("a"))
    open_own.cache_clear()
    sys.modules.pop("ward_scans")


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dp": "true"}, "not with dp = true"),
        ({"ala": "true"}, "not with ala = true"),
        ({"strategy": "fedala"}, "not with strategy = fedala: its mixing weights"),
        ({"strategy": "player-fl"}, "not with strategy = player-fl: its sensitivity"),
        ({"patch": "8;8"}, "depth, height and width are needed"),
        ({"patch": "0,8,8"}, "each side is 1 or more"),
        ({"patch": "", "patches-per-volume": 2}, "is of patches: set patch"),
        ({"foreground-share": 1.5}, "foreground-share"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    fails(UserError, reason, parse_settings, {"patch": "8,8,8", **changes})


def test_samples_that_have_no_such_patch_are_refused():
    common = parse_settings({"patch": "8,8,8"}).common
    assert seen_shape(common, (1, 9, 9, 9), "segmentation") == (1, 8, 8, 8)
    for shape, task, reason in (
        ((1, 9, 9, 7), "segmentation", "larger than samples of"),
        ((1, 9, 9), "segmentation", "need h,w"),
        ((1, 9, 9, 9), "multiclass", "it is of outlines"),
    ):
        fails(UserError, reason, seen_shape, common, shape, task)
    assert read_sides("") == ()


@pytest.mark.parametrize(
    "passes, epochs, said",
    [
        (21, 0, ["patches-per-volume = 21"]),
        (20, 1, []),
        (5, 4, []),
        (7, 3, ["local-epochs = 3 x patches-per-volume = 7"]),
        ("2", "11", ["local-epochs = 11 x patches-per-volume = 2"]),
        (-1, 20, []),
    ],
)
def test_a_hospital_bounds_the_passes(passes, epochs, said):
    """They are epochs of each training: max-local-epochs, 20 by default, holds for the product."""
    run = {"strategy": "fedavg", "patches-per-volume": passes, "local-epochs": epochs}
    faults = [f.partition("the run ")[2] for f in setting_faults(Policy(), run)]
    assert faults == said


def test_a_window_of_a_linear_network_is_the_network():
    """Where outputs depend on one pixel alone, the average over windows is the output itself."""
    x = torch.rand(2, 1, 7, 9, 8)
    outputs = Window((4, 4, 4))(lambda part: torch.cat([part, 1 - part], 1), x)
    near(outputs, torch.cat([x, 1 - x], 1), 1e-5)


LIMITED = """
import resource, sys
import subprocess
import sys
from functools import partial
from pathlib import Path
import torch
from torch import nn
from models.flat import FlatModel
from models.samples import Samples
from models.tasks import segmentation, task_of
from models.tasks.patches import Patches, Window, sliding_window
from models.training import loss_gradient
from partitions.npz import write_npz
from partitions.silo_file import read_silo_file

torch.set_num_threads(1)
sides, rng = (64, 128, 128), torch.Generator().manual_seed(0)
task, model, window = task_of("segmentation"), FlatModel(nn.Conv3d(1, 2, 1)), Window(sides)
sliding_window()
line = next(l for l in open("/proc/self/status") if l.startswith("VmData"))
most = int(line.split()[1]) * 1024 + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
data = read_silo_file(Path(sys.argv[1]))
train, test = (Samples(s.x, s.y, window=window) for s in (data.train, data.test))
place = partial(Patches(sides, 1, 0.5).place, rng=rng)
for x, y in train.cuts(torch.arange(len(train)).split(2), place):
    loss_gradient(model, x, y, task.own_loss)
print("done", len(train), task.evaluate(model, test)["dice"])
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="limits what Linux counts")
def test_cts_train_in_less_memory_than_they_have(tmp_path):
    """20 of 512 x 512 x 200, 3.1 GB with their outlines, in 2 GB; one of them is drawn and measured whole."""
    whole, counts = (200, 512, 512), {"train": 18, "val": 1, "test": 1}
    scan = np.broadcast_to(np.arange(200, dtype=np.int16)[:, None, None], (1, *whole))
    mask = np.zeros(whole, np.uint8)
    mask[20:40, 100:140, 200:240] = 1
    arrays = {"task": np.array("segmentation"), "classes": np.array(2)}
    samples = {}
    for split, n in counts.items():
        for name, one in ((f"x_{split}", scan), (f"y_{split}", mask)):
            arrays[name] = np.broadcast_to(one, (n, *one.shape))
            samples[name] = [one] * n
    write_npz(tmp_path / "cts.npz", arrays, samples)
    found = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            LIMITED,
            str(tmp_path / "cts.npz"),
            str(2 * 10**9),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert found.stdout.startswith("done 18"), found.stderr[-2000:]
    (tmp_path / "cts.npz").unlink()


def test_a_large_volume_is_measured_in_slabs(monkeypatch):
    """Losses and Dice of 3 samples are those of the whole."""
    outputs = torch.randn(3, 4, 9, 6, 5, generator=rng())
    y = torch.randint(0, 4, (3, 9, 6, 5), generator=rng(1))
    y[0, :2] = 255
    task = task_of("segmentation")
    whole = task.measure(outputs, y)
    monkeypatch.setattr(segmentation, "SLAB", 800)
    assert len(list(segmentation.in_slabs(outputs, y))) == 5
    assert task.measure(outputs, y) == pytest.approx(whole, rel=1e-12)
