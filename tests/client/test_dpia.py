"""``silofl study dpia``: what Article 35(7) of the GDPR asks for; what the study does not tell is the hospital's."""

from __future__ import annotations

import pytest
from study_text import study_text
from taken import silofl


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "study.toml"
    text = study_text(purpose="Who needs a bed?", contact="Dr. A", step=0.9, bytes=12_345_678)
    file.write_text(
        text.replace("[settings]", '[settings]\nstrategy = ["fedavg"]\nbatch-size = 8')
    )
    return file


def test_a_draft_of_a_study(file, tmp_path, capsys):
    out = tmp_path / "dpia.md"
    assert silofl("study", "dpia", file, "--out", out) == 0
    page = out.read_text()
    assert f"{page.count('**TO DO**')} places are the hospital's" in capsys.readouterr().out
    for part in (
        *(
            "## (a)",
            "## (b)",
            "## (c)",
            "## (d)",
            "Purpose: Who needs a bed?",
            "Dr. A",
            "NOT SIGNED",
        ),
        *("12,345,678 bytes that leave", "fewer than 3 hospitals", "fedavg: the whole model"),
        *("gradient inversion", "imprint", "each hospital's", "without masks", "adds noise"),
    ):
        assert part in page, part
    assert max(page.count(line) for line in page.splitlines() if line.startswith("* step")) == 1
    assert (
        silofl("study", "dpia", file, "--out", out) == 2
    )  # what was filled in is not overwritten
    assert "is there already" in capsys.readouterr().err and out.read_text() == page


def test_masks_and_noise_are_measures(file, tmp_path):
    text = file.read_text().replace(
        "batch-size = 8", "batch-size = 64\nsecure-aggregation = true\ndp = true"
    )
    peers = "".join(f'h{n} = "SHA256:{n:064x}"\n' for n in range(4))
    file.write_text(text.replace("step = 0.9", "step = 0.1") + f"[peers]\n{peers}")
    out = tmp_path / "dpia.md"
    assert silofl("study", "dpia", file, "--out", out) == 0
    page = out.read_text()
    assert (
        "under masks" in page and "sums of hospitals only" in page and "adds noise here" in page
    )
    assert "gradient inversion" not in page
