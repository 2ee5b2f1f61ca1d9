"""``silofl evaluate``: the bits of the run, no state touched, and what a hospital's policy makes of it."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import Context, RecordDict
from schemas import DECLARED, PERMUTED, save
from taken import silofl
from tiny import (
    TinyGrid,
    audited,
    federate,
    notes,
    random_silos,
    round_of,
    same,
    settings_of,
    small_study,
    summary_of,
)

from client import app as answer
from client.export import export_model, read_model
from client.protocol import receipts
from client.protocol.keys import make_signing_key
from client.protocol.methods import DEFAULTS
from client.protocol.policy import Policy, PolicyRefusedError
from client.protocol.study import FREE, TEXTS, parse_study
from client.site.rules.study import message_faults
from client.site.terms import read_terms
from client.site.trust.message_rules import round_faults
from partitions.common.errors import UserError
from partitions.common.files import write_atomically
from partitions.schema import parse_schema
from server.app import run_app as server_main
from server.deploy import submit
from server.results.history import History
from server.results.models import find_run
from server.results.run_directory import RunDirectory
from server.results.study import study_config, study_runs
from server.run.evaluated_models import evaluation_settings, read_models
from server.run.evaluation import EvaluationLoop, add_cells, models_in, own_cells
from server.run.receipts import KEY
from server.run.withdrawal import withdraw
from server.simulation.engine import flower_identity
from server.simulation.evaluate import evaluate, gather_models
from server.simulation.simulate import simulate
from strategies.base.evaluation import digest_of, input_digest
from strategies.base.run_settings import parse_settings


def read(matrix):
    with matrix.open(newline="") as file:
        return {
            (r["model"], r["silo"], r["split"], r["metric"]): r["value"]
            for r in csv.DictReader(file)
        }


def digests(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.fixture(scope="module")
def study(table, tmp_path_factory):
    given = {"rounds": 3, "validation": 0.2, "strategy": "fedavg,fedper,ditto"}
    return small_study(tmp_path_factory.mktemp("runs") / "study", table, **given)


def command(run, out, *words):
    """The exit code of `silofl evaluate`."""
    return silofl("evaluate", run, "--out", out, *words)


ALL = ("--models", "all", "--strategy")


@pytest.mark.parametrize("method", ["fedavg", "fedper"])
def test_the_matrix_has_the_bits_of_the_run(study, tmp_path, method):
    """Each silo's reported model at that silo: every metric of the round that the report shows, in the history."""
    before = digests(study)
    assert command(study, tmp_path / "m", *ALL, method) == 0
    assert digests(study) == before
    found = read(tmp_path / "m/matrix.csv")
    shared = {"shared"} if method == "fedavg" else set()
    silos = {f"hospital-{i:02d}" for i in (1, 2, 3)}
    assert {key[:2] for key in found} == {(m, s) for m in silos | shared for s in silos}
    run = next(r for r in summary_of(study)["runs"] if r["strategy"] == method)
    rows = [
        r for r in History(study / "history.csv").of(method, 42) if r.snapshot == "received"
    ]
    for model, silo in {key[:2] for key in found}:
        if model not in (silo, "shared"):
            continue
        shown = [
            r for r in rows if r.silo == silo and r.round == run["per_silo"][silo]["round"]
        ]
        assert len(shown) == len([key for key in found if key[:2] == (model, silo)]) > 0
        assert all(found[model, silo, r.split, r.metric] == repr(r.value) for r in shown)
    if method == "fedper":
        assert len({found[m, "hospital-01", "test", "loss"] for m in silos}) == 3


@pytest.mark.parametrize("method", ["fedavg", "fedper", "ditto"])
def test_the_diagonal_is_what_the_run_measured(study, tmp_path, method):
    """The rows of each silo's model at that silo, byte for byte, without the silos' states and without a federation."""
    lines = (
        evaluate(study, tmp_path / "all", "all", strategy=method)
        .read_text()
        .splitlines(keepends=True)
    )
    diagonal = [line for line in lines[1:] if line.split(",")[0] == line.split(",")[1]]
    silos = ["hospital-01", "hospital-02", "hospital-03"]
    own = own_cells(study, find_run(study, method, None))
    add_cells(tmp_path / "own.csv", own, silos)
    assert (tmp_path / "own.csv").read_text() == "".join([lines[0], *diagonal]) and len(
        diagonal
    ) >= 12
    rest = [line for line in lines if line not in diagonal]
    (tmp_path / "rest.csv").write_text("".join(rest))
    add_cells(tmp_path / "rest.csv", own, silos)
    assert (tmp_path / "rest.csv").read_text() == "".join(lines)  # in their places
    changed = [[*cells[:4], "9.0", cells[5]] for cells in own]
    add_cells(tmp_path / "rest.csv", changed, silos)
    assert (tmp_path / "rest.csv").read_text() == "".join(lines)  # what was evaluated stays


def without_states(study, folder):
    """A run as a federation leaves it on the server."""
    return shutil.copytree(study, folder, ignore=shutil.ignore_patterns("silos"))


def test_models_that_all_stayed_at_their_hospitals(study, tmp_path, capsys):
    """No model, so nothing to ask of a federation: none is running here."""
    run, out = without_states(study, tmp_path / "run"), tmp_path / "m"
    given = (*ALL, "fedper", "--federation", "none")
    assert command(run, out, *given) == 0
    assert {key[:2] for key in read(out / "matrix.csv")} == {
        (f"hospital-0{i}", f"hospital-0{i}") for i in (1, 2, 3)
    }
    said = capsys.readouterr().err
    assert (
        "not evaluated: hospital-01, hospital-02, hospital-03: the server has no model of theirs"
        in said
    )
    assert command(run, out, *given) == command(run, tmp_path / "x", *ALL, "ditto") == 2
    assert "lie at the silos: --federation NAME evaluates there" in capsys.readouterr().err
    for gone in ("history.csv", "summary.json"):
        (run / gone).unlink()
        assert command(run, tmp_path / gone, *given) == 2
        assert not (tmp_path / gone).exists() and not (run / gone).exists()


def test_a_model_at_one_file(study, tmp_path):
    """In a file with other samples; ``shared`` alone is the default of a run."""
    file = random_silos(tmp_path, {"north": 40})["north"]
    given = ("--strategy", "fedavg", "--data", str(file))
    assert command(study, tmp_path / "m", *given) == 0
    found = read(tmp_path / "m/matrix.csv")
    assert {key[:2] for key in found} == {("shared", "north")}
    exported = tmp_path / "mine.safetensors"
    export_model(study, "hospital-02", "reported", exported, "fedavg")
    again = read(evaluate(exported, tmp_path / "again", data=file))
    assert {key[:2] for key in again} == {("mine", "north")}
    assert [*found.values()] == [*again.values()]  # fedavg's reported model is the shared one


def test_columns_and_labels_are_those_that_the_shared_model_was_trained_on(tmp_path):
    """At a file that has them in another order: the same samples, so the same metrics. And beside the silos' models."""
    files = {}
    for order, changes in (("declared", {}), ("turned", PERMUTED)):
        (tmp_path / order).mkdir()
        files[order] = save(tmp_path / order / "all.npz", **changes)
        with np.load(files[order]) as found:
            arrays: dict[str, Any] = {
                key: np.concatenate([v] * 6) if key[:2] in ("x_", "y_") else v
                for key, v in found.items()
            }
        np.savez(files[order], **arrays)
    given = {"strategy": "ditto", "agreed": DECLARED}
    run = small_study(tmp_path / "run", files["declared"], **given)
    one, other = (
        evaluate(run, tmp_path / f"at-{order}", data=file).read_text()
        for order, file in files.items()
    )
    assert one == other and "shared,all,test,loss,0." in one
    assert {key[0] for key in read(evaluate(run, tmp_path / "all", "all"))} == {
        *("shared", "hospital-01", "hospital-02", "hospital-03")
    }


@pytest.mark.parametrize(
    ("source", "options", "line"),
    [
        ("study", {"strategy": "fedper"}, "fedper has no model that all silos share"),
        ("study", {"strategy": "apple"}, "holds no such run"),
        ("study", {}, "holds several"),
        ("nowhere", {}, "there is no .*nowhere: a run directory, or an exported model"),
        (
            "nowhere",
            {"data": "file"},
            "there is no .*nowhere: a run directory, or an exported model",
        ),
        ("model", {}, "says where to evaluate it"),
        ("model", {"which": "all", "data": "file"}, "is one model"),
        ("damaged", {"data": "file"}, "damaged"),
        ("wide", {"data": "file"}, "samples of shape"),
    ],
)
def test_one_clear_line_and_nothing_half_written(study, tmp_path, source, options, line):
    model = tmp_path / "model.safetensors"
    export_model(study, "hospital-01", "reported", model, "fedavg")
    if source == "damaged":
        model.write_bytes(model.read_bytes()[:-4])
    columns = 5 if source == "wide" else 3
    file = random_silos(tmp_path, {"north": 40}, columns=columns)["north"]
    given = {**options, **({"data": file} if "data" in options else {})}
    where = {"study": study, "nowhere": tmp_path / "nowhere"}.get(source, model)
    fails(UserError, line, evaluate, where, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    fails(UserError, "is there already", evaluate, study, tmp_path / "taken", strategy="fedavg")


def test_a_network_of_ones_own(table, tmp_path, monkeypatch):
    (tmp_path / "evaluated_net.py").write_text(
        "from torch import nn\ndef f(i, o): return nn.Sequential(nn.Linear(*i, o))"
    )
    monkeypatch.syspath_prepend(tmp_path)
    given = {"silos": 2, "rounds": 1, "strategy": "fedavg", "model": "evaluated_net:f"}
    run = small_study(tmp_path / "run", table, **given)
    found = read(evaluate(run, tmp_path / "matrix", "all"))
    assert {model for model, *_ in found} == {"shared", "hospital-01", "hospital-02"}


def test_models_of_two_networks_are_not_mixed(study, table, tmp_path):
    given = {"rounds": 1, "model": "mlp", "mlp.hidden": "7"}
    other = small_study(tmp_path / "other", table, **given)
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    export_model(study, "hospital-01", "reported", files[0], "fedavg")
    export_model(other, "hospital-01", "reported", files[1])
    fails(UserError, "has another model than", read_models, files)


def test_evaluation_is_no_method(table, tmp_path):
    with pytest.raises(UserError, match="trains nothing: silofl evaluate runs it"):
        simulate(
            {
                "strategy": "evaluate",
                "rounds": 1,
                "evaluate.models": f"a={'0' * 64}",
                "out": str(tmp_path / "x"),
            }
        )
    for models, rounds in (
        ("", 1),
        ("a=b", 1),
        (f"a={'0' * 64},a={'1' * 64}", 2),
        (f"a={'0' * 64}", 2),
    ):
        with pytest.raises(UserError, match=r"evaluate\.models|rounds = 2"):
            parse_settings(
                {"strategy": "evaluate", "rounds": rounds, "evaluate.models": models}
            )
    for owner in ("@A", "@a b", "@a@b", "@"):
        with pytest.raises(UserError, match=r"NAME=SHA-256\[@SILO\]"):
            parse_settings(
                {"strategy": "evaluate", "rounds": 1, "evaluate.models": f"a={'0' * 64}{owner}"}
            )


def test_a_federations_run_is_not_evaluated_at_simulated_data(tmp_path):
    """Its settings have the default data set, which is nobody's; the hospitals' files are elsewhere."""
    files = random_silos(tmp_path, {"a": 20, "b": 24})
    federate(files, strategy="fedavg", rounds=1, directory=tmp_path / "run")
    for states in (tmp_path / "run/checkpoint").glob("*/silos"):
        shutil.rmtree(states)  # they stay at the hospitals
    with pytest.raises(UserError, match="was no simulation: --federation NAME, or --data FILE"):
        evaluate(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert evaluate(tmp_path / "run", tmp_path / "out", data=files["a"]).is_file()


# ---- At hospitals with files and policies of their own -------------------------------------------------------------


class Sites:
    """Three hospitals with a policy, and the models of a run at which they took part."""

    def __init__(self, folder, rule):
        self.folder = folder
        self.files = random_silos(folder, {"a": 20, "b": 24, "c": 22})
        federate(
            self.files,
            strategy="fedavg",
            rounds=2,
            directory=folder / "run",
            normalization="agreed",
        )
        self.made = gather_models(folder / "run", folder / "models", "shared")
        self.policy = folder / "policy.toml"
        self.policy.write_text(rule)
        self.values = evaluation_settings(read_models(self.made))

    def grid(self, values):
        settings = parse_settings({"silos": 3, "threads": 1, **values})
        return TinyGrid(
            self.files, settings, state_dir=self.folder / "states", policy=str(self.policy)
        )

    def run(self, prepare=lambda grid: None, **changes):
        """The ServerApp as Flower calls it, with the models in its directory as ``silofl evaluate`` puts them."""
        out = self.folder / "out"
        values = {
            "silos": 3,
            "threads": 1,
            "min-silos": 1,
            **self.values,
            "out": str(out),
            **changes,
        }
        runs = study_runs(values)
        with RunDirectory.open(out, study_config(runs), resume=False) as directory:
            write_atomically(directory.path / "study", "")
        (out / "models").mkdir()
        for file in self.made:
            for one in (file, file.with_name(f"{file.name}.json")):
                (out / "models" / one.name).write_bytes(one.read_bytes())
        grid = TinyGrid(
            self.files, runs[0], state_dir=self.folder / "states", policy=str(self.policy)
        )
        prepare(grid)
        context = Context(
            run_id=1,
            node_id=0,
            node_config={},
            state=RecordDict(),
            run_config=dict(runs[0].flat()),
        )
        with flower_identity():
            server_main(grid, context)
        return out / "matrix.csv"


TODAY = date(2026, 11, 24)
STUDY = f"""kind = "silofl study 1"
name = "given"
purpose = "x"
contact = "x"
results = "x"
retention = "x"
start = {TODAY}
end = {TODAY}
apps = ["{"0" * 64}"]
participants = 3
step = 0.001
metrics = ["loss", "score"]
[settings]
"""
LIMITS = """[limits]
runs = 1
rounds = 0
evaluations = 1
messages = 9
bytes = 99999
days = 1
"""
ONLY = 'methods = ["evaluate"]\nmin-silos = 1\n'


def test_a_site_allows_evaluation_and_nothing_else(tmp_path):
    """The same bits as at its file in this process, of what its policy lets out; no state is left."""
    sites = Sites(tmp_path, ONLY)
    found = read(sites.run())
    assert {key[:2] for key in found} == {("shared", name) for name in "abc"}
    assert {key[3] for key in found} <= {"loss", "accuracy", "score_low", "score_high"}
    for name, file in sites.files.items():
        here = read(evaluate(sites.made[0], tmp_path / f"at-{name}", data=file))
        own = {key: value for key, value in found.items() if key[1] == name}
        assert own and all(here[key] == value for key, value in own.items())
    assert not list((tmp_path / "states").rglob("*.safetensors"))
    with pytest.raises(UserError, match=r'methods = \["evaluate"\], the run strategy = fedavg'):
        federate(
            sites.files,
            strategy="fedavg",
            rounds=1,
            policy=str(sites.policy),
            state_dir=tmp_path / "states",
        )


def test_no_note_says_how_a_silo_counts(tmp_path):
    """Nothing is averaged, so no number of samples has a bound: b, over 1 times the median, is not named."""
    capped = {"weight-cap": 1.0}
    Sites(tmp_path, ONLY).run(**capped)
    assert "counts as" not in (tmp_path / "out/progress.jsonl").read_text()


def test_a_policy_refuses_it_like_any_run(tmp_path):
    with pytest.raises(Exception, match=r'methods = \["fedavg"\], the run strategy = evaluate'):
        Sites(tmp_path, 'methods = ["fedavg"]\n').run()
    assert not (tmp_path / "out/matrix.csv").exists()


def test_a_site_that_wants_receipts_gets_them(tmp_path, monkeypatch):
    """As of any run: the server signs each line of the silos' logs, and keeps the receipts in the run directory."""
    make_signing_key(tmp_path / "receipt.key")
    monkeypatch.setenv(KEY, str(tmp_path / "receipt.key"))

    def site(grid):
        for context in grid.contexts.values():
            context.node_config["state-dir"] = str(
                tmp_path / "site" / str(context.node_config["name"])
            )
        audited(grid, takes_receipts=True)

    assert Sites(tmp_path, f'{ONLY}receipts = "required"\n').run(site).exists()
    kept = [
        receipts.read_receipt(text)
        for text in receipts.read_kept(tmp_path / "out" / receipts.FILE)
    ]
    assert sorted((one.silo, one.line) for one in kept) == [
        (silo, line) for silo in "abc" for line in (1, 2)
    ]


def test_a_study_can_approve_given_models(tmp_path, monkeypatch):
    """The run as it is sent, under a study that lists its settings: no step binds a model that the study names."""
    sites = Sites(tmp_path, ONLY)
    run = study_runs({"silos": 3, "threads": 1, "min-silos": 1, **sites.values})[0].flat()
    listed = {k: v for k, v in run.items() if k not in FREE and DEFAULTS[k] != v}
    protocol = parse_study(
        STUDY + "".join(f'"{k}" = {json.dumps(v)}\n' for k, v in listed.items()) + LIMITS, "f"
    )

    def check(message, context, *terms, **more):
        sent = dict(message.content.config_records.get("config", {}))
        if faults := message_faults(
            protocol, context.run_config, message.metadata.message_type, sent, (), TODAY
        ):
            raise PolicyRefusedError("; ".join(faults))

    monkeypatch.setattr(answer, "check_message", check)
    monkeypatch.setattr(
        answer, "read_terms", lambda node, run: replace(read_terms(node, run), study=protocol)
    )
    assert {key[1] for key in read(sites.run())} == set("abc")


@pytest.mark.parametrize("own_data", [True, False])
def test_a_study_is_drafted_from_an_evaluation_at_ones_own_data(
    own_data, study, table, tmp_path, monkeypatch
):
    """What a federation is asked under ``--study`` is what the draft says: owners, and an evaluation for each model.

    At simulated silos, too, whose seed, validation share and partition divide no hospital's data.
    """
    out, sent = tmp_path / "here", list[dict[str, Any]]()
    models = f"evaluate {study} --models all --strategy ditto".split()
    assert silofl(*models, *(["--data", str(table)] if own_data else []), "--out", out) == 0
    settings = out / "config.toml"
    assert ("validation = 0.2\n" in settings.read_text()) is not own_data
    settings.write_text(
        settings.read_text().replace("seed = 42\n", "seed = 42\n" if own_data else "seed = 7\n")
    )
    given = ["study", "new", str(tmp_path / "s.toml"), "--name", "look", "--sum", "0" * 64]
    assert (
        silofl(*given, "--config", out / "config.toml", *(f"--{key}=x" for key in TEXTS)) == 0
    )
    approved = parse_study((tmp_path / "s.toml").read_text(), "s.toml")
    monkeypatch.setattr(submit, "run", lambda values, *_, **__: sent.append(values))
    assert silofl(*models, *f"--study look --out {tmp_path}/x".split()) == 2
    silofl(*models, *f"--study look --federation c --out {tmp_path}/there".split())
    (values,) = sent
    assert values.pop("out") and values["study"] == "look" and values["rounds"] == 4
    run, today = parse_settings({**values, "silos": 3}).flat(), date.today()
    for number in range(1, 5):
        asked = {"participants": 3, "round": number}
        assert message_faults(approved, run, "evaluate", asked, ("0" * 64,), today) == []
    assert approved.limits.evaluations == 5


def evaluations(change):
    """For ``prepare``: change each message that asks to evaluate."""

    def prepare(grid):
        def before(silo, message, context):
            if message.metadata.message_type == "evaluate":
                change(message)

        grid.before = before

    return prepare


def other_numbers(message):
    for record in message.content.array_records.values():
        for array in record.values():
            array.__dict__["tensor"] = array.tensor + 1e-3


def to_train(message):
    message.metadata.__dict__["_message_type"] = "train"
    message.content["config"]["participants"] = 3


OTHER = "as the model of round 1, and the message brings another"
BROUGHT: tuple[dict[str, Any], ...] = (
    {"mean": [9.0, 0.0, 0.0]},
    {"std": [1.0, 1.0, 1e-6]},
    {"mean": [], "std": []},
    {"own_statistics": ["a", "b", "c"]},
    {"schema": '{"labels":["z","y","x"]}'},
)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (other_numbers, OTHER),
        *((lambda m, new=new: m.content["config"].update(new), OTHER) for new in BROUGHT),
        (to_train, "the run has strategy = evaluate, and a message asks it to train"),
    ],
)
def test_another_message_than_the_settings_name_is_refused(tmp_path, change, line):
    """Red team: other numbers; the same vector, with another first layer made of its statistics, or other columns
    and labels; a message to train.
    """
    with pytest.raises(RuntimeError, match=line):
        Sites(tmp_path, ONLY).run(evaluations(change))


def test_the_limit_of_evaluations_holds(tmp_path):
    """Two models and one evaluation: the second is refused by every silo, and there is no matrix of a part."""
    sites = Sites(tmp_path, f"{ONLY}max-evaluations = 1\n")
    card, net = read_model(sites.made[0])
    second = sites.made[0].with_name("second.safetensors")
    export_model(tmp_path / "run", "a", "last", second)
    sites.made.append(second)
    # As a server that does not say whose it is
    sites.values = evaluation_settings(read_models(sites.made), owned=False)
    assert not same(read_model(second)[1].vector, net.vector) and card.classes == 3
    fails(RuntimeError, r"no silo evaluated second .*max-evaluations = 1", sites.run)
    assert not (tmp_path / "out/matrix.csv").exists()


@pytest.mark.parametrize("strict", ["a", "b", "c"])
def test_a_model_of_one_silo_goes_where_peers_allow_it(tmp_path, strict):
    """The shared model at all. The models of a and b not at a site that has peers = false, and its own nowhere."""
    sites = Sites(tmp_path, f"{ONLY}peers = true\n")
    for silo in "ab":
        sites.made.append(sites.made[0].with_name(f"of-{silo}.safetensors"))
        export_model(tmp_path / "run", silo, "last", sites.made[-1])
    sites.values = evaluation_settings(read_models(sites.made))
    (tmp_path / "strict.toml").write_text(ONLY)
    asked: list[tuple[str, int]] = []

    def prepare(grid):
        for context in grid.contexts.values():
            if context.node_config["name"] == strict:
                context.node_config["policy"] = str(tmp_path / "strict.toml")
        grid.before = lambda silo, message, context: asked.append((silo, round_of(message)))

    found = read(sites.run(prepare))
    others = {silo for silo in "abc" if silo != strict}
    assert {key[1] for key in found if key[0] == "shared"} == set("abc")
    for number, silo in ((2, "a"), (3, "b")):
        own = {key: value for key, value in found.items() if key[0] == f"of-{silo}"}
        assert {key[1] for key in own} == (set() if silo == strict else others)
        order = [name for name, round in asked if round == number]
        assert order[0] == silo and len(order) == (1 if silo == strict else 3)
        for name in {key[1] for key in own}:
            here = read(
                evaluate(
                    sites.made[number - 1],
                    tmp_path / f"{silo}-at-{name}",
                    data=sites.files[name],
                )
            )
            assert all(here[key] == value for key, value in own.items() if key[1] == name)
    told = notes(tmp_path / "out")
    (note,) = [text for text in told if "did not evaluate of" in text]
    refused = f"{strict} refuses: its policy has peers = false"
    assert note.startswith(f"{strict} did not evaluate of-a, of-b: {refused}")
    alone = f"of-{strict} is {strict}'s own, which did not evaluate it: no other silo was asked"
    assert (alone in told) is (strict != "c")
    assert (
        withdraw("b", [tmp_path / "out"])
        and not (tmp_path / "out/models/of-b.safetensors").exists()
    )
    after = read(tmp_path / "out/matrix.csv")
    assert after == {
        key: value for key, value in found.items() if key[1] != "b" and key[0] != "of-b"
    }
    assert "of-b" not in (tmp_path / "out/config.toml").read_text()


@pytest.mark.parametrize(
    ("entry", "refused"),
    [("a=1@b,c=2", [True, False, True]), ("a=1,c=2", [False] * 3), ("a=1@", [False] * 3)],
)
def test_whose_model_a_message_brings_is_in_the_settings(entry, refused):
    """A message that names no round of the run is taken for one of an owned model, where there is one."""
    run = {"strategy": "evaluate", "evaluate.models": entry}
    asked: list[dict[str, Any]] = [{"round": 1}, {"round": 2}, {"round": float("nan")}]
    assert [bool(round_faults(Policy(), run, "evaluate", sent)) for sent in asked] == refused
    assert not round_faults(Policy(peers=True), run, "evaluate", {"round": 1})
    assert not round_faults(Policy(), run, "query", {}) and not round_faults(
        Policy(), {**run, "strategy": "fedavg"}, "evaluate", {"round": 1}
    )


def test_other_files_than_were_named_are_refused(tmp_path):
    sites = Sites(tmp_path, ONLY)
    settings = parse_settings(
        {"silos": 3, "threads": 1, **sites.values, "evaluate.models": f"shared={'0' * 64}"}
    )
    grid = sites.grid(settings.flat())
    with (
        flower_identity(),
        pytest.raises(UserError, match=r"are not the models that evaluate\.models names"),
    ):
        EvaluationLoop(grid, settings).run(models_in(tmp_path, settings))


def test_the_digest_is_of_every_number():
    vector, buffers = torch.arange(3.0), torch.ones(2)
    numbers = torch.tensor([0.0, 1.0, 2.0, 1.0, 1.0]).numpy().tobytes()
    known = hashlib.sha256(b"x" + numbers).hexdigest()
    assert digest_of(vector, buffers, "x") == known != digest_of(vector, buffers, "y")
    assert digest_of(vector, None, "x") == digest_of(vector, torch.empty(0), "x") != known
    schema = parse_schema(
        {"features": ["a", "b"], "labels": ["well", "ill"], "dtype": "float32"}
    )
    turned = [
        replace(schema, features=schema.features[::-1]),
        replace(schema, labels=schema.labels[::-1]),
    ]
    mean, std = [0.5, 1], [2.0, 0.1 + 0.2]
    found = [input_digest(mean, std, one) for one in (schema, *turned)]
    found += [
        input_digest([0.5, 1.5], std, schema),
        input_digest(mean, [2.0, 0.3], schema),
        input_digest((), (), schema),
    ]
    assert (
        len(set(found)) == 6
        and input_digest(mean, std, replace(schema, dtype="float64")) == found[0]
    )
    assert settings_of({"a": Path()}, strategy="fedavg").head is None
