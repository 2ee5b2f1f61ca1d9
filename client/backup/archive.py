"""A backup: one tar, whose member `manifest.json` has the SHA-256 of every other one.

With a passphrase the tar as a whole is encrypted (`age.py`). Nothing is put in place before every sum was right, and
nothing is overwritten.
"""

import importlib.metadata
import io
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from client.protocol.chain import utc_now
from partitions.common.errors import DataError
from partitions.common.files import file_fault, file_sum, make_folder, write_atomically
from partitions.common.parsed import Frozen, parse_values, read_text

from .age import VERSION, decrypt, encrypt

MANIFEST = "manifest.json"
AGAIN = "the copy is damaged: take another one"
LEAST = 12  # characters of a passphrase


class BackupManifest(Frozen):
    """What a backup is of. ``time``: UTC; ``files``: SHA-256 by name."""

    kind: Literal["silofl backup 1"] = "silofl backup 1"
    of: Literal["server", "silo"]
    name: str
    time: str
    silofl: str
    files: dict[str, str]


def files_below(folder: Path, prefix: str) -> dict[str, Path]:
    """Return the files below a folder by their names in a backup: not those that begin with a dot, no links."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*"))}
    return {
        f"{prefix}/{inside.as_posix()}": path
        for inside, path in files.items()
        if path.is_file() and not path.is_symlink()
        if not any(part.startswith(".") for part in inside.parts)
    }


def copy_now(source: str, target: str) -> None:
    """Keep a model as it is now by a second name, for it is replaced and never changed; copy any other file."""
    with suppress(FileNotFoundError):  # of an older round
        if source.endswith(".safetensors"):
            with suppress(OSError):  # another disk
                os.link(source, target)
                return
        shutil.copy2(source, target)


def write_backup(
    out: Path,
    of: Literal["server", "silo"],
    name: str,
    files: Mapping[str, Path],
    passphrase: str,
) -> BackupManifest:
    """Write a backup of these files, mode 0600. Raises DataError if ``out`` is there, OSError."""
    if out.exists():
        raise DataError(f"{out} is there already: remove it, or give --out another name")
    sums = {member: file_sum(path) for member, path in files.items()}
    version = importlib.metadata.version("silofl")
    manifest = BackupManifest(of=of, name=name, time=utc_now(), silofl=version, files=sums)

    def write(temporary: Path) -> None:
        beside = out.absolute().parent
        with tempfile.TemporaryFile(dir=beside) as plain, temporary.open("wb") as target:
            text = manifest.model_dump_json(indent=1).encode()
            with tarfile.open(fileobj=plain, mode="w") as archive:
                info = tarfile.TarInfo(MANIFEST)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
                for member, path in files.items():
                    archive.add(path, member, recursive=False)
            plain.seek(0)
            if passphrase:
                encrypt(plain, target, passphrase)
            else:
                shutil.copyfileobj(plain, target)

    write_atomically(out, write, mode=0o600)
    return manifest


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path) -> None:
    """Write one file of an archive below a folder; anything else than a file there is refused.

    As tarfile's filter `data` does, which Python 3.11.2 lacks.
    """
    parts = PurePosixPath(member.name).parts
    content = archive.extractfile(member) if member.isreg() else None
    if content is None or ".." in parts or parts[:1] == ("/",):
        raise tarfile.TarError(f"{member.name} is outside the destination, or no file")
    path = folder.joinpath(*parts)
    make_folder(path.parent, 0o700)
    with content, path.open("wb") as target:
        shutil.copyfileobj(content, target)
    path.chmod(member.mode & 0o700)
    os.utime(path, (member.mtime, member.mtime))


@contextmanager
def open_backup(
    file: Path, passphrase: str, beside: Path
) -> Iterator[tuple[BackupManifest, Path]]:
    """Yield a backup's manifest, and a new folder in ``beside`` with its files, which all have their sums.

    The folder is removed afterwards. Raises DataError, one line, for another file, or one that is not whole.
    """
    if fault := file_fault(file):
        raise DataError(fault)
    make_folder(beside, 0o700)
    with tempfile.TemporaryDirectory(prefix=".restore-", dir=beside) as place:
        plain, folder = file, Path(place, "files")
        with file.open("rb") as source:
            if source.read(len(VERSION)) == VERSION:
                if not passphrase:
                    raise DataError(f"{file} is encrypted: --passphrase-file FILE")
                source.seek(0)
                plain = Path(place, "plain")
                with plain.open("wb") as target:
                    target.writelines(decrypt(source, passphrase))
        try:
            with tarfile.open(plain, "r:") as archive:
                for member in archive:
                    _extract(archive, member, folder)
            manifest = parse_values(
                BackupManifest, (folder / MANIFEST).read_bytes(), file, AGAIN
            )
            (folder / MANIFEST).unlink()
        except (tarfile.TarError, OSError) as error:
            raise DataError(
                f"{file} is no backup of silofl, or cut off ({error}): {AGAIN}"
            ) from None
        sums = {member: file_sum(path) for member, path in files_below(folder, "").items()}
        if wrong := sorted(
            sums.items() ^ {f"/{m}": s for m, s in manifest.files.items()}.items()
        ):
            raise DataError(f"{file}: {wrong[0][0][1:]} is missing, added or changed: {AGAIN}")
        yield manifest, folder


def put_in_place(moves: Mapping[Path, Path]) -> None:
    """Rename files and folders, or none of them; a folder that is there may be an empty one, such as a new volume.

    Raises DataError if a target is there already.
    """
    for source, target in moves.items():
        empty = source.is_dir() and target.is_dir() and not files_below(target, "")
        if target.exists() and not empty:
            raise DataError(
                f"{target} is there already: nothing is overwritten; move it away first"
            )
    for source, target in moves.items():
        make_folder(target.parent, 0o700)
        for path in source.iterdir() if target.is_dir() else ():
            path.rename(target / path.name)
        if source.exists() and not target.is_dir():
            source.rename(target)


def read_passphrase(file: Path | None) -> str:
    """Return the first line of a file; empty without one. Raises DataError if it is short, or no text."""
    if file is None:
        return ""
    if fault := file_fault(file):
        raise DataError(fault)
    lines = read_text(file).splitlines()
    if not lines or len(lines[0]) < LEAST:
        raise DataError(
            f"--passphrase-file {file}: its first line has fewer than {LEAST} characters"
        )
    return lines[0]
