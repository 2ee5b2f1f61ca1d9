"""A recipe's section ``[combat]``: import and predict harmonise alike, and what does not fit is refused in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from surveyed import HEADER, RECIPE, hospital, rows

from client.tables.new_samples import asked_rows, disclosed
from partitions.common.errors import DataError
from partitions.importing.new_rows import read_new_rows
from partitions.recipes.combat import Harmonised
from partitions.recipes.harmonisation import Harmonisation, load_harmonisation, parse_harmonisation, with_combat
from partitions.recipes.pictures import read_any
from partitions.recipes.recipe import Recipe, load_recipe, parse_recipe, unfitted
from partitions.recipes.shared import schema_of
from partitions.silo_file import read_contents
from server.cli.main import main

FOUND = Harmonisation(
    ("age", "sex=male", "kind=b"),
    {
        "north": [
            Harmonised("glucose", 6.0, (0.01, -0.2, 0.3), 1.2, 0.5, 1.44),
            Harmonised("crp", 5.0, (0.0, 0.1, 0.2), 4.0, -0.5, 0.81),
        ],
        "south": [Harmonised("glucose", 6.0, (0.01, -0.2, 0.3), 1.2, -0.5, 0.9)],
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``north.npz`` as imported, its recipe, ``combat.toml``, and ``ours.npz``, the same rows harmonised."""
    made = tmp_path_factory.mktemp("harmonised")
    hospital(made, "north", 90, 1)
    (made / "north.recipe.toml").write_text(read_any(read_contents(made / "north.npz").recipe).toml())
    (made / "combat.toml").write_text(FOUND.toml(["by hand"]))
    assert main([*map(str, arguments(made)), "--out", str(made / "ours.npz")]) == 0
    return made


def arguments(folder: Path, *, recipe: str = "north.recipe.toml", silo: str = "north") -> list[object]:
    by = ["--harmonize", folder / "combat.toml", "--silo", silo]
    return ["import", folder / "north.csv", "--recipe", folder / recipe, *by]


def test_every_row_by_the_equation(folder: Path) -> None:
    """Filled gaps too; the other columns, who is for testing and which values are gaps stay as they were."""
    raw, made = read_contents(folder / "north.npz"), read_contents(folder / "ours.npz")
    names = list(made.schema.names)
    changed = {"glucose": FOUND.silos["north"][0], "crp": FOUND.silos["north"][1]}
    for part, split in made.splits.items():
        x = raw.splits[part].x.astype(float)
        sex, kind = x[:, names.index("sex=male")], x[:, names.index("kind")] == 1
        for j, name in enumerate(names):
            if name not in changed:
                assert (split.x[:, j] == raw.splits[part].x[:, j]).all()
                continue
            own = changed[name]
            level = own.alpha + own.beta[0] * x[:, names.index("age")] + own.beta[1] * sex + own.beta[2] * kind
            wanted = ((x[:, j] - level) / own.sigma - own.gamma) / own.delta**0.5 * own.sigma + level
            np.testing.assert_allclose(split.x[:, j], wanted, rtol=1e-6)
        assert (split.y == raw.splits[part].y).all() and (made.gaps[part] == raw.gaps[part]).all()
    gone = made.gaps["train"][:, names.index("crp")]
    assert gone.any() and not (made.splits["train"].x[gone] == raw.splits["train"].x[gone]).all()
    ranges = {feature.name: feature.range for feature in made.schema.features}
    assert ranges["glucose"] is None and ranges["age"] == (0, 120)


def test_import_and_predict_repeat_it_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    """The same rows by the recipe that was written, all at once, in another order, and one by one, as predict reads."""
    recipe = load_recipe(folder / "ours.recipe.toml")
    assert recipe.combat is not None and recipe.combat.silo == "north"
    arguments_ = ["import", str(folder / "north.csv"), "--recipe", str(folder / "ours.recipe.toml")]
    assert main([*arguments_, "--out", str(tmp_path / "again.npz")]) == 0
    assert (tmp_path / "again.npz").read_bytes() == (folder / "ours.npz").read_bytes()
    whole = read_new_rows(folder / "north.csv", recipe).x
    some = [",".join(row.values()) for row in rows(90, 1)]
    (tmp_path / "back.csv").write_text("\n".join([HEADER, *reversed(some)]) + "\n")
    assert (read_new_rows(tmp_path / "back.csv", recipe).x == whole[::-1]).all()
    for i in (0, 17):
        (tmp_path / "one.csv").write_text(f"{HEADER}\n{some[i]}\n")
        assert (read_new_rows(tmp_path / "one.csv", recipe).x[0] == whole[i]).all()


def test_whose_numbers_a_recipe_has_is_said(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where predict reads a csv by it, maybe at another hospital, and where it leaves in a card."""
    made, raw = load_recipe(folder / "ours.recipe.toml"), load_recipe(folder / "north.recipe.toml")
    asked_rows(folder / "north.csv", made, False)
    assert "note: the recipe harmonises the rows as those of 'north' ([combat])" in capfd.readouterr().err
    asked_rows(folder / "north.csv", raw, False)
    assert "[combat]" not in capfd.readouterr().err + disclosed(raw)
    assert "[combat], from which your means and deviations follow" in disclosed(made)


def test_ranges_are_of_the_raw_values(folder: Path, tmp_path: Path) -> None:
    """A harmonised value may lie outside; a raw one may not."""
    row = next(iter(rows(1, 1))) | {"glucose": "1000.5"}
    (tmp_path / "new.csv").write_text(f"{HEADER}\n{','.join(row.values())}\n")
    with pytest.raises(DataError, match=r"glucose is '1000.5', outside of its range -100..1000"):
        read_new_rows(tmp_path / "new.csv", load_recipe(folder / "ours.recipe.toml"))


def test_the_schema_of_all_hospitals_is_the_same(folder: Path) -> None:
    """Made of the harmonised recipe it has the raw ranges, and nothing of the hospital."""
    raw, made = (load_recipe(folder / f"{name}.recipe.toml") for name in ("north", "ours"))
    assert schema_of(raw) == schema_of(made)


def test_a_file_of_one_hospital_alone_is_enough(tmp_path: Path) -> None:
    one = Harmonisation(FOUND.covariates, {"south": FOUND.silos["south"]})
    (tmp_path / "combat.toml").write_text(one.toml())
    assert load_harmonisation(tmp_path / "combat.toml") == one


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"recipe": "ours.recipe.toml"}, "harmonised already, for 'north'"),
        ({"silo": "norht"}, "has no silo 'norht': north, south (did you mean 'north'?)"),
        ({"silo": ""}, "--harmonize COMBAT.toml goes with --silo NAME"),
    ],
)
def test_one_clear_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], change: dict[str, str], line: str
) -> None:
    assert main([*map(str, arguments(folder, **change)), "--out", str(tmp_path / "o.npz")]) == 2
    assert line in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_the_recipe_before_stays(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """It is needed for every later survey: --overwrite does not replace it."""
    given = [*map(str, arguments(folder)), "--out", str(folder / "north.npz"), "--overwrite"]
    before = (folder / "north.npz").read_bytes()
    assert main(given) == 2 and "so that it stays as it is without [combat]" in capfd.readouterr().err
    assert (folder / "north.npz").read_bytes() == before


def without(name: str) -> Recipe:
    return parse_recipe({**RECIPE, "columns": [own for own in RECIPE["columns"] if own["name"] != name]})  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("glucose", r"\[combat\] harmonises 'glucose', which is no column of numbers"),
        ("sex", r"\[combat\] has the covariates sex=male, which are none of the recipe's: age, glucose and 5 more"),
    ],
)
def test_a_column_that_the_recipe_lacks(name: str, line: str) -> None:
    with pytest.raises(DataError, match=line):
        with_combat(without(name), FOUND, "north", "combat.toml")


def test_rows_of_other_centres_are_not_harmonised_by_one_recipe() -> None:
    with pytest.raises(DataError, match="harmonised for 'north' alone"):
        unfitted(with_combat(parse_recipe(RECIPE), FOUND, "north", "combat.toml"), "centre")


SHARED = {"name": "a", "alpha": 0.0, "sigma": 1.0, "beta": []}
OWN = {"name": "n", "gamma": {"a": 0.0}, "delta": {"a": 1.0}}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"version": 2}, "version is 2"),
        ({"version": 1, "silos": [OWN]}, "columns are tables"),
        ({"version": 1, "columns": [SHARED, SHARED], "silos": [OWN]}, "'a' is there twice"),
        ({"version": 1, "columns": [{**SHARED, "sigma": 0.0}], "silos": [OWN]}, "sigma and delta are above 0"),
        ({"version": 1, "columns": [SHARED], "silos": [{**OWN, "delta": {"a": "x"}}]}, "delta of 'a' is x, no number"),
        ({"version": 1, "columns": [SHARED], "silos": [{**OWN, "delta": {"b": 1.0}}]}, "not of the file's columns"),
        ({"version": 1, "columns": [{**SHARED, "beta": [1.0]}], "silos": [OWN]}, "beta of 'a' is a list of 0 numbers"),
        ({"version": 1, "columns": [SHARED], "silos": [OWN], "rows": 1}, "no key 'rows'"),
    ],
)
def test_a_file_that_is_none(content: dict[str, object], line: str) -> None:
    assert parse_harmonisation({"version": 1, "columns": [SHARED], "silos": [OWN]}).silos["n"][0].delta == 1
    with pytest.raises(DataError, match=line):
        parse_harmonisation(content)
