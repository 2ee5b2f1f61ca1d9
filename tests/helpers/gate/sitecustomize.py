"""First on the PYTHONPATH of a drill's federation: whoever comes to the place that the drill names waits there.

The file `place` in the folder SILOFL_GATE names it in three words: a part of the federation, a file, a function. A
process of that part that is about to run that function writes its number into the file `here`, and goes on once another
place is named, or none. ``faults.Gate`` is the drill's side; SILOFL_GATE_FUNCTIONS are all functions that it may name.
"""

import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

FUNCTIONS = frozenset(os.environ.get("SILOFL_GATE_FUNCTIONS", "").split())
PLACE, HERE = (Path(os.environ.get("SILOFL_GATE", "."), name) for name in ("place", "here"))


def look(frame: FrameType, event: str, _: Any) -> None:
    """Called by Python for every call of a function."""
    code = frame.f_code
    if event != "call" or code.co_name not in FUNCTIONS or not (place := named()):
        return
    part, file, function = place.split()
    mine = part == os.environ.get("SILOFL_PART", "").rpartition(":")[2]
    if mine and code.co_filename.endswith(file) and code.co_qualname == function:
        HERE.write_text(str(os.getpid()))
        while named() == place:
            time.sleep(0.01)


def named() -> str:
    """The place that the drill has named, if it has."""
    try:
        return PLACE.read_text()
    except FileNotFoundError:
        return ""


if FUNCTIONS:
    sys.setprofile(look)
