"""A site bundle at the hospital: read, unpacked, and run without Docker (`silofl join`).

    NAME/.env  allowed-apps  ca.crt  docker-compose.yml  node.key  policy.toml  README.md  signed.json

`silofl add-silo` makes it (server/deploy/bundle.py). With `node.key` in it, whoever has it is the silo. Without, it is
of a hospital that made its key itself (`request.py`): the key lies at the site, or beside the unpacked files. With
`signed.json` the consortium has signed it (`signing.py`).
"""

import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from client.site.keys import fingerprint
from client.site.launch import free_ports, silo_environment, supernode_command
from client.site.node import Site
from partitions.disk import locked, write_atomically

if TYPE_CHECKING:
    from client.site.signing import Signed

FILES = (".env", "README.md", "allowed-apps", "ca.crt", "docker-compose.yml", "node.key", "policy.toml", "signed.json")
# A bundle of an older version has no policy, one for a hospital's own key no key, and not every consortium signs.
OPTIONAL = ("README.md", "docker-compose.yml", "policy.toml", "node.key", "signed.json")
LARGEST = 1 << 20  # bytes; every file of a bundle is a few thousand at most


def read_bundle(path: Path) -> dict[str, bytes]:
    """The files of a bundle, be it the tar or the folder that was unpacked from it.

    Raises ValueError where it is no bundle; nothing outside the known names is looked at, so no path of the
    archive is ever used.
    """
    hint = "name the NAME.tar that `silofl add-silo` made, or the folder unpacked from it"
    try:
        if path.is_dir():
            files = {name: (path / name).read_bytes() for name in FILES if (path / name).is_file()}
        else:
            with tarfile.open(path) as archive:
                files = dict(_members(archive))
    except FileNotFoundError:
        raise ValueError(f"there is no bundle {path}: {hint}") from None
    except PermissionError:
        raise ValueError(f"{path} cannot be read by this user: a bundle is its owner's alone") from None
    except (OSError, EOFError, tarfile.TarError):
        raise ValueError(f"{path} is no bundle, or is damaged: {hint}") from None
    missing = [name for name in FILES if name not in files and name not in OPTIONAL]
    if missing:
        raise ValueError(f"{path} is no bundle: it has no {missing[0]}; {hint}")
    return files


def _members(archive: tarfile.TarFile) -> Iterator[tuple[str, bytes]]:
    for member in archive:
        name = member.name.rpartition("/")[2]
        if member.isfile() and name in FILES and member.size <= LARGEST:
            file = archive.extractfile(member)
            assert file is not None
            yield name, file.read()


def read_variables(text: str) -> dict[str, str]:
    """The `KEY=value` lines of an `.env` file."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip().strip("'\"") for key, value in pairs}


def site_root() -> Path:
    """The directory that holds one directory per silo that joined from this machine without Docker."""
    home = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(home).absolute() / "silofl-site"


def own_key(folder: Path) -> Path:
    """Where a key lies that the site made itself, in the silo's folder below `site_root()`."""
    return folder / "own.key"


def check_key(files: Mapping[str, bytes], site: Site) -> None:
    """Raise ValueError where the key that a bundle wants is not here, or the bundle brings another than our own."""
    from client.site.request import load_key, public_bytes

    own, wanted = own_key(site_root() / site.name), read_variables(files[".env"].decode(errors="replace"))
    if "node.key" in files and own.exists() and files["node.key"].strip() != own.read_bytes().strip():
        raise ValueError(
            f"this bundle brings a private key, and {site.name} has made its own ({own}): a key that others have had "
            f"is not its alone; ask for the bundle of your request, or remove {own}"
        )
    if "node.key" in files:
        return
    if not own.exists():
        raise ValueError(
            f"the key of {site.name} is not on this machine ({own}), and this bundle brings none: join where, and as "
            "the user by whom, `silofl request` was run, or name the folder that holds its node.key"
        )
    here = fingerprint(public_bytes(load_key(own)))
    if here != wanted.get("SILOFL_KEY", here):
        raise ValueError(
            f"this bundle is for the key {wanted['SILOFL_KEY']}, and {own} is {here}: send the request anew, or take "
            "the bundle of this one"
        )


def site_of(
    files: Mapping[str, bytes], folder: Path, data: Path | None = None, device: str = "", policy: Path | None = None
) -> Site:
    """The silo of a bundle whose files lie, or will lie, in `folder`; `policy` is a file that stands above its own.

    Raises ValueError where the bundle's `.env` lacks a name or an address.
    """
    variables = read_variables(files[".env"].decode(errors="replace"))
    site = Site.from_environment(variables)
    if "/" in site.name or site.name.startswith("."):
        raise ValueError(f"SILOFL_NAME={site.name} in the bundle's .env is no name of a silo")
    named = variables.get("SILOFL_DATA", "")
    own = folder / "policy.toml" if "policy.toml" in files else None
    return replace(
        site,
        ca_certificate=folder / "ca.crt",
        node_key=folder / "node.key" if "node.key" in files else own_key(site_root() / site.name),
        data=(data or Path(named or "data.npz")).expanduser().absolute(),
        state=site_root() / site.name / "state",
        device=device or site.device,
        allowed_apps=str(folder / "allowed-apps"),
        policy=str(policy.expanduser().absolute()) if policy else str(own or ""),
    )


def check_signature(
    bundle: Path,
    files: Mapping[str, bytes],
    name: str,
    by: str = "",
    *,
    say: Callable[[str], None],
    remember: bool = True,
) -> "Signed | None":
    """Raise ValueError where a bundle is not of whom this site knows, or not what they signed (`signing.py`)."""
    from client.site.signing import check_signed

    own = signed_by(site_root() / name)
    others = sorted(path for path in site_root().glob(f"*/{own.name}") if path != own)
    return check_signed(
        files, unpacked=bundle.is_dir(), remembered=own, others=others, by=by, say=say, remember=remember
    )


def signed_by(folder: Path) -> Path:
    """Where it is remembered who signed a silo's bundle, in the silo's folder below `site_root()`."""
    return folder / "signed-by"


def check(bundle: Path, by: str = "", *, say: Callable[[str], None]) -> None:
    """`silofl check-bundle`: whose bundle it is, and whether Docker here has the image that they signed."""
    from client.site.signing import check_image

    files = read_bundle(bundle)
    site = site_of(files, Path())
    say(f"{site.name}, at the server {site.server}")
    signed = check_signature(bundle, files, site.name, by, say=say)
    if signed is None:
        say("nobody signed this bundle")
    elif image := read_variables(files[".env"].decode(errors="replace")).get("SILOFL_IMAGE"):
        say(check_image(signed, image))


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write the files that a silo needs, readable for their owner alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name in ("ca.crt", "node.key", "allowed-apps", "policy.toml"):
        if name in files:
            write_atomically(folder / name, files[name], mode=0o600)


def join(
    bundle: Path,
    data: Path,
    *,
    device: str = "",
    policy: Path | None = None,
    signed_by: str = "",
    say: Callable[[str], None],
) -> int:
    """Run the silo of a bundle in the foreground until SIGTERM or SIGINT; everything is checked first.

    State, models and logs stay under `site_root()/NAME`. `signed_by` is `check_signed`'s `by`.

    Raises ValueError: the bundle, its signature, the data, the address, the certificate or the key; or this silo runs
    already.
    """
    from client.site.doctor import first_failure, one_line, site_checks, table
    from client.site.supervisor import run
    from client.site.warm.install import install_shim

    files = read_bundle(bundle)
    site = site_of(files, Path())
    check_key(files, site)
    name = site.name
    folder = site_root() / name
    with only_one(folder, name):
        check_signature(bundle, files, name, signed_by, say=say)
        unpack(files, folder)
        site = site_of(files, folder, data, device, policy)
        checks = site_checks(site)
        say(table(checks))
        if fault := first_failure(checks):
            raise ValueError(f"{name} cannot join: {one_line(fault)}")
        shim = install_shim(folder / "bin")
        say(f"{name} joins {site.server}; Ctrl-C leaves")
        command = supernode_command(site, path=str(shim.with_name("flower-supernode")), port=free_ports(1)[0])
        environment = silo_environment(folder / "flower", scripts=shim.parent, warm_socket=folder / "warm.sock")
        environment |= {"SILOFL_ALLOWED_APPS": site.allowed_apps, "SILOFL_POLICY": site.policy}
        environment |= {"SILOFL_SERVER": site.server}  # who asks, in the audit log
        return run(site, command, environment, online=folder / "online", say=say)


@contextmanager
def only_one(folder: Path, name: str) -> Iterator[None]:
    """One `join` of a silo on this machine at a time."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with locked(folder / "lock", f"{name} runs on this machine already: a bundle runs in one place at a time"):
        yield
