"""The silo's own model that the report shows, sent once, at the end of a run that was submitted with that setting.

The message contains no model: the silo kept the reported one (``client/reported.py``), as for the evidence. What leaves
is first noted on the hospital's disk. After that, the run's requests for another model, or for training, are refused
(``client/site/own_models.py``). The server chooses which round the report shows, and how many rounds there are. So it
can get one model of a run, of a round of its choice.
"""

from __future__ import annotations

from flwr.app import Message, RecordDict

from client.egress import release_own_model
from client.local_data import is_own_file
from client.reported import TERMS, load_reported
from client.session import ClientSession
from client.site.audit_gate import cohort_of
from client.site.own_models import claim, names_of
from client.site.trust.message_rules import own_model_faults
from client.site.trust.policy import PolicyRefusedError
from models.privacy.noise import digest_of
from partitions.common.errors import UserError


def answer_own_model(message: Message, session: ClientSession) -> RecordDict:
    """Return the reply with the silo's own model. Raises UserError if there is none to send.

    Raises PolicyRefusedError if the run's settings or the policy do not allow it. Also raises it if the model was
    trained under other ones too, or if another model of the run has left.
    """
    context, sent = session.context, dict(message.content.config_records.get("config", {}))
    # `check_message` has checked this for a hospital's own data; for a simulated or public silo this is the only check.
    for fault in own_model_faults(session.policy, context.run_config, sent):
        raise PolicyRefusedError(f"{session.name} refuses: {fault}")
    if not session.sends_own_model:
        raise UserError(
            f"{session.name} sends no model of its own: {session.info.name} has one for all silos"
        )
    client, config = session.open_client(message), session.config
    client.round = int(config["round"])
    if client.no_file:
        raise UserError(
            f"{session.name} sends no model of its own, that of {session.info.name}: {client.no_file}"
        )
    if session.name in config.get("own_statistics", ()):
        raise UserError(
            f"{session.name} sends no model of its own: it is used with this silo's statistics, which stay here"
        )
    if TERMS not in client.state.numbers:
        raise PolicyRefusedError(
            f"{session.name} refuses: its model was also trained without keep-models = reported, or under another study"
        )
    if not load_reported(client, wanted := config.get("reported"), session.info.reports):
        raise UserError(
            f"{session.name} kept no model of round {wanted!r:.20}, which is asked for"
        )
    if is_own_file(context) and not session.policy.public:
        names = names_of(sent, int(context.run_id), client.state.numbers[TERMS]["runs"])
        model = digest_of([client.model.vector, client.model.buffers]).hex()
        data = cohort_of(context.node_config)
        if fault := claim(
            context.node_config.get("state-dir"), names, session.name, data, model
        ):
            raise PolicyRefusedError(f"{session.name} refuses: {fault}")
    return release_own_model(client)
