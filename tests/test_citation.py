"""CITATION.cff: this version, and the papers that the methods' files name."""

import tomllib
from pathlib import Path

import yaml

from strategies import strategies

ROOT = Path(__file__).resolve().parents[1]


def test_the_citation_names_this_version_and_the_five_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (
        citation["version"]
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )
    papers = {
        r["notes"].lower(): r["identifiers"][0]["value"].replace(":", " ")
        for r in citation["references"]
    }
    assert set(papers) == {"apple", "fedala", "diversifed", "fedapm", "player-fl"}
    for name, number in papers.items():
        assert strategies()[name].info.paper.endswith(number)
