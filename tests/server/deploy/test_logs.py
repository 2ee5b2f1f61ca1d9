"""Logs of a local federation roll at a size, and no process writes into a hole."""

import subprocess
import sys
import threading

from supernode import wait_until

from server.deploy import logs, superlink
from server.deploy.local.parts import SUPERLINK, part_environment

PART = "import sys\nfor line in sys.stdin:\n    print(line.strip() * 1000, flush=True)"


def test_a_log_begins_anew_at_its_size_while_its_processes_write_on(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "LARGEST", 2500)
    log, before = tmp_path / "north.log", tmp_path / "north.log.1"
    command = [sys.executable, "-c", PART]
    with (
        log.open("ab") as output,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True) as part,
    ):

        def write(letter, size):
            print(letter, file=part.stdin, flush=True)
            wait_until(lambda: log.stat().st_size == size)

        for letter, size in (("a", 1001), ("b", 2002)):
            write(letter, size)
            logs.roll_logs(tmp_path)
            assert not before.exists()
        write("c", 3003)
        logs.roll_logs(tmp_path)
        write("d", 1001)
        assert [line[0] for line in before.read_text().splitlines()] == ["a", "b", "c"]
        assert log.read_text() == "d" * 1000 + "\n"
        part.communicate()


def test_the_superlink_of_a_local_federation_rolls_them(tmp_path, monkeypatch):
    folder = part_environment(tmp_path, SUPERLINK)[logs.FOLDER]
    assert logs.FOLDER not in part_environment(tmp_path, "north")
    rolled = threading.Event()

    def roll(where):
        assert str(where) == folder == str(tmp_path / "logs")
        rolled.set()

    monkeypatch.setattr(logs, "roll_logs", roll)
    monkeypatch.setattr(superlink, "run_superlink", lambda *limits: rolled.wait(30))
    monkeypatch.setenv(logs.FOLDER, folder)
    superlink.start_superlink()
    assert rolled.is_set()
