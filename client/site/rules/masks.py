"""Whether a vector leaves under masks only, and whether the server's list of silos may be in a sum with this one."""

from ...protocol.parsed import SiteError
from ...protocol.run_settings import is_secure
from ...protocol.secure import KEYS, START, UNMASK
from ..message import SiteMessage
from ..secure.gate import SecureMessage


def masks_fault(message: SiteMessage) -> str:
    """Return why a message of secure aggregation, or one of a run with it, is not answered."""
    needed = is_secure(message.settings) or message.action in (KEYS, START, UNMASK)
    if not needed and message.terms.rules.secure_aggregation != "required":
        return ""
    try:
        message.passage.masks = SecureMessage(message)
    except (SiteError, OSError) as error:
        return str(error)
    return ""
