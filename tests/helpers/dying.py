"""A silo that is killed, for real, as it answers a private training message (`COMMAND`).

App, ledger and audit log are in one process. The round is the second of a run, so
that there is a state to go back to. For each phase a copy of the silo's state directory gets the message in a process
that dies there. Then it gets the same message again, and the message that a resumed run makes of it. Prints a line of
JSON for each phase.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import Context, Message
from tiny import TinyGrid, federate, random_silos, tensor_of

from client.app import app
from client.session import ClientSession
from client.site import gate, release
from client.site.budget import ledger
from client.site.budget.ledger import SENT, Ledger, charges
from client.site.rules import budget
from client.site.terms import GIVEN, Terms, written_terms
from client.site.trust import audit
from client.store import StateStore
from server.simulation.engine import flower_identity
from strategies.base.privacy import PrivateTraining

COMMAND = "import sys, dying; dying.main(dying.Path(sys.argv[1]))"
SETTINGS: dict[str, Any] = {
    "strategy": "ditto",
    "dp": True,
    "batch_size": 10,
    "rounds": 2,
    "learning_rate": 0.1,
}
# phase: whose function is not called any more, or is not left; and at which call
PHASES: dict[str, tuple[Any, str, int]] = {
    "before the charge": (budget, "charge_message", 1),
    "as the charge is written": (ledger, "write_whole", 1),
    "before training": (ClientSession, "open_client", 1),
    "in training": (PrivateTraining, "gradient", 3),
    "before the state is saved": (StateStore, "save", 1),
    "before the reply is noted": (release, "note_charged", 1),
    "before the audit log": (release, "write_down", 1),
    "as the reply leaves": (gate, "release_reply", -1),
}


def pass_on(message: Message, context: Context) -> Message:
    """Have a message answered as a SuperNode does."""

    def answer(terms: Terms) -> Message:
        context.node_config[GIVEN] = written_terms(terms)
        return app(message, context)

    reply: Message = gate.pass_gate(message, context, "ab" * 32, answer, list)
    return reply


def die(*_: Any, **__: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def dying(owner: Any, name: str, call: int) -> None:
    """Die at this call of a function; -1: as the first one returns."""
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            die()
        found = real(*args, **kwargs)
        return found if call > 0 else die()

    setattr(owner, name, counted)


def second_round(folder: Path) -> tuple[Message, Context]:
    """Silo a's training message of round 2, with its state directory as it then was, in FOLDER/before."""
    kept: list[tuple[Message, Context]] = []
    (folder / "policy.toml").write_text("epsilon = 1000\nmin-silos = 1\n")

    def prepare(grid: TinyGrid) -> None:
        own = grid.context_of("a")
        own.node_config["policy"] = str(folder / "policy.toml")

        def before(silo: str, message: Message, context: Context) -> None:
            if grid.key_of(message) == ("a", 2) and message.metadata.message_type == "train":
                shutil.copytree(folder / "state", folder / "before")
                kept.append((message, context))

        grid.before = before

    federate(
        random_silos(folder, {"a": 40, "b": 40}),
        state_dir=folder / "state",
        prepare=prepare,
        **SETTINGS,
    )
    return kept[0]


def vectors(reply: Message) -> list[bytes]:
    assert not reply.has_error(), reply.error
    return [
        tensor_of(array).numpy().tobytes()
        for r in reply.content.array_records.values()
        for array in r.values()
    ]


def facts(state: Path) -> dict[str, Any]:
    lines = Ledger(state).lines()
    own = [line for line in charges(lines) if line["round"] == 2]
    entries = audit.verify_log(state / "audit").entries
    logged = [e for e in entries if (e["silo"], e["round"], e["asked"]) == ("a", 2, "train")]
    sent = sum(line["kind"] == SENT and line["round"] == 2 for line in lines)
    return {
        "charges": len(own),
        "noted": sent,
        "logged": len(logged),
        "steps": [line["steps"] for line in own],
    }


def main(folder: Path) -> None:
    message, context = second_round(folder)
    whole: list[bytes] = []
    with flower_identity():
        for number, (phase, place) in enumerate({"": None, **PHASES}.items()):
            state = folder / f"state-{number}"
            shutil.copytree(folder / "before", state)
            context.node_config["state-dir"] = str(state)
            result: dict[str, Any] = {"phase": phase}
            if place is not None:
                if not (child := os.fork()):
                    dying(*place)
                    pass_on(message, context)
                    os._exit(0)
                result |= {"status": os.waitpid(child, 0)[1], "killed": facts(state)}
            again = vectors(pass_on(message, context))
            whole = whole or again
            result |= {"equal": again == whole, "again": facts(state)}
            context.run_id, before = context.run_id + 1, context.run_config
            context.run_config = {**before, "resume": True}
            result |= {
                "resumed equal": vectors(pass_on(message, context)) == whole,
                "resumed": facts(state),
            }
            context.run_id, context.run_config = context.run_id - 1, before
            print(json.dumps(result), flush=True)
