"""The command line: what it prints, its exit codes, and that bad input gives one clear line and changes nothing."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shtab
from taken import silofl
from tiny import events_of, history_without_seconds, summary_of

import server.simulation.simulate
from client.commands.table import PATHS
from partitions.common.errors import RunFailedError, UserError
from server.cli.main import COMMANDS, GROUPS, SHELLS, main, parse, parser
from server.cli.options import run_values
from strategies.base.declarations import settings_page
from strategies.base.run_settings import defaults

ROOT = Path(__file__).parents[3]
TINY = "--partition iid --silos 2 --rounds 1 --set threads=1"


@pytest.fixture
def say(capsys):
    """Call ``silofl`` in this process with the words of a line; return exit code, stdout, stderr."""

    def call(line, *words):
        capsys.readouterr()
        try:
            code = silofl(*shlex.split(line), *words)
        except SystemExit as leaving:  # argparse leaves by itself
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a good data file, all kinds of bad ones, configurations, a finished run and an exported model."""
    folder = tmp_path_factory.mktemp("place")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(80, 4)).astype(np.float32), np.arange(80) % 2
    x[y == 1] += 1
    good: dict[str, Any] = {
        "x_train": x[:60],
        "y_train": y[:60],
        "x_test": x[60:],
        "y_test": y[60:],
    }
    late = good["x_train"].copy()
    late[7, 2] = np.nan
    files = {
        "good": good,
        "wide": {"x": rng.normal(size=(40, 5)).astype(np.float32), "y": np.arange(40) % 2},
        "cube": {**good, "x_train": x[:60].reshape(60, 1, 1, 1, 2, 2)},
        "lengths": {**good, "y_train": y[:59]},
        "columns": {**good, "x_test": x[60:, :3]},
        "nan": {**good, "x_train": late},
        "negative": {**good, "y_train": y[:60] - 1},
        "beyond": {**good, "classes": np.array(1)},
        "empty": {**good, "x_test": x[:0], "y_test": y[:0]},
        "objects": {**good, "x_train": x[:60].astype(object)},
        "names": {**good, "x_tets": x[60:]},
        "texts": {**good, "y_train": np.array(["ill", "well"] * 30)},
    }
    for name, arrays in files.items():
        np.savez(folder / f"{name}.npz", **arrays)
    (folder / "text.npz").write_text("age,label\n61,1\n")
    (folder / "folder.npz").mkdir()
    (folder / "a-folder").mkdir()
    (folder / "broken.toml").write_text("rounds = \n")
    (folder / "unknown.toml").write_text("[apple]\nmuh = 0.1\n")
    (folder / "list.toml").write_text("rounds = [1, 2]\n")
    (folder / "table.csv").write_text("age,label\nold,1\n")
    for name in ("taken.onnx", "taken.pub"):
        (folder / name).write_text("notes")
    for line in (
        f"simulate --strategy local --data {folder}/good.npz {TINY} --out {folder}/run",
        f"export {folder}/run --silo hospital-01 --out {folder}/model.safetensors",
    ):
        assert main(line.split()) == 0
    return folder


def content(*folders):
    """Everything in folders, to see that nothing has changed."""
    return {
        path: path.read_bytes() if path.is_file() else None
        for folder in folders
        for path in folder.rglob("*")
    }


@pytest.fixture
def refused(place, say, tmp_path, monkeypatch):
    """Exit 2, one line on stderr that says ``reason``, and not a byte changed: neither in ``place`` nor here."""
    monkeypatch.chdir(tmp_path)

    def check(line, reason, *words):
        before = content(place, tmp_path)
        code, _, err = say(line.replace("{place}", str(place)), *words)
        assert code == 2, err
        assert err.count("\n") == 1 and err.endswith("\n"), err
        assert reason.replace("{place}", str(place)) in err
        assert err.startswith("silofl") and "Traceback" not in err
        assert content(place, tmp_path) == before

    return check


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


SIMULATE = [
    # names
    ("--strategy appel", "unknown strategy 'appel' (did you mean 'apple'?); there are: "),
    (
        "--strategy local,fedvag",
        "unknown strategy 'fedvag' (did you mean 'fedavg'?); there are: ",
    ),
    ("--strategy local,local", "strategy = local,local names one of them twice"),
    ("--dataset digit", "unknown data set 'digit' (did you mean 'digits'?); there are: "),
    (
        "--partition dirichlett",
        "unknown partition 'dirichlett' (did you mean 'dirichlet'?); there are: ",
    ),
    ("--set model=fedala", "unknown model 'fedala' (did you mean 'fedala-cnn'?); there are: "),
    ("--set apple.muh=1", "unknown setting 'apple.muh' (did you mean 'apple.mu'?)"),
    (
        "--set learning_rate=1",
        "unknown setting 'learning_rate' (did you mean 'learning-rate'?)",
    ),
    (
        "--set optimizer=sdg",
        "optimizer = 'sdg' (did you mean 'sgd'?): one of sgd, adam, adamw is needed here",
    ),
    ("--set device=gpu", "device 'gpu' is unknown: auto, cpu, cuda or cuda:N is needed here"),
    # values
    (
        "--set learning-rate=-1",
        "learning-rate = -1.0 is out of range: more than 0 is needed here",
    ),
    ("--set learning-rate=nan", "learning-rate = 'nan': a number is needed here"),
    ("--set learning-rate=inf", "learning-rate = 'inf': a number is needed here"),
    (
        "--set participation=1.5",
        "participation = 1.5 is out of range: at most 1 is needed here",
    ),
    ("--strategy apple --set apple.prox-share=2", "apple.prox-share = 2.0 is out of range"),
    ("--set batch-size=2.5", "batch-size = '2.5': a whole number is needed here"),
    ("--set resume=maybe", "resume = 'maybe': true or false is needed here"),
    ("--set mlp.hidden=wide", "mlp.hidden must be widths such as '128,64', not 'wide'"),
    ("--rounds 0", "rounds = 0 is out of range: at least 1 is needed here"),
    ("--seed 1,2,b", "seed = 'b': a whole number is needed here"),
    ("--seed -1", "seed = -1 is out of range: at least 0 is needed here"),
    # silos and partitions
    ("--silos 0", "silos = 0 is out of range: at least 1 is needed here"),
    (
        "--silos 61",
        "hospital-21 is left without test samples by iid over 61 silos of good (seed 42); take fewer",
    ),
    (
        "--silos 12 --partition player-dirichlet --set player-dirichlet.beta=0.01",
        "hospital-01 is left without training samples by player-dirichlet over 12 silos of good (seed 42); "
        "take fewer silos, a larger player-dirichlet.beta or another seed",
    ),
    (
        "--silos 12 --partition dirichlet --set dirichlet.beta=0.01 dirichlet.least=1",
        "dirichlet: no draw in 10000 gives each of 12 silos 1 samples of good; take fewer silos, a larger",
    ),
    (
        "--partition natural",
        "natural: good does not come with silos of its own (heart-disease does); take another",
    ),
    (
        "--set model=apple-cnn",
        "model 'apple-cnn' cannot take inputs of shape (4,): it takes pictures",
    ),
    # the command line itself
    ("--set rounds", "--set rounds: KEY=VALUE is needed here"),
    ("--set =3", "--set =3: KEY=VALUE is needed here"),
    (
        "--out {place}/run",
        "{place}/run holds another run: give --out a new directory, or continue it with ",
    ),
    ("--out {place}/a-folder/..", "is not empty and holds no run: give --out a new directory"),
    ("--out {place}/table.csv", "{place}/table.csv is a file: give --out a directory"),
    ("--set optimizer=AdamW", "(did you mean 'adamw'?)"),
    ("--set resume=true", "out holds no run to resume"),
    ("--xyzzy", "unrecognized arguments: --xyzzy"),
    (
        "--stratgy fedavg",
        "--stratgy fedavg (did you mean '--strategy'?); see silofl simulate --help",
    ),
    (
        "--evidence-horizon=365",
        "unrecognized arguments: --evidence-horizon=365: evidence-horizon is a setting of a run, write --set "
        "evidence-horizon=VALUE; see silofl simulate --help",
    ),
    ("--set", "argument --set: expected at least one argument; see silofl simulate --help"),
    ("--dataset digits", "argument --dataset: not allowed with argument --data"),
    ("--config {place}/nowhere.toml", "there is no configuration file {place}/nowhere.toml"),
    (
        "--config {place}/broken.toml",
        "the configuration file {place}/broken.toml cannot be read: Invalid value",
    ),
    ("--config {place}/good.npz", "the configuration file {place}/good.npz cannot be read: "),
    ("--config {place}/a-folder", "{place}/a-folder: Is a directory"),
    ("--config {place}/unknown.toml", "unknown setting 'apple.muh' (did you mean 'apple.mu'?)"),
    ("--config {place}/list.toml", "rounds = [1, 2]: a whole number is needed here"),
]


@pytest.mark.parametrize(
    ("options", "reason"), SIMULATE, ids=[o.replace("{place}/", "") for o, _ in SIMULATE]
)
def test_bad_simulate(options, reason, refused):
    """One line on stderr, exit 2, no output directory, and nothing changed beside it."""
    own = "--dataset digit" in options and "digits" not in options
    given = {"--data": "{place}/good.npz", "--silos": 2, "--partition": "iid", "--out": "out"}
    words = [f"{k} {v}" for k, v in given.items() if f"{k} " not in options]
    refused(" ".join(["simulate", *words[own:], options]), reason)


@pytest.mark.parametrize(
    "words", [["--strategy", ""], ["--strategy", " , "], ["--seed", ""], ["--seed", ","]]
)
def test_empty_study(words, refused):
    refused("simulate", "a study needs at least one strategy and one seed", *words)


DATA = [
    ("cube.npz", "x_train is float32 (60, 1, 1, 1, 2, 2); pictures are "),
    ("lengths.npz", "train has 60 inputs but 59 labels; "),
    (
        "columns.npz",
        "test has a table of 3 columns, float32, but train has a table of 4 columns, float32; ",
    ),
    ("nan.npz", "x_train has a value that is no finite number, first in sample 7; "),
    ("negative.npz", "y_train has a label -1; labels count from 0"),
    ("beyond.npz", "has a label 1 where classes is 1; "),
    ("empty.npz", "has no samples in test; "),
    (
        "objects.npz",
        "x_train is an array of Python objects, which are not read: they could run code; ",
    ),
    (
        "names.npz",
        "has an array 'x_tets' of no known name (did you mean 'x_test'?); the names are ",
    ),
    ("texts.npz", "labels are whole numbers 0, 1, 2, ...; `silofl import` numbers text labels"),
    ("text.npz", "is no .npz file, or is cut short; "),
    ("folder.npz", "is no file; "),
    ("nowhere.npz", "there is no such file; "),
]


@pytest.mark.parametrize(("file", "reason"), DATA)
def test_bad_data(file, reason, refused):
    """The same fault in the same words, whichever command reads the file first."""
    path = f"{{place}}/{file}"
    if "labels are whole" not in reason and "has a label 1" not in reason:
        reason = f"{path}: {reason}"
    refused(f"simulate --data {path} {TINY} --out out", reason)
    refused(f"partition --dataset {path} --out out", reason)
    refused(f"check-data {path}", reason)


OTHERS = [
    ("simulat", "there is no command 'simulat' (did you mean 'simulate'?); see silofl --help"),
    (
        "simulate --data {place}/a-folder",
        "{place}/a-folder has no .npz file; silofl import makes one for each hospital",
    ),
    (
        "simulate --data t.txt",
        "--data t.txt: is no folder, no .npz file (silofl import makes one), no csv, and no MODULE:FUNCTION",
    ),
    (
        "simulate --data t.csv",
        "--data t.csv: a csv needs --recipe FILE.recipe.toml and --by COLUMN",
    ),
    (
        "simulate --data {place}/good.npz --data-dir sets",
        "--data-dir goes with --dataset: --data names its own file",
    ),
    (
        "simulate --dataset digits --by x",
        "digits: a csv needs --recipe and --by, and nothing else takes them",
    ),
    ("simulate --subsample many", "subsample is 'many'; it is a number of samples, 1 or more"),
    (
        "partition --dataset digitz --out out",
        "unknown data set 'digitz' (did you mean 'digits'?)",
    ),
    (
        "partition --set dirichlet.bet=1 --out out",
        "unknown setting 'dirichlet.bet' (did you mean 'dirichlet.beta'?)",
    ),
    ("partition --silos two --out out", "silos = 'two': a whole number is needed here"),
    ("partition --silos 400 --partition iid --out out", "is left without"),
    ("partition --plot plot.gif --out out", "plot.gif does not end in .png, .svg or .pdf"),
    ("partition --out {place}/run", "{place}/run holds something else"),
    ("partition", "the following arguments are required: --out"),
    (
        "export {place}/run --silo hospital-1 --out m",
        "'hospital-1' (did you mean 'hospital-01'?); there are: hospital-01, ",
    ),
    (
        "export {place}/run --silo hospital-01 --strategy apple --out m",
        "no model of hospital-01 by apple; there are: local-42",
    ),
    ("export {place}/a-folder --silo hospital-01 --out m", "holds no silo's state"),
    (
        "export {place}/nowhere --silo hospital-01 --out m",
        "there is no directory {place}/nowhere",
    ),
    (
        "export {place}/run --silo hospital-01 --which worst --out m",
        "argument --which: invalid choice: 'worst'",
    ),
    (
        "export {place}/run --silo hospital-01 --out {place}/a-folder",
        "{place}/a-folder is a directory",
    ),
    (
        "export {place}/run --silo hospital-01 --out {place}/good.npz",
        "{place}/good.npz is there already, and is no model",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/good.npz --out {place}/good.npz",
        "--out {place}/good.npz is what data names, and would replace it",
    ),
    *(
        (
            f"{line} --{option} {{place}}/{file}",
            f"--{option} {{place}}/{file} is what {key} names",
        )
        for line, option, file, key in (
            ("predict --model m --data {place}/good.npz", "masks", "good.npz", "data"),
            ("predict --model m --data d --masks {place}/m.npz", "out", "m.npz", "masks"),
            ("audit {place}/run --check {place}/table.csv", "export", "table.csv", "check"),
            ("partition --dataset {place}/good.npz --out o", "plot", "good.npz", "dataset"),
            ("schema {place}/list.toml --overwrite", "out", "list.toml", "recipe"),
        )
    ),
    (
        "export {place}/run --silo hospital-01 --out {place}/run/summary",
        "{place}/run/summary.json is there already, and is no model's card: name another file",
    ),
    (
        "export {place}/run --silo hospital-01 --onnx --out {place}/taken.safetensors",
        "{place}/taken.onnx is there already, and is no ONNX model: name another file",
    ),
    ("export {place}/run --silo hospital-01 --out {place}/taken.onnx", "and is no model: name"),
    ("operator add Alice", "'Alice' is no name: use 1 to 63 lower-case letters"),
    ("operator add ''", "'' is no name: use 1 to 63 lower-case letters"),
    (f"operator add {'a' * 80}", "is no name: use 1 to 63 lower-case letters"),
    ("backup --out b --passphrase-file {place}/good.npz", "{place}/good.npz is not in UTF-8"),
    (
        "restore {place}/good.npz --passphrase-file {place}/good.npz",
        "{place}/good.npz is not in UTF-8",
    ),
    (
        "signing-key --out {place}/table.csv",
        "{place}/table.csv is no signing key: name another file, restore it from a backup, or move it",
    ),
    ("signing-key --out k.pub", "--out k.pub: .pub is for the public half"),
    ("signing-key --out {place}/taken.key", "taken.pub is there already, and is no public key"),
    ("predict --model {place}/a-folder --data {place}/good.npz", "damaged (Is a directory)"),
    (
        "predict --model {place}/nowhere --data {place}/good.npz",
        "there is no model {place}/nowhere",
    ),
    (
        "predict --model {place}/good.npz --data {place}/good.npz",
        "is no exported model, or damaged",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/wide.npz",
        "holds float32 samples of shape (5,)",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/good.npz --recipe r.toml",
        "--recipe is of new rows or pictures; an .npz file has gone through its recipe",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/table.csv --recipe r.toml",
        "r.toml cannot be read (No such file or directory)",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/table.csv",
        "card has no recipe, so it cannot read a csv or pictures: name one with",
    ),
    (
        "predict --model {place}/model.safetensors --data {place}/good.npz --out {place}/a-folder",
        "a-folder: Is a directory",
    ),
    (
        "import {place}/table.csv --out t.npz",
        "has no column that can be an input (age is left out",
    ),
    (
        "import {place}/table.csv --out t.npz --labels 0,1 --recipe r.toml",
        "--labels beside --recipe: the recipe says",
    ),
    ("schema r.toml --out schema.toml", "r.toml cannot be read (No such file or directory)"),
    ("import {place}/table.csv --out t.npz --label lable", "'lable' (did you mean 'label'?)"),
    ("import {place}/nowhere --out t.npz", "there is no {place}/nowhere"),
    (
        "import {place}/table.csv --out t.npz --time days",
        "survival needs --time and --event, and no --label",
    ),
    (
        "import {place}/table.csv --out t.npz --time days --event died --label label",
        "survival needs --time and --event, and no --label",
    ),
    (
        "import {place}/table.csv --out t.npz --recipe r.toml --codes sex:W=female",
        "--schema, --map and --codes make a recipe: leave out --recipe, or them",
    ),
    ("import {place}/table.csv --out t.npz --map sex=S", "--map and --codes go with --schema"),
    (
        "import {place}/table.csv --out t.npz --map sex --schema s.toml",
        "--map sex: the schema's column and yours are wanted once, for",
    ),
    (
        "import {place}/table.csv --out t.npz --codes sex:W --schema s.toml",
        "--codes sex:W: COLUMN:CELL=CATEGORY is wanted, for example",
    ),
    (
        "import {place}/table.csv --out t.npz --columns age --schema s.toml",
        "--columns beside --schema: the schema says that",
    ),
    (
        "import {place}/a-folder --out t.npz --schema s.toml",
        "--schema is of a csv table; {place}",
    ),
    (
        "import {place}/table.csv --out t.npz --thousands . --decimal .",
        "--thousands and --decimal are both '.'",
    ),
    (
        "import {place}/table.csv --out t.npz --length 9",
        "--vocabulary and --length are of texts: name their column with",
    ),
    (
        "import {place}/table.csv --out t.npz --text note",
        "unknown column of {place}/table.csv 'note'",
    ),
    ("import {place}/a-folder --out t.npz --size 0", "size is 0; it must be 1 or more"),
]


@pytest.mark.parametrize(
    ("options", "reason"), OTHERS, ids=[o.replace("{place}/", "") for o, _ in OTHERS]
)
def test_bad_input_of_the_other_commands(options, reason, refused):
    refused(options, reason)


def test_an_export_replaces_its_own_files(place, say, tmp_path):
    """The model, its card and its ONNX file; with --onnx and after it."""
    again = f"export {place}/run --silo hospital-01 --out {tmp_path}/m.safetensors"
    for line in (again, f"{again} --onnx", f"{again} --onnx", again):
        assert say(line)[::2] == (0, "")
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json", ".onnx"}


def test_a_compose_file_is_replaced_as_a_whole(say, tmp_path):
    """The earlier file stays as it is, by its other name."""
    out, earlier = tmp_path / "docker-compose.yml", tmp_path / "earlier"
    out.write_text("earlier")
    os.link(out, earlier)
    assert say(f"compose {ROOT}/federation.yaml --out {out}")[0] == 0
    assert "services:" in out.read_text() and earlier.read_text() == "earlier"


def test_an_import_names_every_problem_on_a_line_of_its_own(place, say, tmp_path, monkeypatch):
    """One patient's table, a wrong ending, a list of words that is not there."""
    monkeypatch.chdir(tmp_path)
    options = "--out t.csv --text age --vocabulary w.txt"
    code, _, err = say(f"import {place}/table.csv {options}")
    first, *lines = err.splitlines()
    assert code == 2 and first == f"silofl import: {place}/table.csv has 3 problems:"
    parts = (
        "t.csv does not end in .npz",
        "there is no vocabulary w.txt",
        "the 1 labels are 1: not all",
    )
    for i, (line, part) in enumerate(zip(lines, parts, strict=True), 1):
        assert line.startswith(f"silofl import: ({i}) {part}")
    assert not [*tmp_path.iterdir()]


def test_resume_as_another_run(place, say, refused, tmp_path):
    again = "simulate --config {place}/run/config.toml --out {place}/run --set resume=true "
    for change, reason in (
        (
            "learning-rate=0.1",
            "was run with learning-rate = 0.05, not 0.1: resume with the settings of its ",
        ),
        ("strategy=fedavg", "was run with strategy = 'local', not 'fedavg'"),
        ("silos=3", "was run with silos = 2, not 3"),
    ):
        refused(again + change, f"{{place}}/run {reason}")
    # Two rounds are behind it, one is asked for.
    longer = tmp_path / "longer"
    two = f"simulate --data {place}/good.npz {TINY} --rounds 2 --strategy local --out {longer}"
    assert say(two)[0] == 0
    refused(
        f"simulate --config {longer}/config.toml --out {longer} --set resume=true rounds=1",
        "has 2 rounds behind it, more than rounds = 1",
    )


# ---------------------------------------------------------------------------------------------------------------------
# A failed and an interrupted run


def test_failed_run(place, say, tmp_path):
    """A learning rate that makes every silo diverge: exit 1, the reason in one line, in progress and report."""
    given = f"simulate --data {place}/good.npz {TINY} learning-rate=1e38 local-epochs=3"
    code, printed, err = say(f"{given} --strategy fedavg --out {tmp_path}/out")
    last = err.splitlines()[-1]
    assert code == 1 and printed == "" and "Traceback" not in err
    assert last.startswith(
        "silofl simulate: round 1: no silo sent a usable update (hospital-01: the local training diverged"
    )
    event = events_of(tmp_path / "out")[-1]
    assert (event["event"], event["strategy"], event["seed"]) == ("error", "fedavg", 42)
    assert f"silofl simulate: {event['message']}" == last
    assert "the local training diverged" in (tmp_path / "out/report.html").read_text()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("x"), 1, "silofl simulate: KeyError: 'x'"),
        (RunFailedError("two\n  lines"), 1, "silofl simulate: two lines"),
        (RunFailedError("a: out of memory"), 1, "silofl simulate: a: out of memory"),
        (RuntimeError("two\n  lines"), 1, "silofl simulate: RuntimeError: two lines"),
        (ValueError("shapes"), 1, "silofl simulate: ValueError: shapes"),
        (UserError("a setting"), 2, "silofl simulate: a setting"),
        (
            PermissionError(13, "Permission denied", "/there"),
            2,
            "silofl simulate: /there: Permission denied",
        ),
    ],
)
def test_any_error_is_one_line(error, code, line, say, monkeypatch, caplog):
    """A fault of silofl's, and that alone, has its traceback in the log, at ERROR."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(server.simulation.simulate, "simulate", fail)
    assert say("simulate") == (code, "", line + "\n")
    logged = [
        record.exc_info[1]
        for record in caplog.records
        if record.exc_info and record.levelname == "ERROR"
    ]
    assert logged == ([error] if type(error) in (KeyError, RuntimeError, ValueError) else [])
    monkeypatch.setenv("SILOFL_TRACEBACK", "1")
    with pytest.raises(type(error)):
        silofl("simulate")


def test_interrupted_run(place, say, tmp_path, monkeypatch):
    """Ctrl-C in round 2: exit 130, and the line that is printed continues the run to the same end."""
    given = f"simulate --strategy fedavg --data {place}/good.npz {TINY} --rounds 3 --out"
    assert say(f"{given} {tmp_path}/whole")[0] == 0

    ordinary = server.simulation.simulate.RoundLoop.round

    def interrupted(self, strategy, server_round):
        if server_round == 2:
            raise KeyboardInterrupt
        ordinary(self, strategy, server_round)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(server.simulation.simulate.RoundLoop, "round", interrupted)
        code, printed, err = say(f"{given} {out}")
    last = err.splitlines()[-1]
    offer = f"silofl simulate --config {out}/config.toml --out {out} --set resume=true"
    assert (code, printed) == (130, "")
    assert last == f"silofl simulate: interrupted; continue with {offer}"
    assert say(offer.removeprefix("silofl "))[0] == 0
    assert history_without_seconds(out) == history_without_seconds(tmp_path / "whole")


# ---------------------------------------------------------------------------------------------------------------------
# What the commands print


def test_strategies_json(say):
    code, out, err = say("strategies --json")
    listed = json.loads(out)
    assert (code, err) == (0, "")
    assert [r["name"] for r in listed] == sorted(r["name"] for r in listed)
    by_name = {r["name"]: r for r in listed}
    assert {"local", "fedavg", "fedavg-ft", "fedprox", "fedprox-ft", "fedala", "apple"} <= set(
        by_name
    )
    types = {"bool": bool, "int": int, "float": float, "str": str}
    keys = defaults()
    for r in listed:
        assert set(r) - {"sums", "not_sums"} == {
            "name",
            "title",
            "paper",
            "sends",
            "reports",
            "settings",
        }
        assert set(r["sends"]) == {"down", "up"} and r["reports"] in ("received", "personal")
        assert r["title"] and r["paper"]
        for key, value in r["settings"].items():
            assert set(value) == {"default", "symbol", "type"}
            assert type(value["default"]) is types[value["type"]]
            assert key.startswith(f"{r['name']}.") and keys[key] == value["default"]
    assert by_name["fedprox"]["settings"] == {
        "fedprox.mu": {"default": 0.001, "symbol": "μ", "type": "float"}
    }
    assert by_name["local"]["settings"] == {}


def test_without_a_command_the_help_lists_all_by_their_users(say):
    code, out, _ = say("")
    assert code == 0 and out == say("--help")[1]
    listed = re.findall(r"^  ([a-z-]+) ", out, re.MULTILINE)
    assert sorted(listed) == sorted(command.name for command in COMMANDS)
    assert all(f"\n{group}:\n" in out for group in GROUPS)


LEAVES = {
    command.name if action is command else f"{command.name} {action.name}": action
    for command in COMMANDS
    for action in command.actions or (command,)
}


@pytest.mark.parametrize("name", LEAVES)
def test_examples_of_a_command(name, say):
    """Each command has one, it can be parsed, and the help prints it."""
    _, text, _ = say(f"{name} --help")
    command = LEAVES[name]
    assert command.examples
    for example in command.examples:
        assert f"  $ {example}\n" in text
        first, *arguments = shlex.split(example.partition(" > ")[0])
        assert first == "silofl" and parser().parse_args(arguments).run is command.run


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell, say):
    _, script, _ = say(f"completion {shell}")
    assert "check-bundle" in script and "hold-out" in script and "revoke" in script
    assert PATHS.items() <= shtab.FILE.items()  # as the table has it
    if shell == "bash":
        words = "COMP_WORDS=(silofl stu); COMP_CWORD=1"
        lines = f"{script}\n{words}; _shtab_silofl silofl stu silofl; echo ${{COMPREPLY[@]}}"
        done = subprocess.run(["bash", "-c", lines], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["study", "studies"]


def test_version(say):
    assert say("--version") == (0, f"silofl {version('silofl')}\n", "")


def test_strategies_as_text(say):
    code, out, _ = say("strategies")
    assert code == 0
    assert out.startswith(
        "down, up: the numbers that a silo receives and sends in a round. Σ: of the whole model"
    )
    assert (
        "fedprox           Federated averaging with a proximal term (Li et al., MLSys 2020"
        in out
    )
    assert "    fedprox.mu = 0.001  (μ, weight of the proximal term)" in out


def test_simulate_prints_the_run_directory_last(place, say, tmp_path):
    out = tmp_path / "study"
    given = f"simulate --strategy local,fedavg --seed 1,2 --data {place}/good.npz {TINY}"
    code, printed, _ = say(f"{given} --out {out}")
    *_, one, two, three, four, last = printed.splitlines()
    results = [one, two, three, four]
    assert code == 0 and last == str(out)
    runs = summary_of(out)["runs"]
    assert [line.split(":")[0] for line in results] == [
        "local-1",
        "fedavg-1",
        "local-2",
        "fedavg-2",
    ]
    for line, run in zip(results, runs, strict=True):
        assert (
            f"accuracy {run['final']['accuracy_mean']:.4f}, " in line and "of 2 silos" in line
        )


def test_default_output_directory(place, say, tmp_path, monkeypatch):
    """``runs/TIME-STRATEGY``; two runs within a second do not meet."""
    monkeypatch.chdir(tmp_path)
    strftime = time.strftime  # only now is fixed: the report writes a file's own date
    monkeypatch.setattr(
        "time.strftime", lambda form, *at: strftime(form, *at) if at else "20261231-235959"
    )
    given = f"simulate --strategy local,fedavg --data {place}/good.npz {TINY}"
    printed = [say(given)[1].splitlines()[-1] for _ in range(2)]
    assert printed == [
        "runs/20261231-235959-local+fedavg",
        "runs/20261231-235959-local+fedavg-2",
    ]
    assert all(
        (tmp_path / name / file).is_file()
        for name in printed
        for file in ("summary.json", "report.html")
    )


def test_partition_check_simulate_export_predict(say, tmp_path):
    """The way of a file through the commands: each takes what the one before has made."""
    parts, run, model = (str(tmp_path / name) for name in ("parts", "run", "m.safetensors"))
    three = "partition --dataset breast-cancer --partition iid --silos 3"
    code, out, err = say(f"{three} --out {parts} --plot {tmp_path}/who.svg")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == parts and out.startswith(
        "hospital-01: 129 train, 23 val, 38 test\n"
    )
    assert sorted(p.name for p in (tmp_path / "parts").iterdir()) == [
        "hospital-01.npz",
        "hospital-02.npz",
        "hospital-03.npz",
        "manifest.json",
    ]
    assert (tmp_path / "who.svg").stat().st_size > 1000

    silo = f"{parts}/hospital-02.npz"
    code, out, _ = say(f"check-data {silo}")
    assert code == 0 and all(line.startswith("ok  ") for line in out.splitlines())
    assert "ok    inputs: a table of 30 columns, float32" in out

    code, out, _ = say(f"simulate --data {silo} --strategy fedavg {TINY} --out {run}")
    assert code == 0 and out.splitlines()[-1] == run
    code, out, _ = say(f"export {run} --silo hospital-02 --which last --out {model}")
    assert (code, out) == (
        0,
        f"{model}: fedavg, seed 42, last model of hospital-02: after training in round 1\n",
    )

    code, out, err = say(f"predict --model {model} --data {silo}")
    assert code == 0 and out.startswith("index,label,p_0,p_1\n0,") and out.count("\n") == 39
    assert "no temperature" in err and "no conformal threshold" in err and err.count("\n") == 2
    code, printed, _ = say(f"predict --model {model} --data {silo} --out {tmp_path}/p.csv")
    assert (code, printed) == (0, f"{tmp_path}/p.csv\n") and (
        tmp_path / "p.csv"
    ).read_text() == out


def test_import_says_what_it_made(say, tmp_path):
    table, out = tmp_path / "table.csv", tmp_path / "t.npz"
    rows = [f"{i},{i % 7},{'ill' if i % 2 else 'well'}" for i in range(50)]
    table.write_text("\n".join(["age,score,label", *rows]))
    code, printed, _ = say(f"import {table} --out {out} --labels well,ill")
    assert code == 0
    assert printed.splitlines() == [
        "train 32, val 8, test 10 samples: a table of 2 columns, float32",
        "2 classes",
        "0 = well",
        "1 = ill",
        "note: 50 of 50 samples name no patient: each is taken for another patient's (--patient)",
        f"{out.with_suffix('.recipe.toml')}: the recipe; silofl import NEW.csv --recipe "
        f"{out.with_suffix('.recipe.toml')} repeats it",
        "the split is written into the file: no run can change it",
        str(out),
    ]
    assert say(f"check-data {out}")[0] == 0


def test_settings_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs/settings.md"
    assert page.read_text() == settings_page(), "run: make settings"


# ---------------------------------------------------------------------------------------------------------------------
# The installed command


SILOFL = Path(sys.executable).with_name("silofl")


def test_output_may_be_cut_off():
    """As by ``silofl strategies | head -0``: whoever reads stops reading, and nothing is to be said about it."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        cut = subprocess.run(
            [SILOFL, "strategies", "--json"],
            stdout=broken,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (cut.returncode, cut.stderr) == (0, "")


def test_progress_has_no_accuracy_for_rounds_that_are_not_evaluated(
    say, place, tmp_path, monkeypatch
):
    """Rounds 2 and 4 are; round 3 leaves what round 2 said, and round 1 says nothing."""
    shown = []
    monkeypatch.setattr(
        server.simulation.simulate.tqdm,
        "set_postfix_str",
        lambda bar, text, **_: shown.append(text),
    )
    given = f"simulate --data {place}/good.npz {TINY} evaluate-every=2 --rounds 4"
    code, _, _ = say(f"{given} --out {tmp_path}/run")
    assert code == 0 and len(shown) == 2
    assert all(0 <= float(text.removeprefix("accuracy ")) <= 1 for text in shown)


def permissions(folder):
    return {
        f"{'d' if p.is_dir() else '-'}{p.stat().st_mode & 0o777:o}"
        for p in (folder, *folder.rglob("*"))
    }


def test_data_models_and_runs_are_their_users_alone(say, tmp_path):
    """Under the usual umask, where others could read all that is written; and it is the caller's own again after."""
    before = os.umask(0o022)
    try:
        new = tmp_path / "new"
        for line in (
            f"simulate --strategy local {TINY} --out {new}/run",
            f"partition --silos 2 --out {new}/parts",
            f"export {new}/run --silo hospital-01 --out {new}/own.safetensors",
        ):
            assert say(line)[0] == 0
        assert permissions(tmp_path / "new") == {"d700", "-600"}
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_help_loads_nothing_that_takes_time():
    """The libraries, and of Python's own modules those that took a sixth of the start."""
    code = "import sys\nfrom server.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.splitlines()[-1].split())
    assert "server.cli.deploy" in loaded
    assert not loaded & {
        "numpy",
        "torch",
        "flwr",
        "yaml",
        "logging",
        "tempfile",
        "dataclasses",
        "inspect",
    }


def test_a_module_that_hides_a_package_is_named(tmp_path):
    (tmp_path / "models.py").touch()
    words = [sys.executable, "-P", "-c", "import server.cli.main"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "models.py hides silofl's own models" in done.stderr


def test_a_setting_of_a_method_that_does_not_run_is_noted(capsys):
    run_values(parse(["simulate", "--set", "fedprox.mu=1", "apple.mu=1", "strategy=apple"]))
    assert capsys.readouterr().err == "note: fedprox.mu has no effect: no run is of fedprox\n"


def test_commands_around_a_federation_load_no_pytorch():
    """It takes two seconds, and neither a SuperLink nor keys, bundles or a live view need it."""
    code = "import sys, server.deploy.bundle, server.deploy.compose, server.deploy.local, server.deploy.superlink\n"
    code += "import server.watch.serve, server.watch.source, server.watch.source\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "server.deploy.local.parts" in loaded and "torch" not in loaded


def test_a_draft_has_the_sums_of_weights_and_own_data_sets(tmp_path):
    weights, file = tmp_path / "w.safetensors", tmp_path / "study.toml"
    weights.write_bytes(b"weights")
    federation = tmp_path / "federation.yaml"
    federation.write_text("name: ward\nsilos: [{name: north, data: {dataset: 'ward:ours'}}]\n")
    given = f"study new {file} --name trial --sum {'a' * 64} --federation {federation}"
    command = f"{given} --own-dataset south={'b' * 64} --set init-weights={weights}".split()
    assert main(command) == 2  # no index yet
    np.savez(tmp_path / "ward.ours.index.npz", code="c" * 64)
    assert not main(command)
    study = tomllib.loads(file.read_text())
    assert study["weights"] == hashlib.sha256(b"weights").hexdigest()
    assert study["datasets"] == {"north": "c" * 64, "south": "b" * 64}
