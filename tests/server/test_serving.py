"""``silofl predict --serve``: the answers of ``silofl predict``, and who gets none."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import subprocess
import sys

import httpx
import pytest
from predictions import read_rows, trained_on_visits
from taken import silofl

from client.export import export_model, read_model
from client.prediction.new_samples import recipe_of
from client.prediction.posted import MOST_BYTES, MOST_ROWS
from client.prediction.predict import predict_file
from server.serving import prediction_app

TOKEN = "0123456789abcdef-token"
OLD = {"Patient-ID": "X-1", "age": "81,5", "sex": "w", "dose": 3}
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Run, model, and what its application needs."""
    run, model = trained_on_visits(tmp_path_factory.mktemp("served"))
    card, net = read_model(model)
    return run, model, (card, net, recipe_of(card))


def ask(served, content, path="/predict", token="", **headers):
    """One request; ``content``: JSON, or bytes as they are; None for GET."""

    card, net, recipe = served[2]

    async def go():
        transport = httpx.ASGITransport(prediction_app(card, net, recipe, token))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8643"
        ) as client:
            given = {**JSON, **{k.replace("_", "-"): v for k, v in headers.items()}}
            if content is None:
                return await client.get(path, headers=given)
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            return await client.post(path, content=body, headers=given)

    return asyncio.run(go())


def test_the_answers_are_those_of_a_csv(served, tmp_path):
    """Numbers as numbers or texts, null for a gap, columns in any order."""
    rows = [
        OLD,
        {"sex": "m", "dose": None, "age": None, "Patient-ID": "X-2"},
        {**OLD, "age": 35.25, "dose": "0"},
    ]
    answer = ask(served, {"rows": rows})
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    cells = [["3", "w", "81,5", "X-1"], ["", "m", "", "X-2"], ["0", "w", "35,25", "X-1"]]
    text = io.StringIO()
    csv.writer(text, delimiter=";").writerows([["dose", "sex", "age", "Patient-ID"], *cells])
    (tmp_path / "new.csv").write_text(text.getvalue())
    wanted = read_rows(predict_file(served[1], tmp_path / "new.csv"))
    found = [
        {k: v if isinstance(v, str) else f"{v:.6g}" for k, v in row.items()}
        for row in answer.json()["rows"]
    ]
    assert found == wanted and list(found[0]) == [
        "Patient-ID",
        "label",
        "p_ill, acute",
        "p_well",
    ]


def test_it_says_what_it_takes(served):
    about = ask(served, None, "/").json()
    assert [column["name"] for column in about["columns"]] == ["age", "sex", "dose"]
    assert about["also"] == ["Patient-ID"] and about["columns"][1]["categories"] == ["m", "w"]
    assert any("no conformal threshold" in line for line in about["answers"])


@pytest.mark.parametrize(
    ("content", "status", "words"),
    [
        (
            {"rows": [{**OLD, "BMI": 3}]},
            422,
            "row 1 has columns that the recipe does not have: BMI",
        ),
        (
            {"rows": [OLD, {k: v for k, v in OLD.items() if k != "age"}]},
            422,
            "row 2 has no column age",
        ),
        ({"rows": [{**OLD, "sex": "x"}]}, 422, "row 1: sex is 'x', none of m, w"),
        ({"rows": [{**OLD, "age": "81.5"}]}, 422, "row 1: age is '81.5', no number"),
        ({"rows": [{**OLD, "age": [1]}]}, 422, "row 1, age is no text, number or null"),
        ({"rows": [{**OLD, "age": True}]}, 422, "row 1, age is no text, number or null"),
        ({"rows": [{**OLD, "age": 1e300}]}, 422, "no number"),
        (b'{"rows": [{"age": NaN}]}', 422, "no JSON (NaN is no number)"),
        (b'{"rows": [{"age": 1, "age": 2}]}', 422, "named twice"),
        (b'{"rows": ' + b"[" * 100_000, 422, "no JSON"),
        (b"\xff\xfe\x00", 422, "no JSON"),
        *(
            (
                {"rows": [{**OLD, key: f"x{half}"}]},
                422,
                "no JSON (a text in it has half a character",
            )
            for key in ("Patient-ID", "age", "sex", "\ud800")
            for half in ("\ud800", "\udfff")
        ),
        ({"rows": [{**OLD, "age": 10**4000}]}, 422, "no number"),
        (
            b'{"rows": [{"age": ' + b"1" * 100_000,
            422,
            "no JSON (a number in it has too many digits)",
        ),
        ({"rows": []}, 422, "0 rows; 1 to 1000"),
        ({"rows": [OLD] * (MOST_ROWS + 1)}, 422, "1001 rows"),
        ({"rows": [OLD], "model": "other"}, 422, "the request is no"),
        ({"rows": [3]}, 422, "the request is no"),
        ([OLD], 422, "the request is no"),
        (b" " * (MOST_BYTES + 1), 413, "more than 1048576 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(served, content, status, words, capsys):
    """In one line without a path, and not a word of it in the log."""
    answer = ask(served, content)
    assert answer.status_code == status and words in answer.json()["error"]
    assert "\n" not in answer.json()["error"] and "/" not in answer.json()["error"]
    assert capsys.readouterr() == ("", "")


def test_a_fault_tells_nothing_of_the_patient(served, monkeypatch, capsys):
    def broken(*_):
        raise RuntimeError("/secret/path: patient X-1 is 81")

    monkeypatch.setattr("server.serving.predict_rows", broken)
    answer = ask(served, {"rows": [OLD]})
    assert (answer.status_code, answer.json()) == (
        500,
        {"error": "a fault of silofl; the request is not answered"},
    )
    out, err = capsys.readouterr()
    assert out == "" and err == "a fault of silofl: RuntimeError; please report it\n"


def test_memory_that_ran_out_is_no_fault(served, monkeypatch, capsys):
    def too_large(*_):
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 81 bytes"
        )

    monkeypatch.setattr("server.serving.predict_rows", too_large)
    answer = ask(served, {"rows": [OLD]})
    assert (answer.status_code, answer.json()) == (
        503,
        {"error": "out of memory: send less at once"},
    )
    assert capsys.readouterr() == ("", "out of memory: a request is not answered\n")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1.evil.example:8643"}, 403),
        ({"host": "[::1]@evil.example:8643"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}, 403),
        ({"content_type": "text/plain"}, 415),
        ({"content_type": ""}, 415),
        ({"origin": "http://127.0.0.1:8643", "sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_pages_of_other_sites_get_nothing(served, headers, status):
    answer = ask(served, {"rows": [OLD]}, **headers)
    assert answer.status_code == status and ("p_well" in answer.text) == (status == 200)
    assert "access-control-allow-origin" not in answer.headers


def test_beyond_loopback_a_token_is_needed(served):
    elsewhere = {"host": "server.example:8643"}
    refused = ask(served, {"rows": [OLD]}, token=TOKEN, **elsewhere)
    assert (
        refused.status_code == 401
        and "Authorization: Bearer" in refused.text
        and TOKEN not in refused.text
    )
    assert (
        ask(
            served, {"rows": [OLD]}, token=TOKEN, authorization="Bearer wrong", **elsewhere
        ).status_code
        == 401
    )
    assert (
        ask(
            served, {"rows": [OLD]}, token=TOKEN, authorization=f"Bearer {TOKEN}", **elsewhere
        ).status_code
        == 200
    )


def test_the_command_line(served, tmp_path, capsys):
    run, model, _ = served
    bare = tmp_path / "bare.safetensors"
    export_model(run, "hospital-01", "last", bare, recipe=False)
    for given, words in (
        (["--model", str(model)], "--data FILE is missing"),
        (f"--model {model} --serve --data x.csv".split(), "leave --data"),
        (f"--model {model} --data x.csv --port 1".split(), "belong to --serve"),
        (["--model", str(bare), "--serve"], "has no recipe"),
    ):
        assert silofl("predict", *given) == 2 and words in capsys.readouterr().err


def test_a_real_server(served):
    """The printed address answers, over a socket; standard error stays empty."""
    given = f"-m server.cli.main predict --serve --port 0 --model {served[1]}"
    command = [sys.executable, *given.split()]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None and server.stderr is not None
            address = server.stdout.readline().strip()
            found = httpx.post(f"{address}predict", json={"rows": [OLD]}, timeout=60)
            assert found.json() == ask(served, {"rows": [OLD]}).json()
            assert (
                httpx.post(
                    f"{address}predict", json={"rows": [{"age": "x"}]}, timeout=60
                ).status_code
                == 422
            )
        finally:
            server.terminate()
        assert server.stderr.read() == ""
