"""``keep-models = reported``: at a run's end each silo is asked once for its own model that the report shows.

Otherwise such a model has usually never left its hospital, so no other hospital can evaluate it. The silo's checks
before it sends the model are in ``client/own_model/answer.py``.
"""

from __future__ import annotations

from flwr.app import MessageType

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.settings import Common

ACTION = "own_model"  # of the message that requests it; client/site/trust/message_rules.py has the same kind
KIND = f"{MessageType.EVALUATE}.{ACTION}"
OWN = "own"  # the model's name in the reply; its running statistics have their usual name


def sends_own_model(info: MethodInfo) -> bool:
    """Return whether silos have models to send; not if the report shows the shared one, which the server has."""
    return info.trains and not info.pooled and not info.reports_shared


def asks_for_models(info: MethodInfo, common: Common) -> bool:
    """Return whether a run requests silos' own models."""
    return common.keep_models == "reported" and sends_own_model(info)


def check_keep(common: Common) -> None:
    """Raise UserError if a run requests models that it cannot get, or models trained without noise."""
    if common.keep_models == "none":
        return
    if common.dp:
        raise UserError(
            f"keep-models = {common.keep_models}: not with dp = true: a silo's own model may be trained without noise"
        )
    if common.normalization == "silo":
        raise UserError(
            f"keep-models = {common.keep_models}: not with normalization = silo: a model is of use with its silo's own "
            "statistics, which stay there"
        )
    if not common.evaluate_every:
        raise UserError(
            f"keep-models = {common.keep_models}: with evaluate-every = 0 no report shows a model; set it to 1"
        )
