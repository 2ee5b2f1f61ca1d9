"""A fixture of the tests that read data sets."""

import pytest


@pytest.fixture
def own_places(tmp_path, monkeypatch):
    """No cache, no home and no SILOFL_DATA but those of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SILOFL_DATA", raising=False)
