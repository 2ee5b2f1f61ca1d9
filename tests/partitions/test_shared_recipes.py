"""One schema for all tables: made of a first hospital's recipe, mapped once by every other one."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from failing import fails
from taken import silofl, write_lines

from partitions.recipes.recipe import load_recipe, parse_recipe
from partitions.recipes.shared import parse_shared, schema_of, schema_toml
from partitions.schema import load_schema, parse_schema, read_schema

N = 60


def first(path):
    """A table with decimal commas, a category, a rare value, two dates, gaps."""
    rows = ["Patient-ID;Alter;Geschlecht;Geburt;Aufnahme;Ort;Befund"]
    for i in range(N):
        sex, where = ("w", "m", "")[i % 3], "Ulm" if i > 3 else f"Dorf{i}"
        birth = f"0{1 + i % 9}.02.{1940 + i}"
        rows.append(
            f"P{i};{30 + i},5;{sex};{birth};05.06.2024;{where};{'krank' if i % 2 else 'gesund'}"
        )
    path.write_text("\n".join(rows) + "\n")
    return path


def second(path):
    """The same patients in another layout: other names, signs, codes, dates and order, and one more column."""
    rows = ["outcome,height,born,admitted,sex,town,age,mrn"]
    for i in range(N):
        sex, where = ("2", "1", "NA")[i % 3], "Ulm" if i > 3 else f"Dorf{i}"
        birth = f"{1940 + i}-02-0{1 + i % 9}"
        rows.append(
            f"{'ill' if i % 2 else 'well'},{160 + i},{birth},2024-06-05,{sex},{where},{30 + i}.5,P{i}"
        )
    path.write_text("\n".join(rows) + "\n")
    return path


MAPPED = [
    "Alter=age",
    "Geschlecht=sex",
    "Geburt=born",
    "Aufnahme=admitted",
    "Ort=town",
    "Befund=outcome",
]
CODES = ["Geschlecht:2=w", "Geschlecht:1=m", "Befund:ill=krank", "Befund:well=gesund"]


def options(name, values):
    return [word for value in values for word in (name, value)]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """The first hospital's file, with its admission counted from birth, and the schema of it."""
    monkeypatch.chdir(tmp_path)
    first(Path("a.csv"))
    command = ["import", "a.csv", "--label", "Befund", "--patient", "Patient-ID"]
    assert silofl(*command, "--out", "draft.npz") == 0
    content = load_recipe(Path("draft.recipe.toml")).content
    for column in content["columns"]:
        column.pop("fill-value", None)
        column |= {"range": [0, 120], "unit": "years"} if column["name"] == "Alter" else {}
        column |= {"since": "Geburt", "range": [0, 120]} if column["name"] == "Aufnahme" else {}
        column |= {"kind": "skip", "fill": "refuse"} if column["name"] == "Geburt" else {}
    Path("mine.toml").write_text(parse_recipe(content).toml())
    assert silofl("import", "a.csv", "--recipe", "mine.toml", "--out", "a.npz") == 0
    assert silofl("schema", "a.recipe.toml", "--out", "schema.toml") == 0
    second(Path("b.csv"))
    return Path("schema.toml")


BY_SCHEMA = "import b.csv --schema schema.toml --patient mrn"


def test_two_layouts_become_the_same_file(made, capsys):
    """All arrays but the recipe are equal, bit for bit: the patients, their order and the seed are the same."""
    assert (
        silofl(
            *BY_SCHEMA.split(),
            "--out",
            "b.npz",
            *options("--map", MAPPED),
            *options("--codes", CODES),
        )
        == 0
    )
    said = capsys.readouterr().out
    assert (
        "column sex: becomes Geschlecht; 2 = w, 1 = m" in said
        and "column outcome: ill = krank, well = gesund" in said
    )
    assert "left out, as the schema does not have them: height" in said
    assert (
        "b.csv, line 2: Ort is 'Dorf0', none of Ulm, other: taken as 'other', and 3 cells more like it"
        in said
    )
    with np.load("a.npz") as a, np.load("b.npz") as b:
        assert set(a) == set(b)
        assert [key for key in a if a[key].tobytes() != b[key].tobytes()] == ["recipe"]
        assert a["feature_names"].tolist()[:4] == [
            "Alter",
            "Geschlecht=m",
            "Geschlecht=w",
            "Aufnahme",
        ]
    assert silofl("check-data", "b.npz", "--schema", "schema.toml") == 0
    assert "the file fits" in capsys.readouterr().out
    assert silofl("import", "b.csv", "--recipe", "b.recipe.toml", "--out", "again.npz") == 0
    assert Path("again.npz").read_bytes() == Path("b.npz").read_bytes()


def test_the_first_hospital_fits_its_own_schema(made):
    assert silofl("import", "a.csv", "--schema", "schema.toml", "--out", "c.npz") == 0
    with np.load("a.npz") as a, np.load("c.npz") as c:
        assert [key for key in a if a[key].tobytes() != c[key].tobytes()] in (["recipe"], [])


def test_nothing_of_one_hospital_is_in_the_schema(made):
    text = made.read_text()
    for own in ("%d.%m", "fill-value", "Dorf", "decimal", '"P1"'):
        assert own not in text
    schema = load_schema(made)
    assert schema.bare.digest == schema.digest and "table" not in schema.bare.content
    assert (
        read_schema(schema.text) == schema == parse_schema(tomllib.loads(schema_toml(schema)))
    )
    assert [column.name for column in parse_shared(schema).columns] == [
        "Alter",
        "Geschlecht",
        "Geburt",
        "Aufnahme",
        "Ort",
    ]


@pytest.mark.parametrize(
    "maps, codes, words",
    [
        (
            [],
            CODES,
            "b.csv has no column Alter, Geschlecht, Geburt, Aufnahme, Ort, Befund: name its own with --map Alter=",
        ),
        (
            MAPPED[1:],
            CODES,
            "name its own with --map Alter=COLUMN, one for each; not used yet: height, age, mrn",
        ),
        (
            MAPPED,
            CODES[1:],
            "b.csv, line 2: sex is '2', and Geschlecht has the categories m, w: say what '2' mean",
        ),
        (
            MAPPED,
            CODES[:3],
            "outcome is 'well', and Befund has the categories gesund, krank: say what 'well' mean",
        ),
        (MAPPED, [*CODES[1:], "Geschlecht:2=W"], "--codes Geschlecht: 'W' is none of m, w"),
        (
            ["Alter=agee", *MAPPED[1:]],
            CODES,
            "--map Alter=agee: b.csv has no column 'agee' (did you mean 'age'?)",
        ),
        (
            ["Altr=age", *MAPPED],
            CODES,
            "--map Altr=age: the schema has no column 'Altr' (did you mean 'Alter'?)",
        ),
        (
            ["Alter=height", *MAPPED[1:]],
            CODES,
            "line 2: Alter is '160', outside of its range 0..120",
        ),
        (["Alter=sex", *MAPPED[1:]], CODES, "b.csv: sex stands for two columns of the schema"),
    ],
)
def test_what_has_no_shared_name_is_asked_for(made, capsys, maps, codes, words):
    assert (
        silofl(
            *BY_SCHEMA.split(),
            "--out",
            "b.npz",
            *options("--map", maps),
            *options("--codes", codes),
        )
        == 2
    )
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and not Path("b.npz").exists()


def test_a_draft_by_the_schema_can_be_corrected(made, capsys):
    """A hospital that measures age in months: the factor is its own, and the range of the schema holds after it."""
    text = Path("b.csv").read_text().splitlines()
    rows = [line.split(",") for line in text[1:]]
    months = [",".join([*row[:6], str(float(row[6]) * 12), row[7]]) for row in rows]
    write_lines(Path("b.csv"), text[0], *months)
    maps = [*options("--map", MAPPED), *options("--codes", CODES)]
    capsys.readouterr()
    assert silofl(*BY_SCHEMA.split(), "--propose", *maps) == 0
    draft = capsys.readouterr().out
    assert 'name = "Alter"' in draft
    Path("draft.toml").write_text(
        draft.replace('from = "age"', 'from = "age"\nfactor = 0.08333333333333333')
    )
    assert silofl("import", "b.csv", "--recipe", "draft.toml", "--out", "b.npz") == 0
    with np.load("a.npz") as a, np.load("b.npz") as b:
        assert (
            np.allclose(a["x_train"], b["x_train"])
            and a["feature_names"].tolist() == b["feature_names"].tolist()
        )


def test_a_bundle_carries_the_table(made, tmp_path):
    """What federation.yaml names is in the bundle whole; messages have the schema without it."""
    from server.deploy.federation import read_federation

    Path("f.yaml").write_text(
        "name: f\nschema: schema.toml\nsilos: [{name: a, data: a.npz}, {name: b, data: a.npz}]\n"
    )
    federation = read_federation(Path("f.yaml"))
    assert json.loads(federation.declared.text)["table"]["patient"] == "Patient-ID"
    assert "table" not in json.loads(federation.agreed)["schema"]


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            ("[table]", "[tabel]"),
            "'tabel' is no key of it (did you mean 'table'?); a schema has features",
        ),
        (('kind = "number"', 'kind = "numbre"'), "columns.1.kind = 'numbre': must be one of"),
        (
            ('kind = "number"', 'kind = "number"\ndecimal = ","'),
            "decimal of a column is a hospital's own",
        ),
        (
            ('categories = ["m", "w"]', 'categories = ["m", "f"]'),
            "the schema's [table] makes other columns than its",
        ),
    ],
)
def test_a_damaged_schema_is_refused(made, capsys, changed, words):
    text = made.read_text()
    assert changed[0] in text
    made.write_text(text.replace(*changed, 1))
    assert silofl("import", "a.csv", "--schema", "schema.toml", "--out", "x.npz") == 2
    assert words in capsys.readouterr().err


def test_a_recipe_that_was_never_used_makes_no_schema(made, capsys):
    assert (
        silofl("import", "a.csv", "--label", "Befund", "--patient", "Patient-ID", "--propose")
        == 0
    )
    Path("draft.toml").write_text(capsys.readouterr().out)
    fails(ValueError, "the recipe has no task yet", schema_of, load_recipe(Path("draft.toml")))
    assert silofl("schema", "a.recipe.toml", "--out", "schema.toml") == 2
    assert "is there already" in capsys.readouterr().err
