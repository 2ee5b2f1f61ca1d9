"""The gate of a message: `pass_gate` is the one way through it, and reads from top to bottom.

    parse        `SiteMessage`, from here on the only reading of what the server sent (`message.py`)
    rules        in their order, in one transaction: counted and charged before the answer (`rules/`)
    answer       the app's, in its own process, under the message's terms; then the masks (`secure/gate.py`)
    release      in a second transaction: budget, study's bytes, audit log; then the reply may leave (`release.py`)

The site's SuperNode calls it before the app is unpacked or imported. The app checks nothing of this again. Killed
between the two transactions, a site has counted and charged a message whose reply did not leave. Standard library.
"""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ..flower.messages import refuse
from ..protocol.parsed import SiteError
from ..protocol.policy import PolicyRefusedError
from .message import SiteMessage, read_message
from .record import Record
from .release import describe_message, release_reply
from .rules.budget import budget_fault, content_of
from .rules.counts import counts_fault
from .rules.masks import masks_fault
from .rules.own_model import own_model_fault
from .rules.policy import policy_fault
from .rules.receipt import receipt_fault
from .rules.study import study_fault
from .terms import Terms
from .trust.code import AppRefusedError

# A rule returns its fault in one line, which continues "SILO refuses:", or an empty text. It leaves what the reply
# needs in the message's passage. What it has written stays where a later rule refuses: a refused message counts, too.
Rule = Callable[[SiteMessage], str]
RULES: tuple[Rule, ...] = (
    policy_fault,
    study_fault,
    own_model_fault,
    counts_fault,
    masks_fault,
    receipt_fault,
    budget_fault,
)


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
        parsed = read_message(message, context, build)
        parsed.passage.line = describe_message(parsed)
    except Exception as error:
        line = f"nothing leaves: the message cannot be checked: {type(error).__name__}: {error}"
        print(f"ERROR: {line}", file=sys.stderr, flush=True)
        return refuse(message, line)
    try:
        parsed = replace(parsed, app=tuple(check_app()))
        check_rules(parsed)
        parsed.passage.allowed = True
        reply = answer_allowed(parsed, answer)
    except Exception as error:
        if not isinstance(error, AppRefusedError):  # whose line is there already
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
        reply = refuse(message, str(error) or type(error).__name__)
    return release_reply(reply, parsed)


def check_rules(message: SiteMessage, rules: Sequence[Rule] = RULES) -> None:
    """Raise PolicyRefusedError, one line, with the first rule's fault; SiteError if policy or study cannot be read.

    The transaction is on the disk when this returns, if it has a charge.
    """
    if message.terms.error is not None:
        raise message.terms.error
    record = Record(message.state) if message.state else None
    try:
        with record.write(sync=message.charged) if record else contextlib.nullcontext():
            fault = next(filter(None, (find_fault(message) for find_fault in rules)), "")
    except SiteError as error:
        fault = str(error)
    except OSError as error:
        fault = f"messages cannot be counted: {error.strerror}"
    if fault:
        raise PolicyRefusedError(f"{message.silo} refuses: {fault}")


def check_message(message: Any, context: Any, terms: Terms, *, app: Iterable[str] = ()) -> None:
    """Check, count and charge a message where no SuperNode does, as in a simulation; raises as `check_rules` does.

    There the server signs no log, and silos share no masks. ``app``: the sums of the app's build.
    """
    if "data" not in context.node_config or terms.rules.public:
        return
    parsed = replace(read_message(message, context, terms=terms), app=tuple(app))
    check_rules(parsed, [rule for rule in RULES if rule not in (masks_fault, receipt_fault)])


def answer_allowed(message: SiteMessage, answer: Callable[[Terms], Any]) -> Any:
    """Return the app's reply to an allowed message, or this silo's own, with masks where the run has them.

    Raises PolicyRefusedError if it must not leave.
    """

    def noted() -> Any:
        reply = answer(message.terms)
        if message.passage.charge is not None and not reply.has_error():
            message.passage.content = content_of(reply)
        return reply

    masks = message.passage.masks
    return noted() if masks is None else masks.reply(noted)
