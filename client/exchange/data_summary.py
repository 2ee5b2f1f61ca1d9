"""What a silo tells the server before round 1: counts, shape, classes, versions, and sums for the standardisation."""

from __future__ import annotations

import platform
from dataclasses import replace

import flwr
import torch

from client.local_data import columns_in, is_own_file, weights_file
from client.privacy.checks import check_records, released_sums
from client.session import ClientSession
from models.shapes import write_shape
from strategies.base.transport.payload import Number
from strategies.base.transport.reporting import SCHEMA, WITHHELD


def data_summary(session: ClientSession, *, late: bool = False) -> dict[str, Number]:
    """Return the summary for the server before round 1: counts, shape, classes, versions; never a label count.

    For tables, and for measurements to be predicted, it includes the sums from which the silos agree on the
    standardisation (``normalization = "agreed"``). ``late``: the run has started and its standardisation is fixed.
    """
    data, own_file = session.data, is_own_file(session.context)
    # Fails here, before the first round, if the silo lacks the weights: it is then left out.
    session.settings.part(weights_file(session.settings, session.context))
    summary: dict[str, Number] = {
        "name": session.name,
        "n_train": len(data.train),
        "n_val": len(data.val),
        "n_test": len(data.test),
        "task": data.task,
        "shape": write_shape(session.seen_shape),
        "classes": data.classes,
        SCHEMA: replace(data.schema, dtype=data.dtype).text,
        "own_file": own_file,
        "simulated": not own_file,
        "device": str(session.device),
        "threads": torch.get_num_threads(),
        "versions": f"python {platform.python_version()}, torch {torch.__version__}, flwr {flwr.__version__}",
    }
    columns = columns_in(data)
    check_records(session.settings, session.data, session.name)
    # A held-out or late silo's sums are for no other silo; a model that is only evaluated brings its statistics.
    c = session.settings.common
    alone = late or session.name in (*c.held_out, *c.late) or not session.info.trains
    if columns is not None and c.normalization == "agreed" and not alone:
        state = str(session.context.node_config.get("state-dir", ""))
        sums, reason = released_sums(columns, data.train, session.policy, state)
        if sums is None:
            summary[WITHHELD] = reason
        else:
            summary["sum"], summary["square_sum"] = sums
    return summary
