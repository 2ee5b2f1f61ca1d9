"""Flower's internals: every name beyond its public API that silofl uses, and the function to get one.

Public are the exports of `flwr.app`, `flwr.clientapp`, `flwr.serverapp` with its `strategy`, `flwr.client` and
`flwr.common`. Everything else may change without notice. It is accessed by `internal(NAME)` and listed in `INTERNALS`.
docs/decisions.md says of each name what it is for and what breaks when Flower changes it. A test checks that the code
uses no other way, looks up every name in the installed Flower, and compares the names with that page.

Standard library only. Flower is imported when a name is looked up, since the template process, which imports nothing
else of ours (see `private.py`), loads this file too.
"""

import importlib
from collections.abc import Callable
from typing import Any

# Log lines of Flower's SuperNode: registered, connection lost, connection back, and refused by the server.
REGISTERED = "SuperNode ID: "
LOST = "Connection attempt failed, retrying in"
BACK = "Connection successful after"
REFUSED = "Failed to activate SuperNode"

# Name -> module, or module:attribute
INTERNALS = {
    "load_client_app": "flwr.clientapp.utils:get_load_client_app_fn",
    "install_from_fab": "flwr.cli.install:install_from_fab",
    "inflatable_utils": "flwr.supercore.inflatable.inflatable_utils",
    "get_flwr_home": "flwr.supercore.utils:get_flwr_home",
    "make_message": "flwr.app.message:make_message",
    "SubStatus": "flwr.common.constant:SubStatus",
    "RuntimeVersionHttpInterceptor": "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
    "ErrorCode": "flwr.common.constant:ErrorCode",
    "flower_superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "FleetServicer": "flwr.server.superlink.fleet.grpc_rere.fleet_servicer:FleetServicer",
    "PullMessagesResponse": "flwr.proto.fleet_pb2:PullMessagesResponse",
    "superlink_server": "flwr.superlink.cli.flower_superlink",
    "runtime_handlers": "flwr.superlink.servicer.runtime.runtime_handlers",
    "fleet_pb2": "flwr.proto.fleet_pb2",
    "message_pb2": "flwr.proto.message_pb2",
    "NoObjectInStoreError": "flwr.supercore.object_store:NoObjectInStoreError",
    "ObjectPushError": "flwr.supercore.inflatable.inflatable_utils:ObjectPushError",
    "ControlHttpClient": "flwr.supercore.control:ControlHttpClient",
    "control_pb2": "flwr.proto.control_pb2",
    "CliClientHttpInterceptor": "flwr.cli.cli_client_interceptor:CliClientHttpInterceptor",
    "DEFAULT_FLOWER_CONFIG_TOML": "flwr.cli.constant:DEFAULT_FLOWER_CONFIG_TOML",
    "build_fab_from_files": "flwr.cli.build:build_fab_from_files",
    "user_config_to_proto": "flwr.common.serde:user_config_to_proto",
    "serde": "flwr.common.serde",
    "recorddict_pb2": "flwr.proto.recorddict_pb2",
    "TaskIdentity": "flwr.supercore.task_identity:TaskIdentity",
    "get_all_nested_objects": "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects",
    "get_object_tree": "flwr.supercore.inflatable.inflatable_object:get_object_tree",
    "flower_supernode": "flwr.supernode.cli.flower_supernode:flower_supernode",
    "supernode_loop": "flwr.supernode.start_client_internal",
    "heartbeat": "flwr.supercore.heartbeat",
    "fleet_connection": "flwr.client.grpc_rere_client.connection",
    "http_grid": "flwr.superlink.grid.http_grid",
    "Status": "flwr.common.constant:Status",
    "headers": "flwr.common.constant",
    "sign_message": "flwr.supercore.primitives.asymmetric:sign_message",
    "FleetStub": "flwr.proto.fleet_pb2_grpc:FleetStub",
    "ActivateNodeRequest": "flwr.proto.fleet_pb2:ActivateNodeRequest",
    "ApiErrorCode": "flwr.supercore.error:ApiErrorCode",
    "FlowerError": "flwr.supercore.error:FlowerError",
    "public_key_to_bytes": "flwr.supercore.primitives.asymmetric:public_key_to_bytes",
}


def internal(name: str) -> Any:
    """Return one of Flower's internals by its name in the table. AttributeError, ImportError: Flower has moved it."""
    module, _, attribute = INTERNALS[name].partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def wraps(owner: Any, name: str) -> Callable[[Any], None]:
    """Put the decorated function in the place of Flower's, which it gets first, or of an earlier one."""
    there = getattr(owner, name)
    original = getattr(there, "flowers", there)

    def put(wrapper: Any) -> None:
        def call(*given: Any, **named: Any) -> Any:
            return wrapper(original, *given, **named)

        call.flowers = original  # type: ignore[attr-defined]
        setattr(owner, name, call)

    return put


def records_of(content: Any, kind: str) -> dict[str, Any]:
    """Return the records of a type (Array, Metric, Config), by name.

    Flower's views of them (``content.array_records``) refer to themselves: they keep a message's memory until Python
    collects garbage.
    """
    from flwr import app

    of = getattr(app, f"{kind}Record")
    return {name: record for name, record in content.items() if isinstance(record, of)}
