"""A backup: what is in it, what a changed one says; a restored silo answers nothing before a person accepts it.

The vector is of pyrage 1.4.0, another implementation of age.
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import tarfile

import pytest
from charged import answered, reply, spent
from failing import fails
from taken import silofl

from client.backup import age
from client.backup.age import CHUNK, decrypt, encrypt
from client.backup.archive import files_below, open_backup, write_backup
from client.backup.silo import back_up_silo
from client.local_data import EMBEDDINGS
from client.protocol.parsed import SiteError
from client.site.budget.ledger import Ledger
from client.site.record import FILE, Record, close_records
from client.site.trust.audit import verify_log
from partitions.common.errors import DataError

WORDS = "correct horse battery"
VECTOR = (
    "YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IHNjcnlwdCBNeTFuM0lySm1wd2dWMVNndzArbUtBIDE5CkJPOUpWOVR3ZXNDNURlb0RadmdRN1N4aDBG"
    "aGppSzY5VmhvaW15aWtuSEUKLS0tIGRFeVpiZE5HMlVIL1NSSDlXQnpYUjdoMTFoZTVXeDVYRjNNbHBsMnNMZG8KEvY9sFfIFThvc+TPG67gbxNe"
    "5npQFX+cr46Hocd8yRNz9NHALkLLKrK8FyBNvKJW"
)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(age, "WORK", 10)


def encrypted(data):
    target = io.BytesIO()
    encrypt(io.BytesIO(data), target, WORDS)
    return target.getvalue()


def plain(content, words=WORDS):
    return b"".join(decrypt(io.BytesIO(content), words))


def test_the_format_is_ages():
    assert plain(base64.b64decode(VECTOR)) == b"twelve hospitals"


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_what_is_encrypted_comes_back_and_nothing_else(quick, size):
    data = os.urandom(size)
    content = encrypted(data)
    assert plain(content) == data
    assert data[:40] not in content or size < 2
    fails(DataError, "passphrase is another one", plain, content, "another passphrase")
    for cut in {1, size // 2, CHUNK + age.TAG}:  # the last one at the end of a chunk
        if 0 < cut < size:
            fails(DataError, "changed", plain, content[:-cut])
    for place in (30, len(content) // 2, -1):
        other = bytearray(content)
        other[place] ^= 1
        fails(DataError, "passphrase", plain, bytes(other))


def test_chunks_keep_their_places(quick):
    content = encrypted(os.urandom(2 * CHUNK) + b"end")
    start = len(content) - 2 * (CHUNK + age.TAG) - 3 - age.TAG
    middle = start + CHUNK + age.TAG
    swapped = content[:start] + content[middle : middle + CHUNK + age.TAG]
    swapped += content[start:middle] + content[middle + CHUNK + age.TAG :]
    fails(DataError, "changed", plain, swapped)


def test_a_work_factor_that_would_fill_the_memory_is_refused():
    content = base64.b64decode(VECTOR).replace(b" 19\n", b" 30\n")
    fails(DataError, "not encrypted with a passphrase", plain, content)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "here"
    (folder / "deep").mkdir(parents=True)
    (folder / "key").write_bytes(b"secret")
    (folder / "key").chmod(0o600)
    (folder / "deep" / "model").write_bytes(os.urandom(100_000))
    (folder / ".lock").touch()
    (folder / "link").symlink_to("/etc/passwd")
    return folder


def test_a_backup_has_these_files_and_their_modes(quick, folder, tmp_path):
    for words in ("", WORDS):
        out = tmp_path / f"out{len(words)}"
        write_backup(out, "server", "trio", files_below(folder, "here"), words)
        assert out.stat().st_mode & 0o777 == 0o600
        assert (b"secret" in out.read_bytes()) is not bool(words)
        with open_backup(out, words, tmp_path / "beside") as (manifest, place):
            assert sorted(manifest.files) == ["here/deep/model", "here/key"]
            assert (place / "here/key").stat().st_mode & 0o777 == 0o600
            for name, path in files_below(place / "here", "here").items():
                assert path.read_bytes() == folder.parent.joinpath(name).read_bytes()
        assert not [*(tmp_path / "beside").iterdir()]
        fails(DataError, "is there already", write_backup, out, "server", "trio", {}, words)
    fails(DataError, "is encrypted: --passphrase-file", opened, out, "", tmp_path / "beside")


def opened(file, words, beside):
    with open_backup(file, words, beside):
        pass


def rewritten(out, change):
    """The same tar with another member list: (name, content) pairs."""
    with tarfile.open(out) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive]  # type: ignore[union-attr]
    with tarfile.open(out, "w") as archive:
        for name, content in change(members):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


OUTSIDE = "../../outside"


def outside(members):
    """Someone who may write the manifest, too, names a file outside."""
    manifest = json.loads(members[0][1])
    manifest["files"][OUTSIDE] = manifest["files"].pop("here/key")
    key = next(content for name, content in members if name == "here/key")
    return [(members[0][0], json.dumps(manifest).encode()), (OUTSIDE, key)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda members: [(n, c.replace(b"secret", b"public")) for n, c in members],
            "here/key is missing, added or changed",
        ),
        (lambda members: members[:-1], "here/key is missing, added or changed"),
        (lambda members: [*members, ("more", b"x")], "more is missing, added or changed"),
        (
            lambda members: [*members, ("here/key", b"public")],
            "here/key is missing, added or changed",
        ),
        (lambda members: members[1:], "no backup of silofl"),
        (lambda members: [("manifest.json", b"{}"), *members[1:]], "damaged"),
        (outside, "outside the destination"),
    ],
)
def test_a_changed_backup_puts_nothing_in_place(folder, tmp_path, change, says):
    out = tmp_path / "out"
    write_backup(out, "server", "trio", files_below(folder, "here"), "")
    rewritten(out, change)
    fails(DataError, says, opened, out, "", tmp_path / "beside")
    assert not [*(tmp_path / "beside").iterdir()] and not (tmp_path / "outside").exists()


def test_a_restored_silo_spends_nothing_anew(tmp_path, capsys):
    """The one rule: a copy, on any machine, refuses all until it was charged what its head had spent."""
    state, elsewhere = tmp_path / "clinic" / "state", tmp_path / "elsewhere" / "state"
    elsewhere.mkdir(parents=True)  # as a container's new volume
    answered(state, 1, 2)
    (state / "run-0").mkdir()
    (state / "run-0" / "round.safetensors").write_bytes(b"model")
    out = tmp_path / "clinic.backup"
    back_up_silo("clinic", state, out, "")
    answered(state, 3, 4)
    after = spent(state)
    close_records()

    assert silofl("restore", out, "--state-dir", elsewhere) == 0
    assert (
        "every sum is right" in (said := capsys.readouterr().out)
        and "approve --restored" in said
    )
    assert (elsewhere / "run-0" / "round.safetensors").read_bytes() == b"model"
    head = elsewhere.with_name("state.head")
    for keep in (False, True):  # without a head nothing tells what was spent
        fails(SiteError, "was restored from a backup.*approve --restored", reply, elsewhere, 5)
        fails(SiteError, "was restored from a backup", spent, elsewhere)
        if not keep:
            assert (
                silofl("approve", "--restored", "--by", "Dr. D", "--state-dir", elsewhere) == 2
            )
            assert "no head is kept here" in capsys.readouterr().err
            shutil.copytree(state.with_name("state.head"), head)
    assert silofl("approve", "--restored", "--by", "Dr. D", "--state-dir", elsewhere) == 0
    close_records()
    assert spent(elsewhere) == pytest.approx(after)
    assert verify_log(elsewhere / "audit").entries[-1]["asked"] == "state restored"
    reply(elsewhere, 5)
    close_records()
    assert spent(elsewhere) > after and not Ledger(elsewhere).verify().faults

    # Twice: nothing is overwritten; and a copy of nothing newer is marked all the same
    assert silofl("restore", out, "--state-dir", elsewhere) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_copy_is_whole_while_the_silo_answers(tmp_path):
    """Its record, log and ledger are of one moment, whatever another process does meanwhile."""
    state = tmp_path / "clinic" / "state"
    answered(state, 1)
    done, pid = 0, os.fork()
    if pid == 0:
        try:
            for number in range(2, 40):
                reply(state, number)
            close_records()
        finally:
            os._exit(0)
    for number in range(8):
        out = tmp_path / f"{number}.backup"
        back_up_silo("clinic", state, out, "")
        close_records()
        with open_backup(out, "", tmp_path / "beside") as (_, place):
            copy = tmp_path / f"copy-{number}" / "state"
            shutil.copytree(place / "state", copy)
        assert not verify_log(copy / "audit").faults and not Ledger(copy).verify().faults
        with Record(copy).reading() as db:
            replies = db.execute("SELECT replies FROM meta").fetchone()[0]
        assert replies == len(verify_log(copy / "audit").entries)
        close_records()
        done += 1
    os.waitpid(pid, 0)
    assert done == 8


def test_a_refused_state_is_not_copied(tmp_path):
    state = tmp_path / "clinic" / "state"
    answered(state, 1)
    older = tmp_path / "older"
    shutil.copytree(state, older)
    answered(state, 2)
    (state / FILE).unlink()
    shutil.copy(older / FILE, state / FILE)
    fails(SiteError, "older copy", back_up_silo, "clinic", state, tmp_path / "out", "")
    assert not (tmp_path / "out").exists()


def test_embeddings_stay_with_the_data(tmp_path):
    """They are made of samples, and made again of them; a backup has neither."""
    state = tmp_path / "clinic" / "state"
    answered(state, 1)
    (state / EMBEDDINGS).mkdir()
    (state / EMBEDDINGS / f"{'0' * 64}.npy").write_bytes(b"embedded patients")
    back_up_silo("clinic", state, tmp_path / "out", "")
    close_records()
    with open_backup(tmp_path / "out", "", tmp_path / "beside") as (manifest, _):
        assert manifest.files and not any(EMBEDDINGS in name for name in manifest.files)
    assert b"embedded patients" not in (tmp_path / "out").read_bytes()
