"""``silofl survey`` under masks: sums of what hospitals would answer, survival from them, and what nobody gets."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from failing import fails
from public_data import DATA, needs
from scipy import stats
from secured import Secured
from surveyed import hospital, rewritten
from taken import silofl
from tiny import TinyGrid, json_of

from client.protocol.secure import KEYS, START, SURVEY, UNMASK
from client.site.record import Record, close_records
from models.evidence.pooled import CURVE, survival_table
from models.evidence.survey import MISSING, ReleaseLimits, is_suppressed
from partitions.common.errors import RunFailedError, UserError
from partitions.importing.options import ImportOptions
from partitions.importing.source import import_source
from partitions.recipes.recipe import parse_recipe
from server.results.survey import read_survey
from server.results.survival import kaplan_meier, log_rank
from server.run.secure import rounds
from server.run.survey import survey_silos
from server.run.withdrawal import withdraw
from server.simulation.engine import flower_identity
from strategies.base.run_settings import parse_settings
from strategies.base.survey import Answer
from strategies.base.transport.payload import array_record

EXACT = ReleaseLimits(1, 1, True, True)
YEARS = [365.0 * k for k in range(1, 9)]
FLAGS = ("prior_malignancy_yes", "treatment_or_therapy_yes", "ajcc_pathologic_n_N1")
RECIPE = {
    "version": 1,
    "label": ["T", "E"],
    "task": "survival",
    "patient": "pid",
    "file": {"encoding": "utf-8", "separator": ",", "gaps": ["", "NA"]},
    "columns": [
        {"name": "age_at_index", "kind": "number", "unit": "years", "range": [20, 100], "fill": "median"},
        *({"name": name, "kind": "category", "categories": ["0", "1"], "fill": "most-frequent"} for name in FLAGS),
    ],
}  # fmt: skip


# ---- By hand -------------------------------------------------------------------------------------------------------


def table(rows, times, limits=EXACT):
    y = np.array([[time, event] for time, event in rows], np.float32)
    return survival_table(y, np.arange(len(y)), times, limits).get("cells")


def test_two_hospitals_by_hand():
    """Times 1 and 2. North: event at .5, event at 2, last seen at 1.5, at 3. South: event at 1.5, last seen at 1, at 9.

    North: events until 1: 1, until 2: 1; others until 1: 0, until 2: 1, later 1. South: events 0, 1; others 1, 0, 1.
    Sum: events 1, 2; others 1, 1; later 2: 7 patients. At risk 7, then 7 - 1 - 1 = 5.
    S = 6/7, then 6/7 x 3/5 = 18/35. At least: others first, 1 - 1/6 = 5/6, then 5/6 x (1 - 2/4) = 5/12.
    """
    north = table([(0.5, 1), (2.0, 1), (1.5, 0), (3.0, 0)], [1.0, 2.0])
    south = table([(1.5, 1), (1.0, 0), (9.0, 1)], [1.0, 2.0])
    assert north == [1, 1, 0, 1, 1] and south == [0, 1, 1, 0, 1]
    curve = kaplan_meier([1.0, 2.0], [a + b for a, b in zip(north, south, strict=True)])
    assert curve.table.at_risk.tolist() == [7, 5]
    assert curve.survival == pytest.approx([6 / 7, 18 / 35])
    assert curve.least == pytest.approx([5 / 6, 5 / 12])


def test_log_rank_by_hand():
    """North of 4 with events 1, 1, South of 3 with events 0, 1 (above): at 1 there are 1 of 7, at 2 2 of 5 (3 and 2).

    Expected of North: 4/7 + 2 x 3/5 = 62/35, observed 2, so O - E = 8/35. Variance: 1 x 6/6 x 4/7 x 3/7 = 12/49, and
    2 x 3/4 x 3/5 x 2/5 = 9/25, together 741/1225. Chi squared = (8/35)^2 / (741/1225) = 64/741.
    """
    curves = [kaplan_meier([1.0, 2.0], cells) for cells in ([1, 1, 0, 1, 1], [0, 1, 1, 0, 1])]
    test = log_rank([curve.table for curve in curves])
    assert test is not None and test.df == 1 and test.chi2 == pytest.approx(64 / 741)
    assert test.p == pytest.approx(stats.chi2.sf(64 / 741, 1))
    assert log_rank([curves[0].table]) is None


def test_small_cells_join_by_hand():
    """Sets of 5 in order of time: 12 events at cells 0 0 1 1 1 | 1 2 2 2 2 2 2: 5 at cell 1, and 7 at cell 2.

    Cumulative 0, 5, 12 in multiples of 5: 0, 5, 10. The 6 others, last seen at cell 0 and five times later, are one
    set at its middle, later: 6 becomes 5. With 4 others nothing leaves.
    """
    limits = ReleaseLimits(5, 50, True, False)
    events = [(0.5, 1)] * 2 + [(1.5, 1)] * 4 + [(2.5, 1)] * 6
    cells = table([*events, (0.5, 0), *[(9.0, 0)] * 5], [1.0, 2.0, 3.0], limits)
    assert cells == [0, 5, 5, 0, 0, 0, 5]
    assert table([*events, *[(9.0, 0)] * 4], [1.0, 2.0, 3.0], limits) is None


@pytest.mark.parametrize("least", [5, 10, 12])
def test_no_cell_is_of_few_and_cumulative_counts_are_wrong_by_fewer_than_a_set(least):
    """A cell is empty or of whole sets; at each time fewer than min-cell events are missing, or too many."""
    rng, limits = np.random.default_rng(least), ReleaseLimits(least, 50, True, False)
    for _ in range(50):
        n = int(rng.integers(2 * least, 200))
        rows = [*zip(rng.exponential(4, n), rng.random(n) < 0.6, strict=True)]
        exact = table(rows, [1.0, 2.0, 3.0, 5.0, 8.0])
        if (cells := table(rows, [1.0, 2.0, 3.0, 5.0, 8.0], limits)) is None:
            assert sum(exact[:5]) < least or sum(exact[5:]) < least
            continue
        assert all(cell % 5 == 0 for cell in cells) and abs(sum(cells) - n) <= 5
        assert all(cell == 0 or cell > least - 5 for cell in cells)
        wrong = np.abs(np.cumsum(exact[:5]) - np.cumsum(cells[:5]))
        assert wrong.max() < least + 2.5


# ---- Equality with the pooled patients -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    """TCGA-BRCA's six hospitals, imported from csv files as hospitals do, and all rows."""
    folder = tmp_path_factory.mktemp("regions")
    source = DATA / "fed_tcga_brca"
    with (source / "brca.csv").open(newline="") as file:
        every = {row["pid"]: row for row in csv.DictReader(file)}
    with (source / "train_test_split.csv").open(newline="") as file:
        places = {row["pid"]: row["fold2"].partition("_")[2] for row in csv.DictReader(file)}
    keep = ["pid", "T", "E", "age_at_index", *FLAGS]
    for place in sorted({*places.values()}):
        path = folder / f"region-{place}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, keep, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(every[pid] for pid, of in places.items() if of == place)
        out = folder / "files" / f"region-{place}.npz"
        out.parent.mkdir(exist_ok=True)
        import_source(path, out, ImportOptions(recipe=parse_recipe(RECIPE)))
    return folder / "files", [every[pid] for pid in places]


def in_bins(rows):
    """The pooled patients with times rounded up to the next of YEARS, as scipy takes them."""
    time, event = (np.array([float(row[key]) for row in rows]) for key in "TE")
    place = np.searchsorted(YEARS, time)
    died = (event > 0) & (place < len(YEARS))
    return stats.CensoredData.right_censored(np.array([*YEARS, 1e9])[place], ~died)


@needs("fed_tcga_brca")
def test_real_hospitals_are_the_pooled_patients(regions, tmp_path, capfd):
    """Without rounding: the curve and test are scipy's of the pooled patients in the same bins; table 1 is numpy's.

    Of the times themselves the curve lies between `least` and S.
    """
    files, rows = regions
    out, times = tmp_path / "out", ",".join(map(str, YEARS))
    sets = f"secure-aggregation=true survey.times={times} survey.by={FLAGS[0]}"
    assert silofl("survey", *f"--data {files} --out {out} --set {sets}".split()) == 0
    found = read_survey(out)
    groups = {level: [row for row in rows if row[FLAGS[0]] == level] for level in "01"}
    assert [*found.answers] == ["0", "1"] and len(found.summed) == 6
    for level, of in groups.items():
        answer, curve = found.answers[level], found.curves[level]
        ours = stats.ecdf(in_bins(of)).sf
        assert curve.survival == pytest.approx(ours.evaluate(YEARS), abs=1e-12)
        ends = ours.confidence_interval(method="log-log")
        assert curve.low == pytest.approx(ends.low.evaluate(YEARS), abs=1e-12)
        assert curve.high == pytest.approx(ends.high.evaluate(YEARS), abs=1e-12)
        time, event = (np.array([float(row[key]) for row in of]) for key in "TE")
        true = stats.ecdf(stats.CensoredData.right_censored(time, event == 0)).sf
        for least, middle, most in zip(
            curve.least, true.evaluate(YEARS), curve.survival, strict=True
        ):
            assert least - 1e-12 <= middle <= most + 1e-12
        age = np.array([float(row["age_at_index"]) for row in of])
        item = answer["columns"]["age_at_index"]
        # Each hospital's mean and deviation have four digits
        assert item["mean"] == pytest.approx(age.mean(), abs=0.005)
        assert item["sd"] == pytest.approx(age.std(), abs=0.005)
        assert item["cells"] == np.histogram(age, 10, (20, 100))[0].tolist()
        assert answer["n"] == len(of) and item[MISSING] == 0
        counts = [sum(row[FLAGS[1]] == value for row in of) for value in "01"]
        assert answer["columns"][FLAGS[1]]["cells"] == counts
    ours = stats.logrank(in_bins(groups["0"]), in_bins(groups["1"]))
    assert found.log_rank is not None
    assert found.log_rank.chi2 == pytest.approx(ours.statistic**2, rel=1e-9)
    assert found.log_rank.p == pytest.approx(ours.pvalue, rel=1e-9)
    text = capfd.readouterr().out
    assert "log-rank: chi2" in text and "Sums over 6 hospitals" in text
    content, page = json_of(out / "survey.json"), (out / "survey.html").read_text()
    assert content["survival"]["0"][0]["survival"] == found.curves["0"].survival[0]
    assert "<svg" in page and "could not be drawn" not in page
    with (out / "survey.csv").open(newline="") as file:
        cells = {
            (r["silo"], r["column"], r["statistic"]): r["value"] for r in csv.DictReader(file)
        }
    assert float(cells["1", "365", "survival"]) == found.curves["1"].survival[0]
    assert float(cells["", "log-rank", "chi2"]) == found.log_rank.chi2
    assert withdraw("region-0", [out]) and not read_survey(out).answers


@needs("fed_tcga_brca")
def test_with_a_hospitals_rules_the_curve_is_near(regions, tmp_path):
    """min-cell = 10, counts in multiples of 5, and hospitals with fewer than ten events withhold the table."""
    files, rows = regions
    policy = tmp_path / "policy.toml"
    policy.write_text('methods = ["survey"]\nclass-means = true\nsecure-peers = 2\n')
    out, times = tmp_path / "out", ",".join(map(str, YEARS[:4]))
    sets = f"secure-aggregation=true survey.times={times}"
    given = f"--data {files} --policy {policy} --out {out} --set {sets}"
    assert silofl("survey", *given.split()) == 0
    found = read_survey(out)
    (curve,), (answer,) = found.curves.values(), found.answers.values()
    assert answer[CURVE]["withheld"] == 2
    assert all(cell % 5 == 0 for cell in answer[CURVE]["cells"])
    true = stats.ecdf(in_bins(rows)).sf.evaluate(YEARS[:4])
    assert np.abs(curve.survival - true).max() < 0.06
    item = answer["columns"]["age_at_index"]
    age = np.array([float(row["age_at_index"]) for row in rows])
    assert item["mean"] == pytest.approx(age.mean(), abs=0.5) and item["withheld"] == 6


# ---- Under masks ---------------------------------------------------------------------------------------------------

RULES = 'methods = ["survey"]\nclass-means = true\nruns-per-day = 0\n'
NAMES = ["east", "north", "south", "west"]
RUN = {"strategy": "survey", "rounds": 1, "threads": 1, "secure-aggregation": True}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hospitals")
    return {name: hospital(folder, name, 120, seed) for seed, name in enumerate(NAMES)}


class Hospitals:
    """Four hospitals with gates, policies and disks of their own; each survey is a run of its own."""

    def __init__(self, folder, files):
        self.folder, self.files, self.number = folder, {}, 0
        for name, file in files.items():
            self.files[name] = folder / f"{name}.npz"
            self.files[name].write_bytes(file.read_bytes())
        (folder / "policy.toml").write_text(RULES)
        self.secured = Secured(folder, files)

    def ask(self, prepare=lambda grid: None, **changes):
        settings = parse_settings({**RUN, "silos": len(self.files), **changes})
        grid = TinyGrid(self.files, settings, policy=str(self.folder / "policy.toml"))
        for context in grid.contexts.values():
            state = self.folder / "state" / context.node_config["name"]
            context.node_config = {**context.node_config, "state-dir": str(state)}
        self.number += 1
        self.secured.run = self.number
        self.secured(grid)
        prepare(grid)
        self.grid = grid
        with flower_identity():
            return survey_silos(grid, settings)

    def sent(self):
        """The vectors that left, by hospital."""
        return {
            self.grid.name_of(message.metadata.dst_node_id): reply.content.array_records[
                "masked"
            ]["sum"].numpy()
            for message, reply in self.grid.traffic
            if message.metadata.message_type == SURVEY and not reply.has_error()
        }


@pytest.fixture
def four(tables, tmp_path, monkeypatch):
    monkeypatch.setattr(rounds, "AWAY_SECONDS", 0.1)
    yield Hospitals(tmp_path, tables)
    close_records()


def unmasked(hospitals, **changes):
    """The same in a simulation of the hospitals, whose answers are in their records."""
    settings = parse_settings({**RUN, "silos": len(hospitals.files), **changes})
    grid = TinyGrid(hospitals.files, settings, policy=str(hospitals.folder / "policy.toml"))
    for context in grid.contexts.values():
        state = hospitals.folder / "state" / context.node_config["name"]
        context.node_config = {**context.node_config, "state-dir": str(state)}
    with flower_identity():
        found = survey_silos(grid, settings)
    hospitals.grid = grid
    return found


def test_the_sum_is_that_of_the_hospitals_own_answers(four):
    """Under masks the server gets the numbers that hospitals would answer, added up, and no single one."""
    found = four.ask()
    asked = [kind for silo, kind, _ in four.secured.asked if silo == "east"]
    assert asked == ["query", KEYS, START, SURVEY, UNMASK]
    masked = four.sent()
    assert unmasked(four) == found
    for silo, plain in four.sent().items():
        assert (masked[silo] != plain).mean() > 0.99
    settings = {**RUN, "secure-aggregation": False}
    alone = dict[str, Answer]()
    for name, file in four.files.items():
        grid = TinyGrid(
            {name: file},
            parse_settings({**settings, "silos": 1}),
            policy=str(four.folder / "policy.toml"),
            state_dir=four.folder / "state" / name,
        )
        with flower_identity():
            alone |= survey_silos(grid, parse_settings({**settings, "silos": 1})).answers
    (answer,) = found.answers.values()
    assert answer["n"] == sum(one["n"] for one in alone.values())
    for part in ("columns", "labels"):
        for name, item in answer[part].items():
            own = [one[part][name] for one in alone.values()]
            assert item["withheld"] == sum(map(is_suppressed, own))
            assert item[MISSING] == sum(one[MISSING] or 0 for one in own)
            for place, count in enumerate(item.get("cells", ())):
                assert count == sum(one["cells"][place] or 0 for one in own)
            if "mean" in own[0]:
                k = np.array(
                    [
                        a["n"] - (o[MISSING] or 0)
                        for a, o in zip(alone.values(), own, strict=True)
                    ]
                )
                mean = np.average([o["mean"] for o in own], weights=k)
                square = np.average([o["sd"] ** 2 + o["mean"] ** 2 for o in own], weights=k)
                assert item["mean"] == pytest.approx(mean)
                assert item["sd"] == pytest.approx((square - mean**2) ** 0.5)
    assert {"age", "glucose", "sex", "kind", "since", "crp"} == {*answer["columns"]}
    assert not found.findings and not found.unlike


def test_groups_are_answers_of_their_own(four):
    found = four.ask(**{"survey.by": "sex"})
    assert [*found.answers] == ["female", "male"]
    assert found.answers["female"]["n"] > found.answers["male"]["n"] > 0
    fails(
        UserError,
        r"survey.by = pid: no category that all hospitals",
        four.ask,
        **{"survey.by": "pid"},
    )


@pytest.mark.exhaustive
def test_a_hospital_that_is_away_is_named_and_stays_out(four):
    """The sum of three is opened. With the fourth a second sum would show it alone, so the others refuse that one."""
    four.secured.gone = lambda silo, kind, number: silo == "west" and kind == SURVEY
    found = four.ask()
    assert (
        found.summed == ["east", "north", "south"]
        and "the line is cut" in found.without["west"]
    )
    four.secured.gone = lambda *_: False
    line = "was summed over other silos before, .* update: survey the same silos"
    fails(RunFailedError, line, four.ask)
    four.secured.gone = lambda silo, kind, number: silo == "west"
    assert four.ask() == replace(found, without=four.ask().without)
    four.secured.gone = lambda *_: False
    for file in four.files.values():
        rewritten(file, lambda arrays: arrays["x_train"].__iadd__(3))
    assert four.ask().summed == NAMES  # of other patients' numbers


def test_too_few_hospitals_have_no_sum(four):
    four.secured.gone = lambda silo, kind, number: silo in ("west", "south") and kind == SURVEY
    fails(RunFailedError, "2 masked vectors have come, and 3 are needed", four.ask)


@pytest.mark.parametrize(
    "changes", [{"survey.by": "sex"}, {"survey.times": "1 2"}, {"survey.by": "kind"}]
)
def test_other_groups_or_times_about_the_same_patients_are_refused(four, changes):
    """Differencing: a second table with a border moved would show who lies between. Far other patients are another."""
    first = four.ask()
    fails(
        RunFailedError,
        r"of \d{4}-\d\d-\d\d, which had other columns, survey.times or survey.by",
        four.ask,
        **changes,
    )
    assert four.ask() == first
    for file in four.files.values():
        rewritten(file, lambda arrays: arrays["x_train"].__iadd__(1e-3))
    assert four.ask(**changes).answers
    with Record(four.folder / "state/east").reading() as db:
        assert db.execute(
            "SELECT count(*) FROM disclosed WHERE kind = 'survey'"
        ).fetchone() == (2,)


def asking(change, *silos):
    """For ``ask``: a server that changes the columns of its message, to these silos alone or to all."""

    def prepare(grid):
        inner = grid.app

        def app(message, context):
            to = str(context.node_config["name"])
            if message.metadata.message_type == SURVEY and to in (silos or NAMES):
                config = message.content.config_records["config"]
                layout = json.loads(str(config["columns"]))
                change(layout["columns"])
                config["columns"] = json.dumps(layout)
            return inner(message, context)

        grid.app = app

    return prepare


def test_fewer_columns_about_the_same_patients_are_refused(four):
    """A server that leaves a column out would get another vector, to be summed over other hospitals."""
    four.ask()
    drop = asking(lambda columns: columns.pop("crp"))
    fails(RunFailedError, "which had other columns", four.ask, drop)


def test_a_column_that_not_all_state_alike_is_in_no_sum(four):
    """The sum of a column of one hospital would be that hospital's own. A server that asks for it gets nothing."""
    recipe = {}

    def change(arrays):
        text = arrays["recipe"].item()
        recipe["kind"] = text.count('"c"')
        arrays["recipe"] = np.full_like(arrays["recipe"], text.replace('"c"', '"d"'))

    rewritten(four.files["east"], change)
    assert recipe["kind"] == 1
    found = four.ask()
    assert found.unlike == ["kind"] and "kind" not in found.answers["all"]["columns"]
    assert len(found.summed) == 4


def test_a_hospital_refuses_a_column_that_it_states_otherwise(four):
    """Else the sum of a column that one hospital has would be its own."""
    asks = asking(
        lambda columns: columns.update(kind={"kind": "category", "levels": ["a", "b", "d"]}),
        "east",
    )
    found = four.ask(asks)
    assert "refuses: it states 'kind' otherwise than the sum has it" in found.without["east"]
    assert found.summed == NAMES[1:]


def test_other_columns_for_one_hospital_give_noise(four):
    """Masks depend on every word of the message: a server that tells one hospital another order opens no sum."""

    def swap(columns):
        columns["age"] = columns.pop("age")

    fails(RunFailedError, "the sum cannot be of 480 patients", four.ask, asking(swap, "west"))


def test_a_hospital_that_sends_nonsense_is_not_believed(four):
    """A sum does not show who sent it, so the survey has no result in place of a wrong one."""

    def prepare(grid):
        def after(silo, message, reply):
            if silo == "west" and message.metadata.message_type == SURVEY:
                size = reply.content["masked"]["sum"].shape
                noise = torch.randint(2**31, size, generator=torch.Generator().manual_seed(1))
                noise = noise.int().view(torch.uint32)
                reply.content["masked"] = array_record({"sum": noise})
            return reply

        grid.after = after

    fails(RunFailedError, "the sum cannot be of 480 patients", four.ask, prepare)
