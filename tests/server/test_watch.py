"""`silofl watch` without a browser: what events become, who may read, the numbers, the terminal."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from failing import fails
from flwr.app import ConfigRecord, Context, RecordDict
from fuzz import FEW, VALUES
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from taken import silofl
from tiny import federate, settings_of
from watching import begin, done, event, round_done, write

import server.watch.source
from client.progress import note_failure
from partitions.common.errors import DataError, UserError
from server.cli.main import main
from server.results.summary import run_summary
from server.run.withdrawal import without
from server.watch.access import cookie_name, read_token, token_for
from server.watch.board import Board
from server.watch.serve import Follower, exposition, listen, serve, watch_app
from server.watch.source import WatchSource, find_source, lines
from strategies.base.client import SiloClient

TOKEN = "0123456789abcdef-token"


def board(*events, own=""):
    found = Board(own)
    for one in events:
        found.take(one)
    return found


def silo(picture, name):
    return next(row for row in picture["run"]["silos"] if row["name"] == name)


# ---------------------------------------------------------------------------------------------------------------------
# The board


def test_a_real_run_is_shown_as_the_report_has_it(three, tmp_path):
    """Two methods in one directory: best round and scores are those of `summary.json`, and gains its gains so far."""
    board = Board()
    entries = {}
    for method in ("local", "apple"):
        run = federate(
            three, directory=tmp_path / method, strategy=method, rounds=4, learning_rate=0.3
        )
        entries[method] = run_summary(run.federation.history, run.federation.finish_run())
        for line in (tmp_path / method / "progress.jsonl").read_text().splitlines():
            board.take(json.loads(line))
        board.take(done(method) | {"seed": 7})
    picture = board.picture()
    for shown in picture["runs"]:
        entry = entries[shown["strategy"]]
        assert (shown["state"], shown["round"], shown["rounds"], shown["score"]) == (
            "done",
            4,
            4,
            "accuracy",
        )
        assert shown["best_round"] == entry["final"]["round"]
        assert shown["best_test"] == pytest.approx(entry["final"]["accuracy_mean"])
    for name in three:
        gain = (
            entries["apple"]["per_silo"][name]["accuracy"]
            - entries["local"]["per_silo"][name]["accuracy"]
        )
        assert silo(picture, name)["gain"] == pytest.approx(gain)
    assert picture["run"]["bytes"] == sum(
        entries["apple"][key] for key in ("bytes_down", "bytes_up")
    )
    json.dumps(picture, allow_nan=False)


def test_who_trains_who_has_answered_and_who_is_late():
    """Four are asked. Three answer in 2, 4 and 6 s: the last one is late after max(5, 2 * 4) seconds."""
    found = board(begin(3, dict.fromkeys("abcd", "train"), rounds=9, time=1000.0))
    assert {row["doing"] for row in found.picture(1001)["run"]["silos"]} == {"train"}
    for name, seconds in (("a", 2.0), ("b", 4.0), ("c", 6.0)):
        found.take(event("reply", silo=name, seconds=seconds))
    assert [silo(found.picture(1007), name)["doing"] for name in "abcd"] == [
        "",
        "",
        "",
        "train",
    ]
    assert silo(found.picture(1008.5), "d")["doing"] == "late"
    found.take(event("transfer", message="receiving a reply: 40 of 100 MB; waits for d"))
    assert found.picture()["run"]["transfer"].startswith("receiving a reply: 40 of 100 MB")
    assert silo(found.picture(1007), "b")["seconds"] == 4.0


def test_who_was_left_out_and_why():
    found = board(*round_done(1, {"a": 0.5}, rounds=3, rejected={"b": "no reply within 300 s"}))
    row = silo(found.picture(), "b")
    assert (row["left_out"], row["missed"]) == ("no reply within 300 s", 1)
    for one in round_done(2, {"a": 0.5, "b": 0.5}, rounds=3):
        found.take(one)
    row = silo(found.picture(), "b")
    assert (row["left_out"], row["missed"]) == ("", 1)


def test_time_to_the_end_is_by_the_pace_of_the_last_rounds():
    found = board(*[one for n in (1, 2, 3) for one in round_done(n, {"a": 0.5}, rounds=10)])
    assert found.picture()["run"]["left"] == 2.0 * 7
    found.take(
        event("stopped", after=3, rounds=10, since=1, message="stops after round 3 of 10")
    )
    found.take(done())
    run = found.picture()["run"]
    assert (run["left"], run["state"], run["why"]) == (
        None,
        "done",
        "stops after round 3 of 10",
    )


def test_a_failed_run_says_why():
    run = board(
        *round_done(1, {"a": 0.5}, rounds=3), event("error", message="no silo\nreplied")
    ).picture()["run"]
    assert (run["state"], run["why"]) == ("failed", "no silo replied")


def test_a_site_sees_its_own_row_only():
    """Whatever stands in the file: names, scores and reasons of others are in nothing that is shown."""
    events = [
        event("silos", samples={"a": 3, "other": 4}, left_out={"third": "it is away"}),
        *round_done(
            1, {"a": 0.5, "other": 0.7512853}, rounds=3, rejected={"third": "secret reason"}
        ),
        event("transfer", message="receiving; waits for other"),
        event("reply", silo="other", seconds=1.0),
    ]
    found = board(*events, own="a")
    shown = json.dumps(found.picture())
    assert not re.search(r"other|third|secret|0\.7512853", shown)
    assert [row["name"] for row in found.picture()["run"]["silos"]] == ["a"]


FIELDS = (
    "strategy seed round rounds number silos silo seconds time per_silo rejected bounded score message samples "
    "left_out epsilon bytes"
)
KINDS = "begin round reply silos closed error note transfer stopped done"


@FEW
@given(
    st.lists(st.dictionaries(st.sampled_from(FIELDS.split()), VALUES, max_size=4), max_size=3)
)
def test_no_event_breaks_the_picture(events):
    """Any JSON value in any field: the picture is JSON, without NaN."""
    found = Board()
    for kind in KINDS.split():
        for one in events:
            found.take({"strategy": "fedavg", "seed": 1, **one, "event": kind})
    json.dumps(found.picture(5.0), allow_nan=False)
    exposition({**found.picture(5.0), "fault": ""})


def test_a_silo_that_withdraws_leaves_no_name_in_the_events():
    """`silofl withdraw` takes its keys out of every table; a line about it alone goes."""
    for one in round_done(1, {"a": 0.5, "b": 0.5}, rounds=2):
        assert '"b"' not in json.dumps(
            {k: v for k, v in without(one, "b", []).items() if isinstance(v, dict)}
        )


def test_the_closing_evaluation_may_be_the_best_round():
    """Of the received model the last one is evaluated after the last round; it is named as in the report."""
    found = board(
        *[one for n in (1, 2) for one in round_done(n, {"a": n / 10, "b": n / 10}, rounds=2)]
    )
    scores = {name: {"val": 0.5, "test": 0.75} for name in "ab"}
    found.take(event("closed", number=2, score="accuracy", per_silo=scores))
    run = found.picture()["runs"][0]
    assert (run["best_round"], run["best_when"], run["best_validation"], run["best_test"]) == (
        3,
        "after 2",
        0.5,
        0.75,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The file


def test_lines_are_taken_in_once_and_whole(tmp_path):
    write(tmp_path, *round_done(1, {"a": 0.5}, rounds=9))
    source = WatchSource(tmp_path)
    assert source.poll() and not source.poll()
    file = tmp_path / "progress.jsonl"
    two = "".join(json.dumps(one) + "\n" for one in round_done(2, {"a": 0.6}, rounds=9))
    with file.open("a") as writing:
        writing.write("no JSON\n[1]\n" + two[:-20])
    assert source.poll()
    assert source.board.picture()["run"]["round"] == 1
    with file.open("a") as writing:
        writing.write(two[-20:])
    assert source.poll()
    assert source.board.picture()["run"]["round"] == 2
    assert source.board.picture()["run"]["bytes"] == 6000


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    write(tmp_path, *round_done(1, {"a": 0.5, "gone": 0.5}, rounds=9))
    source = WatchSource(tmp_path)
    source.poll()
    os.replace(tmp_path / "progress.jsonl", tmp_path / "old")
    write(tmp_path, *round_done(1, {"a": 0.5}, rounds=9))
    assert source.poll()
    assert [row["name"] for row in source.board.picture()["run"]["silos"]] == ["a"]


def test_a_long_file_is_read_in_parts(tmp_path, monkeypatch, capsys):
    """So that the page answers meanwhile; a line without an end is passed over; one picture is of the whole file."""
    monkeypatch.setattr(server.watch.source, "LARGEST", 2000)
    for number in range(1, 9):
        write(tmp_path, *round_done(number, {"a": number / 10}, rounds=9))
    with (tmp_path / "progress.jsonl").open("a") as writing:
        writing.write("x" * 5000 + "\n")
    write(tmp_path, *round_done(9, {"a": 0.9}, rounds=9))
    source = WatchSource(tmp_path)
    assert source.poll()
    assert source.board.picture()["run"]["round"] < 8
    assert silofl("watch", tmp_path, "--text", "--once") == 0
    assert "round 9 of 9" in capsys.readouterr().out


def test_a_folder_of_runs_shows_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, strategy, seconds in (("first", "local", 100), ("second", "apple", 200)):
        (tmp_path / "runs").mkdir(exist_ok=True)
        write(tmp_path / "runs" / name, *round_done(1, {"a": 0.5}, rounds=2, strategy=strategy))
        os.utime(tmp_path / "runs" / name / "progress.jsonl", (seconds, seconds))
    source = find_source("")
    source.poll()
    assert (source.title, source.board.picture()["run"]["strategy"]) == ("second", "apple")
    os.utime(tmp_path / "runs/first/progress.jsonl", (300, 300))
    source.poll()
    assert (source.title, source.board.picture()["run"]["strategy"]) == ("first", "local")


def test_it_waits_for_a_federations_first_run(tmp_path, monkeypatch, capsys):
    """Runs of a connection land in `runs/`, which the first run makes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "config.toml").write_text(
        "[superlink.hospitals]\naddress = '127.0.0.1:9093'\ninsecure = true\n"
    )
    assert silofl("watch", "hospitals", "--text", "--once") == 0
    assert capsys.readouterr().out == "runs: no run has begun\n"
    source = find_source("hospitals")
    assert not source.poll()
    (tmp_path / "runs").mkdir()
    write(tmp_path / "runs/first", *round_done(1, {"a": 0.5}, rounds=2))
    assert source.poll() and source.title == "first"


def test_what_is_not_there_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    for arguments in (
        ["watch"],
        ["watch", "nowhere"],
        ["watch", "--once"],
        ["watch", "--host", "0.0.0.0", "x"],
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1 and said[0].startswith("silofl watch: ")


def test_a_port_that_is_taken_is_one_line():
    line = r"cannot listen on 127\.0\.0\.1, port .*--port 0"
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match=line):
        listen("127.0.0.1", taken.getsockname()[1])


def test_a_hospital_follows_its_own_silo(three, tmp_path, capsys):
    """From its own state directory: rounds, own scores and bytes."""
    run = federate(
        three,
        directory=tmp_path / "run",
        state_dir=tmp_path / "state",
        strategy="fedavg",
        rounds=2,
    )
    source = WatchSource(tmp_path / "state", "b")
    source.poll()
    picture = source.board.picture()
    assert [row["name"] for row in picture["run"]["silos"]] == ["b"]
    assert (picture["run"]["state"], picture["run"]["round"], picture["run"]["rounds"]) == (
        "done",
        2,
        2,
    )
    assert silo(picture, "b")["test"] == run.values("accuracy", "b", "received")[-1]
    assert picture["run"]["bytes_up"] == run.values("bytes_up")[0] / 3 * 2
    assert silofl("watch", tmp_path / "state", "--text", "--once") == 2
    assert "holds the states of several silos: a, b, c" in capsys.readouterr().err


def test_a_hospitals_page_shows_a_round_that_has_failed(three, tmp_path, monkeypatch):
    """The reason, and that it no longer trains; the next round that counts clears it."""
    train = SiloClient.train
    seen: list[dict[str, Any]] = []

    def trains(self, **options):
        if (self.silo.name, self.round) == ("b", 2):
            raise DataError("the disk of b is slow")
        train(self, **options)

    def look(progress):
        source.poll()
        seen.append(silo(source.board.picture(), "b"))

    source = WatchSource(tmp_path / "state", "b")
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(SiloClient, "train", trains)
    given = {"directory": tmp_path / "run", "state_dir": tmp_path / "state", "watch": look}
    federate(three, strategy="fedavg", rounds=3, **given)
    assert [(row["doing"], row["left_out"], row["missed"]) for row in seen] == [
        ("", "", 0),
        ("", "the disk of b is slow", 1),
        ("", "", 1),
    ]
    assert source.board.picture()["notes"][0]["text"] == "the disk of b is slow"


def test_a_hospital_sees_that_the_server_is_silent_and_that_a_run_has_failed(monkeypatch):
    """Between messages it cannot know more than when the last one came; a message clears a failure."""
    begun = event("begin", number=2, rounds=9, time=1000.0, silos={"a": "train"})
    rows = board(begun, own="a").picture(1300.0)
    assert (rows["run"]["heard"], "last message" in "".join(lines(rows, "a"))) == (None, False)
    answered = (
        *round_done(2, {"a": 0.5}, rounds=9),
        begun,
        event("reply", silo="a", seconds=7.0),
    )
    assert "running, last message 5 min ago" in " ".join(
        lines(board(*answered, own="a").picture(1300.0), "a")
    ).replace("round 2 of 9, ", "").replace(", round 2 of 9", "")
    assert (
        board(*answered).picture(1300.0)["run"]["heard"] is None
    )  # a server has its own clock
    failed = board(
        *answered, event("left_out", silo="a", time="now", message="no disk"), own="a"
    )
    picture = failed.picture(1300.0)
    assert (picture["run"]["state"], picture["run"]["why"]) == ("failed", "no disk")
    failed.take(begun)
    assert failed.picture(1300.0)["run"]["state"] == "running"


def test_a_message_that_is_refused_before_any_run_has_begun_leaves_nothing(three, tmp_path):
    """A server cannot fill a hospital's disk with names of runs that its policy refuses."""
    context = Context(
        1, 1, {"state-dir": str(tmp_path / "state"), "name": "b"}, RecordDict(), {}
    )
    for config in (
        {"config": ConfigRecord({"run": "r", "run_id": "0" * 16})},
        {"config": ConfigRecord()},
        {},
    ):
        content = RecordDict(config)  # type: ignore[arg-type]
        message: Any = SimpleNamespace(content=content, has_content=lambda: True)
        note_failure(message, context, settings_of(three, strategy="fedavg"), "refused")
    assert not (tmp_path / "state").exists()


def test_a_hospital_sees_its_gains_over_training_alone(tmp_path):
    """The runs of a study are files of their own at a site; a newer run of that name, and of another, counts."""

    def at_site(run, method, run_id, score, seconds):
        folder = tmp_path / run / f"{method}-1" / "b" / f"run-{run_id}"
        folder.mkdir(parents=True)
        write(folder, *round_done(1, {"b": score}, rounds=1, strategy=method), done(method))
        os.utime(folder / "progress.jsonl", (seconds, seconds))

    at_site("first", "local", "0" * 16, 0.1, 100)
    at_site("first", "local", "1" * 16, 0.5, 200)
    at_site("first", "fedavg", "2" * 16, 0.75, 300)
    source = WatchSource(tmp_path, "b")
    source.poll()
    picture = source.board.picture()
    assert [(run["strategy"], run["best_test"]) for run in picture["runs"]] == [
        ("local", 0.5),
        ("fedavg", 0.75),
    ]
    assert silo(picture, "b")["gain"] == 0.25
    at_site("second", "apple", "3" * 16, 0.6, 400)
    source.poll()
    assert [run["strategy"] for run in source.board.picture()["runs"]] == ["apple"]


def test_epsilon_is_on_both_pages(three, tmp_path):
    """What the history has, by silo; at a hospital its own."""
    private = {"dp": True, "dp__noise_multiplier": 2.0, "normalization": "none"}
    run = federate(
        three,
        directory=tmp_path / "run",
        state_dir=tmp_path / "state",
        strategy="fedavg",
        rounds=2,
        **private,
    )
    for source in (WatchSource(tmp_path / "run"), WatchSource(tmp_path / "state", "b")):
        source.poll()
        picture = source.board.picture()
        for row in picture["run"]["silos"]:
            wanted = [
                r.value for r in run.rows if (r.silo, r.metric) == (row["name"], "epsilon")
            ][-1]
            assert row["epsilon"] == wanted > 0
    assert "epsilon" in exposition({**picture, "fault": ""}).decode()


def test_a_simulation_writes_no_events_of_silos(three, tmp_path):
    federate(three, directory=tmp_path / "run", strategy="fedavg", rounds=1)
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("progress.jsonl")] == [
        Path("run/progress.jsonl")
    ]


# ---------------------------------------------------------------------------------------------------------------------
# Who may read


def ask(folder, path, token="", **headers):
    """One request to the application, as a browser at 127.0.0.1 sends it."""

    async def go():
        transport = httpx.ASGITransport(watch_app(WatchSource(folder), token))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8642"
        ) as client:
            return await client.get(
                path, headers={k.replace("_", "-"): v for k, v in headers.items()}
            )

    return asyncio.run(go())


@pytest.mark.parametrize("path", ["/", "/metrics", "/health"])
@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8642", "", "[::1"),
        *(
            "[::1]@evil",
            "[::1]@evil:8642",
            "evil@localhost",
            "evil:x@127.0.0.1:80",
            "[::1]evil",
        ),
        *(
            "localhost/evil",
            "localhost?evil",
            "localhost#",
            "localhost:evil",
            "localhost:1:2",
            " localhost",
        ),
        *("[localhost]", "[127.0.0.1]:1", "localhost:", "localhost:123456", "local\thost"),
    ],
)
def test_a_name_that_is_not_loopbacks_is_refused(tmp_path, path, host):
    """DNS rebinding: the request comes to this machine, under another site's name."""
    assert ask(tmp_path, path, host=host).status_code == 403


@pytest.mark.parametrize("host", ["127.0.0.1:9999", "localhost:5000", "[::1]:8642"])
def test_loopbacks_names_are_answered_on_any_port(tmp_path, host):
    """`ssh -L 5000:localhost:8642` gives the page another port."""
    assert ask(tmp_path, "/", host=host).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {
            "sec_fetch_site": "cross-site",
            "sec_fetch_mode": "no-cors",
            "sec_fetch_dest": "image",
        },
        {"sec_fetch_site": "same-site", "sec_fetch_mode": "cors", "sec_fetch_dest": "empty"},
        {
            "sec_fetch_site": "cross-site",
            "sec_fetch_mode": "navigate",
            "sec_fetch_dest": "iframe",
        },
    ],
)
@pytest.mark.parametrize("token", ["", TOKEN])
def test_requests_of_other_sites_are_refused(tmp_path, headers, token):
    given = {"authorization": f"Bearer {TOKEN}", **headers}
    assert ask(tmp_path, "/metrics", token, **given).status_code == 403


def test_a_link_to_the_page_may_be_followed(tmp_path):
    headers = {
        "sec_fetch_site": "cross-site",
        "sec_fetch_mode": "navigate",
        "sec_fetch_dest": "document",
    }
    assert ask(tmp_path, "/", **headers).status_code == 200


def test_beyond_loopback_a_token_is_needed(tmp_path):
    elsewhere = {"host": "server.example:8642"}
    for path in ("/", "/events", "/metrics", "/?token=wrong", "/metrics?token=" + TOKEN):
        assert ask(tmp_path, path, TOKEN, **elsewhere).status_code == 401
    assert (
        ask(
            tmp_path, "/metrics", TOKEN, authorization=f"Bearer {TOKEN}", **elsewhere
        ).status_code
        == 200
    )
    assert (
        ask(
            tmp_path, "/metrics", TOKEN, authorization=f"Basic {TOKEN}", **elsewhere
        ).status_code
        == 401
    )
    assert (
        ask(
            tmp_path,
            "/",
            TOKEN,
            cookie=f"{cookie_name(elsewhere['host'])}={TOKEN}",
            **elsewhere,
        ).status_code
        == 200
    )
    other = f"{cookie_name('server.example:8643')}={TOKEN}"  # browsers send it to all ports of a host
    assert ask(tmp_path, "/", TOKEN, cookie=other, **elsewhere).status_code == 401
    opened = ask(tmp_path, f"/?token={TOKEN}", TOKEN, **elsewhere)
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    assert opened.headers["set-cookie"].startswith("silofl-8642=")
    assert (
        "HttpOnly" in opened.headers["set-cookie"]
        and "SameSite=lax" in opened.headers["set-cookie"]
    )
    health = ask(tmp_path, "/health", TOKEN, **elsewhere)
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


def test_every_answer_forbids_what_the_page_does_not_need(tmp_path):
    for path, status in (("/", 200), ("/metrics", 200), ("/none", 404)):
        answer = ask(tmp_path, path)
        assert answer.status_code == status
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert (
            answer.headers["x-frame-options"] == "DENY"
            and answer.headers["cache-control"] == "no-store"
        )
        assert "access-control-allow-origin" not in answer.headers
    page = ask(tmp_path, "/").text
    assert not re.search(r"(?:src|href)=\"(?!data:,)", page) and "http" not in page.replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_it_is_read_only(tmp_path):
    async def go(method):
        transport = httpx.ASGITransport(watch_app(WatchSource(tmp_path)))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1"
        ) as client:
            return (await client.request(method, "/")).status_code

    assert {
        asyncio.run(go(method)) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")
    } == {405}


def test_a_token_file_is_made_for_its_owner(tmp_path):
    token = read_token(tmp_path / "token")
    assert len(token) > 30 and (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert read_token(tmp_path / "token") == token
    (tmp_path / "token").chmod(0o644)
    fails(UserError, "others may read it", read_token, tmp_path / "token")
    (tmp_path / "short").write_bytes(b"\xff" * 30)
    fails(UserError, "16 or more", read_token, tmp_path / "short")
    (tmp_path / "short").write_text("1234\n")
    fails(UserError, "16 or more", read_token, tmp_path / "short")


def test_a_token_of_a_file_is_not_printed(tmp_path, capsys, monkeypatch):
    """Neither for the page nor for a served model, which print their address by the same function."""
    monkeypatch.setattr("uvicorn.Server.run", lambda *args, **options: None)
    for host in ("127.0.0.1", "0.0.0.0"):
        token = token_for(host, tmp_path / "token")
        serve(WatchSource(tmp_path), host, 0, token)
        said = "".join(capsys.readouterr())
        assert token.text == (tmp_path / "token").read_text().strip() and token.text not in said
        assert f"with the token in {tmp_path / 'token'}" in said
    serve(WatchSource(tmp_path), "0.0.0.0", 0, printed := token_for("0.0.0.0", None))
    assert f"?token={printed.text}\n" in capsys.readouterr().out
    assert token_for("127.0.0.1", None).text == ""


# ---------------------------------------------------------------------------------------------------------------------
# Stream, numbers, health, terminal


def test_the_stream_begins_with_the_picture_and_goes_on_with_news(tmp_path):
    write(tmp_path, *round_done(1, {"a": 0.5}, rounds=3))

    async def go():
        follower = Follower(WatchSource(tmp_path))
        follower.poll()
        stream = follower.stream()
        told = [await anext(stream), await anext(stream)]
        task = asyncio.create_task(follower.follow())
        write(tmp_path, *round_done(2, {"a": 0.75}, rounds=3))
        while "0.75" not in told[-1]:
            told.append(await anext(stream))
        task.cancel()
        return told

    told = asyncio.run(asyncio.wait_for(go(), 60))
    assert told[0] == "retry: 1000\n\n"
    pictures = [json.loads(one.partition("data: ")[2]) for one in told[1:] if "data: " in one]
    assert [pictures[0]["run"]["round"], pictures[-1]["run"]["round"]] == [1, 2]


def test_numbers_for_prometheus(tmp_path):
    """Every sample by the reader of the same library; names of silos are labels, whatever stands in them."""
    odd = 'a"b\\c\nd'
    events = [
        *round_done(1, {odd: 0.25, "b": 0.75}, rounds=4, rejected={"c": "away"}),
        *round_done(1, {"b": 0.5}, rounds=4, strategy="local"),
    ]
    found = board(*events[:4], done("local"), *round_done(2, {odd: 0.5, "b": 0.75}, rounds=4))
    answer = exposition({**found.picture(), "fault": ""}).decode()
    samples = {
        (s.name, *sorted(s.labels.items())): s.value
        for f in text_string_to_metric_families(answer)
        for s in f.samples
    }
    run = (("seed", "1"), ("strategy", "fedavg"))
    named = lambda silo, *more: tuple(sorted([*run, ("silo", silo), *more]))  # noqa: E731
    assert samples["silofl_run_rounds_done", *run] == 2
    assert samples["silofl_run_rounds_planned", *run] == 4
    assert samples["silofl_silo_score", *named(odd, ("part", "test"))] == 0.5
    assert samples["silofl_silo_gain_over_local", *named("b")] == 0.25
    assert samples["silofl_silo_rounds_missed", *named("c")] == 1
    assert samples["silofl_payload_bytes_total", *sorted([*run, ("direction", "up")])] == 2000
    assert samples["silofl_run_state", *sorted([*run, ("state", "running")])] == 1
    assert samples["silofl_remaining_seconds", *run] == 4.0
    assert samples["silofl_source_readable",] == 1


def test_health_says_whether_the_source_can_be_read(tmp_path):
    async def go(change):
        app = watch_app(WatchSource(tmp_path / "run"))
        async with app.router.lifespan_context(app):
            change()
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                while True:
                    await asyncio.sleep(0)  # the follower's turn
                    answer = await client.get("/health")
                    if answer.status_code != 200 or (tmp_path / "run").exists():
                        return answer.status_code, answer.json()["status"]

    (tmp_path / "run").mkdir()
    assert asyncio.run(go(lambda: None)) == (200, "ok")
    assert asyncio.run(go((tmp_path / "run").rmdir)) == (503, "source unreadable")


def test_one_picture_in_the_terminal(tmp_path, capsys):
    """No markup and no control sign of a silo's text reaches the terminal."""
    reason = "[red]no reply[/red] \x1b[2J"
    write(
        tmp_path,
        *round_done(1, {"a": 0.5}, rounds=3, rejected={"b": reason}),
        event("note", message="a\x07b", time="now"),
    )
    assert silofl("watch", tmp_path, "--text", "--once") == 0
    shown = capsys.readouterr().out
    assert "round 1 of 3" in shown and "0.5000" in shown and "[red]" in shown
    assert [line.split()[0] for line in shown.splitlines()[1:]] == ["silo", "a", "b"]
    assert "\x1b" not in shown and "\x07" not in shown


def test_a_run_that_has_not_begun(tmp_path, capsys):
    (tmp_path / "config.toml").write_text("")
    assert silofl("watch", tmp_path, "--text", "--once") == 0
    assert capsys.readouterr().out == f"{tmp_path.name}: no run has begun\n"
