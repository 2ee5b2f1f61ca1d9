"""What leaves a silo: the data card through :func:`release_card`, everything else through :func:`release`.

The vectors that the method names in ``uploads``, the method's numbers that it names in ``sends_numbers``, metrics and
seconds of the list in ``strategies/reports.py``, sample counts. Everything that left is logged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from logging import INFO
from typing import cast

from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.supercore import log
from torch import Tensor

from strategies.base import SiloClient
from strategies.payload import Model, Number, Payload, Wire, encode
from strategies.reports import CARD, SECONDS, SPLITS, SUMS, allowed_metrics


def release_card(card: Mapping[str, Number]) -> RecordDict:
    """The content of the reply that the data card is. Raises ValueError for what is not on the list."""
    unknown = sorted(set(card) - set(CARD))
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not on the list of what a data card may tell")
    shown = {
        name: f"of {len(cast(list[float], v))} columns" if name in SUMS else v for name, v in card.items()
    }
    log(INFO, "%s sent its data card: %s", card["name"], shown)
    return RecordDict({"card": ConfigRecord({**card})})


def release(
    client: SiloClient,
    vectors: Sequence[Tensor],
    metrics: Mapping[str, float],
    *,
    min_samples: int,
) -> RecordDict:
    """The content of a silo's reply. Raises ValueError where a method tries to send what it has not declared."""
    names = client.upload_names() if vectors else ()
    models = {
        name: Model(vector, client.silo.name, client.round, len(client.silo.train))
        for name, vector in zip(names, vectors, strict=True)
    }
    for name in client.replies:
        if name not in client.sends_numbers:
            raise ValueError(f"{type(client).__name__} may not send '{name}': it is not in sends_numbers")
    config: dict[str, Number] = {
        "round": client.round,
        "silo": client.silo.name,
        "samples": len(client.silo.train),
    }
    records = encode(Payload(models, client.replies), config, Wire(client.common.wire_dtype))
    counts = {split: len(getattr(client.silo, split)) for split in SPLITS}
    kept: dict[str, float] = {}
    for name, value in metrics.items():
        if name not in allowed_metrics():
            raise ValueError(f"metric '{name}' is not on the list of what may leave a silo")
        if name in SECONDS or counts[name.split(".")[1]] >= min_samples:
            kept[name] = value
    records["metrics"] = MetricRecord({name: float(value) for name, value in kept.items()})
    size = {name: m.vector.numel() for name, m in models.items()}
    log(INFO, "%s round %d sent: vectors %s, numbers %s, metrics %s", client.silo.name, client.round, size,
        dict(client.replies), sorted(kept))  # fmt: skip
    return records
