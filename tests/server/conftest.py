"""Fixtures of the server's tests."""

from __future__ import annotations

from html import escape

import numpy as np
import pytest

from server.report import canvas
from server.report.canvas import Canvas


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """Ninety rows in three columns, three classes."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(90, 3)), np.arange(90) % 3
    x[range(90), y] += 1.5
    path = tmp_path_factory.mktemp("data") / "table.npz"
    np.savez(path, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    return path


@pytest.fixture(scope="module", autouse=True)
def _blank_charts(request):
    """Charts are laid out, and put to ink in ``report`` alone: it takes half of a simulation of three rounds."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.parent.name != "report":
            patch.setattr(
                Canvas,
                "svg",
                lambda canvas, key, label: f'<svg aria-label="{escape(label)}"></svg>',
            )
        patch.setattr(canvas, "log_undrawn", _raise)  # a user's page goes on without the chart
        yield


def _raise(name, error):
    raise error
