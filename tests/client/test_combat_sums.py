"""Exact sums for ComBat: what a policy lets out, of one choice, once; and what a server can read from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from surveyed import hospital, rewritten
from tiny import TinyGrid, audited

from client.policies import policy_page
from client.site import audit_gate
from client.site.released import read_released
from client.site.study.approvals import approve
from client.site.study.dangers import dangers
from client.site.trust.policy import Policy, parse_policy
from client.studies import released_page
from client.survey.combat import FILE, Rows, Selection, chosen, sums_for
from models.survey.exact import has_small_cells, kept_rows, tells_label, tells_of_few
from partitions.common.errors import DataError, UserError
from partitions.recipes.places import TableColumn
from partitions.silo_file import read_contents
from server.deploy.study_draft import draft
from server.run.survey.loop import SurveyLoop
from server.simulation.engine import flower_identity
from strategies.base.run_settings import parse_settings
from strategies.base.schema.combat import KEY
from strategies.base.schema.survey import RECORD, read_answer, written_answer

ALLOWED = 'methods = ["survey"]\nmin-sum-samples = 20\nmax-surveys = 0\nruns-per-day = 0\n'
RULES = f"{ALLOWED}combat = true\n"
ASKED = {"survey.harmonize": "glucose,crp"}
RUN = {"strategy": "survey", "rounds": 1, "threads": 1, "silos": 1}


class Site:
    """One hospital with its policy and state directory; it is asked as a server would."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file, self.policy = folder, hospital(folder, "north", 160, 1), folder / "policy.toml"
        self.policy.write_text(RULES)
        self.run = 0

    def reply(self, prepare: Callable[[TinyGrid], object] = lambda grid: None, /, **asked: Any) -> dict[str, Any]:
        """What it answers, as the server reads it."""
        settings = parse_settings({**RUN, **ASKED, **asked})
        grid = TinyGrid({"north": self.file}, settings, state_dir=self.folder / "state", policy=str(self.policy))
        self.run += 1
        grid.contexts[1].run_id = self.run
        prepare(grid)
        with flower_identity():
            SurveyLoop(grid, settings).run()
        return read_answer(grid.traffic[-1][1].content[RECORD])

    def sums(self, **asked: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.reply(lambda grid: None, **asked)[KEY]
        return found

    def refused(self, **asked: Any) -> str:
        """Why it gives no sums; the survey itself is answered."""
        answer = self.reply(lambda grid: None, **asked)
        assert answer["n"] == 160 and answer["columns"]["glucose"]["mean"] and not answer[KEY]["columns"]
        return str(answer[KEY]["refused"])

    def rewrite(self, change: Callable[[dict[str, np.ndarray]], object]) -> None:
        rewritten(self.file, change)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_sums_are_those_of_the_training_part(site: Site) -> None:
    """Exact, of the rows with a value; of no other part."""
    found, train = site.sums(), read_contents(site.file).splits["train"]
    names, gaps = list(read_contents(site.file).schema.names), read_contents(site.file).gaps["train"]
    for name in ("glucose", "crp"):
        y = train.x[~gaps[:, names.index(name)], names.index(name)].astype(np.float64)
        assert found["columns"][name]["n"] == len(y) <= len(train)
        assert found["columns"][name]["mean"] == pytest.approx(y.mean(), rel=1e-14)
        assert found["columns"][name]["square"] == pytest.approx(((y - y.mean()) ** 2).sum(), rel=1e-12)
    assert found["columns"]["crp"]["n"] < found["columns"]["glucose"]["n"] == len(train)


@pytest.mark.parametrize(
    ("rules", "asked", "line"),
    [
        (ALLOWED, {}, "its policy has combat = false, the run survey.harmonize"),
        (RULES, {"survey.covariates": "state"}, "'state' is the label: a future patient has none"),
        (RULES, {"survey.harmonize": "sex"}, "'sex' is a category"),
        (RULES, {"survey.harmonize": "ages"}, "no column 'ages' (did you mean 'age'?)"),
        (f"{RULES}min-cell = 40\n", {"survey.covariates": "sex"}, "min-cell = 40, and exact sums would be about fewer"),
        (RULES, {"survey.covariates": "kind"}, "min-sum-samples = 20, and exact sums would be about fewer patients"),
    ],
)
def test_a_refusal_is_one_line_and_the_survey_goes_on(site: Site, rules: str, asked: dict[str, str], line: str) -> None:
    site.policy.write_text(rules)
    assert line in site.refused(**asked)


def test_an_unasked_survey_has_no_sums(site: Site) -> None:
    assert (
        KEY not in site.reply(lambda grid: None, **{"survey.harmonize": ""})
        and not (site.folder / "state" / FILE).exists()
    )


def test_differencing_one_patient_more_gets_the_same_answer(site: Site) -> None:
    """Red team: sums before and after a patient came would be that patient's values, to the last digit.

    The second answer is the first one, bit for bit. What it would have been gives the patient away.
    """
    first = site.sums()
    whole = read_contents(site.file)
    glucose = whole.splits["train"].x[:, list(whole.schema.names).index("glucose")].astype(np.float64)
    before = first["columns"]["glucose"]
    leaked = before["n"] * before["mean"] - glucose[1:].sum()
    assert leaked == pytest.approx(glucose[0], abs=1e-9)  # the attack works on what would be exact

    def drop(arrays: dict[str, np.ndarray]) -> None:
        for key in [k for k in arrays if k.endswith("_train")]:
            arrays[key] = arrays[key][1:]

    site.rewrite(drop)
    assert site.sums() == first


def test_other_data_get_no_second_answer(site: Site) -> None:
    """A unit that changes hides which patient came with it, so that no second exact answer is given by itself."""
    first = site.sums()

    def convert(arrays: dict[str, np.ndarray]) -> None:
        arrays["x_train"][:, 1] *= 2

    site.rewrite(convert)
    assert "its data changed since its sums of" in site.refused() and FILE in site.refused()
    (site.folder / "state" / FILE).unlink()  # what the hospital itself may do
    assert site.sums()["columns"]["glucose"]["mean"] == pytest.approx(2 * first["columns"]["glucose"]["mean"])


@pytest.mark.parametrize(
    "other", [{"survey.harmonize": "glucose"}, {"survey.harmonize": "all"}, {"survey.covariates": "age"}]
)
def test_another_choice_would_be_more_equations(site: Site, other: dict[str, str]) -> None:
    """Red team: the sums of k choices of covariates are k systems of equations about the same patients."""
    first = site.sums()
    assert "it gave sums of glucose, crp on" in (why := site.refused(**other)) and "answers one choice" in why
    assert site.sums() == first


def test_a_refusal_binds_the_choice_but_not_the_answer(site: Site) -> None:
    """Asking which covariates have small cells would be an oracle; a policy that is loosened is asked again."""
    site.refused(**{"survey.covariates": "kind"})
    assert "answers one choice" in site.refused(**{"survey.covariates": "sex"})
    site.policy.write_text(RULES.replace("20", "5") + "min-cell = 5\n")
    assert site.sums(**{"survey.covariates": "kind"})["covariates"] == ["kind=b", "kind=c"]


def test_with_covariates_all_columns_have_the_same_rows(site: Site) -> None:
    """Red team: the sums of a covariate over the rows of two columns, less each other, are of those with a gap."""
    found = site.sums(**{"survey.covariates": "age,sex"})
    assert len({own["n"] for own in found["columns"].values()}) == 1 and len(found["x"]) == 2


def test_a_recipe_that_is_none_of_columns_alone_may_be_harmonised(site: Site) -> None:
    """One with a column of text is none for a survey, so whether it has [combat] is not known."""
    asked: Any = parse_settings({**RUN, **ASKED}).method
    with pytest.raises(UserError, match=r"may have \[combat\]: nothing is harmonised"):
        chosen(asked, read_contents(site.file), None)


def test_a_damaged_memory_tells_nothing(site: Site) -> None:
    site.sums()
    (site.folder / "state" / FILE).write_text("[")
    assert "cannot be remembered" in site.refused()


def test_what_a_server_writes_into_the_message_changes_nothing(site: Site) -> None:
    """The choice is the run's settings, which study and policy see; the message has none."""
    first = site.sums()

    def prepare(grid: TinyGrid) -> None:
        def before(silo: str, message: Message, context: Any) -> None:
            if message.metadata.message_type == "query.survey":
                message.content.config_records["config"]["survey.harmonize"] = "age"

        grid.before = before

    assert site.reply(prepare)[KEY] == first


def test_audit_log_and_record_of_what_left(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(audit_gate.BY_SITE, audit_gate.BY_SITE_VALUE)
    site.reply(audited)
    site.reply(audited, **{"survey.harmonize": "glucose"})
    (file,) = (site.folder / "state" / "audit").rglob("*.jsonl")
    first, second = (json.loads(line) for line in file.read_text().splitlines() if "query.survey" in line)
    assert {"combat.glucose", "combat.crp"} <= set(first["sent"][0]["keys"])
    assert "combat.glucose" not in second["sent"][0]["keys"] and second["withheld"]["combat"] == ["glucose"]
    (cohort,) = read_released(site.folder / "state").values()
    assert (cohort["surveys"], cohort["exact"]) == (2, 1)
    assert "2 to surveys (1 with exact sums)" in released_page([{"cohort": "ab" * 32, **cohort}])


def test_a_study_names_the_choice(site: Site) -> None:
    site.policy.write_text(f'{RULES}studies = "required"\n')
    texts = dict.fromkeys(("purpose", "contact", "results", "retention"), "a text")
    text = draft("look", {"strategy": "survey", "rounds": 1, **ASKED}, texts=texts, end=None, apps=["ab" * 32])
    study = approve(site.folder / "state", "north", text, "Dr. B", "", [])
    assert any("survey.harmonize may be glucose,crp: exact sums" in line for line in dangers(study, Policy()))

    def prepare(grid: TinyGrid) -> None:
        grid.contexts[1].run_config |= {"study": "look", "threads": 0}

    assert set(site.reply(prepare)[KEY]["columns"]) == {"glucose", "crp"}
    with pytest.raises(UserError, match=r"the study look has survey\.harmonize = glucose,crp, the run 'age'"):
        site.reply(prepare, **{"survey.harmonize": "age"})


def test_policy_page_says_it() -> None:
    page = policy_page(parse_policy('methods = ["survey"]\ncombat = true\n', "policy.toml"))
    assert "exact sums of one choice of columns over 50 patients or more, for ComBat, once" in page
    assert "no exact sums for ComBat (combat)" in policy_page(parse_policy('methods = ["survey"]\n', "policy.toml"))


# ---- What exact sums tell of few ------------------------------------------------------------------------------------


def test_where_few_lack_a_value_others_are_left_out_with_them() -> None:
    """n would count the 1 to 9 patients with a gap; a gap of none, or of ten, costs no other row."""
    units, order = np.repeat(np.arange(40), 2), np.repeat(np.arange(40)[::-1], 2)
    gone = np.zeros(80, bool)
    assert kept_rows(gone, units, order, 10).all()
    gone[0] = True  # one record of patient 0
    kept = kept_rows(gone, units, order, 10)
    left = set(units[~kept].tolist())
    assert left == {0, *range(31, 40)} and kept[1]  # its other record counts; nine patients of the lowest order go
    gone[:20:2] = True
    assert (kept_rows(gone, units, order, 10) == ~gone).all()


def test_a_column_of_few_or_with_one_who_outweighs_stays() -> None:
    rng, units = np.random.default_rng(0), np.arange(100)
    fine = rng.normal(size=100)
    assert tells_of_few(fine, units, [], 10) == ""
    rare = np.where(units < 9, rng.normal(size=100) + 5, 0.0)  # sums of nine patients
    assert tells_of_few(rare, units, [], 9) == "it has 10 different values, as a category has"
    rare = np.where(units < 20, fine, 0.0)
    assert "fewer than 21 patients" in tells_of_few(rare, units, [], 21) and not tells_of_few(rare, units, [], 20)
    assert "fewer than 10" in tells_of_few(rare, units, [units >= 15], 10)  # in one category only five have another
    heavy = fine.copy()
    heavy[7] = 1e4
    assert tells_of_few(heavy, units, [], 10) == "one patient outweighs the others"
    assert tells_of_few(heavy, np.repeat(np.arange(50), 2), [], 10)  # nor with another record of the patient


def test_one_patient_may_outweigh_in_no_category_and_in_no_product() -> None:
    """Red team: X'y holds a category's sum, and where the others are alike that is one patient's value."""
    rng, units = np.random.default_rng(0), np.arange(200)
    half = units % 2 == 0
    y = np.where(half, 5 + 1e-3 * rng.normal(size=200), 3 * rng.normal(size=200))
    y[0] = 40
    assert tells_of_few(y, units, [], 50) == ""
    assert tells_of_few(y, units, [half, ~half], 50) == "one patient outweighs the others"
    alike = np.where(half & (units > 20), 5.0, rng.normal(size=200))  # most of one category, few of all
    assert tells_of_few(alike, units, [], 50) == "" and "fewer than 50" in tells_of_few(alike, units, [half], 50)
    x, y = rng.normal(size=(2, 200))
    x[3] = y[3] = 12
    assert tells_of_few(x, units, [], 50) == tells_of_few(y, units, [], 50) == ""
    assert tells_of_few(y, units, [], 50, [x]) == "one patient outweighs the others"
    x, y = np.where(units < 110, x, 0), np.where(units >= 90, y, 0)  # a product of twenty patients
    assert tells_of_few(y, units, [], 50) == "" and "fewer than 50" in tells_of_few(y, units, [], 50, [x])


def test_as_many_covariates_as_patients_would_be_the_table() -> None:
    """Red team: p (p + 1) / 2 exact equations determine whole numbers of a known range."""
    rng, policy = np.random.default_rng(0), parse_policy('methods = ["survey"]\ncombat = true\n', "policy.toml")
    table = rng.integers(18, 95, (60, 8)).astype(np.float32)
    columns = tuple(TableColumn(f"c{i}", "number", (i,)) for i in range(8))
    rows = Rows(table, np.zeros(table.shape, bool), rng.integers(0, 2, 60), np.arange(60))
    refused = sums_for(Selection(columns[:1], columns[1:]), rows, policy)[0]
    assert refused["refused"] == "7 covariates, categories counted singly, need 70 patients: name fewer"
    assert "xx" not in refused and "columns" not in refused
    assert len(sums_for(Selection(columns[:1], columns[1:7]), rows, policy)[0]["xx"]) == 6


def test_a_product_that_one_patient_outweighs_stays() -> None:
    rng, policy = np.random.default_rng(0), parse_policy('methods = ["survey"]\ncombat = true\n', "policy.toml")
    table = rng.normal(size=(200, 3))
    table[3, :2] = 12
    a, b, c = (TableColumn(name, "number", (i,)) for i, name in enumerate("abc"))
    rows = Rows(table, np.zeros(table.shape, bool), rng.integers(0, 2, 200), np.arange(200))
    found = sums_for(Selection((a, c), (b,)), rows, policy)[0]
    assert set(found["columns"]) == {"c"} and set(found["withheld"]) == {"a"}
    assert sums_for(Selection((c,), (b, a)), rows, policy)[0]["refused"].endswith("(a)")


def test_a_covariate_of_a_single_patient_stays() -> None:
    """X'X would hold the count, and X'y the patient's value."""
    units, one = np.arange(100), np.arange(100) == 3
    half = np.arange(100) % 2 == 0
    assert has_small_cells([[~one, one]], units, 10) and not has_small_cells([[~half, half]], units, 10)
    other = np.arange(100) < 55
    assert not has_small_cells([[~half, half], [~other, other]], units, 20)
    assert has_small_cells([[~half, half], [~other, other]], units, 25)  # in pairs of categories
    assert has_small_cells([[half, ~half, np.zeros(100, bool)]], units, 10)  # an empty one looks like a small one


def test_a_covariate_that_is_the_label() -> None:
    y = np.arange(60) % 3
    assert tells_label(2 - y, y) and not tells_label(np.arange(60) % 2, y)
    assert tells_label(y + np.linspace(0, 0.5, 60), y) and not tells_label(y + np.linspace(0, 3, 60), y)
    measured = np.linspace(1, 9, 60)
    assert tells_label(measured * 18 + 3, measured[:, None]) and not tells_label(measured**3, measured[:, None])
    assert tells_label(y == 1, np.stack([np.zeros(60, int), (y == 1).astype(int)], 1))  # one of two findings


@pytest.mark.parametrize(
    "change",
    [
        {"combat": "{"},
        {"combat": '{"rows": 1}'},
        {"combat": '{"covariates": ["a"], "x": [], "xx": []}'},
        {"combat": '{"covariates": ["a\\n"], "x": [1], "xx": [[1]]}'},
        {"combat": '{"withheld": {"a": 1}}'},
        {"combat": '{"refused": 1}'},
        {"combat.a": '{"n": 0, "mean": 1, "square": 1, "xy": []}'},
        {"combat.a": '{"n": 5, "mean": NaN, "square": 1, "xy": []}'},
        {"combat.a": '{"n": 5, "mean": 1, "square": -1, "xy": []}'},
        {"combat.a": '{"n": 5, "mean": 1, "square": 1, "xy": [1]}'},
        {"combat.a": '{"n": 5, "mean": 1e300, "square": 1, "xy": []}'},
        {"combat.a\x1b": '{"n": 5, "mean": 1, "square": 1, "xy": []}'},
    ],
)
def test_a_lying_silo_stops_nothing(change: dict[str, Any]) -> None:
    own = {"n": 5, "mean": 1.0, "square": 2.0, "xy": []}
    answer = {"n": 5, "day": "", "columns": {}, "labels": {}, KEY: {"day": "", "columns": {"a": own}}}
    record = written_answer(answer)
    assert read_answer(record)[KEY]["columns"]["a"] == own
    for key, value in change.items():
        record[key] = value
    with pytest.raises(DataError):
        read_answer(record)
