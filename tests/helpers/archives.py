"""Unpack an archive as a hospital does."""

from __future__ import annotations

import subprocess
from pathlib import Path


def untar(archive: Path, folder: Path) -> None:
    """Extract a tar file into a folder with `tar`; `TarFile.extractall(filter=...)` is newer than Python 3.11.0."""
    subprocess.run(["tar", "--extract", "--file", archive, "--directory", folder], check=True)
