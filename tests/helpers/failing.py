"""What ends in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def fails(
    kind: type[Exception] | tuple[type[Exception], ...],
    match: str | None,
    call: Callable[..., object],
    /,
    *given: Any,
    **named: Any,
) -> str:
    """The line with which the call ends, an error of this kind, in which this regular expression is found."""
    with pytest.raises(kind, match=match) as caught:
        call(*given, **named)
    said = str(caught.value)
    assert "\n" not in said
    return said
