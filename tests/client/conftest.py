"""The SuperLink that a module's tests share."""

import pytest
from superlink import superlink


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with superlink(tmp_path_factory.mktemp("superlink")) as running:
        yield running
