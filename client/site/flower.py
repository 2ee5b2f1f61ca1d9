"""Flower's internals: the table of every name beyond its public API that silofl uses, and the function to get one.

Public are the exports of `flwr.app`, `flwr.clientapp`, `flwr.serverapp` with its `strategy`, `flwr.client` and
`flwr.common`. Everything else may change without notice. It is accessed by `internal(NAME)` and listed in `INTERNALS`,
with the reason for its use and with what breaks when Flower changes it. A test checks that the code uses no other
way, looks up every name in the installed Flower, and compares the table with docs/decisions.md.

Standard library only. Flower is imported when a name is looked up, since the template process, which imports nothing
else of ours (see `private.py`), loads this file too.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Internal:
    """One of Flower's names. `where` is a module, or `module:name`."""

    where: str
    why: str
    breaks: str  # when Flower moves or changes it

    @property
    def module(self) -> str:
        """Return the module that contains the name, or is it."""
        return self.where.partition(":")[0]


NO_TASK = "a silo runs no task at all, rather than one that is not pinned; its log names the missing function"
NO_CONTROL = "`up`, `status`, `run` and `add-silo` cannot speak with the SuperLink"
NO_REFUSAL = "a reply that is too large is awaited until the round's time is up"
NO_KEY_CHECK = "`doctor` and `join` cannot say whether the server knows the silo's key"

# Log lines of Flower's SuperNode: registered, connection lost, connection back, and refused by the server.
REGISTERED = "SuperNode ID: "
LOST = "Connection attempt failed, retrying in"
BACK = "Connection successful after"
REFUSED = "Failed to activate SuperNode"

INTERNALS = {
    # A message at the SuperNode, and the process that runs the app.
    "load_client_app": Internal(
        "flwr.clientapp.utils:get_load_client_app_fn", "loads the app in its process", NO_TASK
    ),
    "install_from_fab": Internal(
        "flwr.cli.install:install_from_fab", "unpacks an app whose pin was checked", NO_TASK
    ),
    "inflatable_utils": Internal(
        "flwr.supercore.inflatable.inflatable_utils",
        "its `inflate_object_from_contents` makes a message of its parts; its `inflatable_class_registry` gets an "
        "`Array` that keeps its chunks",
        NO_TASK,
    ),
    "get_flwr_home": Internal(
        "flwr.supercore.utils:get_flwr_home",
        "where apps are unpacked and where `config.toml` lies",
        NO_TASK,
    ),
    "make_message": Internal(
        "flwr.app.message:make_message", "the message that a reply refers to", NO_TASK
    ),
    "SubStatus": Internal("flwr.common.constant:SubStatus", "how a task ended", NO_TASK),
    "RuntimeVersionHttpInterceptor": Internal(
        "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
        "names Flower's version in calls",
        NO_CONTROL,
    ),
    "ErrorCode": Internal(
        "flwr.common.constant:ErrorCode",
        "why a message has no reply: an exception in the app, or a silo that is gone",
        "the loop cannot tell a silo that is gone from one that failed",
    ),
    # The server.
    "flower_superlink": Internal(
        "flwr.superlink.cli.flower_superlink:flower_superlink",
        "the entry that a server runs",
        "no server starts",
    ),
    "FleetServicer": Internal(
        "flwr.server.superlink.fleet.grpc_rere.fleet_servicer:FleetServicer",
        "its `PullMessages` is wrapped: the answer waits for a message",
        "no server starts",
    ),
    "PullMessagesResponse": Internal(
        "flwr.proto.fleet_pb2:PullMessagesResponse",
        "an empty answer to a silo that has disconnected",
        "no server starts",
    ),
    "superlink_server": Internal(
        "flwr.superlink.cli.flower_superlink",
        "its `GRPC_MAX_MESSAGE_LENGTH`: the largest call that a silo may make",
        "a silo may fill the server's memory with one call",
    ),
    "runtime_handlers": Internal(
        "flwr.superlink.servicer.runtime.runtime_handlers",
        "its `pull_messages` and `push_messages` are wrapped: small parts of messages come with them",
        "no server starts",
    ),
    "fleet_pb2": Internal(
        "flwr.proto.fleet_pb2", "the answer to a reply that is refused by its size", NO_REFUSAL
    ),
    "message_pb2": Internal(
        "flwr.proto.message_pb2", "the answer to a part of it; messages as bytes", NO_REFUSAL
    ),
    "NoObjectInStoreError": Internal(
        "flwr.supercore.object_store:NoObjectInStoreError",
        "a message has been confirmed",
        "silos get no messages",
    ),
    "ObjectPushError": Internal(
        "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
        "a part of a message did not reach the SuperLink, and goes again",
        "no run starts",
    ),
    "ControlHttpClient": Internal(
        "flwr.supercore.control:ControlHttpClient", "the Control API", NO_CONTROL
    ),
    "control_pb2": Internal("flwr.proto.control_pb2", "the Control API's requests", NO_CONTROL),
    "CliClientHttpInterceptor": Internal(
        "flwr.cli.cli_client_interceptor:CliClientHttpInterceptor",
        "makes a call look like `flwr`'s own",
        NO_CONTROL,
    ),
    "DEFAULT_FLOWER_CONFIG_TOML": Internal(
        "flwr.cli.constant:DEFAULT_FLOWER_CONFIG_TOML",
        "how Flower's `config.toml` begins",
        "a first `up` writes no connection",
    ),
    "build_fab_from_files": Internal(
        "flwr.cli.build:build_fab_from_files",
        "the app as `flwr run` ships it, to run it and for its SHA-256",
        "`run` and `add-silo` fail",
    ),
    "user_config_to_proto": Internal(
        "flwr.common.serde:user_config_to_proto",
        "a run's settings in the request that starts it",
        "`run` fails",
    ),
    "serde": Internal(
        "flwr.common.serde",
        "messages and contexts as bytes, for the process that runs the app",
        NO_TASK,
    ),
    "recorddict_pb2": Internal("flwr.proto.recorddict_pb2", "the same bytes, read", NO_TASK),
    "TaskIdentity": Internal(
        "flwr.supercore.task_identity:TaskIdentity",
        "a message asks its process who it is; `simulate` answers for it",
        "`simulate` makes no message",
    ),
    "get_all_nested_objects": Internal(
        "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",
        "the bytes of a message: its small parts go in its tree",
        "no run starts",
    ),
    "get_object_tree": Internal(
        "flwr.supercore.inflatable.inflatable_object:get_object_tree",
        "the tree of a message, as a ServerApp sends it",
        "no run starts",
    ),
    # The SuperNode.
    "flower_supernode": Internal(
        "flwr.supernode.cli.flower_supernode:flower_supernode",
        "the entry that a silo runs",
        "no silo starts",
    ),
    "supernode_loop": Internal(
        "flwr.supernode.start_client_internal",
        "its `time` is replaced, for it sleeps 3 s where we want a quarter, and its `subprocess`, for we need no "
        "SuperExec; its `_pull_and_store_message`, `_push_messages` and `pull_objects` are wrapped; `_insert_message`",
        "every round takes 3 s more; no message is answered; no silo starts",
    ),
    "heartbeat": Internal(
        "flwr.supercore.heartbeat",
        "how often a SuperNode says that it is alive",
        "no silo starts",
    ),
    "fleet_connection": Internal(
        "flwr.client.grpc_rere_client.connection",
        "how long the SuperLink believes it then",
        "no silo starts",
    ),
    "http_grid": Internal(
        "flwr.superlink.grid.http_grid",
        "its `pull_objects` is wrapped: how far a long reply is; its `push_objects` is replaced: few copies at once; "
        "its `iterate_object_tree` and `get_object_tree`, too: small parts of a message come in its tree",
        "no run starts",
    ),
    "Status": Internal("flwr.common.constant:Status", "which tasks are waiting", NO_TASK),
    # The doctor.
    "headers": Internal(
        "flwr.common.constant",
        "under which names a call carries key, time and signature",
        NO_KEY_CHECK,
    ),
    "sign_message": Internal(
        "flwr.supercore.primitives.asymmetric:sign_message",
        "signs a call with the silo's key",
        NO_KEY_CHECK,
    ),
    "FleetStub": Internal("flwr.proto.fleet_pb2_grpc:FleetStub", "the Fleet API", NO_KEY_CHECK),
    "ActivateNodeRequest": Internal(
        "flwr.proto.fleet_pb2:ActivateNodeRequest", "the call that is made", NO_KEY_CHECK
    ),
    "ApiErrorCode": Internal(
        "flwr.supercore.error:ApiErrorCode", "which refusal it was", NO_KEY_CHECK
    ),
    "FlowerError": Internal(
        "flwr.supercore.error:FlowerError", "a refusal in Flower's own words", NO_KEY_CHECK
    ),
    "public_key_to_bytes": Internal(
        "flwr.supercore.primitives.asymmetric:public_key_to_bytes",
        "the key as Flower writes it",
        NO_KEY_CHECK,
    ),
}


@dataclass(frozen=True)
class Assumption:
    """Assumption about undocumented behaviour of Flower that our code relies on."""

    what: str
    who: str
    breaks: str
    test: str


ASSUMPTIONS = (
    Assumption(
        "a SuperNode logs `SuperNode ID: `, `Connection attempt failed, retrying in`, `Connection successful after`, "
        "`Failed to activate SuperNode`",
        "`client/site/runtime/supervisor.py`, `server/deploy/local/`",
        "a silo's container never counts as healthy; one that has to wait is not tried again",
        "`test_what_the_supervisor_waits_for_is_what_flower_logs`",
    ),
    Assumption(
        "its loop sleeps 3 s without a message, through its module's `time`",
        "`client/site/runtime/supernode.py`",
        "every round takes 3 s more",
        "`test_flower_sleeps_where_we_think_it_does`",
    ),
    Assumption(
        "a SuperNode starts one SuperExec, by `subprocess.Popen`, and nothing else",
        "`client/site/runtime/supernode.py`",
        "a process of 120 MB more, which finds no work",
        "`test_flower_starts_its_superexec_where_we_think_it_does`",
    ),
    Assumption(
        "an app's module is taken from `sys.modules`, or from `FLWR_HOME/apps/PUBLISHER.NAME.VERSION.HASH8`",
        "`client/site/private.py`, `client/site/runtime/answering.py`",
        "an app is unpacked where Flower does not look",
        "`test_another_run_or_another_app_ends_it`",
    ),
    Assumption(
        "a SuperLink in memory keeps messages in `message_ins_store` with `delivered_at`, and deletes a message's "
        "parts from its store when the silo confirms it; a SuperNode asks for no message while it has one",
        "`server/deploy/superlink.py`",
        "every question is answered at once, or messages come twice",
        "`test_superlink.py`",
    ),
    Assumption(
        "`ActivateNode` with a heartbeat interval of 0 is refused after key and clock were looked at",
        "`client/site/runtime/connection.py`",
        "`doctor` cannot tell a wrong key from a wrong clock",
        "`test_doctor.py`",
    ),
    Assumption(
        "an `Array` is serialised by its `data`, `children` and `deflate`, and keeps chunks in `_chunks`; inflated, it "
        "joins the `data` of its chunks",
        "`TensorArray` in `strategies/base/transport/payload.py`",
        "models are copied in `simulate`, or arrive damaged",
        "`test_payload.py`",
    ),
    Assumption(
        "a SuperLink takes a silo that died for present for two of its heartbeats (24 s, in a long transfer three "
        "minutes; of Flower's own SuperNode a minute), and refuses its key until then",
        "`client/site/runtime/supervisor.py`, `server/deploy/local/`",
        "a silo that crashed waits too long, or gives up too early",
        "`test_local_federation.py`",
    ),
    Assumption(
        "only `.py`, `.toml`, `.md`, `.yaml` and `.json` files travel with an app",
        "`pyproject.toml`, `fab-include`",
        "a file is missing at a silo, or data of a checkout travel",
        "`test_deployed.py`",
    ),
)


def internal(name: str) -> Any:
    """Return one of Flower's internals by its name in the table. AttributeError, ImportError: Flower has moved it."""
    row = INTERNALS[name]
    module = importlib.import_module(row.module)
    _, colon, attribute = row.where.partition(":")
    return getattr(module, attribute) if colon else module


def markdown() -> str:
    """Return both tables in Markdown, as in docs/decisions.md."""
    rows = ["| name | in Flower | what for | when Flower moves it |", "|---|---|---|---|"]
    rows += [
        f"| `{name}` | `{row.where}` | {row.why} | {row.breaks} |"
        for name, row in INTERNALS.items()
    ]
    rows += [
        "",
        "| how it behaves | who relies on it | when it changes | the test that sees it |",
        "|---|---|---|---|",
    ]
    rows += [f"| {r.what} | {r.who} | {r.breaks} | {r.test} |" for r in ASSUMPTIONS]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
