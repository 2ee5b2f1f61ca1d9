"""Flower apps for tests."""


def project(server: str, client: str, config: str = "") -> str:
    """The `pyproject.toml` of an app; ``server``, ``client``: its two apps, MODULE:NAME; ``config``: its settings."""
    return f"""
[project]
name = "probe"
version = "1.0.0"
license = "Apache-2.0"
[tool.flwr.app]
publisher = "test"
[tool.flwr.app.components]
serverapp = "{server}"
clientapp = "{client}"
[tool.flwr.app.config]
{config}
"""
