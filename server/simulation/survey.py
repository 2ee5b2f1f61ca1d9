"""``silofl survey``: statistics of data files on this machine, of a simulation, or of a federation's silos."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

from client.protocol.policy import PUBLIC, default_file, read_policy
from partitions.common.errors import UserError
from partitions.common.names import silo_names
from partitions.simulated import data_files
from server.deploy import submit
from server.report.survey import write_survey_page
from server.results.survey import write_survey
from server.run.survey import survey_silos
from server.simulation.evaluate import new_directory, silos_here
from strategies.base.aggregation.secure import NEEDED
from strategies.base.run_settings import parse_settings
from strategies.base.settings import Value
from strategies.base.survey import SURVEY

RUN: Mapping[str, object] = {"strategy": SURVEY, "rounds": 1}


def survey(
    values: Mapping[str, object], out: Path, data: Path | None = None, policy: str = PUBLIC
) -> Path:
    """Survey in this process, and return the output directory.

    ``values``: settings of a simulation's data. ``data``: a hospital's file, or a folder with
    one file per hospital, in place of a simulation. ``policy``: the policy that applies to them. Raises UserError.
    """
    logging.getLogger("flwr").setLevel(logging.WARNING)
    files = [] if data is None else [data] if data.is_file() else data_files(data)
    if data is None and policy != PUBLIC:
        raise UserError("--policy goes with --data: a simulation's data are public")
    site = read_policy(policy)
    settings = parse_settings({**values, **({"silos": len(files)} if files else {}), **RUN})
    with new_directory(out), tempfile.TemporaryDirectory() as folder:
        if site.studies == "required":  # a preview of what would leave needs no approved study
            policy = f"{folder}/.policy.toml"
            Path(policy).write_text(default_file(**{**dict(site), "studies": "optional"}))
        names = zip(files, silo_names([file.stem for file in files]), strict=True)
        nodes: list[dict[str, Value]] = [
            {
                "name": name,
                "data": str(file.resolve()),
                "policy": policy,
                "state-dir": f"{folder}/{name}",
            }
            for file, name in names
        ]
        with silos_here(out, settings, settings, nodes) as grid:
            write_survey(out, survey_silos(grid, settings))
        write_survey_page(out)
    return out


def survey_deployed(values: Mapping[str, object], out: Path | None, connection: str) -> Path:
    """Survey the silos of a federation, and return the output directory. ``values``: settings, such as the study.

    Raises UserError, RunFailedError.
    """
    plain: dict[str, object] = {
        "hold-out": "",
        "patience": 0,
        "dp": False,
        "ala": False,
        "secure-robust": "none",
    }
    plain |= {key: value for key, (value, _) in NEEDED.items()}
    # Overrides the federation file's training settings
    settings = {**plain, **values, **RUN}
    return submit.run({**settings, **({"out": str(out)} if out else {})}, connection)
