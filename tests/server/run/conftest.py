"""What the tests of silos that train together share."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """What was logged about ``vectorize``."""
    logger = logging.getLogger("flwr")
    before, logger.propagate = logger.propagate, True
    yield lambda: [r.getMessage() for r in caplog.records if "vectorize" in r.getMessage()]
    logger.propagate = before
