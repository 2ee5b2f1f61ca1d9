"""Demo data of a federation: split once, each part assigned to a silo's name."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.datasets.registry import load_dataset
from partitions.own.index import ENDING, keep_index
from server.deploy.federation import Federation
from server.results.manifest import read_manifest, write_partition


def split_demo(
    federation: Federation, directory: Path, echo: Callable[[str], None]
) -> dict[str, Path]:
    """Return each silo's data file; first split the demo data if they do not exist as requested, and make indices.

    A part stays assigned to its silo's name (`owner` in `manifest.json`). A new silo gets a part without an owner, or
    else the part of a silo that is no longer in the file. Raises UserError if there is none.
    """
    data = {silo.name: silo.data for silo in federation.silos if silo.data is not None}
    for file in data.values():
        if file.name.endswith(ENDING):
            keep_index(file, echo)
    demo, users = federation.demo, [silo.name for silo in federation.demo_silos]
    if demo is None or not users:
        return data
    folder = directory / "data"
    manifest = read_manifest(folder)
    parts = manifest.get("silos", [])
    same = split_of(manifest) == split_of(demo.model_dump())
    count = demo.parts or (len(parts) if same else len(users))
    if not same or len(parts) != count:
        echo(
            f"splitting {demo.dataset} ({demo.partition}, seed {demo.seed}) over {count} silos"
        )
        from strategies.base.run_settings import parse_settings

        dataset = load_dataset(demo.dataset, os.environ.get("SILOFL_DATA", ""))
        settings = parse_settings(
            {**demo.settings, "partition": demo.partition, "seed": demo.seed}
        )
        manifest = write_partition(
            dataset,
            demo.partition,
            folder,
            silos=count,
            seed=demo.seed,
            settings=settings.partition,
            validation=settings.common.validation,
        )
    before = [part.get("owner") for part in manifest["silos"]]
    owners = assign_parts(federation, before, users, echo)
    for part, owner in zip(manifest["silos"], owners, strict=True):
        part["owner"] = owner
    if owners != before:
        write_atomically(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    files = {part["owner"]: folder / part["file"] for part in manifest["silos"]}
    return data | {name: files[name] for name in users}


def split_of(content: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what determines the parts, of a manifest or a federation's demo data: with all settings."""
    from strategies.base.run_settings import defaults

    partition = str(content.get("partition", ""))
    known = {
        key: value
        for key, value in defaults().items()
        if key.startswith(f"{partition}.") or key == "validation"
    }
    settings = known | dict(content.get("settings", {}))
    return content.get("dataset"), partition, content.get("seed"), settings


def assign_parts(
    federation: Federation,
    owners: Sequence[str | None],
    users: Sequence[str],
    echo: Callable[[str], None],
) -> list[str | None]:
    """Return each part's owner (None: no owner); each silo in `users` keeps its part or gets one."""
    assigned = list(owners)
    for name in (user for user in users if user not in owners):
        free = [i for i, owner in enumerate(assigned) if owner is None]
        free = free or [i for i, owner in enumerate(assigned) if owner not in users]
        if not free:
            raise UserError(
                f"{federation.path}: silo {name}: the demo data are split into {len(assigned)} parts, and other silos "
                f"have them: give {name} a file of its own, or write `parts: {len(users)}` into `demo`, which splits "
                "them anew for every silo"
            )
        if assigned[free[0]]:
            echo(
                f"{name} gets the demo data of {assigned[free[0]]}, which is no longer in {federation.path}"
            )
        assigned[free[0]] = name
    return assigned
