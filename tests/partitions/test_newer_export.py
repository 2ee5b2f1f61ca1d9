"""The page's way to keep a patient in one part from export to export (docs/hospital.md), as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from near import near
from taken import silofl

from partitions.silo_file import read_silo_file

PAGE = Path(__file__).parents[2] / "docs/hospital.md"
PARTS = ("train", "val", "test")


def snippet():
    (found,) = (
        text
        for text in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "division.key" in text
    )
    return str(found)


def parts_of(folder, patients, capsys):
    """The part of each patient of an export, who has two rows of a number of the patient's own."""
    rows = [f"P{n:05d},{n},{n + 0.5},{n % 2}" for n in patients for _ in range(2)]
    (folder / "export.csv").write_text("\n".join(["patient,number,other,died", *rows]) + "\n")
    exec(compile(snippet(), str(PAGE), "exec"), {})
    recipe = (
        ["--recipe", "ours.recipe.toml", "--overwrite"]
        if (folder / "ours.recipe.toml").exists()
        else ["--label", "died"]
    )
    assert silofl("import", "ours.csv", *recipe, "--out", "ours.npz") == 0, (
        capsys.readouterr().err
    )
    data = read_silo_file(folder / "ours.npz")
    each = {name: np.unique(getattr(data, name).x[:, 0]).astype(int).tolist() for name in PARTS}
    assert sum(map(len, each.values())) == len(patients)  # none in two
    return {n: name for name, numbers in each.items() for n in numbers}


def test_patients_stay_in_their_part_when_an_export_grows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = parts_of(tmp_path, range(300), capsys)
    after = parts_of(tmp_path, range(20, 1000), capsys)
    assert all(after[n] == part for n, part in before.items() if n in after)
    shares = [list(after.values()).count(name) / len(after) for name in PARTS]
    near(shares, [0.64, 0.16, 0.2], 0.06)  # four deviations of 980 draws
    (tmp_path / "division.key").write_bytes(b"another")
    other = parts_of(tmp_path, range(300), capsys)
    assert any(other[n] != part for n, part in before.items())


def test_without_it_a_newer_export_is_drawn_anew(tmp_path, monkeypatch):
    """What the page warns of: the same seed and recipe, more patients, and test patients that are trained on."""
    monkeypatch.chdir(tmp_path)
    parts = []
    for count, options in (
        (300, ["--label", "died"]),
        (400, ["--recipe", "ours.recipe.toml", "--overwrite"]),
    ):
        rows = [f"P{n:05d},{n},{n + 0.5},{n % 2}" for n in range(count)]
        (tmp_path / "ours.csv").write_text(
            "\n".join(["patient,number,other,died", *rows]) + "\n"
        )
        assert silofl("import", "ours.csv", *options, "--out", "ours.npz") == 0
        data = read_silo_file(tmp_path / "ours.npz")
        parts.append(
            {name: set(getattr(data, name).x[:, 0].astype(int).tolist()) for name in PARTS}
        )
    assert parts[0]["test"] & parts[1]["train"]
