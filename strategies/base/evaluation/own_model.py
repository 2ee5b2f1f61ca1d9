"""``keep-models = reported``: at a run's end each silo is asked once for its own model that the report shows.

Such a model has otherwise mostly never left its hospital, so that no other hospital can evaluate it. What the silo
checks before it sends the model: ``client/own_model/answer.py``.
"""

from __future__ import annotations

from flwr.app import MessageType

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.settings import Common

ACTION = "own_model"  # of the message that asks for it; client/site/trust/message_rules.py has the same kind
KIND = f"{MessageType.EVALUATE}.{ACTION}"
OWN = "own"  # the model's name in the reply; its running statistics go by theirs


def sends_own_model(info: MethodInfo) -> bool:
    """Return whether silos have models to send: not where the report shows the one that the server has anyway."""
    return info.trains and not info.pooled and not info.reports_shared


def asks_for_models(info: MethodInfo, common: Common) -> bool:
    """Return whether a run asks for silos' own models."""
    return common.keep_models == "reported" and sends_own_model(info)


def check_keep(common: Common) -> None:
    """Raise UserError where a run asks for models and can have none, or for such as have no noise."""
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
