"""Bundles: what `add-silo` writes and registers, what a site makes of it, `remove-silo`, `join`."""

import io
import os
import shlex
import signal
import stat
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from archives import untar
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from failing import fails
from representatives import seldom
from taken import silofl
from tiny import write_silo

from client.policies import policy_at
from client.protocol.keys import site_root
from client.protocol.node import Site, read_variables, supernode_command
from client.protocol.policy import Policy, read_policy
from client.site.runtime.doctor import data_checks
from client.site.runtime.supervisor import only_one
from client.site.trust.bundle import read_bundle, site_of, unpack_bundle
from client.site.trust.signing import check_signed
from partitions.schema import Feature, Schema
from server.deploy.bundle import Bundle, add_silo, pins, remove_silo
from server.deploy.control import Control, write_connection
from server.deploy.federation import read_federation
from server.deploy.study_draft import app_sums
from server.deploy.submit import app_directory

FILES = {
    ".env",
    "clinic.container",
    "clinic-install.container",
    "README.md",
    "allowed-apps",
    "bundle.json",
    "ca.crt",
    "docker-compose.yml",
    "node.key",
    "policy.toml",
}


def bundle(device="cpu", image=""):
    return Bundle(
        "clinic", "net", "fl.example.org:9092", b"CA", b"KEY", "# pins\n", device, image
    )


@pytest.fixture
def tar(tmp_path):
    path = tmp_path / "clinic.tar"
    bundle().write(path)
    return path


def refused(reason, bundle):
    fails(ValueError, reason, read_bundle, bundle)


# --- what is in a bundle ----------------------------------------------------------------------------------


def test_tar_and_its_files_are_their_owners_alone(tar):
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600
    with tarfile.open(tar) as archive:
        members = {member.name: member for member in archive}
    assert set(members) == {"clinic", *(f"clinic/{name}" for name in FILES)}
    assert members["clinic"].mode == 0o700
    assert all(member.mode == 0o600 for member in members.values() if member.isfile())
    assert list(tar.parent.iterdir()) == [tar]  # no temporary file stays


def test_the_federations_schema(tmp_path, capsys):
    """It lies in the bundle, `check-data` and `doctor` hold the data file against it; a bundle without one has none."""
    schema = Schema((Feature("age"), Feature("bmi")))
    replace(bundle(), schema=schema).write(tmp_path / "clinic.tar")
    files = read_bundle(tmp_path / "clinic.tar")
    assert files["schema.json"].decode() == schema.text
    unpack_bundle(files, tmp_path / "site")
    site = site_of(files, tmp_path / "site", tmp_path / "data.npz")
    x = np.arange(12, dtype=np.float32).reshape(6, 2)
    parts: dict[str, Any] = {"x": x, "y": np.arange(6) % 2}
    where = ["check-data", str(site.data), "--schema"]
    for names, code, said in (
        (
            ("bmi", "age"),
            0,
            "ok    federation's schema: columns in another order: each run maps them by name",
        ),
        (
            ("age", "sex"),
            2,
            "FAIL  federation's schema: has columns named sex, the federation has bmi",
        ),
        (
            (),
            2,
            "FAIL  federation's schema: has no names of its columns, the federation has age, bmi",
        ),
    ):
        np.savez(site.data, **(parts | ({"feature_names": names} if names else {})))
        for schema_of in (tmp_path / "clinic.tar", tmp_path / "site/schema.json"):
            assert silofl(*where, schema_of) == code and said in capsys.readouterr().out
        check = data_checks(site.data, site.schema)[-1]
        assert check.ok == (code == 0) and said.partition(": ")[2] in check.detail
    bundle().write(tmp_path / "other.tar")
    assert silofl(*where, tmp_path / "other.tar") == 2
    assert "other.tar has no schema: its federation declares none" in capsys.readouterr().err
    unpack_bundle(read_bundle(tmp_path / "other.tar"), tmp_path / "site")
    assert not (tmp_path / "site/schema.json").exists()


def test_doctor_asks_for_the_data_file(tmp_path, capsys, monkeypatch):
    """A bundle's .env names a place-holder, and that it is not there is no fault of the hospital's."""
    monkeypatch.chdir(tmp_path)
    bundle().write(tmp_path / "clinic.tar")
    assert silofl("doctor", "clinic.tar") == 2
    assert (
        "data.npz, as the bundle's .env has it: name your data file with --data FILE"
        in capsys.readouterr().err
    )


def test_an_existing_file_is_never_overwritten(tar):
    before = tar.read_bytes()
    fails(ValueError, "is there already", bundle().write, tar)
    assert tar.read_bytes() == before


def filled_in(device="cpu"):
    """The bundle's compose file with the variables of its `.env` put in, as compose does it."""
    files = bundle(device).files()
    text = str(files["docker-compose.yml"])
    for key, value in read_variables(str(files[".env"])).items():
        text = text.replace(f"${{{key}}}", value)
    assert "${" not in text
    return yaml.safe_load(text)


def test_the_container_takes_the_proxy_of_the_shell_that_starts_it():
    """Compose gives a variable without a value that of its shell, and none if that has none."""
    environment = filled_in()["services"]["silo"]["environment"]
    assert {name for name, value in environment.items() if value is None} == {
        "https_proxy",
        "no_proxy",
    }


def test_sites_containers_are_locked_down():
    services = filled_in()["services"]
    for name, service in services.items():
        assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert "ports" not in service, name
    assert services["install"]["network_mode"] == "none"
    assert services["silo"]["user"] == "10001:10001" and "cap_add" not in services["silo"]
    assert services["silo"]["environment"]["SILOFL_ALLOWED_APPS"] == "/site/allowed-apps"
    assert services["silo"]["environment"]["SILOFL_POLICY"] == "/site/policy.toml"
    assert services["silo"]["volumes"][0] == "site:/site:ro"
    data = services["silo"]["volumes"][3]
    assert data["read_only"] is True and data["bind"] == {"create_host_path": False}
    site = Site.from_environment(services["silo"]["environment"])
    assert supernode_command(site) == services["silo"]["command"]


@pytest.mark.parametrize("name", ["silo", "install"])
def test_podmans_units_are_the_compose_files_services(name):
    """Command, environment, mounts and rights; both run as the hospital's own user, who is 10001 in the container."""
    service = filled_in()["services"][name]
    unit = f"clinic{'-install' if name == 'install' else ''}.container"
    text = str(bundle().files()[unit]).split("[Container]\n")[1].split("\n\n[Service]")[0]
    keys = dict[str, list[str]]()
    for line in text.splitlines():
        key, _, value = line.partition("=")
        keys.setdefault(key, []).append(value)
    assert shlex.split(keys["Exec"][0]) == service["command"]
    told = dict(word.split("=") for word in keys["Environment"][0].split())
    assert told == {key: str(v) for key, v in service["environment"].items() if v}
    mounted = [volume.partition(":")[2] for volume in keys["Volume"]]
    binds = [v for v in service["volumes"] if isinstance(v, dict)]
    wanted = [v.partition(":")[2] for v in service["volumes"] if isinstance(v, str)]
    assert mounted == [*wanted, *(f"{bind['target']}:ro" for bind in binds)]
    assert keys["Image"] == [service["image"]] and keys["User"] == ["10001"]
    assert keys["UserNS"] == ["keep-id:uid=10001,gid=10001"]
    assert ["true"] == keys["ReadOnly"] == keys["RunInit"] == keys["NoNewPrivileges"]
    assert keys["DropCapability"] == ["all"] and "AddCapability" not in keys
    assert keys["Tmpfs"] == service["tmpfs"] and "PublishPort" not in keys
    assert keys.get("Network", [""])[0] == service.get("network_mode", "")


def test_another_unit_in_a_bundles_folder_is_not_what_was_signed(tmp_path, monkeypatch):
    """Podman would start it with the bundle's own."""
    # The signer that this site has seen is in its state
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    replace(bundle(), signing_key=Ed25519PrivateKey.generate()).write(tmp_path / "clinic.tar")
    untar(tmp_path / "clinic.tar", tmp_path)
    assert check_signed(
        read_bundle(tmp_path / "clinic"), unpacked=True, folder=tmp_path, echo=print
    )
    (tmp_path / "clinic/other.container").write_text("[Container]\nImage=evil\n")
    with pytest.raises(ValueError, match=r"other\.container is not what was signed"):
        check_signed(
            read_bundle(tmp_path / "clinic"), unpacked=True, folder=tmp_path, echo=print
        )


def test_a_bundle_for_a_gpu():
    assert "AddDevice=nvidia.com/gpu=2\n" in str(bundle("cuda:2").files()["clinic.container"])
    service = filled_in("cuda:2")["services"]["silo"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] == ["2"]
    assert service["environment"]["SILOFL_DEVICE"] == "cuda:0" and service["image"].endswith(
        "-gpu"
    )
    several = str(bundle("cuda:2,cuda:3").files()["clinic.container"])
    assert "AddDevice=nvidia.com/gpu=2\nAddDevice=nvidia.com/gpu=3\n" in several
    assert "device='cuda:0,cuda:1'" in several
    assert "SILOFL_IMAGE=registry/silo:1\n" in str(
        bundle(image="registry/silo:1").files()[".env"]
    )


def test_pins_are_the_app_that_flwr_run_ships(tmp_path):
    """The SHA-256 changes with the code and with nothing else; the file is one that a site reads."""
    from client.site.trust.code import read_pins

    app = tmp_path / "app"
    (app / "pkg").mkdir(parents=True)
    (app / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "1"\nlicense = "MIT"\n[tool.flwr.app]\npublisher = "y"\n'
        'fab-include = ["pkg/**/*.py"]\n[tool.flwr.app.components]\nserverapp = "pkg.a:app"\nclientapp = "pkg.a:app"\n'
    )
    (app / "pkg/a.py").write_text("app = 1\n")
    first = pins(app)
    (app / "data.csv").write_text("1")
    os.utime(app / "pkg/a.py", (0, 0))
    assert pins(app) == first
    (app / "pkg/a.py").write_text("app = 2\n")
    assert pins(app) != first
    (tmp_path / "allowed-apps").write_text(pins(app))
    # A study's sum, too
    assert list(read_pins(str(tmp_path / "allowed-apps"))) == app_sums(app)


# --- what a site makes of it ------------------------------------------------------------------------------


def members(path, extra, content=b""):
    """A tar of a bundle's files with one member more."""
    with tarfile.open(path, "w") as archive:
        for name in FILES:
            member = tarfile.TarInfo(f"clinic/{name}")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"x"))
        extra.size = extra.size or len(content)
        archive.addfile(extra, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(
            ("clinic/signed.json", kind)
            for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)
        ),
        ("clinic/signed.json", tarfile.FIFOTYPE),
        ("../signed.json", tarfile.REGTYPE),
        ("/etc/signed.json", tarfile.REGTYPE),
        ("clinic/deeper/signed.json", tarfile.REGTYPE),
        ("clinic/.env", tarfile.REGTYPE),  # a second time
        # Docker Compose would start it in place of the signed one
        ("clinic/compose.yaml", tarfile.REGTYPE),
        ("clinic/\x1b[2J", tarfile.REGTYPE),
        ("clinic/deeper", tarfile.DIRTYPE),
    ],
)
def test_a_tar_with_anything_but_a_bundles_files_is_refused(tmp_path, name, kind):
    """Links, devices, other paths and other files, which `tar` at the hospital would unpack."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "clinic/ca.crt"
    with pytest.raises(ValueError, match="which no bundle has in that form") as refused:
        read_bundle(members(tmp_path / "evil.tar", member))
    assert str(refused.value).isprintable()
    assert (
        len(read_bundle(members(tmp_path / "fine.tar", tarfile.TarInfo("clinic/signed.json"))))
        == len(FILES) + 1
    )


def test_a_bundle_that_is_too_large_is_not_read(tmp_path):
    member = tarfile.TarInfo("clinic/signed.json")
    refused(
        "which no bundle has in that form",
        members(tmp_path / "one.tar", member, bytes((1 << 20) + 1)),
    )
    with (tmp_path / "all.tar").open("wb") as file:
        file.truncate(1 << 30)
    refused("is too large for a bundle", tmp_path / "all.tar")


@pytest.mark.parametrize("kind", ["link", "dangling link", "folder", "pipe", "large"])
def test_in_a_bundles_folder_only_plain_files_are_read(tar, tmp_path, kind):
    """A link to a file elsewhere would bring that into the silo's volume."""
    untar(tar, tmp_path)
    folder = tmp_path / "clinic"
    file = folder / "policy.toml"
    file.rename(tmp_path / "elsewhere")
    if kind.endswith("link"):
        file.symlink_to(tmp_path / ("elsewhere" if kind == "link" else "nowhere"))
    elif kind == "large":
        file.write_bytes(bytes((1 << 20) + 1))
    else:
        file.mkdir() if kind == "folder" else os.mkfifo(file)
    refused(r"policy\.toml (is a symbolic link|is no plain file|has more than)", folder)
    for command in ("check-bundle", "join", "doctor"):
        assert silofl(command, folder, *(["--data", "x.npz"] if command == "join" else [])) == 2


@pytest.mark.parametrize("name", ["compose.yaml", "compose.yml", "docker-compose.yaml"])
def test_a_compose_file_that_would_start_instead(tar, tmp_path, capsys, monkeypatch, name):
    """Docker Compose prefers compose.yaml, and adds an override: the one is refused, the other named."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = tmp_path / "clinic"
    folder.mkdir()
    for file, content in read_bundle(tar).items():
        (folder / file).write_bytes(content)
    assert silofl("check-bundle", folder) == 0
    (folder / "docker-compose.override.yml").write_text("services: {}\n")
    assert silofl("check-bundle", folder) == 0
    assert (
        "not of the bundle: docker-compose.override.yml, which Docker Compose adds"
        in capsys.readouterr().out
    )
    (folder / name).write_text("services: {}\n")
    assert silofl("check-bundle", folder) == 2
    assert (
        f"{name}: Docker Compose would start this file in place of the bundle's"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, None])
def test_what_is_no_bundle(tar, tmp_path, content):
    path = tmp_path / "x.tar"
    path.write_bytes(tar.read_bytes()[:1500] if content is None else content)
    refused("is no bundle", path)
    refused("there is no bundle", tmp_path / "none.tar")
    refused(r"has no \.env", tmp_path)


def test_site_of_a_bundle(tar, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    site = site_of(read_bundle(tar), tmp_path / "files", tmp_path / "own.npz", "cuda:1")
    assert (site.name, site.server, site.device) == ("clinic", "fl.example.org:9092", "cuda:1")
    assert (site.data, site.state) == (
        tmp_path / "own.npz",
        tmp_path / "state/silofl-site/clinic/state",
    )
    assert site.allowed_apps == str(tmp_path / "files/allowed-apps")
    unpack_bundle(read_bundle(tar), tmp_path / "files")
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "files").iterdir()
    }
    assert modes == {
        "ca.crt": 0o600,
        "node.key": 0o600,
        "allowed-apps": 0o600,
        "policy.toml": 0o600,
    }
    assert (
        dict(read_policy(site.policy)).items()
        >= {"studies": "required", "where": site.policy, "floor": 10}.items()
    )
    files = read_bundle(tar)
    assert site_of(files, tmp_path, policy=tmp_path / "ours.toml").policy == str(
        tmp_path / "ours.toml"
    )
    old = {name: content for name, content in files.items() if name != "policy.toml"}
    assert read_policy(site_of(old, tmp_path).policy) == Policy()


@pytest.mark.parametrize(
    ("variables", "reason"),
    [("", "SILOFL_NAME is not set"), ("SILOFL_NAME=a", "SILOFL_SERVER is not set")],
)
def test_settings_that_are_missing(variables, reason):
    fails(ValueError, reason, site_of, {".env": variables.encode()}, Path("x"))


@pytest.mark.parametrize("server", ["fl.example.org", "a b:1", "a:b", "-:1 x", "http://a:1"])
def test_addresses_that_are_none(server):
    with pytest.raises(ValueError, match="no HOST:PORT"):
        site_of({".env": f"SILOFL_NAME=a\nSILOFL_SERVER={server}\n".encode()}, Path("x"))


@pytest.mark.parametrize("name", ["../../root", ".hidden", "a/b", "Clinic", "a b", "a\u202eb"])
def test_names_that_would_leave_the_state_directory(name):
    with pytest.raises(ValueError, match=r"no name of a silo|line 1 is"):
        site_of({".env": f"SILOFL_NAME={name}\nSILOFL_SERVER=a:1\n".encode()}, Path("x"))


def test_variables_as_compose_reads_them():
    text = "# a comment=1\n\nSILOFL_NAME=a\r\nSILOFL_DATA=/two words \nSILOFL_USER='1:2'\nSILOFL_IMAGE=a=b\n"
    found = {
        "SILOFL_NAME": "a",
        "SILOFL_DATA": "/two words",
        "SILOFL_USER": "1:2",
        "SILOFL_IMAGE": "a=b",
    }
    assert read_variables(text) == found


@pytest.mark.parametrize(
    "line",
    [
        "export SILOFL_SERVER=evil:1",
        " SILOFL_SERVER=evil:1",
        "SILOFL_SERVER = evil:1",
        "SILOFL_SERVER: evil:1",
        "SILOFL_SERVER",
        "SILOFL_SERVER=${OTHER}",
        "SILOFL_SERVER='evil:1",
        'SILOFL_SERVER=a""b:1',
        "SILOFL_SERVER=a:1 # b",
        "SILOFL_SERVER=a:1\\",
        "# a comment\rSILOFL_SERVER=evil:1",
        "# a comment\x85SILOFL_SERVER=evil:1",
        "SILOFL_SERVER=a:1\x1b[2J",
        "\ufeffSILOFL_SERVER=evil:1",
        "COMPOSE_FILE=/tmp/other.yml",
        "silofl_server=evil:1",
        "SILOFL_NAME=again",
    ],
)
def test_a_line_that_compose_may_read_in_another_way_is_refused(line):
    said = fails(
        ValueError,
        r"the bundle's \.env, line 3 ",
        read_variables,
        f"SILOFL_NAME=a\nSILOFL_DEVICE=cpu\n{line}\n",
    )
    assert said.isprintable()


def test_variables_that_are_no_text():
    with pytest.raises(ValueError, match=r"\.env is not in UTF-8"):
        site_of({".env": b"SILOFL_NAME=a\nSILOFL_SERVER=\xff:1\n"}, Path("x"))


def test_one_join_at_a_time(tmp_path):
    again = pytest.raises(ValueError, match="clinic runs on this machine already")
    with only_one(tmp_path, "clinic"), again, only_one(tmp_path, "clinic"):
        pass
    with only_one(tmp_path, "clinic"):
        pass


# --- against a real SuperLink -----------------------------------------------------------------------------


@pytest.fixture
def federation(server, tmp_path, monkeypatch):
    """A federation whose server runs; its connection `test` is written."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    write_connection(server.connection)
    (tmp_path / "federation.yaml").write_text(
        f"name: test\nserver: {{fleet-port: {server.fleet}, control-port: {server.port}}}\n"
        "demo: {dataset: digits}\nsilos: [{name: north, data: demo}]\n"
    )
    return read_federation(Path("federation.yaml"))


def registered(server):
    with Control(server.connection) as control:
        return {node.name: node.public_key for node in control.nodes()}


def test_add_and_remove(server, federation, capsys, tmp_path):
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    assert silofl("add-silo", "clinic") == 0
    out, err = capsys.readouterr()
    assert out == "clinic.tar: hand it to clinic as the secret it is\n"
    assert "works on this machine only" in err and "PRIVATE" not in out + err
    files = read_bundle(Path("clinic.tar"))
    public = load_ssh_private_key(files["node.key"], None).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    assert registered(server)["clinic"].strip() == pem.strip()
    assert files["ca.crt"] == server.credentials.ca_certificate.read_bytes()
    assert app_sums(app_directory())[0] in files["allowed-apps"].decode()
    assert (
        read_variables(files[".env"].decode())["SILOFL_SERVER"] == f"127.0.0.1:{server.fleet}"
    )
    noted = tmp_path / "state/silofl/test/remote/clinic.pem"
    assert noted.read_bytes() == pem

    for again, reason in (
        ("clinic", "is registered already"),
        ("north", "is a silo of"),
        ("No Name", "is no name"),
    ):
        assert silofl("add-silo", again, "--out", "other.tar") == 2
        assert reason in capsys.readouterr().err
    assert not Path("other.tar").exists()

    assert silofl("remove-silo", "clinik") == 2
    assert "did you mean 'clinic'?" in capsys.readouterr().err
    assert silofl("remove-silo", "clinic") == 0
    assert "clinic" not in registered(server) and not noted.exists()


def test_nothing_is_registered_where_no_bundle_can_be_written(server, federation, tmp_path):
    with (
        Control(server.connection) as control,
        pytest.raises(ValueError, match="there is no folder"),
    ):
        add_silo(
            federation,
            control,
            "lost",
            tmp_path / "no/such/folder.tar",
            fleet_port=1,
            app=app_directory(),
        )
    assert "lost" not in registered(server)


def test_an_address_that_the_certificate_lacks_is_found_before_the_hospital_does(
    server, federation, capsys
):
    path = Path("federation.yaml")
    path.write_text(path.read_text().replace("server: {", "server: {address: fl.example.org, "))
    assert silofl("add-silo", "far") == 2
    assert "the server's certificate is not for fl.example.org" in capsys.readouterr().err
    assert not Path("far.tar").exists() and "far" not in registered(server)


def test_a_signed_bundle_has_the_public_address(server, federation, capsys):
    """The certificate must be for its host, too."""
    path = Path("federation.yaml")
    text = path.read_text()
    assert silofl("signing-key", "--out", "sign.key") == 0
    for host, code in (("fl.example.org", 2), ("localhost", 0)):
        path.write_text(text.replace("server: {", f"server: {{public: '{host}:443', "))
        assert silofl("add-silo", "far", "--sign-with", "sign.key") == code
    assert (
        "not for fl.example.org (server.public in federation.yaml)" in capsys.readouterr().err
    )
    files = read_bundle(Path("far.tar"))
    assert read_variables(files[".env"].decode())["SILOFL_SERVER"] == "localhost:443"
    assert "signed.json" in files
    assert silofl("remove-silo", "far") == 0


def test_a_silo_of_the_file_would_come_back(server, federation):
    with Control(server.connection) as control:
        control.register("north", server.credentials.node_public_pem("north"))
        assert "still stands in" in remove_silo(federation, control, "north")
    assert "north" not in registered(server)


OWN_DATA = """
import numpy as np

def ours():
    samples = [(np.full((1, 4, 4), i, np.float32), i % 2) for i in range(20)]
    return {s: (samples, {"label": np.arange(20) % 2}) for s in ("train", "test")}
"""


def join(bundle_file, data, *more):
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "server.cli.main",
            "join",
            str(bundle_file),
            "--data",
            str(data),
            *more,
        ],
        env={**os.environ, "PYTHONPATH": f"{app_directory()}{os.pathsep}{Path.cwd()}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.deployed
@pytest.mark.parametrize("own", [True, seldom(False)], ids=["own key", "bundle's key"])
def test_join_and_leave_without_docker(server, federation, tmp_path, own):
    """The silo is online while `join` runs; a second `join` is refused; SIGTERM leaves and says goodbye.

    `silofl policy` then prints the policy that it joined with. The data of the second case are a data set of one's own.
    """
    data = write_silo(tmp_path / "data.npz", np.zeros((20, 3)), [0, 1] * 10)
    if not own:
        Path("ward_joins.py").write_text(OWN_DATA)
        data = Path("ward_joins:ours")
    (tmp_path / "ours.toml").write_text("max-rounds = 7\n")
    if own:
        assert (
            silofl("request", "joiner")
            == silofl("add-silo", "--request", "joiner.request")
            == 0
        )
    else:
        assert silofl("add-silo", "joiner") == 0
    online = site_root() / "joiner/online"
    with join(Path("joiner.tar"), data, "--policy", str(tmp_path / "ours.toml")) as first:
        try:
            deadline = time.monotonic() + 120
            while not online.exists():
                assert first.poll() is None, first.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.2)
            with Control(server.connection) as control:
                assert {node.name: node.status for node in control.nodes()}[
                    "joiner"
                ] == "online"
            if own:
                second = join(Path("joiner.tar"), data)
                _, error = second.communicate(timeout=120)
                assert second.returncode == 2
                assert error.splitlines()[-1] == (
                    "silofl join: joiner runs on this machine already: a bundle runs in one place at a time"
                )
        finally:
            first.send_signal(signal.SIGTERM)
            output, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    assert "ok    key: registered at the server" in output and "joiner joins" in output
    assert "port " not in output.partition("joiner joins")[2]  # a silo opens none
    assert policy_at(None).where == str(tmp_path / "ours.toml")
    assert not online.exists()
    with Control(server.connection) as control:
        assert {node.name: node.status for node in control.nodes()}["joiner"] == "offline"
    assert silofl("remove-silo", "joiner") == 0  # the server is the other case's, too


@pytest.mark.deployed
def test_a_bundle_of_a_removed_silo_is_refused_at_once(server, federation, tmp_path, capsys):
    data = write_silo(tmp_path / "data.npz", np.zeros((20, 3)), [0, 1] * 10)
    assert silofl("add-silo", "gone") == 0 and silofl("remove-silo", "gone") == 0
    capsys.readouterr()
    assert silofl("join", "gone.tar", "--data", data) == 2
    out, err = capsys.readouterr()
    assert (
        "FAIL  key: the server does not know this silo's key\n      fix: ask the server's operator"
        in out
    )
    assert err.startswith("silofl join: gone cannot join: key: ") and err.count("\n") == 1


def test_join_with_data_that_are_not_there(server, federation, tmp_path, capsys):
    bundle().write(tmp_path / "x.tar")
    assert silofl("join", "x.tar", "--data", "nowhere.npz") == 2
    err = capsys.readouterr().err
    assert "clinic cannot join: data (file): " in err and err.count("\n") == 1
