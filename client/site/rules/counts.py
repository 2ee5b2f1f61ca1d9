"""How many silos train in the round, and how many messages there have been: an allowed one is counted here."""

from pathlib import Path

from ...protocol.policy import Policy
from ...protocol.study import StudyProtocol
from ..counts import count_faults, counted_limits, study_faults
from ..message import SiteMessage
from ..record import MESSAGE, Record
from ..trust.message_rules import round_faults


def counts_fault(message: SiteMessage) -> str:
    """Return which number policy or study do not allow."""
    if message.public:
        return ""
    rules, kind = message.terms.rules, message.kind
    if faults := round_faults(rules, message.settings, kind, message.config):
        return faults[0]
    place = message.state, str(message.run), message.silo, kind, message.day.isoformat()
    return count_message(rules, message.terms.study, *place)


def count_message(
    policy: Policy,
    study: StudyProtocol | None,
    state: Path | None,
    run: str,
    silo: str,
    kind: str,
    day: str,
) -> str:
    """Note a message of this run in the record; return which limit of study or policy does not allow another."""
    if state is None:
        limits = counted_limits(policy, kind)
        line = policy.line(next(iter(limits))) if limits else ""
        return f"its policy has {line}, and this silo no state-dir to count in" if line else ""
    with Record(state).write(sync=False) as db:
        faults = [] if study is None else study_faults(db, study, silo, run, kind, day)
        faults += count_faults(db, policy, run, silo, kind, day)
        if not faults:
            db.execute(MESSAGE, (day, run, silo, kind, "" if study is None else study.name))
    return next(iter(faults), "")
