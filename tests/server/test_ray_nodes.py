"""A cluster of two Ray nodes: both work, and the numbers are those of no cluster."""

import os
import shutil

import pytest
from trio import rows
from two_nodes import RUN, STUDY, inside

from server.simulation.simulate import simulate


@pytest.mark.network
@pytest.mark.deployed
def test_two_nodes_have_the_history_of_none(tmp_path):
    """`silofl simulate --workers ray` spreads the runs of a study, `flwr run` the silos of one run."""
    if os.geteuid() != 0 or not (shutil.which("unshare") and shutil.which("ip")):
        pytest.skip("needs root, unshare and ip")
    pytest.importorskip("ray")
    assert inside(tmp_path) == [["127.0.0.2", "127.0.0.3"]] * 2
    for name, settings in (("study", STUDY), ("flower", RUN)):
        alone = simulate({**settings, "out": str(tmp_path / f"{name}-alone")}, quiet=True)
        assert rows(tmp_path / name) == rows(alone)
