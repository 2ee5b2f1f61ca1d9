"""The consortium's signature: what it covers, who is remembered, and everything that is refused with one line."""

import base64
import json
import os
import re
import shutil
import stat
import tarfile
from functools import partial
from pathlib import Path

import pytest
from archives import untar
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from failing import fails
from taken import silofl

from client.protocol.envelope import BUNDLE, add_prefix, fingerprint, public_pem, sign
from client.protocol.keys import load_signing_key, make_request, make_signing_key, site_root
from client.protocol.manifest import SIGNED, sign_bundle
from client.site.trust import signing
from client.site.trust.bundle import read_bundle, verify_bundle
from client.site.trust.signing import NEWEST, check_signed, signed_by
from docker import entry
from server.cli.main import main
from server.deploy.bundle import Bundle

OURS, THEIRS = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
BY_US, BY_THEM = (fingerprint(public_pem(key)) for key in (OURS, THEIRS))
IMAGE = "sha256:" + "ab" * 32


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


def bundle(key=OURS, name="clinic", image=f"reg/silo@{IMAGE}"):
    """The tar of a bundle that this key signs."""
    tar = Path(f"{name}-{len(list(Path().glob('*.tar')))}.tar")
    made = Bundle(
        name,
        "net",
        "fl.example.org:9092",
        b"CA",
        b"KEY",
        "# pins\n",
        image=image,
        signing_key=key,
    )
    made.write(tar)
    return tar


def rewritten(tar, change):
    """A tar with the same members, but for what `change` does to them."""
    files = read_bundle(tar)
    change(files)
    out = Path(f"changed-{len(list(Path().glob('*.tar')))}.tar")
    for name, content in files.items():
        folder = Path("made", out.stem, "clinic")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    with tarfile.open(out, "w") as archive:
        archive.add(folder, "clinic")
    return out


def check_signature(bundle, name="clinic", by="", echo=print, **more):
    """As `join` and `check-bundle` check a bundle's signature."""
    folder, unpacked = site_root() / name, bundle.is_dir()
    check_signed(read_bundle(bundle), folder, by, unpacked=unpacked, echo=echo, **more)


def looked_at(tar, by=""):
    """What `join` and `check-bundle` say of a bundle's signature."""
    said: list[str] = []
    check_signature(tar, by=by, echo=said.append)
    return said


def refused(reason, tar, by=""):
    fails(ValueError, reason, looked_at, tar, by)


# --- who signed -------------------------------------------------------------------------------------------------------


def test_trust_on_first_use_is_said_and_nobody_elses_bundle_is_taken_afterwards():
    first = looked_at(bundle())
    assert (
        len(first) == 1
        and f"signed by {BY_US}; no signer was known before, so it is taken on trust"
        in first[0]
    )
    assert signed_by(site_root() / "clinic").read_text() == BY_US + "\n"
    assert looked_at(bundle()) == [f"signed by {BY_US}"]
    refused(f"signed by {BY_THEM}, not by {BY_US}: somebody else made it", bundle(THEIRS))
    refused(f"this bundle is not signed, and this site's are signed by {BY_US}", bundle(None))
    assert signed_by(site_root() / "clinic").read_text() == BY_US + "\n"


def test_where_nobody_signs_all_is_as_before():
    assert looked_at(bundle(None)) == []
    assert SIGNED not in read_bundle(bundle(None))
    assert not signed_by(site_root() / "clinic").exists()


def test_the_fingerprint_that_was_told_another_way_decides_the_first_time_too():
    for wrong in (bundle(THEIRS), bundle(None)):
        refused(f"(not by|signed by) {BY_US}", wrong, BY_US)
    assert not signed_by(site_root() / "clinic").exists()
    assert looked_at(bundle(), BY_US) == [f"signed by {BY_US}"]
    Path("ours.pub").write_bytes(public_pem(OURS))
    assert looked_at(bundle(), "ours.pub") == [f"signed by {BY_US}"]


def test_a_new_key_and_no_key_are_taken_where_the_hospital_says_so():
    looked_at(bundle())
    assert looked_at(bundle(THEIRS), BY_THEM) == [f"signed by {BY_THEM}"]
    refused(f"not by {BY_THEM}", bundle())
    refused("leave --signed-by nobody away", bundle(THEIRS), "nobody")
    assert looked_at(bundle(None), "nobody") == [] == looked_at(bundle(None))


@pytest.mark.parametrize(
    "by",
    ["SHA256:12", "nowhere.pub", BY_US.upper(), "changed"],
    ids=["short", "no file", "upper", "changed"],
)
def test_what_is_no_fingerprint(by):
    Path("changed").write_text("no key")
    refused(f"--signed-by {re.escape(by)}: no fingerprint", bundle(), by)


def test_another_name_is_no_way_around_what_the_site_remembers():
    """A bundle under a new name has no memory of its own: one of the site's other silos' keys has to have signed it."""
    looked_at(bundle())
    for wrong in (bundle(None, "clinic-b"), bundle(THEIRS, "clinic-b")):
        with pytest.raises(ValueError, match=BY_US):
            check_signature(wrong, "clinic-b")
    said: list[str] = []
    check_signature(bundle(name="clinic-b"), "clinic-b", echo=said.append)
    assert said == [f"signed by {BY_US}"]


@pytest.mark.parametrize("content", ["", "SHA256:zz"])
def test_a_damaged_memory_is_not_taken_for_none(content):
    looked_at(bundle())
    signed_by(site_root() / "clinic").write_text(content)
    refused("is damaged: it says whose bundles this site takes", bundle(THEIRS))


# --- how old it is ----------------------------------------------------------------------------------------------------


def made_at(monkeypatch, day, year=2024, **changes):
    """A bundle that was signed on this day."""
    with monkeypatch.context() as patch:
        patch.setattr(signing.time, "gmtime", lambda: (year, 11, day, 9, 0, 0, 0, 0, 0))
        return bundle(**changes)


def test_a_bundle_that_is_older_than_the_newest_is_refused_unless_asked_for(monkeypatch):
    """Somebody hands over an old one again, whose signature is right, with the list of apps of then."""
    first, second, third = (made_at(monkeypatch, day) for day in (1, 2, 3))
    for tar in (first, second, second):
        looked_at(tar, BY_US)
    old = "was made at 2024-11-01T09:00:00Z, and this site has taken one of 2024-11-02T09:00:00Z: ask for the newest"
    refused(old, first, BY_US)
    for command in (
        ["check-bundle", str(first)],
        ["join", str(first), "--data", "x.npz"],
        ["doctor", str(first)],
    ):
        assert main(command) == 2
    # 2: no such image here
    assert silofl("check-bundle", first, "--allow-older") in (0, 2)
    looked_at(first)  # from then on this one and those made after it
    looked_at(third)
    refused("was made at", second)


def test_the_age_counts_for_each_key(monkeypatch):
    looked_at(made_at(monkeypatch, 9))
    looked_at(theirs := made_at(monkeypatch, 5, key=THEIRS), BY_THEM)
    refused("was made at 2024-11-04", made_at(monkeypatch, 4, key=THEIRS))
    looked_at(theirs)
    refused("was made at 2024-11-08", made_at(monkeypatch, 8), BY_US)


def test_a_look_remembers_no_time_and_a_damaged_memory_is_not_taken_for_none(monkeypatch):
    first, second = (made_at(monkeypatch, day) for day in (1, 2))
    looked_at(first)
    check_signature(second, remember=False)
    looked_at(first)
    newest = signed_by(site_root() / "clinic").with_name(NEWEST)
    assert stat.S_IMODE(newest.stat().st_mode) == 0o600
    for content in ("", "[]", '{"SHA256:1": "tomorrow"}', '{"SHA256:1": 1}'):
        newest.write_text(content)
        refused(r"is damaged: it says how old a bundle may be \(--allow-older writes", first)
    check_signature(first, allow_older=True)
    looked_at(first)


def test_a_bundle_of_a_later_day_is_refused_and_blocks_no_other(monkeypatch):
    """Signed by a machine whose clock was wrong: once accepted, every right one would be older."""
    late = made_at(monkeypatch, 5, year=2096)
    refused(r"was made at 2096-11-05T.*, and this machine's clock says .*: set the clock", late)
    with pytest.raises(ValueError, match="was made at 2096"):
        check_signature(late, allow_older=True)
    looked_at(made_at(monkeypatch, 5))
    assert "2024-11-05" in signed_by(site_root() / "clinic").with_name(NEWEST).read_text()


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("made", None, "the key made is missing"),
        ("made", "2024-1-1T9:00:00Z", "made = '2024-1-1T9:00:00Z': must be a time"),
        ("files", [], "files = .*: must be keys and values"),
        ("images", "sha256:1", "images = 'sha256:1': must be a valid list"),
        ("more", "x", "'more' is no key of it"),
    ],
)
def test_a_signed_manifest_that_is_none(key, value, fault):
    """A time that is missing, or cannot be compared as text, would pass for any; the rest is no list of files."""

    def change(files):
        fields = json.loads(json.loads(files[SIGNED])["manifest"]) | {key: value}
        odd = json.dumps({k: v for k, v in fields.items() if v is not None})
        signed_json(files, {"manifest": odd, **sign(add_prefix(BUNDLE, odd), OURS)})

    refused(
        rf"the bundle's {SIGNED}: {fault}.*; ask for the bundle again",
        rewritten(bundle(), change),
    )


# --- what was signed --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [".env", "README.md", "allowed-apps", "ca.crt", "docker-compose.yml", "policy.toml"]
)
def test_a_file_of_the_tar_that_was_changed_or_taken_out_is_named(name):
    changed = rewritten(bundle(), lambda files: files.update({name: files[name] + b"# more\n"}))
    refused(
        f"the bundle's {re.escape(name)} is not what was signed: ask for the bundle", changed
    )
    if name not in (".env", "allowed-apps", "ca.crt"):  # without those it is no bundle
        refused(
            f"the bundle's {re.escape(name)} is not what was signed",
            rewritten(bundle(), lambda files: files.pop(name)),
        )


def test_a_key_that_was_put_into_the_tar_is_named():
    _, _, request = make_request("clinic", None, None)
    tar = Path("own.tar")
    Bundle(
        "clinic",
        "net",
        "a:1",
        b"CA",
        b"",
        "# pins\n",
        fingerprint=request.fingerprint,
        image="x",
        signing_key=OURS,
    ).write(tar)
    assert len(looked_at(tar)) == 1
    refused(
        r"the bundle's node\.key is not what was signed",
        rewritten(tar, lambda files: files.update({"node.key": b"KEY"})),
    )


def signed_json(files, fields):
    files[SIGNED] = json.dumps(json.loads(files[SIGNED]) | fields).encode()


def test_a_signature_is_only_as_good_as_its_key_and_its_text():
    """A manifest that was changed; the public key of another; the signature of another; one of the bare text."""
    tar = bundle()
    text = json.loads(read_bundle(tar)[SIGNED])["manifest"]
    more = text.replace('"images": [', '"images": ["sha256:0", ')
    foreign = json.loads(sign_bundle(read_bundle(tar), THEIRS))
    odd = [
        {"manifest": more},
        {"public-key": foreign["public-key"]},
        {"signature": foreign["signature"]},
        {"signature": base64.b64encode(OURS.sign(text.encode())).decode()},
    ]
    for fields in odd:
        refused(
            "its signature is wrong; ask for the bundle again",
            rewritten(tar, partial(signed_json, fields=fields)),
        )


@pytest.mark.parametrize(
    "kind", ["no json", "another curve", "another manifest", "no signature"]
)
def test_a_signature_that_is_none(kind):
    def change(files):
        other = generate_private_key(SECP384R1()).public_key()
        pem = other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
        odd = json.dumps({"kind": "else", "files": {}, "variables": {}, "images": []})
        if kind == "no json":
            files[SIGNED] = b"{"
        elif kind == "another curve":
            signed_json(files, {"public-key": pem})
        elif kind == "another manifest":
            signed_json(files, {"manifest": odd, **sign(add_prefix(BUNDLE, odd), OURS)})
        else:
            signed_json(files, {"signature": "*"})

    refused(rf"the bundle's {SIGNED}: .* ask for the bundle again", rewritten(bundle(), change))


def test_in_the_unpacked_folder_the_hospital_sets_what_is_its_own_and_nothing_else():
    untar(bundle(), Path())
    folder = Path("clinic")
    env = (folder / ".env").read_text()
    (folder / ".env").write_text(
        env.replace("SILOFL_DATA=./data.npz", "SILOFL_DATA=/srv/ours.npz")
    )
    (folder / "policy.toml").write_text("peers = false\n")
    (folder / "README.md").unlink()
    said = looked_at(folder)
    assert said[1] == "not as it was signed, so this site's own: .env, README.md, policy.toml"
    for name, value in (
        ("SILOFL_SERVER", "evil.example.org:9092"),
        ("SILOFL_NAME", "other"),
        ("SILOFL_FLWR", "1"),
    ):
        (folder / ".env").write_text(re.sub(rf"(?m)^{name}=.*$", f"{name}={value}", env))
        refused(f"{name} in the bundle's .env is not what was signed", folder)
    (folder / ".env").write_text(env)
    for name in ("ca.crt", "docker-compose.yml"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(before + b" ")
        refused(f"the bundle's {name} is not what was signed", folder)
        (folder / name).write_bytes(before)


# --- the image --------------------------------------------------------------------------------------------------------


def docker_with(monkeypatch, answer):
    """A `docker` on PATH that knows one image, or none."""
    program = Path("bin/docker").absolute()
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/sh\ntest -n '{answer}' && echo '{answer}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (f'{{"Id": "{IMAGE}"}}', ""),
        (f'{{"Id": "sha256:1", "RepoDigests": ["reg/silo@{IMAGE}"]}}', ""),
        (
            '{"Id": "sha256:1", "RepoDigests": []}',
            "on this machine is sha256:1, and sha256:abab.* it is another one",
        ),
        ("", "Docker has no image reg/silo@sha256:abab.* here: docker load, or docker pull it"),
    ],
    ids=["loaded", "pulled", "another", "none"],
)
def test_the_image_that_was_signed_is_the_one_that_is_started(answer, reason, monkeypatch):
    tar = bundle()
    docker_with(monkeypatch, answer)
    said: list[str] = []
    if reason:
        fails(ValueError, reason, verify_bundle, tar, echo=said.append)
    else:
        verify_bundle(tar, echo=said.append)
        assert said[-1] == f"reg/silo@{IMAGE} is the image that was signed, {IMAGE}"
    assert said[0] == "clinic, at the server fl.example.org:9092"


def test_the_digest_of_an_image_that_is_here_is_signed(monkeypatch):
    docker_with(monkeypatch, '{"Id": "sha256:11", "RepoDigests": ["reg/silo@sha256:22"]}')
    manifest = json.loads(json.loads(read_bundle(bundle(image="silo:1"))[SIGNED])["manifest"])
    assert manifest["images"] == ["sha256:11", "sha256:22"]
    docker_with(monkeypatch, "")
    tar = bundle(image="silo:1")
    assert json.loads(json.loads(read_bundle(tar)[SIGNED])["manifest"])["images"] == []
    said: list[str] = []
    verify_bundle(tar, echo=said.append)
    assert said[-1] == "silo:1: the signature names no image"


# --- commands and containers ------------------------------------------------------------------------------------------


def test_signing_key_and_check_bundle_as_commands(capsys):
    Path("federation.yaml").write_text(
        "name: net\ndemo: {dataset: digits}\nsilos: [{name: a, data: demo}]\n"
    )
    assert silofl("signing-key") == 0
    file = Path("state/silofl/net/signing.key")
    printed = capsys.readouterr().out.splitlines()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and "PRIVATE" not in "".join(printed)
    assert printed[-1] == fingerprint(public_pem(load_signing_key(file)))
    assert fingerprint(file.with_suffix(".pub").read_bytes()) == printed[-1]
    # The same key
    assert silofl("signing-key") == 0 and capsys.readouterr().out.splitlines() == printed
    tar = bundle(load_signing_key(file), image="silo:1")
    assert silofl("check-bundle", tar, "--signed-by", file.with_suffix(".pub")) == 0
    assert f"signed by {printed[-1]}\n" in capsys.readouterr().out
    other = bundle(THEIRS)
    for command in (
        ["check-bundle", str(other)],
        ["join", str(other), "--data", "x.npz"],
        ["doctor", str(other)],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert f"signed by {BY_THEM}, not by {printed[-1]}" in error and error.count("\n") == 1
    assert not Path("state/silofl-site/clinic/ca.crt").exists()


def test_what_is_no_signing_key():
    with pytest.raises(
        ValueError, match=r"no\.key: No such file or directory; `silofl signing-key` makes one"
    ):
        load_signing_key(Path("no.key"))
    ec = generate_private_key(SECP384R1()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    )
    for content in (b"", ec):
        Path("odd.key").write_bytes(content)
        fails(ValueError, r"odd.key is no signing key", load_signing_key, Path("odd.key"))
    assert (
        make_signing_key(Path("new/one.key"))
        and Path("new/one.key").stat().st_mode & 0o777 == 0o600
    )


def test_a_container_refuses_another_hands_bundle_before_it_copies_a_file(monkeypatch):
    """`install`, the one-shot service of a bundle's compose file, over its volumes: what it copied last stays."""
    monkeypatch.setenv("SILOFL_USER", f"{os.getuid()}:{os.getgid()}")
    for folder in ("site", "state", "state.head"):
        Path("root", folder).mkdir(parents=True)

    def place(tar):
        untar(tar, Path("root"))
        shutil.rmtree("root/bundle", ignore_errors=True)
        Path("root/clinic").rename("root/bundle")

    place(bundle())
    Path("root/bundle/via-ca.crt").write_text("of a proxy")
    entry.install(Path("root"))
    there = {path.name: path.read_bytes() for path in Path("root/site").iterdir()}
    assert there.pop("via-ca.crt") == b"of a proxy"
    Path("root/site/via-ca.crt").unlink()
    assert set(there) == {
        "ca.crt",
        "allowed-apps",
        "policy.toml",
        "node.key",
        "signed-by",
        NEWEST,
    }
    for other in (bundle(None), bundle(THEIRS)):
        place(other)
        (Path("root/bundle") / "allowed-apps").write_text("# any\n")
        fails(ValueError, BY_US, entry.install, Path("root"))
        assert {path.name: path.read_bytes() for path in Path("root/site").iterdir()} == there


def test_a_container_takes_an_older_bundle_only_where_it_is_told_to(monkeypatch):
    monkeypatch.setenv("SILOFL_USER", f"{os.getuid()}:{os.getgid()}")
    for folder in ("site", "state", "state.head"):
        Path("root", folder).mkdir(parents=True)
    for day in (2, 1):
        untar(made_at(monkeypatch, day), Path("root"))
        shutil.rmtree("root/bundle", ignore_errors=True)
        Path("root/clinic").rename("root/bundle")
        if day == 2:
            entry.install(Path("root"))
    fails(ValueError, "was made at 2024-11-01", entry.install, Path("root"))
    entry.install(Path("root"), allow_older=True)
    entry.install(Path("root"))
