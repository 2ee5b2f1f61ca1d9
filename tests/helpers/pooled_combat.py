"""ComBat of pooled rows in plain numpy, by the paper's equations one after the other; it shares nothing with silofl."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def pooled_combat(
    tables: Sequence[Numbers], covariates: Sequence[Numbers] | None = None, shrink: bool = True, close: float = 1e-13
) -> list[Numbers]:
    """Each hospital's harmonised table (n_i, g). ``tables``: NaN where a value is missing; ``covariates``: (n_i, p)."""
    batch = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    y = np.concatenate(tables)
    x = np.zeros((len(y), 0)) if covariates is None else np.concatenate(covariates)
    design = np.hstack([(batch[:, None] == np.arange(len(tables))).astype(float), x])
    z, back, sigma = np.full_like(y, np.nan), np.full_like(y, np.nan), np.zeros(y.shape[1])
    for g in range(y.shape[1]):
        rows = ~np.isnan(y[:, g])
        found = np.linalg.lstsq(design[rows], y[rows, g], rcond=None)[0]
        counts = design[rows, : len(tables)].sum(0)
        alpha = counts @ found[: len(tables)] / counts.sum()
        sigma[g] = np.sqrt(((y[rows, g] - design[rows] @ found) ** 2).mean())
        back[:, g] = alpha + x @ found[len(tables) :]
        z[:, g] = (y[:, g] - back[:, g]) / sigma[g]
    made = []
    for i in range(len(tables)):
        own = z[batch == i]
        n = (~np.isnan(own)).sum(0)
        gamma, delta = np.nanmean(own, 0), np.nanvar(own, 0, ddof=1)
        if shrink:
            gamma, delta = posterior(own, n, gamma, delta, close)
        made.append((own - gamma) / np.sqrt(delta) * sigma + back[batch == i])
    return made


def posterior(z: Numbers, n: Numbers, gamma: Numbers, delta: Numbers, close: float) -> tuple[Numbers, Numbers]:
    """gamma* and delta* of one hospital."""
    mean, tau = gamma.mean(), gamma.var(ddof=1)
    m, s = delta.mean(), delta.var(ddof=1)
    a, b = (2 * s + m * m) / s, (m * s + m**3) / s
    g, d = gamma, delta
    for _ in range(100_000):
        new = (tau * n * gamma + d * mean) / (tau * n + d)
        wide = (0.5 * np.nansum((z - new) ** 2, 0) + b) / (n / 2 + a - 1)
        change = max(np.abs((new - g) / g).max(), np.abs((wide - d) / d).max())
        g, d = new, wide
        if change < close:
            break
    return g, d
