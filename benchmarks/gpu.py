"""What one GPU gives: silofl's rounds against PFLlib's, number formats against float32.

    SILOFL_DATA=DIR python -m benchmarks.gpu [pfllib] [precision] [--pfllib FOLDER] [--repeats 5]

pfllib: one FedAvg round of 12 silos of MNIST on one GPU, in turns with PFLlib's own FedAvg (a checkout at FOLDER) on
the same parts, network, batches of 64 and steps; with both libraries' evaluation in each round, and without.
precision: one round of two silos of 512 random pictures, 224 x 224 in colour and 28 x 28 in grey, by ``precision`` and
``tf32``, and the most memory of the card that PyTorch took.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bare import Loop
from benchmarks.common import Prepared, interleaved, random_pictures, ratios, table

DEVICE = "cuda"
SILOS = 12
BATCH = 64
MNIST: dict[str, Any] = {
    "dataset": "mnist",
    "partition": "apple-practical",
    "silos": SILOS,
    "model": "fedala-cnn",
    "batch-size": BATCH,
    "learning-rate": 0.05,
    "device": DEVICE,
    "threads": 1,
}
FORMATS: dict[str, dict[str, Any]] = {
    "float32, tf32 = off": {"tf32": "off"},
    "float32, tf32 = auto": {},
    "float32, tf32 = on": {"tf32": "on"},
    "fp16": {"precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "bf16, deterministic": {"precision": "bf16", "deterministic": True},
}


class Theirs:
    """PFLlib's FedAvg on the parts of a federation of ours."""

    def __init__(
        self, checkout: Path, prepared: Prepared, folder: Path, *, evaluates: bool
    ) -> None:
        loop, common = Loop(prepared, channels_last=False), prepared.settings.common
        for silo, parts in enumerate(zip(loop.train, loop.val, strict=True)):
            for name, (x, y) in zip(("train", "test"), parts, strict=True):
                file = folder / "dataset" / "mnist" / name / f"{silo}.npz"
                file.parent.mkdir(parents=True, exist_ok=True)
                data = {"x": x.cpu().numpy(), "y": y.cpu().numpy()}
                np.savez_compressed(file, data=np.array(data, dtype=object))
        self.folder = folder / "system"
        self.folder.mkdir(exist_ok=True)
        sys.path.insert(0, str(checkout / "system"))
        from flcore.servers.serveravg import FedAvg  # type: ignore[import-not-found]

        options = argparse.Namespace(
            device=DEVICE,
            dataset="mnist",
            num_classes=10,
            global_rounds=1,
            local_epochs=1,
            batch_size=common.batch_size,
            local_learning_rate=common.learning_rate,
            learning_rate_decay=False,
            learning_rate_decay_gamma=1.0,
            model=loop.model.module,
            num_clients=len(loop.train),
            join_ratio=1.0,
            random_join_ratio=False,
            algorithm="FedAvg",
            time_select=False,
            goal="test",
            time_threthold=1e9,
            save_folder_name="items",
            top_cnt=100,
            auto_break=False,
            eval_gap=1,
            client_drop_rate=0.0,
            train_slow_rate=0.0,
            send_slow_rate=0.0,
            dlg_eval=False,
            dlg_gap=100,
            batch_num_per_client=2,
            num_new_clients=0,
            fine_tuning_epoch_new=0,
            privacy=False,
            dp_sigma=0.0,
        )
        with self.there():
            self.server = FedAvg(options, 0)
        self.server.save_results = self.server.save_global_model = lambda: None
        if not evaluates:
            self.server.evaluate = lambda: self.server.rs_test_acc.append(0.0)

    @contextlib.contextmanager
    def there(self) -> Any:
        """Its paths are relative, and it prints; both stay in here."""
        with contextlib.chdir(self.folder), contextlib.redirect_stdout(io.StringIO()):
            yield

    def two_rounds(self) -> None:
        """Run ``global_rounds`` + 1 rounds: its loop counts the first by 0."""
        with self.there():
            self.server.train()


def pfllib(checkout: Path, repeats: int) -> str:
    rows = []
    for evaluates in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            ours = Prepared({**MNIST, "evaluate-every": int(evaluates)})
            theirs = Theirs(checkout, ours, Path(folder), evaluates=evaluates)

            def two_rounds(ours: Prepared = ours) -> None:
                ours.round()
                ours.round()

            works = {"ours": two_rounds, "PFLlib": theirs.two_rounds}
            times = interleaved(works, repeats)
        rows.append(
            [
                "each round" if evaluates else "none",
                *(f"{statistics.median(times[n]) / 2:.3f}" for n in works),
                f"{ratios(times, 'ours')['PFLlib']:.1f}",
            ]
        )
    return table(rows, ["evaluation", "silofl, s", "PFLlib, s", "PFLlib over silofl"])


def precision(repeats: int) -> str:
    rows = []
    for model, shape in (
        ("resnet50", (224, 224, 3)),
        ("resnet18", (224, 224, 3)),
        ("fedala-cnn", (28, 28, 1)),
    ):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "random.npz"
            random_pictures(file, shape, 2, 512)
            values = {
                "dataset": str(file),
                "partition": "iid",
                "silos": 2,
                "model": model,
                "batch-size": BATCH,
                "learning-rate": 1e-3,
                "device": DEVICE,
            }
            works: dict[str, Callable[[], None]] = {}
            memory = {}
            for name, own in FORMATS.items():
                works[name] = Prepared({**values, **own}).round
                works[name]()
                torch.cuda.reset_peak_memory_stats()
                works[name]()
                memory[name] = torch.cuda.max_memory_allocated() / 2**30
            times = interleaved(works, repeats)
        base = next(iter(FORMATS))
        relative = ratios(times, base)
        for name in FORMATS:
            pictures = 1024 / statistics.median(times[name])
            rows.append(
                [model, name, f"{pictures:.0f}", f"{relative[name]:.2f}", f"{memory[name]:.2f}"]
            )
    return table(
        rows, ["network", "numbers", "pictures a second", "time over the first", "GiB"]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "what", nargs="*", default=["pfllib", "precision"], choices=["pfllib", "precision"]
    )
    parser.add_argument("--pfllib", type=Path, help="a checkout of PFLlib")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch sees no GPU here")
    if "pfllib" in args.what and args.pfllib is None:
        parser.error("pfllib needs a checkout of PFLlib: --pfllib FOLDER")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(torch.cuda.get_device_name(0), f"PyTorch {torch.__version__}\n")
    if "pfllib" in args.what:
        print(pfllib(args.pfllib.resolve(), args.repeats), "\n", flush=True)
    if "precision" in args.what:
        print(precision(args.repeats), "\n", flush=True)


if __name__ == "__main__":
    main()
