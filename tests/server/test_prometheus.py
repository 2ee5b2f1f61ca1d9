"""`/metrics` with the real Prometheus, and the Grafana dashboard's queries there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import httpx
import pytest
from tiny import json_of
from watching import done, event, round_done, served, write

from server.watch.board import Board
from server.watch.serve import exposition

ROOT = Path(__file__).parents[2]
DASHBOARD = json_of(ROOT / "docs/grafana.json")
SECONDS = 60.0


def events():
    local = [*round_done(1, {"a": 0.5, "b": 0.5}, rounds=1, strategy="local"), done("local")]
    first, second = (round_done(n, {"a": 0.5 + n / 8, "b": 0.75}, rounds=4) for n in (1, 2))
    return [*local, *first, second[0], event("reply", silo="a", seconds=1.5), second[1]]


def queries():
    """The dashboard's queries, for all methods and seeds."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return [re.sub(r"\$(strategy|seed)", ".*", query) for query in found]


def test_the_dashboard_asks_for_numbers_that_there_are():
    board = Board()
    for one in events():
        board.take(one)
    answer = exposition({**board.picture(), "fault": ""}).decode()
    known = set(re.findall(r"^(silofl_\w+)\{", answer, flags=re.MULTILINE))
    asked = set(re.findall(r"silofl_\w+", " ".join(queries())))
    assert asked and asked <= known
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD["panels"]))) <= names
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.fixture
def prometheus(tmp_path):
    """The address of a Prometheus that reads a watched run."""
    if shutil.which("prometheus") is None:
        pytest.skip("there is no prometheus on this machine")
    write(tmp_path / "run", *events())
    with served(
        str(tmp_path / "run"), "--port", "0", "--token-file", str(tmp_path / "token")
    ) as (address, _):
        port = address.split("/")[2].rpartition(":")[2]
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 200ms}\n"
            "scrape_configs:\n"
            "  - job_name: silofl\n"
            f"    authorization: {{credentials_file: {tmp_path / 'token'}}}\n"
            f"    static_configs: [{{targets: ['127.0.0.1:{port}']}}]\n"
        )
        command = [
            "prometheus",
            f"--config.file={tmp_path / 'prometheus.yml'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        command.append(f"--storage.tsdb.path={tmp_path / 'db'}")
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stderr is not None
                line = next(one for one in process.stderr if "Listening on" in one)
                yield "http://" + re.findall(r"127\.0\.0\.1:\d+", line)[-1]
            finally:
                process.kill()


@pytest.mark.deployed
def test_prometheus_reads_it_and_answers_the_dashboard(prometheus):
    """Every query of the dashboard is valid there, and has an answer."""
    until = time.monotonic() + SECONDS
    with httpx.Client(base_url=prometheus, timeout=SECONDS) as client:
        for query in queries():
            while True:
                answer = client.get("/api/v1/query", params={"query": query}).json()
                assert answer["status"] == "success", (query, answer)
                if answer["data"]["result"]:
                    break
                assert time.monotonic() < until, (query, client.get("/api/v1/targets").text)


def test_promtool_finds_nothing_to_mend(tmp_path):
    if shutil.which("promtool") is None:
        pytest.skip("there is no promtool on this machine")
    board = Board()
    for one in events():
        board.take(one)
    numbers = exposition({**board.picture(), "fault": ""})
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=numbers, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, b""), checked.stderr
