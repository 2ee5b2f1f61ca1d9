"""The SuperLink that a module's tests share."""

from collections.abc import Iterator

import pytest
from superlink import SuperLink, superlink


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SuperLink]:
    with superlink(tmp_path_factory.mktemp("superlink")) as running:
        yield running
