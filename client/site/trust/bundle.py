"""A site bundle at the hospital: reading, unpacking, and running it without Docker (`silofl join`).

    NAME/.env  allowed-apps  bundle.json  ca.crt  docker-compose.yml  node.key  policy.toml  README.md  schema.json
    NAME/signed.json
    NAME/NAME.container  NAME-install.container     for Podman

`silofl add-silo` makes it (server/deploy/bundle.py). A bundle with `node.key` gives its holder the silo's identity. A
hospital that made its key itself (`keys.py`) gets one without: its key is at the site, or beside the unpacked
files. `signed.json` is the consortium's signature (`signing.py`). All but keys and lists is rendered from `bundle.json`
(`bundle_files.py`).
"""

import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from client.protocol.bundle_files import SERVER, VALUES
from client.protocol.envelope import fingerprint, public_pem
from client.protocol.keys import load_key, own_key, site_root
from client.protocol.node import Site, variables_of
from client.site.trust.signing import check_image, check_signed
from partitions.common.errors import DataError, UserError
from partitions.common.files import make_folder, write_atomically
from partitions.common.names import SILO

# Optional files: bundles of older versions have no policy, a hospital's own key is not in its bundle, and not every
# consortium signs, or declares a schema.
OPTIONAL = (
    VALUES,
    "README.md",
    "docker-compose.yml",
    "policy.toml",
    "node.key",
    "schema.json",
    "signed.json",
)
FILES = (".env", "allowed-apps", "ca.crt", *OPTIONAL)
UNIT = re.compile(rf"({SILO.pattern})\.container")
# What Podman takes for a unit, or for a part of one, in a folder
QUADLET = re.compile(
    r".*\.(container|volume|network|kube|image|build|pod|artifact)(\.d)?", re.DOTALL
)
POLICY_ASKED = "policy-asked"  # in the silo's folder: the path of the file that `silofl join --policy` named
LARGEST = 1 << 20  # bytes; every file of a bundle is a few thousand at most
MOST_FILES = 20  # including the folder and extra entries of a tar
KINDS_ONLY = "a bundle is one folder of plain files, each once"
# Files that Docker Compose reads in a folder
COMPOSE = re.compile(r"(docker-)?compose(\.override)?\.ya?ml")


def read_bundle(path: Path) -> dict[str, bytes]:
    """Return the files of a bundle, from its tar or from the folder that was unpacked from it.

    Raises DataError, one line, if it is no bundle, or contains anything but a bundle's regular files. No link is
    followed, and no path of the archive is used. An unpacked folder may also contain files of the hospital's own.
    """
    hint = "name the NAME.tar that `silofl add-silo` made, or the folder unpacked from it"
    try:
        if path.is_dir():
            # Podman would start every unit of the folder
            units = [name for name in sorted(os.listdir(path)) if QUADLET.fullmatch(name)]
            for name in units:
                if not UNIT.fullmatch(name):
                    raise DataError(
                        f"{path} holds {name[:100]!r}, which Podman would use beside the bundle's units: remove it; a "
                        "drop-in of your own goes beside this folder"
                    )
            names = [*FILES, *units]
            files = {
                name: _plain_file(path / name) for name in names if os.path.lexists(path / name)
            }
        else:
            if path.stat().st_size > MOST_FILES * LARGEST:
                raise DataError(f"{path} is too large for a bundle: {hint}")
            with tarfile.open(path, "r:") as archive:
                files = dict(_members(archive, path))
    except FileNotFoundError:
        raise DataError(f"there is no bundle {path}: {hint}") from None
    except PermissionError:
        raise DataError(
            f"{path} cannot be read by this user: a bundle is its owner's alone"
        ) from None
    except (OSError, EOFError, tarfile.TarError):
        raise DataError(f"{path} is no bundle, or is damaged: {hint}") from None
    missing = [name for name in FILES if name not in files and name not in OPTIONAL]
    if missing:
        raise DataError(f"{path} is no bundle: it has no {missing[0]}; {hint}")
    return files


def _plain_file(path: Path) -> bytes:
    """Return the content of a file of an unpacked bundle. Raises DataError for a link or any non-regular file."""
    kind = path.lstat().st_mode
    if not stat.S_ISREG(kind):
        what = "a symbolic link" if stat.S_ISLNK(kind) else "no plain file"
        raise DataError(
            f"{path} is {what}, and a bundle has plain files only: unpack the tar anew"
        )
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise DataError(
            f"{path} has more than {LARGEST} bytes, which no file of a bundle has: unpack the tar anew"
        )
    return content


def _members(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents. Raises DataError for an unexpected member: other path, link, device or duplicate."""
    seen, folders = set[str](), set[PurePosixPath]()
    for member in archive:
        place = PurePosixPath(member.name)
        folders.add(place if member.isdir() else place.parent)
        folder = member.isdir() and len(place.parts) <= 1
        file = (
            member.isreg()
            and len(place.parts) <= 2
            and (place.name in FILES or UNIT.fullmatch(place.name))
            and place.name not in seen
        )
        if (
            place.is_absolute()
            or ".." in place.parts
            or not (folder or file)
            or len(folders) > 1
            # Programs, and files that others could change
            or member.mode & (0o7022 if folder else 0o7133)
            or member.size > LARGEST
        ):
            raise DataError(
                f"{path} holds {member.name[:100]!r}, which no bundle has in that form: {KINDS_ONLY}; ask for the "
                "bundle again"
            )
        if file:
            seen.add(place.name)
            content = archive.extractfile(member)
            assert content is not None
            yield place.name, content.read()


def check_node_key(files: Mapping[str, bytes], site: Site) -> None:
    """Raise DataError if the key that a bundle needs is missing here, or the bundle brings another one than our own."""
    key, wanted = own_key(site_root() / site.name), variables_of(files)
    if (
        "node.key" in files
        and key.exists()
        and files["node.key"].strip() != key.read_bytes().strip()
    ):
        raise DataError(
            f"this bundle brings a private key, and {site.name} has made its own ({key}): a key that others have had "
            f"is not its alone; ask for the bundle of your request, or remove {key}"
        )
    if "node.key" in files:
        return
    if not key.exists():
        raise DataError(
            f"the key of {site.name} is not on this machine ({key}), and this bundle brings none: join where, and as "
            "the user by whom, `silofl request` was run, or name the folder that holds its node.key"
        )
    here = fingerprint(public_pem(load_key(key)))
    if here != wanted.get("SILOFL_KEY", here):
        raise DataError(
            f"this bundle is for the key {wanted['SILOFL_KEY']}, and {key} is {here}: send the request anew, or take "
            "the bundle of this one"
        )


def find_state(where: Path | None) -> Path:
    """Return a silo's state directory: the given one, or that of a bundle, this container, or this machine's only silo.

    Raises UserError, one line, if no silo or several have joined from this machine, or DataError for no bundle.
    """
    if where is None and os.environ.get("SILOFL_NAME"):
        return Site.from_environment(os.environ).state
    if where is None:
        joined = joined_silos()
        if len(joined) != 1:
            names = (
                f"these have: {', '.join(path.name for path in joined)}"
                if joined
                else "none has"
            )
            raise UserError(
                f"name a state directory or a bundle: of silos that joined from this machine, {names}"
            )
        return joined[0] / "state"
    if where.is_file() or (where / ".env").is_file():
        return site_of(read_bundle(where), Path()).state
    return where


def joined_silos() -> list[Path]:
    """Return the folders of the silos that joined from this machine without Docker, by name."""
    return sorted(
        {path.parent for name in ("ca.crt", "state") for path in site_root().glob(f"*/{name}")}
    )


def site_of(
    files: Mapping[str, bytes],
    folder: Path,
    data: Path | None = None,
    device: str = "",
    policy: Path | None = None,
) -> Site:
    """Return the silo of a bundle whose files are, or will be, in `folder`; `policy` is a file that overrides its own.

    Raises DataError if the bundle's `.env` lacks a name or an address, or has a line that sets no variable.
    """
    variables = variables_of(files)
    site = Site.from_environment(variables)
    if not SILO.fullmatch(site.name):
        raise DataError(
            f"SILOFL_NAME={site.name:.80} in the bundle's .env is no name of a silo"
        )
    if not SERVER.fullmatch(site.server):
        raise DataError(f"SILOFL_SERVER={site.server:.80} in the bundle's .env is no HOST:PORT")
    named = variables.get("SILOFL_DATA", "")
    bundled = folder / "policy.toml" if "policy.toml" in files else None
    return replace(
        site,
        ca_certificate=folder / "ca.crt",
        node_key=folder / "node.key"
        if "node.key" in files
        else own_key(site_root() / site.name),
        data=(data or Path(named or "data.npz")).expanduser().absolute(),
        state=site_root() / site.name / "state",
        device=device or site.device,
        allowed_apps=str(folder / "allowed-apps"),
        policy=str(policy.expanduser().absolute()) if policy else str(bundled or ""),
        schema=folder / "schema.json",
    )


def check_compose_files(folder: Path) -> list[str]:
    """Return the files beside an unpacked bundle's that Docker Compose merges into its docker-compose.yml.

    Raises DataError for one that Compose would start instead.
    """
    names = sorted(
        name
        for name in (os.listdir(folder) if folder.is_dir() else [])
        if COMPOSE.fullmatch(name)
    )
    for name in names:
        if ".override." not in name and name != "docker-compose.yml":
            raise DataError(
                f"{folder / name}: Docker Compose would start this file in place of the bundle's docker-compose.yml: "
                "remove it, or check the tar and unpack it anew"
            )
    return [name for name in names if ".override." in name]


def verify_bundle(
    bundle: Path, by: str = "", *, echo: Callable[[str], None], allow_older: bool = False
) -> None:
    """Run `silofl check-bundle`: report the signer, and whether Docker here has the signed image."""
    files = read_bundle(bundle)
    site, added = site_of(files, Path()), check_compose_files(bundle)
    echo(f"{site.name}, at the server {site.server}")
    for name in added:
        echo(
            f"not of the bundle: {name}, which Docker Compose adds to it; read it, unless you wrote it"
        )
    folder, unpacked = site_root() / site.name, bundle.is_dir()
    signed = check_signed(
        files, folder, by, unpacked=unpacked, echo=echo, allow_older=allow_older
    )
    if signed is None:
        echo("this bundle has no signature")
    elif image := variables_of(files).get("SILOFL_IMAGE"):
        echo(check_image(signed, image))


def unpack_bundle(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files that a silo needs, readable by their owner only."""
    make_folder(folder, 0o700)
    (folder / "schema.json").unlink(missing_ok=True)  # left by an earlier bundle
    for name in ("ca.crt", "node.key", "allowed-apps", "policy.toml", "schema.json"):
        if name in files:
            write_atomically(folder / name, files[name], mode=0o600)
