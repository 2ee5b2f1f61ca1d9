"""A hospital's answer to a survey: what its policy lets out, the same however often asked, and what a server cannot."""

from __future__ import annotations

import json

import numpy as np
import pytest
from failing import fails
from flwr.app import ConfigRecord, Message, RecordDict
from study_text import TEXTS
from surveyed import HEADER, RECIPE, hospital, rewritten, rows, times
from tiny import TinyGrid, audited

from client.commands.budget import is_of_records
from client.protocol import launch
from client.protocol.policy import Policy
from client.site.counts import count_used_up, read_released
from client.site.record import Record
from client.site.study.approvals import record_approval
from client.site.study.dangers import dangers
from client.studies import released_page
from models.evidence.survey import MISSING
from partitions.common.errors import DataError, RunFailedError, UserError
from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.recipes.recipe import parse_recipe
from server.deploy.study_draft import draft
from server.run.survey import survey_silos
from server.simulation.engine import flower_identity
from strategies.base.run_settings import parse_settings
from strategies.base.survey import RECORD, read_answer, written_answer

ONLY = 'methods = ["survey"]\n'
RUN = {"strategy": "survey", "rounds": 1, "threads": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    hospital(folder, "north", 90, 1)
    return folder


class SurveySite:
    """One hospital with its policy and state directory."""

    def __init__(self, folder, file, rule):
        self.folder, self.file, self.policy = folder, file, folder / "policy.toml"
        self.policy.write_text(rule)
        self.run = 0

    def grid(self, **changes):
        settings = parse_settings({**RUN, "silos": 1, **changes})
        grid = TinyGrid(
            {"north": self.file},
            settings,
            state_dir=self.folder / "state",
            policy=str(self.policy),
        )
        self.run += 1
        grid.contexts[1].run_id = self.run
        return grid

    def ask(self, prepare=lambda grid: None):
        grid = self.grid()
        prepare(grid)
        with flower_identity():
            return survey_silos(grid, parse_settings({**RUN, "silos": 1}))

    def answer(self):
        return self.ask().answers["north"]

    def rewrite(self, change):
        rewritten(self.file, change)


@pytest.fixture
def site(data, tmp_path):
    file = tmp_path / "north.npz"
    file.write_bytes((data / "north.npz").read_bytes())
    return SurveySite(tmp_path, file, ONLY)


def test_a_site_allows_a_survey_and_nothing_else(site):
    answer = site.answer()
    assert answer["n"] == 90 and list(answer["columns"]) == [
        "age",
        "glucose",
        "sex",
        "kind",
        "since",
        "crp",
    ]
    assert answer["labels"] == {}  # class-means = false
    assert answer["columns"]["age"]["range"] == [0, 120] and "mean" in answer["columns"]["age"]
    # No range in the schema: no sums, no cells
    assert answer["columns"]["crp"].keys() == {"kind", MISSING}
    cells = [
        c
        for item in answer["columns"].values()
        for c in [*item.get("cells", []), item[MISSING]]
    ]
    assert all(c in (None, 0) or c >= 10 for c in cells) and None in cells
    site.policy.write_text(f"{ONLY}class-means = true\n")
    assert sum(site.answer()["labels"]["label"]["cells"]) == 90
    with pytest.raises(UserError, match=r'methods = \["survey"\], the run strategy = fedavg'):
        refusal(site, "query", strategy="fedavg")


def refusal(site, kind, **changes):
    """Ask with a message of this kind, in a run with these settings."""
    grid = site.grid(**changes)
    with flower_identity():
        message = Message(
            RecordDict(
                {"config": ConfigRecord({"round": 1, "personal": False, "save": False})}
            ),
            dst_node_id=1,
            message_type=kind,
        )
        reply = grid.call(message, grid.contexts[1])
    if reply.has_error():
        raise UserError(reply.error.reason)


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        (
            "",
            r'methods = \["all"\], the run strategy = survey, which has to be listed by its name',
        ),
        ('methods = ["fedavg", "evaluate"]\n', "the run strategy = survey"),
        (f"{ONLY}floor = 80\n", "floor = 80"),
        (f"{ONLY}min-cell = 91\n", "min-cell = 91, it has fewer patients[)]"),
        (f"{ONLY}require-dp = true\n", "require-dp = true, the run dp = false"),
        (f"{ONLY}epsilon = 3\n", "epsilon = 3"),
        (f"{ONLY}max-messages = 1\n", "max-messages = 1"),
    ],
)
def test_a_policy_refuses(site, rule, line):
    site.policy.write_text(rule)
    fails((UserError, RunFailedError), line, site.ask)
    with Record(site.folder / "state").reading() as db:
        assert db.execute("SELECT count(*) FROM disclosed").fetchone() == (0,)


@pytest.mark.parametrize(
    ("kind", "changes", "line"),
    [
        (
            "query.survey",
            {"strategy": "fedavg"},
            "strategy = fedavg, and a message asks for a survey",
        ),
        (
            "query.survey",
            {"strategy": "local"},
            "strategy = local, and a message asks for a survey",
        ),
        ("train", {}, "asks it to train or to evaluate"),
        ("evaluate", {}, "asks it to train or to evaluate"),
        ("evaluate.evidence", {"evidence": "on"}, "asks it to train or to evaluate"),
    ],
)
def test_a_message_of_another_run_is_refused(site, kind, changes, line):
    """Red team: a site that allows both; the message and the run's settings, which study and audit see, must agree."""
    site.policy.write_text('methods = ["all", "survey"]\nmin-silos = 1\n')
    fails(UserError, line, refusal, site, kind, **changes)


def test_with_differential_privacy_it_is_refused(site):
    with pytest.raises(
        UserError, match="dp = true: not with survey: a survey has no mechanism"
    ):
        parse_settings({**RUN, "dp": True})


def test_the_same_data_get_the_same_answer(site):
    """However often, in new runs and from a file that is written anew: there is nothing to average."""
    first = site.answer()
    site.rewrite(lambda arrays: None)
    assert site.answer() == first == site.answer()
    with Record(site.folder / "state").reading() as db:
        assert db.execute("SELECT count(*) FROM disclosed").fetchone() == (1,)


def test_one_patient_more_changes_nothing(site, data):
    """Differencing: below min-sum-samples changes the answer stays the earlier one, with its day; beyond, a new one."""
    first = site.answer()
    with Record(site.folder / "state").write() as db:
        db.execute("UPDATE disclosed SET answer = json_set(answer, '$.day', '2026-01-02')")

    def drop(count):
        def change(arrays):
            for key in [k for k in arrays if k.endswith("_train")]:
                arrays[key] = arrays[key][count:]

        return change

    site.rewrite(drop(1))
    assert site.answer() == {**first, "day": "2026-01-02"}
    site.rewrite(
        lambda arrays: arrays["y_train"].__setitem__(slice(None), 1 - arrays["y_train"])
    )
    assert site.answer()["n"] == 90  # 57 labels changed: an answer of its own
    site.rewrite(lambda arrays: arrays["feature_ranges"].__setitem__((0, 1), 130.0))
    assert site.answer()["columns"]["age"]["range"] == [0, 130]
    site.rewrite(lambda arrays: arrays["feature_ranges"].__setitem__((0, 1), 140.0))
    fails(RunFailedError, "max-surveys = 3, and this would be number 4", site.answer)


def test_one_patient_more_in_the_csv_moves_medians_and_no_answer(site, tmp_path):
    """Imported by a recipe without values for gaps: each patient's filled values move, and are no part of it."""

    def recipe():
        with np.load(site.file) as found:
            return str(found["recipe"])

    first, before, more = site.answer(), recipe(), tmp_path / "more.csv"
    new = "p-new,71.5,6.1,female,b,2001-02-11,99.5,ill"
    more.write_text(
        "\n".join([HEADER, *(",".join(row.values()) for row in rows(90, 1)), new, ""])
    )
    import_source(more, site.file, ImportOptions(recipe=parse_recipe(RECIPE), overwrite=True))
    assert recipe() != before  # another median
    assert site.answer() == first


def test_other_borders_over_data_that_changed_a_little_are_refused(site):
    """A schema that moves between two answers, and a patient with it, would be a bisection of that patient."""
    site.answer()

    def change(arrays):
        arrays["feature_ranges"][0, 1] = 130.0
        arrays["x_train"][0, 0] += 1

    site.rewrite(change)
    with pytest.raises(
        RunFailedError,
        match=r"fewer patients differ .* schema, recipe or policy is another one",
    ):
        site.answer()


def test_a_memory_that_is_damaged_or_missing_tells_nothing(site):
    site.answer()
    with Record(site.folder / "state").write() as db:
        db.execute("UPDATE disclosed SET answer = '[{'")
    fails(RunFailedError, "cannot be remembered", site.answer)
    (site.folder / "state/record.sqlite").unlink()
    fails((UserError, RunFailedError), r"record\.sqlite is missing", site.answer)

    def stateless(grid):
        site.policy.write_text(f"{ONLY}runs-per-day = 0\nmax-messages = 0\n")
        del grid.contexts[1].node_config["state-dir"]

    fails(RunFailedError, "no state-dir to remember", site.ask, stateless)


def test_what_a_server_sends_changes_nothing(site):
    """Ranges, bins, a schema of its own: the message has no say, whatever stands in it."""

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "query.survey":
                config = message.content.config_records["config"]
                config["schema"] = '{"features":[{"name":"age","range":[59,61]}]}'
                config["bins"] = 1000

        grid.before = before

    assert site.ask(prepare).answers["north"] == site.answer()


def test_audit_log_and_record_of_what_left(site, monkeypatch):
    """The log names the columns; what stayed, by rule, is in it alone. The answer counts in the record."""
    entries = []
    monkeypatch.setenv(launch.BY_SITE, launch.BY_SITE_VALUE)

    def prepare(grid):
        audited(grid)
        written = grid.after

        def after(silo, message, reply):
            sent = written(silo, message, reply)
            entries.append({"kind": message.metadata.message_type, "keys": list(sent.content)})
            return sent

        grid.after = after

    site.ask(prepare)
    assert [entry["kind"] for entry in entries] == ["query", "query.survey"] and entries[1][
        "keys"
    ] == [RECORD]
    (line,) = (site.folder / "state/audit").rglob("*.jsonl")
    logged = json.loads(line.read_text().splitlines()[-1])
    assert logged["asked"] == "query.survey" and logged["method"] == "survey"
    assert logged["sent"][0]["keys"][:2] == ["column.age", "column.crp"]
    assert logged["withheld"]["range"] == ["crp"] and "age" in logged["withheld"]["min-cell"]
    assert logged["withheld"]["class-means"] == ["class counts"]
    assert is_of_records(logged["sent"][0])
    (cohort,) = read_released(site.folder / "state").values()
    assert (cohort["models"], cohort["surveys"], cohort["studies"]) == (0, 1, {"": 0})
    assert ": 0 and 1 to surveys" in released_page([{"cohort": "ab" * 32, **cohort}])


def test_a_study_can_approve_a_survey(site):
    """As it is drafted from the run's settings and approved; a site that wants a study, as a bundle's policy does."""
    site.policy.write_text(f'{ONLY}studies = "required"\n')
    fails((UserError, RunFailedError), 'studies = "required"', site.ask)
    text = draft(
        "look", {"strategy": "survey", "rounds": 1}, texts=TEXTS, end=None, apps=["ab" * 32]
    )
    study = record_approval(site.folder / "state", "north", text, "Dr. B", "", [])
    assert any(
        "differencing. Counts and sums of your columns" in line
        for line in dangers(study, Policy())
    )

    def prepare(grid):
        grid.contexts[1].run_config["study"] = "look"
        grid.contexts[1].run_config["threads"] = 0

    assert site.ask(prepare).answers["north"]["n"] == 90
    # The data summary, and the survey
    assert count_used_up(site.folder / "state", study)["queries"] == 2
    with pytest.raises((UserError, RunFailedError), match=r"limits\.(queries|runs|messages)"):
        for _ in range(4):
            site.ask(prepare)


@pytest.mark.parametrize(
    "change",
    [
        {"n": -1},
        {"n": True},
        {"day": "2026-01-01\n"},
        {"column.age": "{"},
        {"column.age": '{"kind":"number","missing":0,"cells":[1,2]}'},
        {"column.age": '{"kind":"category","levels":["a"],"missing":0,"cells":[1e99]}'},
        {"column.age": '{"kind":"number","missing":0,"mean":1}'},
        {"column.age": '{"kind":"number","missing":0,"mean":NaN,"sd":1}'},
        {"column.age": '{"kind":"number","missing":0,"range":[2,1],"cells":[]}'},
        {"column.age": '{"kind":"number","missing":0,"why":1}'},
        {"column.a\x1b[2J": '{"kind":"number","missing":0}'},
        {"column.": '{"kind":"number","missing":0}'},
        {"rows": "1"},
    ],
)
def test_a_lying_silo_stops_nothing(change):
    record = written_answer(
        {"n": 5, "day": "", "columns": {"age": {"kind": "number", MISSING: 0}}, "labels": {}}
    )
    assert read_answer(record)["columns"]["age"] == {"kind": "number", MISSING: 0}
    for key, value in change.items():
        record[key] = value
    with pytest.raises(DataError):
        read_answer(record)


def test_units_mended_are_another_answer(site, tmp_path):
    """After its mistake was named, a hospital imports again and is surveyed again."""
    first = site.answer()
    (tmp_path / "again").mkdir()
    hospital(tmp_path / "again", "north", 90, 1, times("glucose", 0.5))
    site.file.write_bytes((tmp_path / "again/north.npz").read_bytes())
    again = site.answer()
    assert again["columns"]["glucose"]["mean"] < first["columns"]["glucose"]["mean"] / 1.5
    assert again["columns"]["age"] == first["columns"]["age"]
