"""Whether the run's settings stay within the hospital's policy."""

from ...flower.messages import records_of
from ..message import SiteMessage
from ..trust.message_rules import run_faults


def policy_fault(message: SiteMessage) -> str:
    """Return which setting exceeds a rule; the stricter of policy and study holds."""
    if message.public:
        return ""
    content = message.message.content
    if "config" in content and "config" not in records_of(content, "Config"):
        return "the message's config is no ConfigRecord"
    return next(iter(run_faults(message.terms.rules, message.settings)), "")
