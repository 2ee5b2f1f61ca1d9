"""Whether the silo's own model may leave, and whether it has: then its run trains no further here."""

from ..counts import has_left, names_of
from ..message import SiteMessage
from ..trust.message_rules import OWN_MODEL, own_model_faults

LEFT = "its own model has left in this run (keep-models), which trains no further here"


def own_model_fault(message: SiteMessage) -> str:
    """Return why a request for the own model, or one to train after it has left, is not answered."""
    if message.public:
        return ""
    if message.action == OWN_MODEL:
        policy, settings = message.terms.rules, message.settings
        return next(iter(own_model_faults(policy, settings, message.config)), "")
    names = names_of(message.config, message.run)
    left = message.kind == "train" and has_left(message.state, names, message.silo)
    return LEFT if left else ""
