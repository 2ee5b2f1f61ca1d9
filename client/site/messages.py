"""Checks of a message against the hospital's policy, the study that it approved, and its privacy budget.

The site's own process makes them before the app is unpacked or imported. The app repeats them, without charging.
Standard library only.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .audit_gate import cohort_of, folder_of
from .budget.cohort import Reader, read_by_process
from .budget.release import charge
from .errors import SiteError
from .own_models import has_left, names_of
from .record import Record
from .study.accounting import study_faults
from .study.protocol import Study, message_faults
from .takeover import MESSAGE
from .terms import Terms
from .trust.counters import count_faults, limits_of
from .trust.message_rules import OWN_MODEL, own_model_faults, round_faults, run_faults
from .trust.policy import Policy, PolicyRefusedError


def check_message(message: Any, context: Any, terms: Terms, *, count: bool = True, app: Iterable[str] = ()) -> None:
    """Raise PolicyRefusedError, one line, if policy or study do not allow a message.

    Raises ValueError if one of them cannot be read: then nothing is allowed. An allowed message is counted, unless
    another process has done so (``count``). ``app``: the sums of the app's build; empty if another process has compared
    them. A simulation's silos have no data file of their own, and so no policy. `message` and `context` are Flower's.
    """
    node = context.node_config
    if "data" not in node:
        return
    policy, study, silo = terms.rules, terms.study, str(node.get("name", "this silo"))
    if policy.public:
        return
    asked, run_config = message.metadata.message_type, context.run_config
    kind = asked.partition(".")[0]
    sent = dict(message.content["config"]) if "config" in message.content else {}
    state, run, today = node.get("state-dir"), str(int(context.run_id)), datetime.now(UTC).date()
    try:
        left = kind == "train" and has_left(state, names_of(sent, int(run)), silo)
    except SiteError as error:
        raise PolicyRefusedError(f"{silo} refuses: {error}") from None
    faults = list[str]()
    if study is not None:
        faults = message_faults(study, run_config, kind, sent, app, today, silo)
    if asked == OWN_MODEL:
        faults += own_model_faults(policy, run_config, sent)
    if left:
        faults.append("its own model has left in this run (keep-models), which trains no further here")
    for fault in (*run_faults(policy, run_config), *faults, *round_faults(policy, run_config, kind, sent)):
        raise PolicyRefusedError(f"{silo} refuses: {fault}")
    if count:
        count_message(policy, study, state, run, silo, kind, today.isoformat())


def count_message(policy: Policy, study: Study | None, state: Any, run: str, silo: str, kind: str, day: str) -> None:
    """Note a message of this run in the record. Raises PolicyRefusedError if policy or study do not allow another."""
    faults, limits = list[str](), limits_of(policy, kind)
    if not state and limits:
        faults = [f"its policy has {policy.line(next(iter(limits)))}, and this silo no state-dir to count in"]
    elif state:
        try:
            with Record(Path(str(state))).writing() as db:
                faults = [] if study is None else study_faults(db, study, silo, run, kind, day)
                faults += count_faults(db, policy, run, silo, kind, day)
                if not faults:
                    db.execute(MESSAGE, (day, run, silo, kind, "" if study is None else study.name))
        except SiteError as error:
            faults = [str(error)]
        except OSError as error:
            faults = [f"messages cannot be counted: {error.strerror}"]
    for fault in faults:
        raise PolicyRefusedError(f"{silo} refuses: {fault}")


def charge_message(
    message: Any, context: Any, terms: Terms, *, read: Reader = read_by_process
) -> dict[str, Any] | None:
    """Charge an allowed message, before it is answered, to the privacy budget of the people in the data.

    Returns what the audit gate needs of the charge. Returns None if the message costs nothing: a run without
    differential privacy, a message that does not train, or public data. Raises PolicyRefusedError if the budget does
    not allow it. ``read``: reads the units of a new data file.
    """
    node = context.node_config
    if "data" not in node:
        return None
    if terms.rules.public:
        return None
    return charge(message, context, terms.rules, cohort_of(node), folder_of(node).parent, read=read)
