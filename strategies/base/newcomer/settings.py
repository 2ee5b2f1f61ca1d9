"""Whether the setting ``hold-out`` fits a run."""

from partitions.common.errors import UserError
from strategies.base.info import MethodInfo
from strategies.base.settings import Common


def check_hold_out(common: Common, info: MethodInfo) -> None:
    """Raise UserError where the setting ``hold-out`` names no hospital, one twice or all, or is not for this method."""
    held = common.held_out
    if common.hold_out and not held:
        raise UserError(f"hold-out = {common.hold_out!r}: names of hospitals are wanted here, with commas")
    if len(set(held)) < len(held):
        raise UserError(f"hold-out = {common.hold_out} names one of them twice")
    if held and len(held) >= common.silos:
        raise UserError(f"hold-out = {common.hold_out}: of {common.silos} silos none would be left to train")
    if held and not common.evaluate_every:
        raise UserError(f"hold-out = {common.hold_out}: evaluate-every = 0 leaves no round to choose")
    if held and common.dp:
        raise UserError(f"hold-out = {common.hold_out}: not with dp = true, which does not cover what it trains")
    if held and not info.newcomer:
        raise UserError(f"hold-out = {common.hold_out}: {info.name} does not declare it (MethodInfo.newcomer)")
