"""Each row of docs/tables/governance.csv names a command and a test that exist, and a source of the page."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from server.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
ROWS = list(csv.DictReader((ROOT / "docs/tables/governance.csv").open(encoding="utf-8")))
PAGE = (ROOT / "docs/governance.md").read_text("utf-8")
KNOWN = {command.name: {action.name for action in command.actions} for command in COMMANDS}


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['source']} {row['item']}" for row in ROWS])
def test_what_a_row_names_is_there(row):
    assert None not in row and all(row[key] for key in ("source", "item", "concerns"))
    assert row["what stays with the hospital"] and row["what silofl does"]
    assert row["source"].partition(" (")[0].partition(",")[0] in PAGE
    if row["what silofl does"] == "nothing":
        assert not row["command"] and not row["test"]
        return
    assert (ROOT / row["test"]).is_file()
    if row["command"]:
        program, command, *action = row["command"].split()
        assert program == "silofl" and command in KNOWN
        assert {*action} <= KNOWN[command]


def test_the_page_is_short():
    assert len(PAGE.split()) <= 1200
