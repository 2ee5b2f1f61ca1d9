"""A hospital's own key: what a request holds and proves, what the server makes of it, and who may use the bundle."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

import pytest
from archives import untar
from failing import fails
from taken import silofl
from tiny import json_of

from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import (
    load_key,
    make_request,
    new_key,
    own_key,
    private_bytes,
    read_request,
    site_root,
)
from client.protocol.node import read_variables
from client.site.trust.bundle import check_node_key, read_bundle, site_of, unpack_bundle
from server.deploy.bundle import Bundle
from server.deploy.control import Control, write_connection


@pytest.fixture(autouse=True)
def at_the_hospital(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    monkeypatch.chdir(tmp_path)


def test_the_private_key_stays(capsys):
    assert silofl("request", "clinic") == 0
    out = capsys.readouterr().out
    key = own_key(site_root() / "clinic")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and "PRIVATE" in key.read_text()
    text = Path("clinic.request").read_text()
    assert "PRIVATE" not in text + out and len(text) < 1000
    request = read_request(Path("clinic.request"))
    assert request.name == "clinic" and request.public_key == public_pem(load_key(key)).decode()
    assert out.splitlines()[-1] == request.fingerprint == fingerprint(request.public_key)


def test_asking_again_is_asking_with_the_same_key():
    first = make_request("clinic", None, None)[2]
    again = make_request("clinic", None, Path("again.request"))[2]
    assert (again.name, again.public_key) == (first.name, first.public_key)
    assert read_request(Path("again.request")) == again


def with_a_passphrase(key: bytes) -> bytes:
    """Return a key in OpenSSH's form whose head says that a passphrase encrypts it (bcrypt, 16 bytes of salt)."""
    first, *lines, last = key.splitlines()
    plain = b"\0\0\0\4none\0\0\0\4none" + bytes(4)
    head = b"\0\0\0\x0aaes256-ctr\0\0\0\6bcrypt\0\0\0\x18\0\0\0\x10" + bytes(16) + b"\0\0\0\x10"
    content = base64.b64decode(b"".join(lines)).replace(plain, head, 1)
    return b"\n".join((first, base64.b64encode(content), last))


@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"-----BEGIN OPENSSH PRIVATE KEY-----", "short", "public", "encrypted"],
)
def test_a_damaged_key_stays_and_is_named(content):
    file, _, request = make_request("clinic", None, None)
    key = file.read_bytes()
    forms = {
        "short": key[:-90],
        "public": request.public_key.encode(),
        "encrypted": with_a_passphrase(key),
    }
    file.write_bytes(damaged := forms.get(content, content))
    reason = r"own\.key is no private key in Flower's form: restore it from a backup, or remove it and ask anew"
    fails(ValueError, reason, make_request, "clinic", None, None)
    assert file.read_bytes() == damaged


def test_key_and_request_in_a_folder_for_docker(tmp_path):
    """The bundle is unpacked into it; it brings no key, so that the key stays as it is."""
    key, file, request = make_request("clinic", Path("clinic"), None)
    assert (key, file) == (
        Path("clinic/node.key"),
        Path("clinic/clinic.request"),
    ) and not site_root().exists()
    Bundle(
        "clinic", "net", "a:1", b"CA", b"", "# pins\n", fingerprint=request.fingerprint
    ).write(tmp_path / "x.tar")
    before = key.read_bytes()
    untar(Path("x.tar"), tmp_path)
    assert key.read_bytes() == before and set(read_bundle(Path("clinic"))) >= {
        "node.key",
        "ca.crt",
    }


@pytest.mark.parametrize("name", ["../up", "No Name", "", "a_b", "x" * 64])
def test_names_that_are_none(name):
    fails(
        ValueError, "is no name: use 1 to 63 lower-case letters", make_request, name, None, None
    )


@pytest.mark.parametrize("field", ["name", "made", "public-key", "signature"])
def test_a_request_that_somebody_has_changed(field):
    """The attack: another name for the key, or another key for the name; nobody without the key can sign it."""
    make_request("clinic", None, None)
    content = json_of(Path("clinic.request"))
    other = make_request("other", None, Path("other.request"))[1]
    content[field] = json_of(other)[field] if field != "made" else "2020-01-01T00:00:00Z"
    Path("clinic.request").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"clinic\.request was changed, or its maker does not have its key"
    ):
        read_request(Path("clinic.request"))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", "null", "no JSON", '{"name": 1}', "x" * 100_000, "\x00"]
)
def test_what_is_no_request(content):
    Path("x.request").write_text(content)
    fails(
        ValueError,
        r"x\.request: .*; `silofl request NAME` at the hospital makes one",
        read_request,
        Path("x.request"),
    )
    with pytest.raises(
        ValueError, match="none: No such file or directory: `silofl request NAME`"
    ):
        read_request(Path("none"))


# --- whose key a bundle needs -------------------------------------------------------------------------------


def bundle(key=b"", wanted=""):
    path = Path("some.tar")
    path.unlink(missing_ok=True)
    Bundle(
        "clinic", "net", "fl.example.org:9092", b"CA", key, "# pins\n", fingerprint=wanted
    ).write(path)
    return read_bundle(path)


def test_join_finds_the_sites_own_key(tmp_path):
    key, _, request = make_request("clinic", None, None)
    files = bundle(wanted=request.fingerprint)
    site = site_of(files, tmp_path / "files")
    check_node_key(files, site)
    assert site.node_key == key
    unpack_bundle(files, tmp_path / "files")
    assert not (tmp_path / "files/node.key").exists()
    assert (
        "holds no private key" in files["README.md"].decode()
        and len(files["README.md"].splitlines()) == 13
    )


def test_a_bundle_whose_key_is_elsewhere():
    files = bundle(wanted="SHA256:12")
    with pytest.raises(
        ValueError,
        match=r"the key of clinic is not on this machine .* this bundle brings none: join",
    ):
        check_node_key(files, site_of(files, Path()))
    make_request("clinic", None, None)
    with pytest.raises(
        ValueError, match=r"this bundle is for the key SHA256:12, and .* is SHA256:"
    ):
        check_node_key(files, site_of(files, Path()))


def test_a_bundle_does_not_bring_another_key_in_place_of_the_sites_own():
    """Whoever made that key could be the hospital from then on."""
    key = make_request("clinic", None, None)[0]
    files = bundle(private_bytes(new_key()))
    with pytest.raises(
        ValueError, match="this bundle brings a private key, and clinic has made its own"
    ):
        check_node_key(files, site_of(files, Path()))
    check_node_key(bundle(key.read_bytes()), site_of(files, Path()))


# --- against a real SuperLink -----------------------------------------------------------------------------


def test_a_request_is_signed_in(server, tmp_path, capsys):
    write_connection(server.connection)
    Path("federation.yaml").write_text(
        f"name: test\nserver: {{fleet-port: {server.fleet}, control-port: {server.port}}}\n"
        "demo: {dataset: digits}\nsilos: [{name: north, data: demo}]\n"
    )
    _, _, request = make_request("clinic", None, None)
    assert silofl("add-silo", "--request", "clinic.request") == 0
    out = capsys.readouterr().out.splitlines()
    assert out == [
        f"clinic has the key {request.fingerprint}: compare it with what the hospital tells you",
        "clinic.tar: hand it to clinic; no private key is in it",
    ]
    assert b"PRIVATE" not in Path("clinic.tar").read_bytes()
    files = read_bundle(Path("clinic.tar"))
    assert read_variables(files[".env"].decode())["SILOFL_KEY"] == request.fingerprint
    with Control(server.connection) as control:
        assert {n.name: fingerprint(n.public_key) for n in control.nodes()}[
            "clinic"
        ] == request.fingerprint

    from client.link.connection import connection_checks
    from client.site.runtime.doctor import first_failure

    unpack_bundle(files, tmp_path / "files")  # the server knows the key
    assert not first_failure(connection_checks(site_of(files, tmp_path / "files")))

    assert silofl("add-silo", "--request", "clinic.request", "--out", "new.tar") == 0
    assert read_bundle(Path("new.tar")) == files  # and the registration stays
    assert not first_failure(connection_checks(site_of(files, tmp_path / "files")))

    assert silofl("request", "clinic", "--folder", "another") == 0
    own_key(site_root() / "twin").parent.mkdir()
    own_key(site_root() / "twin").write_bytes(own_key(site_root() / "clinic").read_bytes())
    make_request("twin", None, None)
    for arguments, reason in (
        (
            ["--request", "another/clinic.request", "--out", "b.tar"],
            "clinic is registered already, with another key",
        ),
        (
            ["--request", "twin.request"],
            "this key is registered already, as clinic: one key per silo",
        ),
        (
            ["other", "--request", "twin.request"],
            "twin.request is a request of twin, not of other",
        ),
        ([], "give a NAME, or --request FILE"),
    ):
        assert silofl("add-silo", *arguments) == 2
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob("[bto]*.tar"))
