"""Whether the server has countersigned this site's audit log (rule ``receipts``)."""

from ..message import SiteMessage
from ..trust.receipts import REQUIRED, keep_receipt, warn_once


def receipt_fault(message: SiteMessage) -> str:
    """Keep the server's receipt for this silo's last reply; return why a site that requires one does not answer.

    A fault is printed once per run where receipts are optional.
    """
    if message.data is None:
        return ""
    silo, run, policy = message.silo, str(message.run), message.terms.rules
    entry = keep_receipt(message.config, message.kind, run, silo, message.log)
    message.passage.receipt = entry
    fault = entry["fault"] if entry and "fault" in entry else ""
    if fault and policy.receipts == REQUIRED:
        return f"its policy has {policy.line('receipts')}, and {fault}"
    if fault:
        warn_once(f"WARNING: {silo}: {fault} ({message.log})", run)
    return ""
