"""Flower's internals: every name beyond its public API that silofl uses, and the function to get one.

Public are the exports of `flwr.app`, `flwr.clientapp`, `flwr.serverapp` with its `strategy`, `flwr.client` and
`flwr.common`. Everything else may change without notice. It is accessed by `internal(NAME)` and listed in `INTERNALS`.
docs/decisions.md says of each name what it is for and what breaks when Flower changes it. A test checks that the code
uses no other way, looks up every name in the installed Flower, and compares the names with that page.

Standard library only. Flower is imported when a name is looked up, since the template process, which imports nothing
else of ours (see `private.py`), loads this file too.
"""

import importlib
import sys
from importlib.util import find_spec
from threading import Lock
from types import ModuleType
from typing import Any

PROTOCOL = "flwr.proto."
LONE = Lock()
# Name -> module, or module:attribute
INTERNALS = {
    "load_client_app": "flwr.clientapp.utils:get_load_client_app_fn",
    "inflatable_utils": "flwr.supercore.inflatable.inflatable_utils",
    "make_message": "flwr.app.message:make_message",
    "RuntimeVersionHttpInterceptor": "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor",
    "ErrorCode": "flwr.common.constant:ErrorCode",
    "flower_superlink": "flwr.superlink.cli.flower_superlink:flower_superlink",
    "runtime_handlers": "flwr.superlink.servicer.runtime.runtime_handlers",
    "fleet_pb2": "flwr.proto.fleet_pb2",
    "message_pb2": "flwr.proto.message_pb2",
    "NoObjectInStoreError": "flwr.supercore.object_store:NoObjectInStoreError",
    "ControlHttpClient": "flwr.supercore.control:ControlHttpClient",
    "control_handlers": "flwr.superlink.servicer.control.control_handlers",
    "AccountInfo": "flwr.supercore.auth.typing:AccountInfo",
    "control_pb2": "flwr.proto.control_pb2",
    "CliClientHttpInterceptor": "flwr.cli.cli_client_interceptor:CliClientHttpInterceptor",
    "DEFAULT_FLOWER_CONFIG_TOML": "flwr.cli.constant:DEFAULT_FLOWER_CONFIG_TOML",
    "build_fab_from_files": "flwr.cli.build:build_fab_from_files",
    "user_config_to_proto": "flwr.common.serde:user_config_to_proto",
    "serde": "flwr.common.serde",
    "recorddict_pb2": "flwr.proto.recorddict_pb2",
    "TaskIdentity": "flwr.supercore.task_identity:TaskIdentity",
    "inflatable_object": "flwr.supercore.inflatable.inflatable_object",
    "get_fused_config_from_fab": "flwr.common.config:get_fused_config_from_fab",
    "node_pb2": "flwr.proto.node_pb2",
    "FlowerError": "flwr.supercore.error:FlowerError",
    "fleet_handlers": "flwr.superlink.servicer.fleet.fleet_handlers",
    "extensions": "flwr.superlink.extensions",
    "LinkState": "flwr.server.superlink.linkstate:LinkState",
    "API_ERROR_MAP": "flwr.supercore.error.catalog:API_ERROR_MAP",
    "runtime_pb2": "flwr.proto.runtime_pb2",
    "http_grid": "flwr.superlink.grid.http_grid",
}


def internal(name: str) -> Any:
    """Return one of Flower's internals by its name in the table. AttributeError, ImportError: Flower has moved it."""
    module, _, attribute = INTERNALS[name].partition(":")
    lone = module.startswith(PROTOCOL) and "flwr" not in sys.modules
    loaded = import_lone(module) if lone else importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def import_lone(module: str) -> Any:
    """Return a module of `flwr.proto` without what `import flwr` loads: 40 MB that a silo needs for a message only."""
    with LONE:
        if module in sys.modules:
            return sys.modules[module]
        spec = find_spec("flwr")
        assert spec is not None and spec.submodule_search_locations is not None
        sys.modules["flwr"] = bare = ModuleType("flwr")
        bare.__path__ = [*spec.submodule_search_locations]
        try:
            return importlib.import_module(module)
        finally:
            del sys.modules["flwr"]
