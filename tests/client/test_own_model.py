"""``keep-models = reported``: what leaves of a silo's own model, once, and what a server gets that asks for more."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from failing import fails
from flwr.app import Context, Message
from representatives import some
from study_text import TEXTS
from tiny import (
    Files,
    audited,
    federate,
    initial,
    notes,
    one_block,
    random_silos,
    rows_of,
    same,
    settings_of,
    small_study,
    summary_of,
    write_silo,
)

from client.app import app
from client.policies import policy_page
from client.protocol.policy import Policy
from client.protocol.study import parse_study
from client.reported import TERMS, note_terms
from client.site.counts import read_released
from client.site.rules.study import message_faults
from client.site.study.dangers import dangers
from client.site.trust import audit
from client.site.trust.audit_page import page
from client.site.trust.message_rules import OWN_MODEL
from client.studies import released_page, study_page
from partitions.common.errors import RunFailedError, UserError
from partitions.common.messages import OWN_MODEL_KIND as KIND
from server.deploy.study_draft import draft
from server.results.history import History
from server.results.models import FILE, FOLDER
from server.results.run_directory import RunDirectory
from server.results.summary import write_summary
from server.run.withdrawal import withdraw
from server.simulation.engine import flower_identity
from strategies.base.evaluation import OWN
from strategies.base.run_settings import parse_settings
from strategies.base.state import State
from strategies.base.transport.payload import array_record, decode

SIZES = {"a": 40, "b": 30, "c": 22}
ALLOWED = "own-model = true\n"
KEEP = {"strategy": "ditto", "rounds": 2, "learning_rate": 0.3, "keep_models": "reported"}


def config_of(message):
    return (
        dict(message.content.config_records.get("config", {})) if message.has_content() else {}
    )


class Sites:
    """Silos with states, policies and data files of their own, as deployed ones have them."""

    def __init__(self, folder, rules=ALLOWED, **changes):
        self.folder, self.changes = folder, {**KEEP, **changes}
        self.changes |= one_block(self.changes["strategy"])
        (folder / "data").mkdir(parents=True)
        self.files: Files = random_silos(folder / "data", SIZES)
        self.policies = {name: folder / f"{name}.toml" for name in SIZES}
        for file in self.policies.values():
            file.write_text(rules)

    def run(self, prepare=lambda grid: None, out="run", **changes):
        def prepared(grid):
            for context in grid.contexts.values():
                silo = str(context.node_config["name"])
                context.node_config["policy"] = str(self.policies[silo])
                context.node_config["state-dir"] = str(self.folder / "states" / silo)
            prepare(grid)

        states = self.folder / "states"
        given = {**self.changes, **changes}
        run = federate(
            self.files, directory=self.folder / out, state_dir=states, prepare=prepared, **given
        )
        write_summary(
            directory := RunDirectory(self.folder / out),
            History(directory.history),
            run.federation.finish_run(),
        )
        return run

    def kept(self, out="run"):
        """The models that the server has, by silo."""
        files = (self.folder / out / "checkpoint").glob(f"*/{FOLDER}/*/{FILE}")
        return {file.parent.name: State.load(file) for file in files}


def reason(reply):
    """Why a silo does not answer; empty: it does."""
    return str(reply.error.reason) if reply.has_error() else ""


def own_of(reply):
    return decode(reply.content)[0].models[OWN].vector


def asked(run, kind=KIND, silo="a"):
    """The last message of this kind to a silo, and its reply."""
    return [
        (m, r)
        for m, r in run.grid.traffic
        if m.metadata.message_type == kind and run.grid.name_of(m.metadata.dst_node_id) == silo
    ][-1]


def ask(run, message, /, silo="a", kind="", *, number=0, **changed):
    """What the silo answers to such a message with another config, of the same run or of one with this number.

    The ``run__`` in front of a key is of the run's settings.
    """
    context = run.grid.context_of(silo)
    settings = {
        key.removeprefix("run__").replace("_", "-"): v
        for key, v in changed.items()
        if key.startswith("run__")
    }
    told = {key: value for key, value in changed.items() if not key.startswith("run__")}
    again = Context(
        number or context.run_id,
        context.node_id,
        context.node_config,
        context.state,
        {**context.run_config, **settings},
    )
    content = message.content.copy()
    content["config"] = type(content["config"])({**content["config"], **told})
    with flower_identity():
        return app(Message(content, 1, kind or message.metadata.message_type), again)


# ---- What leaves -----------------------------------------------------------------------------------------------------


@some(
    "method",
    ["ditto", "fedper", "apfl", "local", "fedavg-ft"],
    {"ditto", "fedper"}.__contains__,
)
def test_the_model_that_leaves_is_the_one_that_the_report_shows(tmp_path, method):
    """Bit for bit what the silo's state has for ``export --which reported``; one message more, and nothing else."""
    sites = Sites(tmp_path, strategy=method)
    run = sites.run()
    (entry,) = summary_of(tmp_path / "run")["runs"]
    assert set(sites.kept()) == set(SIZES) and notes(tmp_path / "run") == []
    for silo, kept in sites.kept().items():
        assert kept.numbers == {"silo": silo, "round": entry["per_silo"][silo]["round"]}
        (newest, *_) = sorted(
            (tmp_path / "states" / silo).rglob("round-*.safetensors"), reverse=True
        )
        state = State.load(newest)
        array = (
            "reported"
            if state.numbers.get("reported", {}).get("round") == kept.numbers["round"]
            else "candidate"
        )
        assert same(kept.arrays[OWN], state.arrays[array])
    plain = Sites(tmp_path / "plain", strategy=method, keep_models="none").run()
    kinds = [m.metadata.message_type for m, _ in run.grid.traffic]
    assert kinds == [m.metadata.message_type for m, _ in plain.grid.traffic] + [KIND] * 3
    _, reply = asked(run)
    assert set(reply.content) == {"config", f"model.{OWN}"} and set(config_of(reply)) == {
        "manifest",
        "round",
        "silo",
    }


def test_the_best_round_and_not_the_last_one(tmp_path):
    """A rate at which scores jump about: the report shows an earlier round, and so does the model."""
    sites = Sites(tmp_path, rounds=5, learning_rate=20.0, ditto__lambda=0.0)
    run = sites.run()
    shown = {kept.numbers["round"] for kept in sites.kept().values()}
    assert shown == {run.federation.recorder.chosen.round} and shown < {1, 2, 3, 4}
    (newest, *_) = sorted((tmp_path / "states/a").rglob("round-*.safetensors"), reverse=True)
    assert not same(sites.kept()["a"].arrays[OWN], State.load(newest).arrays["personal"])


def test_a_shared_model_is_not_asked_for(tmp_path):
    """FedAvg's report shows the model that the server has; a message that asks all the same is refused."""
    sites = Sites(tmp_path, strategy="fedavg")
    run = sites.run()
    assert sites.kept() == {} and KIND not in {
        m.metadata.message_type for m, _ in run.grid.traffic
    }
    closing, _ = asked(run, "evaluate")
    assert "a sends no model of its own: fedavg has one for all silos" in reason(
        ask(run, closing, kind=KIND)
    )


def test_running_statistics_go_along(tmp_path):
    """Of a network with batch normalisation: a model of its own is of no use without them."""
    rng = np.random.default_rng(3)
    np.savez(
        tmp_path / "p.npz", x=rng.integers(0, 256, (80, 8, 8, 3), np.uint8), y=np.arange(80) % 2
    )
    given = {**KEEP, "silos": 2, "rounds": 1, "model": "resnet8", "batch-size": 16}
    run = small_study(tmp_path / "run", tmp_path / "p.npz", **given)
    found = [
        State.load(file) for file in sorted((run / "checkpoint").glob(f"*/{FOLDER}/*/{FILE}"))
    ]
    assert len(found) == 2 and all(set(one.arrays) == {OWN, "buffers"} for one in found)
    assert not same(found[0].arrays["buffers"], found[1].arrays["buffers"])


# ---- A hospital that does not want it --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "line"),
    [
        ("", "its policy has own-model = false, and a message asks for this silo's own model"),
        (
            f"{ALLOWED}whole-model = false\n",
            "its policy has whole-model = false, and a message asks for this",
        ),
        (f"{ALLOWED}max-evaluations = 1\n", "its policy has max-evaluations = 1"),
    ],
)
def test_a_policy_keeps_it_here_and_the_run_goes_on(tmp_path, rules, line):
    """One line; the others' models, and every number of the run, are as they are without that policy."""
    sites = Sites(tmp_path / "1", strategy="fedper")
    free = Sites(tmp_path / "2", strategy="fedper")
    sites.policies["b"].write_text(rules)
    strict, run = sites.run(), free.run()
    (note,) = notes(tmp_path / "1/run")
    assert note.startswith(f"no model of b: b refuses: {line}")
    assert set(sites.kept()) == {"a", "c"} and all(
        same(kept.arrays[OWN], free.kept()[silo].arrays[OWN])
        for silo, kept in sites.kept().items()
    )
    assert [r.cells() for r in strict.rows if r.metric != "round_seconds"] == [
        r.cells() for r in run.rows if r.metric != "round_seconds"
    ]


def test_a_model_of_two_networks_stays(tmp_path):
    sites = Sites(tmp_path, strategy="apfl", apfl__mix="logits")
    sites.run()
    reason = (
        "sends no model of its own, that of apfl: it is two networks with apfl.mix = logits"
    )
    assert sites.kept() == {}
    assert notes(tmp_path / "run") == [f"no model of 3 silos (a, b, c): {reason}"]


def test_a_silo_with_statistics_of_its_own_is_not_asked(tmp_path):
    """Its model is of use with these alone, and they have not left: its policy has sums = false."""
    sites = Sites(tmp_path, normalization="agreed")
    sites.policies["b"].write_text(f"{ALLOWED}sums = false\n")
    for name in "ac":
        sites.policies[name].write_text(f"{ALLOWED}min-sum-samples = 1\n")
    run = sites.run()
    assert set(sites.kept()) == {"a", "c"}
    assert (
        "no model of b: it is used with the statistics of this silo, which stay there"
        in notes(tmp_path / "run")
    )
    asks, _ = asked(run)
    assert "it is used with this silo's statistics, which stay here" in reason(
        ask(run, asks, "b")
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"dp": True}, "keep-models = reported: not with dp = true"),
        (
            {"evaluate_every": 0},
            "keep-models = reported: with evaluate-every = 0 no report shows a model",
        ),
        ({"normalization": "silo"}, "keep-models = reported: not with normalization = silo"),
        ({"keep_models": "all"}, "keep-models = 'all': one of none, reported is needed here"),
    ],
)
def test_settings_that_cannot_be(changes, line):
    fails(UserError, line, settings_of, {"a": Path()}, **{**KEEP, **changes})


@pytest.mark.parametrize("public", [True, False])
def test_the_runs_settings_hold_for_public_data_too(tmp_path, public):
    """There the site's process asks nothing: the app's own look at the settings is the only one."""
    run = Sites(tmp_path).run()
    message, reply = asked(run)
    assert not reply.has_error()
    context = run.grid.context_of("a")
    context.node_config["policy"] = "public" if public else context.node_config["policy"]
    for changes in ({"run__keep_models": "none"}, {"round": 1}, {"round": 4}):
        assert "and a message asks for this silo's own model" in reason(
            ask(run, message, **changes)
        )


# ---- A server that asks for more -------------------------------------------------------------------------------------


def test_a_server_gets_one_model_of_one_run(tmp_path):
    """Red team, the whole attack: a model in mid-run, then of further rounds, under every name of the run."""
    sites = Sites(tmp_path, "own-model = false\n", strategy="fedper", rounds=3)
    run = sites.run()
    sites.policies["a"].write_text(ALLOWED)  # only now, so nothing has left
    closing, _ = asked(run, "evaluate")
    steps = [
        m
        for m, _ in run.grid.traffic
        if m.metadata.message_type == "train" and config_of(m)["round"]
    ][::3]
    best = config_of(closing)["reported"]
    assert [config_of(m)["round"] for m in steps] == [1, 2, 3] and best in (1, 2, 3)
    taken = []

    def take(**changed):
        """Ask a for its model, as the server of a run that has keep-models; return why it stays."""
        reply = ask(
            run,
            closing,
            kind=KIND,
            **{"reported": best, "run__keep_models": "reported", **changed},
        )
        taken.extend([] if reply.has_error() else [reply])
        return reason(reply)

    # In mid-run, by the round that the message says
    for this in (0, 1, 2, 3, 5, -4, True, "3", float("nan")):
        assert "asks for this silo's own model in round" in take(round=this)
    for this in (1, 5):
        assert "asks for this silo's own model in round" in take(round=this, run__patience=1)
    assert "keep-models = none, and a message asks for this silo's own model" in take(
        run__keep_models="none"
    )
    assert "dp = true, and a message asks" in take(run__dp=True)
    assert "a kept no model of round 99" in take(reported=99) and not taken
    assert take() == ""
    once = "a refuses: its own model leaves once per run, and another one of this run has left"
    assert take(reported=4) == once  # the silo holds two models that a report may show
    further = "a refuses: its own model has left in this run (keep-models), which trains no further here"
    for changed in (
        {},
        {"run__keep_models": "none"},
        {"number": 77},
        {"run": "another"},
        {"run_id": "0" * 16},
    ):
        # Each round again: from an earlier state, which has no mark of its own
        for message in steps:
            assert reason(ask(run, message, **changed)) == further
    # Under two new names it is a new training from the start, and counts as a run; its model leaves under these alone.
    assert not ask(run, steps[0], number=78, run_id="1" * 16).has_error()
    assert take(run_id="1" * 16, reported=1) == once
    assert take(number=79) == take() == ""  # resumed, or asked twice: the same model
    assert len(taken) == 3 and len({own_of(reply).numpy().tobytes() for reply in taken}) == 1


def test_many_trainings_in_one_run_give_one_model(tmp_path):
    """Red team: the id by which a silo keeps its state is the server's word, so each message may begin a new one."""
    run = Sites(tmp_path).run()
    train, _ = asked(run, "train")
    asks, _ = asked(run)
    for name in ("1" * 16, "x", "../../a", 5):
        begun = ask(run, train, round=1, run_id=name)
        assert "which trains no further here" in reason(begun)
        assert ask(run, asks, run_id=name).has_error()


def test_what_a_model_of_one_step_says(tmp_path):
    """Red team: why ``whole-model = false`` keeps it here. FedPer's output layer never leaves otherwise: class counts.

    One round of one step from known weights: the step of the biases is the mean of p - e_y, and p is of the inputs
    alone, which are zeros here.
    """
    x, labels = np.zeros((40, 3)), [0] * 23 + [1] * 11 + [2] * 6
    sites = Sites(tmp_path, strategy="fedper", rounds=1, learning_rate=1.0)
    sites.files = {**sites.files, "a": write_silo(tmp_path / "data/a.npz", x, labels, 3)}
    run = sites.run()
    start = initial(run.settings, 3, 3).double().numpy()[9:]
    model = sites.kept()["a"].arrays[OWN].double().numpy()[9:]
    p = np.exp(start) / np.exp(start).sum()
    assert rows_of(sites.files["a"])[0].shape == (40, 3)
    assert (40 * (p - (start - model))).round(3).tolist() == [23, 11, 6]
    strict = Sites(tmp_path / "2", "", strategy="fedper", rounds=1, learning_rate=1.0)
    strict.run()
    assert strict.kept() == {}


def test_runs_of_different_length_are_runs(tmp_path):
    """Red team: the rounds of one training as the ends of several runs. Each counts, and the policy says how many."""
    sites = Sites(tmp_path, f"{ALLOWED}runs-per-day = 1\n")
    sites.run()

    def another(grid):
        for context in grid.contexts.values():
            context.run_id = 2

    with pytest.raises(Exception, match="runs-per-day = 1, and this is run 2"):
        sites.run(another, out="longer", rounds=3)


def test_where_nothing_can_be_noted_nothing_leaves(tmp_path):
    sites = Sites(tmp_path)

    def prepare(grid):
        def before(silo, message, context):
            if (silo, message.metadata.message_type) == ("b", KIND):
                (tmp_path / "states/b/record.sqlite").unlink()

        grid.before = before

    sites.run(prepare)
    assert set(sites.kept()) == {"a", "c"}
    (note,) = notes(tmp_path / "run")
    assert (
        "record.sqlite is missing, and tells what this site has released: restore it from a backup"
        in note
    )


# ---- A silo that lies or is silent -----------------------------------------------------------------------------------


def spoil(change):
    """For ``prepare``: changes what b answers to the question for its model."""

    def prepare(grid):
        def after(silo, message, reply):
            if silo == "b" and message.metadata.message_type == KIND:
                change(reply.content)
            return reply

        grid.after = after

    return prepare


def vector(values):
    return lambda content: content.update({f"model.{OWN}": array_record({"vector": values})})


LIES = {
    "a shape": (
        vector(torch.zeros(5)),
        r"'own' is torch.float32 of shape \(5,\), not float32 of \(12,\)",
    ),
    "a type": (vector(torch.zeros(12).double()), r"'own' is torch.float64"),
    "no number": (
        vector(torch.full((12,), float("nan"))),
        r"'own' holds values that are not finite",
    ),
    "much too large": (vector(torch.zeros(500_000)), "its reply has more than"),
    "no model": (
        lambda content: content.pop(f"model.{OWN}"),
        "names model 'own' and does not carry it",
    ),
    "another record": (
        lambda content: content.update(x=content["config"]),
        "holds x, which the server did not ask",
    ),
    "another round": (
        lambda content: content["config"].update(round=1),
        "a reply of 'b' for round 1",
    ),
    "as somebody else": (
        lambda content: content["config"].update(silo="a"),
        "a reply of 'a' for round 3",
    ),
    "no manifest": (
        lambda content: content["config"].update(manifest="[]"),
        "the reply holds nothing, not own",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_one_line(tmp_path, lie):
    sites = Sites(tmp_path)
    change, line = LIES[lie]
    sites.run(spoil(change))
    assert set(sites.kept()) == {"a", "c"}
    (note,) = notes(tmp_path / "run")
    assert re.search(f"^no model of b: .*{line}", note), note


def test_somebody_elses_model_is_ones_own(tmp_path):
    """Nobody can tell a copy; it stands under the name of the one who sent it, and only there."""
    sites = Sites(tmp_path)
    copied = torch.arange(12.0)
    sites.run(spoil(vector(copied)))
    kept = sites.kept()
    assert (
        same(kept["b"].arrays[OWN], copied)
        and kept["b"].numbers["silo"] == "b"
        and len(kept) == 3
    )


def test_a_silent_silo_is_one_line(tmp_path):
    sites = Sites(tmp_path)

    def prepare(grid):
        pull = grid.pull_messages

        def without(message_ids):
            kinds = {i: grid.sent.get(i) for i in message_ids}
            silent = {
                i
                for i, m in kinds.items()
                if m
                and m.metadata.message_type == KIND
                and grid.name_of(m.metadata.dst_node_id) == "b"
            }
            return pull([i for i in message_ids if i not in silent])

        grid.pull_messages = without

    sites.run(prepare, round_timeout=1)
    assert set(sites.kept()) == {"a", "c"} and notes(tmp_path / "run") == [
        "no model of b: no reply in time"
    ]


# ---- Resume ----------------------------------------------------------------------------------------------------------


@some(
    "at", ["train 2", "evaluate 3", f"{KIND} 3", "after"], {"train 2", f"{KIND} 3"}.__contains__
)
def test_a_run_that_was_killed_has_the_models_of_one_that_was_not(tmp_path, at):
    """Before the closing exchange, in it, as the models leave (b's has, c's has not), and after all."""
    whole, sites = Sites(tmp_path / "whole"), Sites(tmp_path / "killed")
    whole.run()

    def prepare(grid):
        def before(silo, message, context):
            if (
                silo == "c"
                and at == f"{message.metadata.message_type} {config_of(message).get('round')}"
            ):
                raise KeyboardInterrupt

        grid.before = before

    if at == "after":
        sites.run()
    else:
        with pytest.raises(KeyboardInterrupt):
            sites.run(prepare)
    sites.run(resume=True)
    for silo, kept in whole.kept().items():
        assert (
            same(kept.arrays[OWN], sites.kept()[silo].arrays[OWN])
            and kept.numbers == sites.kept()[silo].numbers
        )


def test_a_run_whose_models_have_left_trains_no_further(tmp_path):
    """Server and silos both say so; the same in a simulation."""
    sites = Sites(tmp_path)
    sites.run()
    with pytest.raises(
        UserError,
        match=r"silos' own models have left at the end of this run .*: start a new one",
    ):
        sites.run(resume=True, rounds=3)
    for file in (tmp_path / "run/checkpoint").glob(f"*/{FOLDER}/*/{FILE}"):
        file.unlink()  # a server that hides it
    with pytest.raises(
        Exception,
        match=r"own model has left in this run \(keep-models\), which trains no further here",
    ):
        sites.run(resume=True, rounds=3)
    given = {**KEEP, "out": tmp_path / "simulated", "dataset": sites.files["a"], "silos": 2}
    small_study(**given)
    with pytest.raises(UserError, match="own models have left at the end"):
        small_study(**{**given, "rounds": 3, "resume": True})
    with pytest.raises(UserError, match="was run with keep-models = 'reported', not 'none'"):
        small_study(**{**given, "keep_models": "none", "resume": True})


def test_a_withdrawn_hospital_takes_its_model_along(tmp_path):
    sites = Sites(tmp_path)
    sites.run()
    assert withdraw("b", [tmp_path / "run"]) and set(sites.kept()) == {"a", "c"}
    assert not list((tmp_path / "run").rglob(f"{FOLDER}/b"))


# ---- What the hospital sees of it ------------------------------------------------------------------------------------


def test_the_audit_log_and_what_left_ever(tmp_path):
    """A line of its own with the array's shape and SHA-256; counted in the record as an own model."""
    sites = Sites(tmp_path)
    sites.policies["b"].write_text("")
    sites.run(audited)
    entries = {
        silo: audit.verify_log(tmp_path / "states" / silo / "audit").entries for silo in "ab"
    }
    last = entries["a"][-1]
    assert (last["asked"], last["round"], last["method"]) == (OWN_MODEL, 3, "ditto")
    (array,) = [one for one in last["sent"] if "shape" in one]
    assert (array["name"], array["shape"]) == (f"model.{OWN}/vector", [12])
    assert (
        entries["a"][0]["rules"]["own-model"] is True
        and "own-model = false" in entries["b"][-1]["sent"][0]["text"]
    )
    (found,) = read_released(tmp_path / "states/a").values()
    assert (found["models"], found["own_models"], found["surveys"]) == (2, 1, 0)
    (other,) = read_released(tmp_path / "states/b").values()
    assert (other["models"], other["own_models"]) == (2, 0)
    assert "2 and 1 own models" in released_page([{"cohort": "", **found}])
    assert f"1 x model.{OWN}/vector float32 (12,), {array['bytes']} bytes" in page(
        entries["a"], last["time"][:7]
    )


def test_the_policy_page_says_what_it_means():
    (stays, leaves, alone) = (
        next(
            line
            for line in policy_page(policy, methods=True).splitlines()
            if line.startswith("  own model")
        )
        for policy in (Policy(), Policy(own_model=True, peers=True), Policy(own_model=True))
    )
    assert "stays: its policy has own-model = false" in stays
    assert "leaves, with all its layers, to the server and goes to other hospitals" in leaves
    assert "no evaluation of it is answered here (peers = false)" in alone
    private = Policy(own_model=True, require_dp=True)
    assert "stays: the run has dp = true" in policy_page(private, methods=True)
    assert KIND == OWN_MODEL  # the site's own process knows no strategies


def test_a_study_has_to_name_it():
    """Else the run is outside of it; within it the question comes behind the last round, and counts."""
    values = {"strategy": "ditto", "rounds": 2}
    plain = parse_study(draft("s", values, texts=TEXTS, end=None, apps=["0" * 64]), "f")
    named = parse_study(
        draft(
            "s", {**values, "keep-models": "reported"}, texts=TEXTS, end=None, apps=["0" * 64]
        ),
        "f",
    )
    run = parse_settings({**values, "keep-models": "reported", "study": "s"}).flat()
    sent = {"round": 3, "participants": 3}
    outside = message_faults(plain, run, "evaluate", sent, (), plain.start)
    assert outside == ["the study s has keep-models = none, the run 'reported'"]
    assert message_faults(named, run, "evaluate", sent, (), named.start) == []
    assert message_faults(named, run, "evaluate", {**sent, "round": 2}, (), named.start)
    assert (plain.limits.evaluations, named.limits.evaluations) == (2, 3)
    assert not [line for line in dangers(plain, Policy()) if "keep-models" in line]
    (line,) = [line for line in dangers(named, Policy()) if "keep-models" in line]
    assert (
        "membership" in line
        and "each of 1 runs (your policy has own-model = false: it stays)" in line
    )
    assert "own model, whole. Can be inferred: class counts, membership, records." in " ".join(
        study_page(named, "").split()
    )
    assert "own model, whole" not in study_page(plain, "")


@pytest.mark.parametrize(
    "before",
    [{"keep_models": "none"}, {"keep_models": "none", "dp": True, "normalization": "none"}],
)
def test_a_run_that_did_not_say_so_gives_no_model_to_a_later_submission(tmp_path, before):
    """The server chooses the run's id, and so which state is loaded: what the state was trained under counts."""
    run = Sites(tmp_path, strategy="fedper", **before).run()
    closing, _ = asked(run, "evaluate")
    for best in (1, 2, 3):
        reply = ask(
            run,
            closing,
            kind=KIND,
            number=5,
            reported=best,
            run__keep_models="reported",
            run__dp=False,
        )
        assert re.search("was also trained without keep-models = reported", reason(reply))


def test_what_a_state_was_trained_under():
    state = State()
    note_terms(state, "A", "1", may_leave=True)
    note_terms(state, "A", "2", may_leave=True)  # resumed
    assert state.numbers == {TERMS: {"study": "A", "runs": ["1", "2"]}}
    for study, may_leave in (("B", True), ("A", False)):
        other = state.copy()
        note_terms(other, study, "2", may_leave=may_leave)
        other.numbers["round"] = 1
        note_terms(other, "A", "2", may_leave=True)  # too late
        assert TERMS not in other.numbers


def test_many_trainings_in_one_run_give_one_model_to_later_ones(tmp_path):
    """Red team: trainings under five ids in one run of Flower's, and a model of each in a run of its own."""
    run = Sites(tmp_path, "own-model = false\n").run()
    train, _ = asked(run, "train")
    asks, _ = asked(run)
    (tmp_path / "a.toml").write_text(ALLOWED)
    names = ["1" * 16, "2" * 16, "3" * 16]
    for k, name in enumerate(names):
        step = {"round": 1, "reported": 0, "run__learning_rate": 0.1 * (k + 1)}
        assert not ask(run, train, run_id=name, **step).has_error()
    taken = [
        reason(ask(run, asks, number=100 + k, run_id=name, reported=1))
        for k, name in enumerate(names)
    ]
    once = "a refuses: its own model leaves once per run, and another one of this run has left"
    assert taken == ["", once, once]


@pytest.mark.parametrize("rule", ["floor = 1000", "min-silos = 50"])
def test_what_holds_for_models_that_leave_holds_for_ones_own(tmp_path, rule):
    """Local sends nothing but its own model at the end, so a rule for uploads holds for it then, and only then."""
    assert (
        Sites(tmp_path / "none", f"{rule}\n", strategy="local", keep_models="none")
        .run()
        .federation.done
    )
    sites = Sites(tmp_path / "kept", f"{ALLOWED}{rule}\n", strategy="local")
    fails((UserError, RunFailedError), rule.partition(" ")[0], sites.run)
