"""The scripts that go first on a SuperNode's PATH, and the command line of the template process."""

import os
import shlex
import sys
import tempfile
from pathlib import Path

PRIVATE = Path(__file__).resolve().parents[2] / "private.py"


def install_shim(directory: Path) -> Path:
    """Write `flwr-clientapp` (`shim.py`) into `directory`, and `flower-supernode` (`../supernode.py`) beside it.

    Returns the path of `flwr-clientapp`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    shim = Path(__file__).resolve().with_name("shim.py")
    scripts = {"flower-supernode": ["-P", str(PRIVATE), "runtime.supernode"], "flwr-clientapp": ["-I", "-S", str(shim)]}
    for name, arguments in scripts.items():
        descriptor, made = tempfile.mkstemp(dir=directory, prefix=f".{name}.")
        os.close(descriptor)
        temporary = Path(made)
        # /bin/sh, because a shebang line allows neither spaces nor a long path.
        temporary.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *arguments])} "$@"\n')
        temporary.chmod(0o755)
        temporary.rename(directory / name)
    return directory / "flwr-clientapp"


def template_command(socket_path: Path) -> list[str]:
    """Return the command line that runs the template process at `socket_path`."""
    return [sys.executable, "-P", str(PRIVATE), "runtime.prefork.commands", "serve", str(socket_path)]
