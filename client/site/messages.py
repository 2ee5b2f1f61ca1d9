"""The gate of a message: policy, the study that was approved, privacy budget; then the app; then the audit log.

`pass_gate` is the one way through it. The site's SuperNode calls it before the app is unpacked or imported, and passes
the message's terms on to the app, which checks nothing of this again. Standard library only.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..flower.contents import config_of, records_of
from ..protocol.parsed import SiteError
from ..protocol.policy import Policy, PolicyRefusedError
from ..protocol.study import StudyProtocol
from .audit_gate import (
    cohort_of,
    describe_message,
    folder_of,
    in_study,
    refuse,
    release_reply,
    take_receipt,
)
from .budget.release import Charged, charge, content_of
from .counts import count_faults, has_left, limits_of, names_of, study_faults
from .record import Record
from .secure.gate import SecureMessage
from .study.protocol import message_faults
from .takeover import MESSAGE
from .terms import Terms, read_terms
from .trust.code import AppRefusedError, dataset_faults
from .trust.message_rules import OWN_MODEL, own_model_faults, round_faults, run_faults


def pass_gate(
    message: Any,
    context: Any,
    build: str,
    answer: Callable[[Terms], Any],
    check_app: Callable[[], Iterable[str]],
) -> Any:
    """Return the reply to a message: checked, counted and charged, then answered, then written down.

    ``build``: the SHA-256 of the app, for the audit log; ``check_app``: returns the sums of the app's build, or raises
    AppRefusedError; ``answer``: returns the app's reply under these terms, and raises nothing.
    """
    try:
        terms = read_terms(context.node_config, context.run_config)
        info = describe_message(message, context, build, terms)
    except Exception as error:
        line = f"nothing leaves: the message cannot be checked: {type(error).__name__}: {error}"
        print(f"ERROR: {line}", file=sys.stderr, flush=True)
        return refuse(message, line)
    try:
        sums = tuple(check_app())
        check_message(message, context, terms, app=sums)
        secure = SecureMessage(message, context, terms, build)
        receipt = take_receipt(message, context, terms)
        charged = charge_message(message, context, terms)
        info = replace(in_study(info, terms).add(receipt=receipt), charged=charged)
    except Exception as error:
        reply = refuse_for(message, error)
    else:

        def answer_noted() -> Any:
            nonlocal charged
            found = answer(terms)
            if charged is not None and not found.has_error():
                # Before masks, which differ where a message is repeated
                charged = replace(charged, content=content_of(found))
            return found

        try:
            reply = secure.reply(answer_noted)
        except Exception as error:
            reply = refuse_for(message, error)
        info = replace(info.add(secure=secure.note or None), charged=charged)
    return release_reply(reply, info, message)


def refuse_for(message: Any, error: Exception) -> Any:
    """Print why a message has no answer, and return the reply with the reason."""
    if not isinstance(error, AppRefusedError):  # whose line is there already
        print(f"ERROR: {error}", file=sys.stderr, flush=True)
    return refuse(message, str(error) or type(error).__name__)


def check_message(message: Any, context: Any, terms: Terms, *, app: Iterable[str] = ()) -> None:
    """Raise PolicyRefusedError, one line, if policy or study do not allow a message.

    Raises ValueError if one of them cannot be read: then nothing is allowed. An allowed message is counted. A
    simulation's silos have no data file of their own, and so no policy. ``app``: the sums of the app's build.
    """
    node = context.node_config
    if "data" not in node:
        return
    policy, study, silo = terms.rules, terms.study, str(node.get("name", "this silo"))
    if policy.public:
        return
    asked, run_config = message.metadata.message_type, context.run_config
    kind = asked.partition(".")[0]
    if "config" in message.content and "config" not in records_of(message.content, "Config"):
        raise PolicyRefusedError(f"{silo} refuses: the message's config is no ConfigRecord")
    sent = config_of(message)
    state = node.get("state-dir")
    run = str(int(context.run_id))
    today = datetime.now(UTC).date()
    try:
        left = kind == "train" and has_left(state, names_of(sent, int(run)), silo)
    except SiteError as error:
        raise PolicyRefusedError(f"{silo} refuses: {error}") from None
    faults = list[str]()
    if study is not None:
        faults = message_faults(study, run_config, kind, sent, app, today, silo)
        faults += dataset_faults(study.name, study.datasets, silo, Path(str(node["data"])))
    if asked == OWN_MODEL:
        faults += own_model_faults(policy, run_config, sent)
    if left:
        faults.append(
            "its own model has left in this run (keep-models), which trains no further here"
        )
    for fault in (
        *run_faults(policy, run_config),
        *faults,
        *round_faults(policy, run_config, kind, sent),
    ):
        raise PolicyRefusedError(f"{silo} refuses: {fault}")
    count_message(policy, study, state, run, silo, kind, today.isoformat())


def count_message(
    policy: Policy,
    study: StudyProtocol | None,
    state: Any,
    run: str,
    silo: str,
    kind: str,
    day: str,
) -> None:
    """Note a message of this run in the record. Raises PolicyRefusedError if policy or study do not allow another."""
    faults, limits = list[str](), limits_of(policy, kind)
    if not state and limits:
        faults = [
            f"its policy has {policy.line(next(iter(limits)))}, and this silo no state-dir to count in"
        ]
    elif state:
        try:
            with Record(Path(str(state))).write(sync=False) as db:
                faults = [] if study is None else study_faults(db, study, silo, run, kind, day)
                faults += count_faults(db, policy, run, silo, kind, day)
                if not faults:
                    db.execute(
                        MESSAGE, (day, run, silo, kind, "" if study is None else study.name)
                    )
        except SiteError as error:
            faults = [str(error)]
        except OSError as error:
            faults = [f"messages cannot be counted: {error.strerror}"]
    for fault in faults:
        raise PolicyRefusedError(f"{silo} refuses: {fault}")


def charge_message(message: Any, context: Any, terms: Terms) -> Charged | None:
    """Charge an allowed message, before it is answered, to the privacy budget of the people in the data.

    Returns what the audit gate needs of the charge. Returns None if the message costs nothing: a run without
    differential privacy, a message that does not train, or public data. Raises PolicyRefusedError if the budget does
    not allow it.
    """
    node = context.node_config
    if "data" not in node or terms.rules.public:
        return None
    return charge(message, context, terms.rules, cohort_of(node), folder_of(node).parent)
