# mypy: disable-error-code="arg-type"
# Stand-ins for the Control API.
"""The server's containers: what `setup` hands to whom, who is registered again after a restart, where runs land."""

import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from partitions.common.errors import UserError
from partitions.common.files import private, share_new_files
from server.cli.main import main
from server.deploy import registrar, setup
from server.deploy.control import Connection, Node, remove_connection, write_connection
from server.deploy.credentials import ensure_credentials
from server.deploy.federation import read_federation
from server.deploy.local.record import Deployed, find_deployed, write_record
from server.deploy.setup import register_silos, set_up
from server.deploy.submit import open_directory

ROOT = Path(__file__).parents[3]


class FakeControl:
    """A SuperLink's Control API as Flower answers it: a key can be registered once, and never again once it was
    unregistered; names need not differ.
    """

    def __init__(self, *_):
        self.registered: dict[int, tuple[str, bytes]] = {}
        self.unregistered: set[bytes] = set()
        self.silent_calls = 0  # how many calls fail before it answers, as while it starts

    def __enter__(self):
        return self

    def __exit__(self, *_): ...

    def nodes(self):
        if self.silent_calls:
            self.silent_calls -= 1
            raise ConnectionError("no answer")
        return [
            Node(number, name, "registered", key.strip(), 0.0)
            for number, (name, key) in self.registered.items()
        ]

    def register(self, name, public_key):
        if public_key in {*self.unregistered, *(key for _, key in self.registered.values())}:
            raise ConnectionError("refused: public key already in use")
        number = len(self.registered) + len(self.unregistered) + 1
        self.registered[number] = (name, public_key)
        return number

    def unregister(self, node_id):
        self.unregistered.add(self.registered.pop(node_id)[1])

    def shut_out(self):
        self.nodes()
        return {key.strip() for key in self.unregistered}

    @property
    def names(self):
        return sorted(name for name, _ in self.registered.values())


# --- setup ------------------------------------------------------------------------------------------------

FEDERATION = """\
name: net
demo: {{dataset: digits, partition: iid, seed: 1}}
silos:
{silos}"""


def prepare(root, *silos):
    """The folders that Docker mounts, and the environment of the service."""
    for name in silos:
        for kind in ("site", "data"):
            (root / "volumes" / kind / name).mkdir(parents=True, exist_ok=True)
    for name in ("setup", "server", "tmp"):
        (root / name).mkdir(exist_ok=True)
    listed = "".join(f"- {{name: {name}, data: demo}}\n" for name in silos)
    return {
        "SILOFL_FEDERATION": FEDERATION.format(silos=listed),
        "SILOFL_HOSTS": "localhost superlink control",
    }


@pytest.fixture
def control(monkeypatch):
    fake = FakeControl()
    monkeypatch.setattr(setup, "Control", lambda _, service: fake)
    monkeypatch.delenv("SILOFL_DATA", raising=False)
    return fake


def test_each_gets_its_own_and_nothing_else(tmp_path, control):
    set_up(prepare(tmp_path, "north", "south"), tmp_path)
    assert control.names == ["north", "south"]
    server = {path.name for path in (tmp_path / "server").iterdir()}
    # Not the CA's key
    files = {"ca.crt", "server.crt", "server.key", "receipt.key", "ready"}
    assert server == files | {"operators.json"}
    assert (tmp_path / "server/ready").read_text() == "localhost superlink control"
    volumes = tmp_path / "volumes"
    for name in ("north", "south"):
        assert {path.name for path in (volumes / "site" / name).iterdir()} == {
            "ca.crt",
            "node.key",
        }
        assert {path.name for path in (volumes / "data" / name).iterdir()} == {"data.npz"}
        key = volumes / "site" / name / "node.key"
        assert key.read_bytes() == (tmp_path / "setup/credentials/nodes" / name).read_bytes()
    for kind, file in (("site", "node.key"), ("data", "data.npz")):
        north, south = (volumes / kind / name / file for name in ("north", "south"))
        assert north.read_bytes() != south.read_bytes()
    for path in [*volumes.glob("site/*/*"), tmp_path / "server/server.key"]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_second_time_keeps_everything(tmp_path, control):
    environment = prepare(tmp_path, "north")
    set_up(environment, tmp_path)
    before = {
        path: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    set_up(environment, tmp_path)
    for path, content in before.items():
        if path.name not in ("federation.yaml", "operators.json", "ready"):
            assert (path.read_bytes(), path.stat().st_mtime_ns) == content
    assert control.names == ["north"]


def test_a_silo_more_and_a_silo_less(tmp_path, control):
    """`west` comes, `south` goes; the CA and `north` stay; a hospital that joined with a bundle is left alone."""
    set_up(prepare(tmp_path, "north", "south"), tmp_path)
    control.register("clinic", b"its own key")
    ca = (tmp_path / "server/ca.crt").read_bytes()
    key = (tmp_path / "volumes/site/north/node.key").read_bytes()
    set_up(prepare(tmp_path, "north", "west"), tmp_path)
    assert control.names == ["clinic", "north", "west"]
    assert (tmp_path / "server/ca.crt").read_bytes() == ca
    assert (tmp_path / "volumes/site/north/node.key").read_bytes() == key
    assert not (tmp_path / "setup/credentials/nodes/south").exists()


def test_a_removed_silo_that_is_still_in_the_file_gets_a_new_key(tmp_path, control):
    """As with `silofl up`; the SuperLink is busy at first. `south` keeps its key, and a third time nothing changes."""
    environment = prepare(tmp_path, "north", "south")
    set_up(environment, tmp_path)
    keys = {name: tmp_path / "volumes/site" / name / "node.key" for name in ("north", "south")}
    before = {name: key.read_bytes() for name, key in keys.items()}
    control.unregister(
        next(number for number, (name, _) in control.registered.items() if name == "north")
    )
    control.silent_calls = 2
    set_up(environment, tmp_path)
    assert control.names == ["north", "south"]
    after = {name: key.read_bytes() for name, key in keys.items()}
    assert after["south"] == before["south"] and after["north"] != before["north"]
    assert after["north"] == (tmp_path / "setup/credentials/nodes/north").read_bytes()
    set_up(environment, tmp_path)
    assert {
        name: key.read_bytes() for name, key in keys.items()
    } == after and control.names == ["north", "south"]


def test_a_new_address_gets_a_new_certificate_under_the_same_ca(tmp_path, control):
    environment = prepare(tmp_path, "north")
    set_up(environment, tmp_path)
    before = {
        name: (tmp_path / "server" / name).read_bytes() for name in ("ca.crt", "server.crt")
    }
    set_up(
        environment | {"SILOFL_HOSTS": "localhost superlink control fl.example.org"}, tmp_path
    )
    assert (tmp_path / "server/ca.crt").read_bytes() == before["ca.crt"]
    assert (tmp_path / "server/server.crt").read_bytes() != before["server.crt"]
    # What the SuperLink waits for before it starts.
    assert (tmp_path / "server/ready").read_text().endswith("fl.example.org")


# --- registrations over a restart -------------------------------------------------------------------------


def test_who_was_registered_is_registered_again(tmp_path, monkeypatch):
    monkeypatch.setattr(registrar.time, "sleep", lambda _: None)
    record = tmp_path / "registered.json"
    registrar.write(record, {"KEY 1\n": "north", "KEY 2\n": "clinic"})
    fresh = FakeControl()
    fresh.silent_calls = 3  # it is still starting
    assert registrar.restore_nodes(fresh, record) == {"KEY 1\n": "north", "KEY 2\n": "clinic"}
    assert fresh.names == ["clinic", "north"]
    registrar.restore_nodes(fresh, record)  # nobody twice
    assert fresh.names == ["clinic", "north"]


def test_setup_and_registrar_may_both_be_at_it(monkeypatch):
    """The other one registers the key between our look and our call: refused, looked at again, found."""
    monkeypatch.setattr(registrar.time, "sleep", lambda _: None)

    class Racing(FakeControl):
        def register(self, name, public_key):
            if not self.registered:
                super().register("the other one", public_key)
            return super().register(name, public_key)

    racing = Racing()
    assert registrar.register(racing, {"KEY\n": "north"}) == {"KEY\n": "the other one"}
    assert racing.names == ["the other one"]


def test_changes_are_noted_and_a_removed_silo_stays_out(tmp_path, monkeypatch):
    """Round 1: a clinic has joined; 2: the SuperLink is busy; 3: the clinic was removed; then the test ends."""
    record, ready = tmp_path / "registered.json", tmp_path / "ready"
    control = FakeControl()
    control.register("north", b"KEY 1\n")
    monkeypatch.setattr(registrar, "Control", lambda _, service: control)
    seen = []

    class Done(Exception):
        pass

    def pause(_):
        seen.append(sorted(registrar.read(record).values()))
        if len(seen) == 1:
            assert ready.exists()
            control.register("clinic", b"KEY 2\n")
        elif len(seen) == 2:
            control.silent_calls = 1
        elif len(seen) == 3:
            control.unregister(2)
        elif len(seen) == 4:
            raise Done

    monkeypatch.setattr(registrar.time, "sleep", pause)
    with pytest.raises(Done):
        registrar.keep_registrations(Connection("x", "y:1"), record, ready)
    assert seen == [[], ["clinic", "north"], ["clinic", "north"], ["north"]]


def test_a_damaged_record_is_not_taken_for_an_empty_one(tmp_path):
    (tmp_path / "registered.json").write_text('{"KEY')
    with pytest.raises(ValueError, match="is damaged"):
        registrar.restore_nodes(FakeControl(), tmp_path / "registered.json")


def test_register_silos_with_real_keys(tmp_path):
    """The keys are registered as Flower wants them: PEM."""
    path = tmp_path / "federation.yaml"
    path.write_text(FEDERATION.format(silos="- {name: north, data: demo}\n"))
    made = ensure_credentials(tmp_path / "credentials", silos=["north"], hosts=["x"])
    control = FakeControl()
    register_silos(read_federation(path), made, control)
    assert list(control.registered.values()) == [("north", made.node_public_pem("north"))]


# --- the host ---------------------------------------------------------------------------------------------


@pytest.fixture
def known(tmp_path, monkeypatch):
    """A federation in containers that the host has connected to."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    found = Deployed(
        name="net",
        file="federation.yaml",
        runs=str(tmp_path / "runs/net"),
        demo=None,
        connection=Connection("net", "127.0.0.1:8000", str(tmp_path / "ca.crt")),
    )
    folder = tmp_path / "state/silofl/net"
    folder.mkdir(parents=True)
    write_record(folder, found)
    write_connection(found.connection)
    return found


def test_a_run_directory_of_the_host_as_the_server_sees_it(known, tmp_path):
    assert known.in_container(tmp_path / "runs/net/today") == Path("/runs/today")
    with pytest.raises(
        ValueError, match=r"--out /elsewhere: the runs of net land in .*/runs/net"
    ):
        known.in_container(Path("/elsewhere"))


def test_a_run_directory_for_the_server_in_its_container(tmp_path):
    """The host's user opens it, the server's, another one, reads its settings and writes to it."""
    with private(), share_new_files():
        directory = open_directory(
            tmp_path / "runs" / "today", {"strategy": "fedavg"}, "federation.yaml", resume=False
        )
    modes = {
        p.name: stat.S_IMODE(p.stat().st_mode)
        for p in (directory.path, *directory.path.iterdir())
    }
    assert modes == {"today": 0o777, "config.toml": 0o666, "study": 0o666, ".lock": 0o666}
    image = (ROOT / "docker" / "Dockerfile").read_text().partition("FROM silo AS server")
    # The server's alone
    assert "SILOFL_SHARED=1" in image[2] and "SILOFL_SHARED" not in image[0]


def test_the_federation_behind_a_connection(known):
    assert find_deployed("net") == find_deployed() == known
    assert find_deployed("other") is None


def test_a_connection_that_another_federation_has_taken_over(known, tmp_path):
    """`docker compose down`, then `silofl up` with the same name: its runs are no containers' runs."""
    write_connection(replace(known.connection, address="127.0.0.1:8123"))
    assert find_deployed("net") is None


OTHERS = """\
# a person's own words
[superlink]
default = "there"

[superlink.there]  # theirs
address = "there:8000"
ports = [
["net"],
[1, 2],
]
"""
NET = """
[ superlink . "net" ]
address = "gone:1"  # ours
root-certificates = "{ca}"
[superlink.net.options]
a = 1
"""


def test_connections_of_a_person_stay_as_they_are(tmp_path, monkeypatch):
    """With comments, however its own entry is written; what cannot be cut out alone is left."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    connection = Connection("net", "127.0.0.1:8000", ca := str(tmp_path / "ca.crt"))
    file = tmp_path / "config.toml"
    for before in (OTHERS, NET.format(ca=ca) + OTHERS, OTHERS + NET.format(ca=ca)):
        file.write_text(before)
        write_connection(connection)
        written = tomllib.loads(file.read_text())["superlink"]
        assert written["net"]["address"] == "127.0.0.1:8000" and "options" not in written["net"]
        remove_connection(connection)
        assert file.read_text().strip() == OTHERS.strip()
    inline = f'[superlink]\nnet = {{address = "gone:1", root-certificates = "{ca}"}}\n'
    file.write_text(inline)
    with pytest.raises(UserError, match="without touching others; edit it by hand"):
        write_connection(connection)
    assert file.read_text() == inline


def test_run_outside_the_servers_folder_is_one_line(known, tmp_path, monkeypatch, capsys):
    control = FakeControl()
    control.register("north", b"KEY\n")
    monkeypatch.setattr("server.deploy.submit.Control", lambda _: control)
    assert main(f"run --strategy fedavg --out {tmp_path}/mine".split()) == 2
    assert f"--out {tmp_path / 'mine'}: the runs of net land in" in capsys.readouterr().err
    assert not (tmp_path / "mine").exists()


def test_credentials_without_containers_are_made_here(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "federation.yaml"
    path.write_text(FEDERATION.format(silos="- {name: north, data: demo}\n"))
    assert main(["credentials", str(path)]) == 0
    out, err = capsys.readouterr()
    made = tmp_path / "state/silofl/net/credentials"
    assert f"keys of 1 silos in {made}" in out and "PRIVATE" not in out + err
    assert stat.S_IMODE((made / "nodes/north").stat().st_mode) == 0o600
    key = (made / "nodes/north").read_bytes()
    assert main(["credentials", str(path)]) == 0
    assert (made / "nodes/north").read_bytes() == key
