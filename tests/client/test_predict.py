"""``silofl predict`` for new patients: a csv goes through the recipe in the model's card; keys and names come back."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
from predictions import trained_on_visits
from tiny import json_of

import silofl
from client.export import card_file, read_model
from client.prediction.predict import predict_file
from models.samples import Samples
from models.training import predict
from partitions.recipes.recipe import parse_recipe
from server.cli.main import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return trained_on_visits(tmp_path_factory.mktemp("trained"))


def read(text):
    reader = csv.DictReader(io.StringIO(text))
    return list(reader.fieldnames or ()), list(reader)


def new(path, *rows, header="dose;sex;age;Patient-ID"):
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_new_patients_get_keys_names_and_probabilities(tmp_path, trained):
    """Columns in another order, no label. The numbers by hand: gaps filled by the card's recipe, then the network."""
    source = new(tmp_path / "new.csv", "3;w;81,5;X-1", ";m;;X-2", "0;;35;X-3")
    header, rows = read(predict_file(trained[1], source))
    assert header == ["Patient-ID", "label", "p_ill, acute", "p_well"]
    assert [row["Patient-ID"] for row in rows] == ["X-1", "X-2", "X-3"]
    assert (rows[0]["label"], rows[2]["label"]) == ("ill, acute", "well")
    card, net = read_model(trained[1])
    fill = {column.name: column.fill_value for column in parse_recipe(card.recipe).columns}
    sex = float(fill["sex"] == "m")
    order = card.columns_and_labels["features"]
    assert [feature["name"] for feature in order] == ["age", "sex=m", "sex=w", "dose"]
    x = np.array(
        [[81.5, 0, 1, 3], [fill["age"], 1, 0, fill["dose"]], [35, sex, 1 - sex, 0]], np.float32
    )
    mean, std = (
        np.array(getattr(card.normalisation, key), np.float32) for key in ("mean", "std")
    )
    logits = (
        predict(net, Samples((x - mean) / std, np.zeros(3, np.int64), "cpu", None, None))
        .double()
        .numpy()
    )
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = [[float(row["p_ill, acute"]), float(row["p_well"])] for row in rows]
    assert np.allclose(found, p, atol=1e-5)
    assert [row["label"] for row in rows] == [("ill, acute", "well")[k] for k in p.argmax(1)]


def test_the_whole_export_predicts_as_its_data_file(tmp_path, trained):
    """The test rows of the csv, by csv and by the .npz file made of it."""
    folder = trained[1].parent
    by_file = read(predict_file(trained[1], folder / "t.npz"))
    assert by_file[0] == ["index", "label", "p_ill, acute", "p_well"]
    with np.load(folder / "t.npz") as npz:
        tested = len(npz["x_test"])
    assert [row["index"] for row in by_file[1]] == [str(i) for i in range(tested)]
    header, *lines = (folder / "t.csv").read_text().splitlines()
    by_csv = read(predict_file(trained[1], new(tmp_path / "all.csv", *lines, header=header)))[1]
    pairs = {(row["p_ill, acute"], row["label"]) for row in by_csv}
    assert (
        len(by_csv) == 160
        and {(row["p_ill, acute"], row["label"]) for row in by_file[1]} <= pairs
    )


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        (
            "dose;sex;age;Patient-ID;BMI",
            "3;w;81,5;X;9",
            "has columns that the recipe does not have: BMI",
        ),
        ("dose;sex;Alter;Patient-ID", "3;w;81,5;X", "does not have: Alter and lacks age"),
        ("dose;sex;Patient-ID", "3;w;X", "has no column age, which the recipe takes"),
        ("dose;sex;age;Patient-ID", "3;x;81,5;X", "line 2: sex is 'x', none of m, w; correct"),
        ("dose;sex;age;Patient-ID", "3;w;81.5;X", "line 2: age is '81.5', no number"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, trained, capsys, header, row, words):
    source, out = new(tmp_path / "new.csv", row, header=header), tmp_path / "p.csv"
    assert main(f"predict --model {trained[1]} --data {source} --out {out}".split()) == 2
    assert words in capsys.readouterr().err and not out.exists()


def test_cells_as_gaps_are_named(tmp_path, trained, capsys):
    source = new(tmp_path / "new.csv", "3;x;81,5;X-1", "3;;81,5;")
    out = tmp_path / "p.csv"
    command = f"predict --model {trained[1]} --data {source} --out {out}".split()
    assert main([*command, "--as-gaps"]) == 0
    said = capsys.readouterr().err
    assert "line 2: sex is 'x', none of m, w: taken as a gap" in said and "1 rows of" in said
    first, second = read(out.read_text())[1]
    assert first["p_well"] == second["p_well"] and first["Patient-ID"] == "X-1"


def test_a_hospital_may_keep_its_recipe(tmp_path, trained, capsys):
    """Then the csv needs the recipe beside it; the predictions are the same."""
    run, model = trained
    bare = tmp_path / "bare.safetensors"
    command = f"export {run} --silo hospital-01 --which last --out".split()
    assert main([*command, str(bare), "--no-recipe"]) == 0
    assert "recipe" not in capsys.readouterr().out and "recipe" not in json_of(card_file(bare))
    assert main([*command, str(tmp_path / "with.safetensors")]) == 0
    assert (
        "names of 3 columns and 2 categories, and 3 medians, means or most frequent"
        in capsys.readouterr().out
    )
    source = new(tmp_path / "new.csv", "3;w;81,5;X-1")
    with pytest.raises(
        ValueError,
        match=r"card has no recipe, so it cannot read a csv or pictures: name one with --recipe",
    ):
        predict_file(bare, source)
    recipe = tmp_path / "t.recipe.toml"
    recipe.write_text(parse_recipe(json_of(card_file(model))["recipe"]).toml())
    assert predict_file(bare, source, recipe=recipe) == predict_file(model, source)


def test_a_recipe_of_another_table_is_refused(tmp_path, trained):
    card = json_of(card_file(trained[1]))["recipe"]
    card["columns"][0]["name"] = "years"
    (tmp_path / "o.toml").write_text(parse_recipe(card).toml())
    source = new(tmp_path / "new.csv", "3;w;81,5;X-1")
    changed = (
        (tmp_path / "o.toml")
        .read_text()
        .replace('kind = "number"', 'from = "age"\nkind = "number"', 1)
    )
    (tmp_path / "o.toml").write_text(changed)
    with pytest.raises(ValueError, match="columns named years, the model has age: rename them"):
        predict_file(trained[1], source, recipe=tmp_path / "o.toml")


def test_the_recipe_stays_in_the_silo(trained):
    """Neither the server's checkpoints nor what silos reported hold a fill value or a column of the recipe."""
    run, _ = trained
    holders = [
        path
        for path in run.rglob("*")
        if path.is_file() and b"most-frequent" in path.read_bytes()
    ]
    assert holders and all("silos" in path.relative_to(run).as_posix() for path in holders)


def test_a_notebook_gets_the_keys_as_they_are(tmp_path, trained):
    source = new(tmp_path / "new.csv", "3;w;81,5;007", "0;;35;008")
    answers = silofl.load_run(trained[0]).model("hospital-01", which="last").predict(source)
    assert list(answers.index) == ["007", "008"] and list(answers.label) == [
        "ill, acute",
        "well",
    ]
