"""Entry point of both images.

    setup                   one-shot: credentials, demo data, registration (server.deploy.setup)
    install [--allow-older] one-shot, at a hospital: a bundle's files into the silo's volume
    flower-superlink ...    as server.deploy.superlink, once `setup` has written its credentials; beside it
                            server.deploy.registrar
    relay                   `silofl relay`, in a service that is off by default
    flower-supernode ...    supervised (client.site.runtime.supervisor)
    anything else           as it is, such as `silofl doctor`

`setup` and `install` start as root, with the one capability it takes to give away a new volume, because Docker makes
volumes and mounted folders as root; they do the rest as the image's user. All else runs as the image's user.
"""

import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from partitions.common.errors import UserError

USER = 10001  # as in the Dockerfile
READY_SECONDS = 600.0  # `setup` may download public data first


def main(command: list[str]) -> int:
    from client.protocol.launch import reach_without_proxy

    # Docker passes on the host's proxies
    reach_without_proxy(os.environ, "control", "superlink")
    if command[:1] == ["setup"]:
        give_away()
        from server.deploy.setup import set_up

        set_up(os.environ)
        return 0
    if command[:1] == ["install"]:
        install(allow_older="--allow-older" in command[1:])
        return 0
    if command[:1] == ["flower-superlink"]:
        from server.deploy.superlink import in_place_of

        command = in_place_of(command)
        wait_for_setup(Path("/server/ready"), os.environ["SILOFL_HOSTS"])
        # A pod's /tmp outlives its containers
        Path("/tmp/registered").unlink(missing_ok=True)
        # Ends with this container
        subprocess.Popen([sys.executable, "-P", __file__, "registrar"])
        # With SILOFL_SHARED of this image: the run directories are the host's user's to tidy up
        os.umask(0)
        # A server app's modules are compiled for the first run alone
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    elif command[:1] == ["registrar"]:
        from server.deploy.control import Connection
        from server.deploy.registrar import keep_registrations

        server = Connection("registrar", "control:8000", "/server/ca.crt")
        keep_registrations(server, Path("/server/registered.json"), Path("/tmp/registered"))
    elif command[:1] == ["relay"]:
        from server.deploy.control import Connection
        from server.deploy.relay import relay, tls_of

        # Of a relay that speaks TLS itself
        files = map(Path, ("/relay/chain.pem", "/relay/key.pem"))
        tls = tls_of(*(path if path.exists() else None for path in files))
        server = Connection("relay", "control:8000", "/server/ca.crt")
        relay(("0.0.0.0", 8082), ("superlink", 9092), server, tls, partial(print, flush=True))
        return 0
    elif command[:1] == ["flower-supernode"]:
        from contextlib import nullcontext

        from client.link.local_end import Link
        from client.protocol.launch import own_supernode, threads
        from client.protocol.node import Site
        from client.site.runtime.supervisor import run
        from partitions.common.files import keep_private

        keep_private()  # what this silo writes, and everything that it starts
        site = Site.from_environment(os.environ)
        # Silos that share this machine's cores
        sharing = int(os.environ.get("SILOFL_SHARING") or 1)
        os.environ.setdefault("OMP_NUM_THREADS", threads(sharing))
        command = [*own_supernode(), *command[1:]]
        with Link.of_container(site, os.environ) or nullcontext() as link:
            return run(
                site,
                command,
                {**os.environ, **(link.environment if link else {})},
                online=Path("/tmp/online"),
                echo=lambda line: print(line, flush=True),
            )
    os.execvp(command[0], command)


def give_away() -> None:
    """Make the image's user the owner of volumes and folders that Docker made as root, and become that user."""
    folders = [*Path("/volumes").glob("*/*"), *map(Path, ("/setup", "/server", "/runs"))]
    if os.geteuid() == 0:
        for folder in [*folders, *Path("/").glob("datasets")]:
            # A folder in use is somebody's
            if folder.stat().st_uid == 0 and not any(folder.iterdir()):
                # The host's user works in `runs` too
                folder.chmod(0o777 if folder.name == "runs" else 0o700)
                os.chown(folder, USER, USER)
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)
    for folder in folders:
        if not os.access(folder, os.W_OK):
            raise UserError(
                f"user {USER} cannot write to {folder}: chmod 777 the host's folder that is mounted there"
            )


def install(root: Path = Path("/"), *, allow_older: bool = False) -> None:
    """A bundle's files, readable for their owner alone, into /site for whoever runs the silo (SILOFL_USER).

    Where the consortium signed them, who it was is remembered there, and nobody else's, nor older ones, are taken
    afterwards. `root` is for tests.
    """
    from client.link.local_end import VIA_CA
    from client.site.trust.bundle import read_bundle
    from client.site.trust.signing import check_signed

    bundle, site, state = root / "bundle", root / "site", root / "state"
    # Kubernetes mounts a Secret as links into this folder
    mounted = bundle / "..data"
    files = read_bundle(mounted.resolve() if mounted.is_dir() else bundle)
    check_signed(files, site, unpacked=True, echo=print, allow_older=allow_older)
    if "node.key" not in files:
        raise UserError(
            "no node.key beside this compose file: it is the one that `silofl request NAME --folder DIR` made, in DIR"
        )
    user, _, group = os.environ["SILOFL_USER"].partition(":")
    # In a pod the silo's own user runs this
    give = os.chown if os.geteuid() == 0 else lambda path, user, group: None
    heads = root / "state.head"
    # They may have been another user's
    for path in (site, state, *state.rglob("*"), heads, *heads.rglob("*")):
        give(path, int(user), int(group or user))
    if (own := bundle / VIA_CA).is_file():  # the hospital's: of a proxy that opens TLS
        files[VIA_CA] = own.read_bytes()
    names = ("ca.crt", "allowed-apps", "policy.toml", "schema.json", VIA_CA)
    readable = dict.fromkeys(names, 0o444)
    for name, mode in {**readable, "node.key": 0o400}.items():
        target = site / name
        target.unlink(missing_ok=True)
        if name not in files:
            continue  # a silo that is told to read one, and finds none, sends nothing
        target.touch(mode=0o600)
        target.write_bytes(files[name])
        target.chmod(mode)
        give(target, int(user), int(group or user))


def wait_for_setup(ready: Path, hosts: str) -> None:
    """Wait until `setup` has written credentials for these host names."""
    deadline = time.monotonic() + READY_SECONDS
    while not ready.exists() or ready.read_text() != hosts:
        if time.monotonic() > deadline:
            raise UserError(
                f"no credentials in {ready.parent} after {READY_SECONDS:.0f} s: see the log of `setup`"
            )
        time.sleep(0.1)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:
        if os.environ.get("SILOFL_TRACEBACK"):
            raise
        from client.faults import explain

        code, text = explain(error)
        print(f"silofl: {' '.join(text.split())}", file=sys.stderr)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(130)
