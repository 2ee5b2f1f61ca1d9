"""A tiny app that computes nothing, and the federation file of its silos."""

import json
import textwrap
from pathlib import Path

from apps import project

SERVER = """
    import json, pathlib, time
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid, context):
        config = context.run_config
        out = pathlib.Path(config["out"])
        if config["behaviour"] == "server":
            raise ValueError("no such column")
        while len(nodes := list(grid.get_node_ids())) < config["silos"]:
            time.sleep(0.1)
        content = RecordDict({"config": ConfigRecord({"behaviour": config["behaviour"]})})
        waiting = set(grid.push_messages([Message(content, n, "train", ttl=60.0) for n in nodes]))
        replies = []
        while waiting:
            replies += grid.pull_messages(list(waiting))
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
            time.sleep(0.1)
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a silo failed: {reply.error.reason}")
        names = sorted(reply.content["answer"]["name"] for reply in replies)
        event = {"event": "round", "strategy": "probe", "seed": 1, "round": 1, "rounds": 1, "silos": len(replies),
                 "score": "accuracy", "accuracy": 0.5, "seconds": 1.0, "bytes": 2000000, "names": names}
        with (out / "progress.jsonl").open("a") as file:
            file.write(json.dumps(event) + "\\n")
"""
CLIENT = """
    import os, pathlib, signal, time
    from flwr.app import ConfigRecord, Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()

    @app.train()
    def train(message, context):
        behaviour = message.content["config"]["behaviour"]
        node = context.node_config
        if behaviour == "killed" and node["name"] == "north":
            os.kill(os.getpid(), signal.SIGKILL)
        if behaviour == "waits":
            pathlib.Path(node["state-dir"], "waits").touch()
            time.sleep(15)
        if behaviour == "data":
            pathlib.Path(node["data"]).read_bytes()
        return Message(RecordDict({"answer": ConfigRecord({"name": node["name"]})}), reply_to=message)
"""


def make_app(folder: Path, server: str = SERVER, client: str = CLIENT) -> Path:
    folder.mkdir()
    (folder / "probe_server.py").write_text(textwrap.dedent(server))
    (folder / "probe_client.py").write_text(textwrap.dedent(client))
    settings = 'behaviour = ""\nsilos = 2\nout = ""'
    (folder / "pyproject.toml").write_text(
        project("probe_server:app", "probe_client:app", settings)
    )
    return folder


def write_file(folder: Path, *names: str) -> Path:
    """A federation file; a silo's data file may have a space and a quote in its name."""
    for name in names:
        (folder / f"data of {name}'s.npz").touch()
    silos = [
        {"name": name, "data": f"data of {name}'s.npz", "policy": "public"} for name in names
    ]
    path = folder / "federation.yaml"
    path.write_text(json.dumps({"name": "trial", "silos": silos}))
    return path
