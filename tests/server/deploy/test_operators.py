"""Who may do what: a call is signed by an operator whose role allows it, or refused; and what changes is in the log."""

from __future__ import annotations

import hashlib
import ssl
from base64 import b64encode
from functools import partial

import anyio
import httpx
import pytest
import yaml
from failing import fails
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from client.flower.control import FIELDS
from client.flower.fleet import sign_call
from client.protocol.keys import load_key
from partitions.common.errors import DataError, UserError
from server.cli.main import main
from server.deploy import local, processes
from server.deploy.access.gate import LATEST, NEEDED, Gate
from server.deploy.access.operators import (
    KEY,
    SERVICE,
    Actions,
    Operator,
    make_key,
    write_operators,
)
from server.deploy.control import Connection, Control
from server.deploy.federation import read_federation
from server.deploy.local import record

NAMES = {"vera": "viewer", "otto": "operator", "olga": "owner"}
BODY = b"what is asked"


@pytest.fixture
def keys(tmp_path):
    return {name: tmp_path / f"{name}.key" for name in (*NAMES, "mallory")}


@pytest.fixture
def gate(tmp_path, keys):
    """A server behind the gate; `mallory` has a key that nobody named."""
    known = tuple(
        Operator(name=name, role=role, key=make_key(keys[name]))  # type: ignore[arg-type]
        for name, role in NAMES.items()
    )
    make_key(keys["mallory"])
    write_operators(tmp_path, tmp_path, known)

    async def echo(request):
        return PlainTextResponse(await request.body())

    middleware = Middleware(
        Gate, operators=tmp_path / "operators.json", log=tmp_path / "actions"
    )
    return Starlette(
        routes=[Route("/{path:path}", echo, methods=["POST"])], middleware=[middleware]
    )


def headers_of(key, path, body=BODY, at=None):
    public, moment, signature = sign_call(load_key(key), path, body, at)
    values = (public, moment.encode(), signature)
    return {name: b64encode(value).decode() for name, value in zip(FIELDS, values, strict=True)}


def call(app, path, headers, body=BODY):
    async def post():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post(path, content=body, headers=headers)

    return anyio.run(post)


def why(answer):
    assert answer.status_code == 403
    return answer.json()


@pytest.mark.parametrize("name", NAMES)
def test_a_role_may_do_this_and_no_more(gate, keys, tmp_path, name):
    allowed = {
        "vera": {"list-nodes", "list-runs", "stream-logs"},
        "otto": {"list-nodes", "list-runs", "stream-logs", "start-run", "stop-run"},
    }
    calls = [*NEEDED, "register-node", "unregister-node", "start-automation", "never-heard-of"]
    for action in calls:
        path = f"/v1/control/{action}"
        answer = call(gate, path, headers_of(keys[name], path))
        if action in allowed.get(name, calls):
            assert answer.content == BODY
        else:
            assert f"{name} is {NAMES[name]}, and {action} needs" in why(answer)
    noted = Actions(tmp_path / "actions").verify()
    assert not noted.faults
    # What only reads is not in it
    assert [line["action"] for line in noted.entries] == calls[3:]
    assert {line["name"] for line in noted.entries} == {name}
    assert {line["digest"] for line in noted.entries} == {hashlib.sha256(BODY).hexdigest()}


PATH = "/v1/control/stop-run"


@pytest.mark.parametrize(
    ("who", "sent", "says"),
    [
        ("", {}, "signed by none: `silofl operator add NAME`"),
        ("mallory", {}, "no operator's key"),
        ("otto", {"body": b"something else"}, "Invalid signature"),
        ("otto", {"path": "/v1/control/list-nodes"}, "Invalid signature"),
        ("otto", {"at": -LATEST - 1}, "Invalid timestamp"),
        ("otto", {"at": 60}, "Invalid timestamp"),
        ("otto", {"path": "/v1//control/stop-run"}, "Invalid signature"),
        ("", {"path": "/v1/anything"}, "signed by none"),
        ("", {"path": "/"}, "signed by none"),
    ],
)
def test_a_call_that_no_operator_signed_is_refused(
    gate, keys, tmp_path, monkeypatch, who, sent, says
):
    import time

    at = time.time() + sent["at"] if "at" in sent else None
    headers = headers_of(keys[who], PATH, at=at) if who else {}
    assert says in why(call(gate, sent.get("path", PATH), headers, sent.get("body", BODY)))
    assert not Actions(tmp_path / "actions").verify().entries


def test_a_call_is_made_once(gate, keys):
    """Also with the other of the two signatures that ECDSA has for it."""
    from cryptography.hazmat.primitives.asymmetric.utils import (
        decode_dss_signature,
        encode_dss_signature,
    )

    order = int(
        "ffffffffffffffffffffffffffffffffffffffffffffffffc7634d81f4372ddf581a0db248b0a77aecec196accc52973",
        16,
    )
    public, moment, signature = sign_call(load_key(keys["otto"]), PATH, BODY)
    r, s = decode_dss_signature(signature)
    for number, text in enumerate((signature, signature, encode_dss_signature(r, order - s))):
        values = (public, moment.encode(), text)
        headers = {n: b64encode(v).decode() for n, v in zip(FIELDS, values, strict=True)}
        answer = call(gate, PATH, headers)
        assert answer.content == BODY if number == 0 else "made before" in why(answer)


def test_what_cannot_be_noted_or_read_does_not_happen(gate, keys, tmp_path):
    (tmp_path / "actions").write_text("no folder")
    assert "log of actions cannot be written" in why(
        call(gate, PATH, headers_of(keys["otto"], PATH))
    )
    listing = "/v1/control/list-nodes"
    assert call(gate, listing, headers_of(keys["vera"], listing)).content == BODY
    for content in ("{", '{"operators": [{"name": "x"}]}', None):
        file = tmp_path / "operators.json"
        file.unlink() if content is None else file.write_text(content)
        assert "cannot read who may do what" in why(
            call(gate, PATH, headers_of(keys["olga"], PATH))
        )


def test_flowers_own_processes_have_their_own_api(gate):
    assert call(gate, "/v1/runtime/pull-task", {}).content == BODY


@pytest.mark.parametrize(
    ("operators", "says"),
    [
        ([("a", "viewer", "0"), ("b", "operator", "1")], "no one has `role: owner`"),
        ([("a", "owner", "0"), ("a", "viewer", "1")], "the name a is there twice"),
        ([("a", "owner", "0"), ("b", "viewer", "0")], "is there twice"),
        ([("a", "boss", "0")], "boss"),
        ([("a", "owner", "xyz")], "silofl operator add prints it"),
    ],
)
def test_operators_that_cannot_be(tmp_path, operators, says):
    listed = [
        {"name": name, "role": role, "key": f"SHA256:{key * 64 if len(key) == 1 else key}"}
        for name, role, key in operators
    ]
    file = tmp_path / "federation.yaml"
    file.write_text(yaml.safe_dump({"name": "x", "silos": [], "operators": listed}))
    assert fails(DataError, says, read_federation, file).count("\n") == 0


def test_a_name_is_checked_before_a_key_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(KEY, str(tmp_path / "ours.key"))
    for name in ("Alice", "", "a" * 80):
        assert main(["operator", "add", name]) == 2
        error = capsys.readouterr().err
        assert "is no name" in error and error.count("\n") == 1 and not [*tmp_path.iterdir()]
    assert main(["operator", "add", "alice"]) == 0


def test_a_damaged_operators_key_has_its_own_remedy(tmp_path, monkeypatch, capsys):
    """A person's at both ends; that of the server's own processes is made by `silofl up`."""
    monkeypatch.setenv(KEY, str(tmp_path / "ours.key"))
    for name in ("ours.key", SERVICE):
        (tmp_path / name).write_text("damaged")
    (tmp_path / "ca.crt").write_text("")
    server = Connection("net", "127.0.0.1:1", str(tmp_path / "ca.crt"))
    ours = r"remove it and run `silofl operator add NAME`, and put its new line into federation\.yaml$"
    fails(UserError, ours, Control, server)
    assert main(["operator", "add", "alice"]) == 2
    assert "remove it and run `silofl operator add NAME`" in capsys.readouterr().err
    for call in (partial(Control, server, service=True), partial(make_key, tmp_path / SERVICE)):
        fails(UserError, "remove it and run `silofl up`$", call)


@pytest.mark.exhaustive
@pytest.mark.deployed
@pytest.mark.timeout(300)
def test_a_federation_with_operators(tmp_path, monkeypatch, capsys):
    """As people use it: each with a key on a machine of their own (another file), one server, real calls."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    lines = []
    for name, role in NAMES.items():
        monkeypatch.setenv(KEY, str(tmp_path / f"{name}.key"))
        assert main(["operator", "add", name, "--role", role]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    file = tmp_path / "federation.yaml"
    text = (
        "name: ops\ndemo: {dataset: digits, partition: dirichlet, seed: 42}\nsilos:\n"
        + "".join(f"  - {{name: hospital-0{n}, data: demo}}\n" for n in (1, 2))
    )
    file.write_text(text + "operators:\n" + "\n".join(lines) + "\n")
    federation = ["--federation", str(file)]
    run = ["run", *federation, "--strategy", "fedavg", "--rounds", "1", "--set", "model=mlp"]

    def says(name, *words):
        monkeypatch.setenv(KEY, str(tmp_path / f"{name}.key"))
        code = main([*words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    try:
        assert main(["up", str(file)]) == 0
        capsys.readouterr()
        code, said = says("nobody", "status", *federation)
        assert code == 2 and "the call is signed by none" in said
        code, said = says("vera", "status", *federation)
        assert code == 0 and said.count("online") == 2
        code, said = says("vera", *run)
        assert code == 2 and "vera is viewer, and start-run needs operator" in said
        code, said = says("otto", *run, "--out", str(tmp_path / "run"))
        assert code == 0, said
        code, said = says("otto", "remove-silo", "hospital-02", *federation)
        assert code == 2 and "otto is operator, and unregister-node needs owner" in said
        assert says("olga", "remove-silo", "hospital-02", *federation)[0] == 0
        # Whoever reaches the loopback port by other means
        up = local.find_local("ops")
        context = ssl.create_default_context(cafile=up.connection.root_certificates)
        bare = httpx.post(
            f"https://{up.connection.address}/v1/control/list-runs", verify=context
        )
        assert bare.status_code == 403

        code, said = says("nobody", "operator", "log", *federation)
        people = [
            line.split("  ")[1:4] for line in said.splitlines() if "(o" in line or "(v" in line
        ]
        assert code == 0 and "none changed, missing or moved" in said
        assert [line for line in people if not line[0].startswith("server")] == [
            ["vera (viewer)", "start-run", "refused"],
            ["otto (operator)", "start-run", "passed on"],
            ["otto (operator)", "unregister-node", "refused"],
            ["olga (owner)", "unregister-node", "passed on"],
        ]
        # One that is taken out of the file, at the next `up`
        file.write_text(text + "operators:\n" + "\n".join(lines[1:]) + "\n")
        assert main(["up", str(file)]) == 0
        capsys.readouterr()
        code, said = says("vera", "status", *federation)
        assert code == 2 and "no operator's key" in said
        log = tmp_path / "state/silofl/ops/actions/actions-000001.jsonl"
        log.write_text(log.read_text().replace("otto", "olga"))
        assert says("olga", "operator", "log", *federation)[0] == 2
    finally:
        processes.end(processes.find(record.state_root() / "ops"), grace=1.0)
