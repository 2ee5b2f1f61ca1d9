"""``silofl survey --harmonize``: from three hospitals' rows to harmonised files, equal to those of pooled ComBat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pooled_combat import Numbers, pooled_combat
from surveyed import Row, hospital, times
from tiny import random_silos

from partitions.recipes.harmonisation import load_harmonisation
from partitions.recipes.pictures import read_any
from partitions.silo_file import Contents, read_contents
from server.cli.main import main
from server.results.survey.combat import ABOUT, harmonise
from server.results.survey.files import read_survey
from server.run.withdrawal import withdraw
from strategies.base.schema.combat import KEY

SIZES = {"north": 90, "south": 160, "west": 240}
EFFECTS = {"north": times("glucose", 1.0), "south": times("glucose", 1.6, 3.0), "west": times("glucose", 0.8, -1.0)}
COVARIATES = ["age", "sex=male", "kind=b", "kind=c"]


def older(row: Row, name: str) -> Row:
    """Patients that differ from hospital to hospital, and a second column with an effect."""
    age = float(row["age"]) + {"north": 0, "south": 8, "west": -5}[name]
    crp = row["crp"] if row["crp"] == "NA" else f"{float(row['crp']) + 0.1 * age + len(name):.2f}"
    return {**row, "age": f"{age:.1f}", "crp": crp}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, n) in enumerate(SIZES.items()):

        def change(row: Row, name: str = name) -> Row:
            return EFFECTS[name](older(row, name))

        hospital(folder, name, n, seed, change)
    return folder


def survey(folder: Path, out: Path, *arguments: str) -> Path:
    assert main(["survey", "--data", str(folder), "--out", str(out), *arguments]) == 0
    return out


@pytest.fixture(scope="module")
def found(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "survey"
    return survey(data, out, "--harmonize", "all", "--covariates", "age,sex,kind")


def columns(contents: Contents, part: str, names: list[str]) -> Numbers:
    places = [contents.schema.names.index(name) for name in names]
    return contents.splits[part].x[:, places].astype(np.float64)


def covariates(contents: Contents) -> Numbers:
    """Age, men, and the kinds b and c, which the recipe codes as 1 and 2."""
    age, man, kind = columns(contents, "train", ["age", "sex=male", "kind"]).T
    return np.stack([age, man, kind == 1, kind == 2], 1).astype(float)


def imported(data: Path, found: Path, out: Path, names: list[str]) -> dict[str, Contents]:
    """Each hospital's file, harmonised by what the survey found."""
    made = {}
    for name in names:
        (out / f"{name}.recipe.toml").write_text(read_any(read_contents(data / f"{name}.npz").recipe).toml())
        given = ["--recipe", str(out / f"{name}.recipe.toml"), "--harmonize", str(found / "combat.toml")]
        (out / "made").mkdir(exist_ok=True)
        target = out / "made" / f"{name}.npz"
        assert main(["import", str(data / f"{name}.csv"), *given, "--silo", name, "--out", str(target)]) == 0
        made[name] = read_contents(target)
    return made


def test_harmonised_files_are_those_of_pooled_combat(data: Path, found: Path, tmp_path: Path) -> None:
    """To 1e-6, from the commands alone; with covariates the rows are those with every chosen value."""
    assert list(load_harmonisation(found / "combat.toml").covariates) == COVARIATES
    made = imported(data, found, tmp_path, list(SIZES))
    raw = {name: read_contents(data / f"{name}.npz") for name in SIZES}
    complete = {name: ~own.gaps["train"][:, own.schema.names.index("crp")] for name, own in raw.items()}
    wanted = pooled_combat(
        [columns(own, "train", ["glucose", "crp"])[complete[name]] for name, own in raw.items()],
        [covariates(own)[complete[name]] for name, own in raw.items()],
    )
    for (name, own), pooled in zip(made.items(), wanted, strict=True):
        np.testing.assert_allclose(columns(own, "train", ["glucose", "crp"])[complete[name]], pooled, rtol=1e-6)


def test_the_effect_is_gone_in_the_next_survey(data: Path, tmp_path: Path) -> None:
    """Without covariates a column's rows are all with a value, and its means become equal up to the shrinkage."""
    found = survey(data, tmp_path / "first", "--harmonize", "glucose,crp")
    told = json.loads((found / "survey.json").read_text())["combat"]
    assert told["without"] == told["columns"] == {} and told["cells"] == []
    made = imported(data, found, tmp_path, list(SIZES))
    wanted = pooled_combat([with_gaps(read_contents(data / f"{name}.npz")) for name in SIZES])
    for own, pooled in zip(made.values(), wanted, strict=True):
        kept = ~np.isnan(pooled)
        np.testing.assert_allclose(columns(own, "train", ["glucose", "crp"])[kept], pooled[kept], rtol=1e-6)
    again = survey(tmp_path / "made", tmp_path / "again")
    assert spread(found, "glucose") > 0.5 and spread(again, "glucose") < 0.05
    for column in ("glucose", "crp"):
        means = [np.mean(pooled_mean(own, column)) for own in made.values()]
        assert np.ptp(means) < 0.15
        for mean, (first, second) in zip(means, told["means"][column].values(), strict=True):
            assert second == pytest.approx(mean, rel=5e-4) and first != second
            assert all(own == float(f"{own:.4g}") for own in (first, second))  # no hospital's sum in survey.json


def with_gaps(contents: Contents) -> Numbers:
    made = columns(contents, "train", ["glucose", "crp"])
    made[contents.gaps["train"][:, contents.schema.names.index("crp")], 1] = np.nan
    return made


def pooled_mean(contents: Contents, column: str) -> Numbers:
    place = contents.schema.names.index(column)
    return contents.splits["train"].x[~contents.gaps["train"][:, place], place].astype(np.float64)


def spread(folder: Path, column: str) -> float:
    """How far apart the hospitals' means are, over their mean."""
    means = [answer["columns"][column]["mean"] for answer in read_survey(folder).answers.values()]
    return float(np.ptp(means) / np.mean(means))


@pytest.mark.parametrize("shrink", [True, False])
def test_of_two_hospitals_each_learns_the_others_mean_and_the_file_says_so(shrink: bool) -> None:
    """From the part of all and its own sums, whatever is left out of the copy: so docs/attacks.md promises no more."""
    made, _ = harmonise({"a": answer((0.0, 100.0), 10, 1.0), "b": answer((0.0, 100.0), 20, 2.0)}, shrink)
    assert made is not None
    column = made.silos["a"][0]
    assert (column.alpha * 30 - 10 * 1.0) / 20 == pytest.approx(2.0, rel=1e-14)
    assert column.sigma**2 * 30 - 10 == pytest.approx(20, rel=1e-14)  # its sum of squares
    assert "Of two hospitals each can work out" in made.toml(ABOUT)


def test_a_file_that_is_harmonised_is_not_harmonised_again(data: Path, found: Path, tmp_path: Path) -> None:
    imported(data, found, tmp_path, ["north"])
    (tmp_path / "made" / "south.npz").write_bytes((data / "south.npz").read_bytes())
    out = survey(tmp_path / "made", tmp_path / "again", "--harmonize", "all")
    told = read_survey(out).combat
    assert told["without"]["north"].startswith("its data file is harmonised already")
    assert (
        "crp: 1 hospitals gave it, and there is nothing to compare" in told["fault"]
        and not (out / "combat.toml").exists()
    )


def test_one_column_needs_a_choice(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = survey(data, tmp_path / "one", "--harmonize", "glucose")
    assert "one column: the shrinkage compares columns" in capfd.readouterr().err and not (out / "combat.toml").exists()
    out = survey(data, tmp_path / "own", "--harmonize", "glucose", "--no-shrink")
    raw = [columns(read_contents(data / f"{name}.npz"), "train", ["glucose"]) for name in SIZES]
    wanted = pooled_combat(raw, shrink=False)
    for name, own, pooled in zip(SIZES, raw, wanted, strict=True):
        (column,) = load_harmonisation(out / "combat.toml").silos[name]
        level = ((own - column.alpha) / column.sigma - column.gamma) / column.delta**0.5
        np.testing.assert_allclose(level * column.sigma + column.alpha, pooled, rtol=1e-9)


def test_page_and_withdrawal(found: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for file in found.iterdir():
        (run / file.name).write_bytes(file.read_bytes())
    assert "Harmonisation (ComBat)" in (run / "survey.html").read_text()
    assert withdraw("south", [run]) == [f"{run}: survey.json, survey.csv, combat.toml"]
    assert not (run / "combat.toml").exists() and "south" not in (run / "survey.json").read_text()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (["--harmonize", "sex"], "'sex' is a category: only columns of numbers are harmonised"),
        (["--harmonize", "since"], "'since' is a date: only columns of numbers are harmonised"),
        (["--harmonize", "glucos"], "it has no column 'glucos' (did you mean 'glucose'?)"),
        (["--harmonize", "glucose,crp", "--covariates", "state"], "is the label: a future patient has none"),
        (["--harmonize", "glucose,crp", "--covariates", "label"], "is the label: a future patient has none"),
        (["--harmonize", "glucose,crp", "--covariates", "crp"], "'crp' is named twice"),
    ],
)
def test_what_cannot_be_asked_for_is_one_line_and_the_survey_goes_on(
    data: Path, tmp_path: Path, asked: list[str], line: str
) -> None:
    told = read_survey(survey(data, tmp_path / "out", *asked))
    assert set(told.answers) == set(SIZES) and not (tmp_path / "out" / "combat.toml").exists()
    assert set(told.combat["without"]) == set(SIZES)
    assert all(line in why for why in told.combat["without"].values())


def test_covariates_go_with_harmonize(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = random_silos(tmp_path, {"a": 30})["a"]
    assert main(["survey", "--data", str(file), "--covariates", "x"]) == 2
    assert "--covariates and --no-shrink go with --harmonize" in capfd.readouterr().err


def test_a_simulation(tmp_path: Path) -> None:
    out = tmp_path / "digits"
    asked = ["--harmonize", "all", "--set", "silos=3", "partition=dirichlet"]
    assert main(["survey", "--dataset", "breast-cancer", *asked, "--out", str(out)]) == 0
    assert len(load_harmonisation(out / "combat.toml").silos) == 3


def part(n: int, mean: float, covariates: tuple[str, ...] = (), **others: Any) -> dict[str, Any]:
    p = len(covariates)
    own = {"n": n, "mean": mean, "square": float(n), "xy": [0.0] * p}
    columns = {"a": own, "b": own | {"mean": mean + 1, "square": 2.0 * n}}
    shared = {"refused": "", "withheld": {}, "covariates": list(covariates), "x": [0.0] * p, "xx": np.eye(p).tolist()}
    return shared | {"columns": columns} | others


def answer(range_: tuple[float, float], *given: Any, **more: Any) -> dict[str, Any]:
    item = {"kind": "number", "missing": 0, "range": range_}
    return {"columns": {"a": item, "b": item}, KEY: part(*given, **more)}


def test_a_silo_that_does_not_fit_stops_nothing() -> None:
    """Other covariates, as of another recipe; sums that its file cannot have; a refusal. The others are harmonised."""
    usual = (0.0, 100.0)
    made, told = harmonise(
        {
            "a": answer(usual, 10, 1.0),
            "b": answer(usual, 20, 2.0),
            "c": answer(usual, 10, 1.0, covariates=("sex=x",)),
            "d": answer(usual, 9, 1.0, refused="no"),
            "liar": answer((0.0, 1e31), 9, 1e30),
        },
        True,
    )
    assert made is not None and set(made.silos) == {"a", "b"} and made.silos["a"][0].alpha == pytest.approx(5 / 3)
    assert told["without"] == {"c": "its covariates are sex=x, those of the others none", "d": "no"}
    assert {own["silo"] for own in told["cells"]} == {"liar"} and "outside of the range 0..100" in told["cells"][0][
        "why"
    ]
