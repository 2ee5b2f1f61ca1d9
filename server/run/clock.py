"""Detect jumps of this machine's clock: Flower uses it for presence, and refuses silos with a different time."""

from __future__ import annotations

import time
from collections.abc import Callable

JUMP_SECONDS = 60.0  # smaller jumps are not reported


class ClockWatch:
    """Report jumps of the wall clock against the monotonic clock; ``note`` receives one line for each."""

    def __init__(self, note: Callable[[str], object]) -> None:
        self.note = note
        self.offset = time.time() - time.monotonic()

    def check(self) -> None:
        """Report a jump since the last check."""
        if abs(jump := time.time() - time.monotonic() - self.offset) > JUMP_SECONDS:
            self.offset += jump
            direction = "forward" if jump > 0 else "back"
            self.note(
                f"this server's clock went {direction} by {abs(jump) / 3600:.1f} h (it was set, or the machine slept): "
                "silos that have another time are refused until it agrees with theirs"
            )
