"""The hospital's policy: what its file may say, what holds without one, and that nothing a run says gets around it."""

from __future__ import annotations

import ast
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from failing import fails
from gates import count_message

from client.policies import policy_at, policy_page
from client.protocol import policy as site_policy
from client.protocol.methods import METHODS, SETTINGS
from client.protocol.policy import (
    Policy,
    PolicyRefusedError,
    Rules,
    default_file,
    parse_policy,
    policy_of,
    read_policy,
)
from client.site.runtime.doctor import policy_check
from client.site.trust.bundle import POLICY_ASKED
from client.site.trust.message_rules import method_faults, run_faults, setting_faults
from client.studies import silo_at
from partitions.common.settings import KINDS, keys_of
from server.cli.main import main
from strategies import strategies
from strategies.base.declarations import method_table_text
from strategies.base.run_settings import defaults, owners
from strategies.base.settings import Common, setting

ROOT = Path(__file__).parents[3]
RUN = {**defaults(), "strategy": "fedavg"}


def policy(**rules):
    return Policy(**rules)


# ---- The file --------------------------------------------------------------------------------------------------------


def test_the_default_file_says_the_defaults():
    assert parse_policy(default_file(), "f") == Policy(where="f")
    assert parse_policy("", "f") == Policy(where="f")


def test_defaults_are_safe():
    """What a data officer who has written no file can rely on."""
    p = Policy()
    assert not p.peers and not p.own_model and not p.class_means and not p.public
    assert (p.min_metric_samples, p.min_silos, p.floor, p.min_sum_samples) == (10, 3, 10, 50)
    assert (p.min_batch_size, p.max_local_epochs, p.runs_per_day) == (8, 20, 20)
    assert (p.max_mixing_epochs, p.max_inner_steps, p.max_decay) == (100, 20, 0.1)
    assert (p.max_rounds, p.max_evaluations, p.max_messages, p.metrics) == (
        200,
        50,
        500,
        ("loss", "score"),
    )


BAD = {
    "unknown": (
        "peer = true",
        r"'peer' is no key of it \(did you mean 'peers'\?\); `silofl policy` prints all rules",
    ),
    "python's name of a rule": (
        "max_rounds = 3",
        r"'max_rounds' is no key of it \(did you mean 'max-rounds'",
    ),
    "public by its own word": ('where = "public"', r"'where' is no key of it"),
    "no toml": ("peers: true", r"is no TOML .* a rule is a line such as peers = false"),
    "a text for a truth": ('peers = "false"', r"peers = 'false': must be true or false"),
    "a number for a truth": ("sums = 0", r"sums = 0: must be true or false"),
    "a truth for a number": ("floor = true", r"floor = True: must be a valid integer"),
    "no floor": ("floor = 0", r"floor = 0: must be greater than or equal to 1"),
    "more than any": (
        "max-rounds = 2147483649",
        r"max-rounds = 2147483649: must be less than or equal to 2147483648",
    ),
    "a truth for a broken number": (
        "max-decay = true",
        r"max-decay = True: must be a valid number",
    ),
    "no number": ("max-decay = nan", r"max-decay = nan: must be a finite number"),
    "a number without end": ("max-decay = inf", r"max-decay = inf: must be a finite number"),
    "a delta that protects nobody": (
        "delta = 0.5",
        r"delta = 0.5: must be less than or equal to 0.01",
    ),
    "a broken number": ("min-silos = 2.5", r"min-silos = 2.5: must be a valid integer"),
    "a method that is none": (
        'methods = ["fedavgg"]',
        r"methods.1 = 'fedavgg': must be one of all,",
    ),
    "a text for a list": ('methods = "fedavg"', r"methods = 'fedavg': must be a list"),
    "a metric that is none": (
        'metrics = ["f1"]',
        r"metrics.1 = 'f1': must be one of loss, accuracy",
    ),
    "another word": (
        'studies = "always"',
        r"studies = 'always': must be 'required' or 'optional'",
    ),
    "no module": (
        'networks = ["a b"]',
        r"networks.1 = 'a b': must be a module, \"app\" or \"all\"",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_policy_is_one_line(case, tmp_path):
    """And what is no policy allows nothing: reading it raises, wherever it is read."""
    text, reason = BAD[case]
    file = tmp_path / "policy.toml"
    file.write_text(text)
    for read in (
        lambda: read_policy(str(file)),
        lambda: policy_of({"policy": str(file)}),
        lambda: policy_at(file),
    ):
        fails(ValueError, reason, read)
    check = policy_check(str(file))
    assert not check.ok and check.fix and "\n" not in check.detail


def test_a_file_that_is_named_and_not_there_is_no_default(tmp_path):
    with pytest.raises(
        ValueError, match="No such file or directory; write the policy there: without it"
    ):
        read_policy(str(tmp_path / "policy.toml"))
    assert not policy_check(str(tmp_path / "policy.toml")).ok
    assert policy_check("").ok and "peers = false" in policy_check("").detail
    assert policy_check("").detail.endswith("; `silofl policy` prints all")


def test_the_silos_own_environment_names_it(tmp_path, monkeypatch):
    file = tmp_path / "policy.toml"
    file.write_text("floor = 77\n")
    monkeypatch.setenv("SILOFL_POLICY", str(file))
    assert policy_of({}).floor == 77 and policy_of({"policy": "public"}).public
    monkeypatch.delenv("SILOFL_POLICY")
    assert policy_of({}) == Policy()


# ---- What each method sends ------------------------------------------------------------------------------------------


def test_the_table_is_what_the_methods_declare():
    assert (ROOT / "client/protocol/methods.json").read_text() == method_table_text(), (
        "run: make settings"
    )


def test_declared_settings_are_the_methods_own():
    for name, strategy in strategies().items():
        if not isinstance(strategy.info.whole, bool):
            keys = keys_of(strategy.Settings, name)
            assert all(f"{name}.{key}" in keys for key in strategy.info.whole), name


MEANS = ("fedproto", "fedpac", "fedgh", "fedmlp", "gh-ofl", "pfedfda")


def test_which_rules_the_kinds_of_what_is_sent_need():
    """Where a method sends nothing of such a kind, no rule refuses it, and `approve` warns of nothing."""
    needed = {name: set(known.get("rules", ())) for name, known in METHODS.items()}
    assert {name: rules for name, rules in needed.items() if rules} == {
        **{name: {"peers"} for name in ("apple", "fedfomo")},
        **{name: {"class_means"} for name in MEANS},
        "fedrdn": {"sums", "peers"},
    }
    assert {name for name, known in METHODS.items() if known.get("dangers")} == {
        name for name, rules in needed.items() if rules
    }
    assert {name for name, known in METHODS.items() if known.get("silent")} == {
        "evaluate",
        "local",
        "survey",
    }


def test_a_method_that_the_site_does_not_know_is_refused():
    assert method_faults(Policy(), "fednew", RUN) == [
        "its policy knows no method 'fednew': a newer silofl at this site may"
    ]
    assert not method_faults(read_policy("public"), "fednew", RUN)


@pytest.mark.parametrize("owner", ["", *owners()])
def test_whatever_says_how_many_epochs_steps_or_rounds_is_declared(owner):
    """A new setting of this kind that is not declared fails here, and at a site whose table lacks it."""
    for key, f in keys_of(owners()[owner] if owner else Common, owner).items():
        if (
            isinstance(f.default, int)
            and not isinstance(f.default, bool)
            and site_policy.AMOUNT.search(key)
        ):
            assert f.metadata["kind"] in site_policy.LIMITS, key


def test_a_kind_that_is_none_is_refused():
    with pytest.raises(
        ValueError, match="kind = 'epoch': one of epochs, local-steps, mixing-epochs"
    ):
        setting(1, "a setting", kind="epoch")
    assert set(SETTINGS.values()) == set(KINDS)


def test_batches_are_drawn_in_one_place():
    """So that no method trains with a batch of fewer patients than the policy allows."""

    def names(file):
        imports = [
            n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        return {f"{n.module}.{name.name}" for n in imports for name in n.names}

    drawing = [
        f.name
        for f in (ROOT / "strategies").rglob("*.py")
        if "models.training.batches" in names(f)
    ]
    # FedGH's server draws batches of the pairs that silos sent
    assert drawing == ["fedgh.py", "silo.py"]


# ---- A server that chooses every setting -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [1000, "1000", 1e3, "1e3", " 1000 ", math.inf, math.nan, "nan", True, None, "many", []],
)
def test_epochs_in_whatever_form(given):
    """A number as text is a number to the app; what is none is refused here, whatever the app makes of it."""
    assert run_faults(Policy(), {**RUN, "local-epochs": given}) == [
        f"its policy has max-local-epochs = 20, the run local-epochs = {given}"
    ]


LIMITED = [key for key, kind in SETTINGS.items() if kind in site_policy.LIMITS]


@pytest.mark.parametrize("key", LIMITED)
@pytest.mark.parametrize("given", [2000, "2e3", math.nan, "many", None])
def test_all_epochs_steps_and_rounds(key, given):
    """`fedalt.shared-epochs = 2000` once passed `max-local-epochs = 1`."""
    method = key.rpartition(".")[0] or "fedavg"
    rule = policy(max_local_epochs=20).line(site_policy.LIMITS[SETTINGS[key]])
    run = {**RUN, "strategy": method, "hold-out": "clinic"}
    assert not setting_faults(policy(max_local_epochs=20), run)
    assert setting_faults(policy(max_local_epochs=20), {**run, key: given}) == [
        f"its policy has {rule}, the run {key} = {given}"
    ]


def test_a_run_without_held_out_hospitals_trains_none_of_their_epochs():
    """`hold-out-epochs` is 5 by default: `max-local-epochs = 1` once refused every run."""
    assert not run_faults(policy(max_local_epochs=1), RUN)
    assert run_faults(policy(max_local_epochs=1), {**RUN, "hold-out": "clinic"}) == [
        "its policy has max-local-epochs = 1, the run hold-out-epochs = 5"
    ]


def test_a_setting_that_the_run_does_not_send_has_its_default():
    run = {key: value for key, value in RUN.items() if key != "fedrep.head-epochs"} | {
        "strategy": "fedrep"
    }
    assert run_faults(policy(max_local_epochs=5), run) == [
        "its policy has max-local-epochs = 5, the run fedrep.head-epochs = 10"
    ]


def test_settings_of_other_methods_do_not_count():
    assert not run_faults(policy(max_local_epochs=5), {**RUN, "fedrep.head-epochs": 2000})
    # Ten, by default
    assert len(run_faults(policy(max_local_epochs=5), {**RUN, "strategy": "fedrep"})) == 1


@pytest.mark.parametrize("ala", [True, "true", "True", "yes", 1])
def test_a_method_that_a_setting_adds_counts(ala):
    run = {**RUN, "fedala.max-epochs": 101}
    assert not run_faults(Policy(), {**run, "ala": "false"})
    assert run_faults(Policy(), {**run, "ala": ala}) == [
        "its policy has max-mixing-epochs = 100, the run fedala.max-epochs = 101"
    ]


@pytest.mark.parametrize("key", ["fedavg.tail-epochs", "warm-up-steps", "fedavg.rounds"])
def test_an_amount_that_no_rule_knows_is_refused(key):
    """Of a newer app, or one of the consortium's own: nobody here can say what it may be."""
    (fault,) = run_faults(Policy(), {**RUN, key: 1})
    assert fault.startswith(f"its policy knows no setting {key!r}")
    assert not run_faults(Policy(), {**RUN, key: True}) and not run_faults(
        Policy(), {**RUN, f"other.{key}": 1}
    )


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        (
            "fedavg",
            {"learning-rate": 1.0, "weight-decay": "1"},
            "learning-rate x weight-decay = 1",
        ),
        (
            "fedavg",
            {"learning-rate": "0.1", "weight-decay": 10},
            "learning-rate x weight-decay = 1",
        ),
        (
            "fedavg",
            {"learning-rate": math.nan, "weight-decay": 0.001},
            "learning-rate x weight-decay = inf",
        ),
        (
            "fedavg",
            {"learning-rate": -1.0, "weight-decay": 1.0},
            "learning-rate x weight-decay = -1",
        ),
        ("fedavg", {"weight-decay": None}, "learning-rate x weight-decay = inf"),
        ("fedprox", {"fedprox.mu": 20}, "learning-rate x fedprox.mu = 1"),
        ("fedamp", {"fedamp.step": 0.05}, "learning-rate x fedamp.lambda = 1"),
        ("fedamp", {"weight-decay": 20}, "learning-rate x weight-decay = 1"),
        (
            "pfedme",
            {"pfedme.personal-learning-rate": 1e3},
            "pfedme.personal-learning-rate x pfedme.mu = 1",
        ),
        ("fedpac", {"weight-decay": 10}, "fedpac.head-learning-rate x weight-decay = 1"),
    ],
)
def test_a_step_that_replaces_the_model(method, changes, said):
    (fault,) = setting_faults(Policy(), {**RUN, "strategy": method, **changes})
    assert fault == f"its policy has max-decay = 0.1, the run {said}"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_default_settings_of_every_method_are_within_the_default_rules(method):
    assert not setting_faults(Policy(), {**RUN, "strategy": method})


@pytest.mark.parametrize("given", [1, "1", 7.0, "-64", 0, False, math.nan])
def test_batches_in_whatever_form(given):
    assert len(run_faults(Policy(), {**RUN, "batch-size": given})) == 1


def test_what_the_rules_allow():
    assert not run_faults(Policy(), RUN)
    assert not run_faults(Policy(), {**RUN, "local-epochs": "20", "batch-size": 8})
    one = policy(methods=("fedavg",))
    assert not run_faults(one, RUN)
    assert run_faults(one, {**RUN, "strategy": "fedprox"}) == [
        'its policy has methods = ["fedavg"], the run strategy = fedprox'
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"fedrep.personal": "none"},
        {"fedrep.personal": " none "},
        {"fedrep.personal": ""},
        {"fedrep.personal": " , "},
        {"fedrep.layers": 0},
        {"fedrep.layers": "0"},
        {"fedrep.layers": "0e3"},
        {"fedrep.layers": 0.0},
        {"fedrep.layers": None},
    ],
    ids=str,
)
def test_a_partial_method_that_is_set_to_send_all(changes):
    strict = policy(whole_model=False)
    run = {**RUN, "strategy": "fedrep"}
    assert not method_faults(strict, "fedrep", run)
    (fault,) = method_faults(strict, "fedrep", {**run, **changes})
    assert fault.startswith(
        "its policy has whole-model = false, the run strategy = fedrep with fedrep."
    )
    assert method_faults(strict, "fedavg", RUN) and not method_faults(strict, "local", RUN)


def counted(rules, state, run, silo="a", kind="query", day="2026-01-01"):
    """Why a message may not be answered; empty: it is counted."""
    try:
        count_message(rules, None, state, run, silo, kind, day)
    except PolicyRefusedError as error:
        return str(error)
    return ""


def test_runs_are_counted_by_the_day(tmp_path):
    """A run counts once, however many messages it has."""
    two, state = policy(runs_per_day=2), tmp_path / "state"
    assert not any(counted(two, state, run) for run in ("11", "12", "11", "12"))
    assert "runs-per-day = 2, and this is run 3 of 2026-01-01" in counted(two, state, "13")
    assert not counted(two, state, "13", day="2026-01-02")
    assert "no state-dir" in counted(two, None, "1")
    (tmp_path / "file").touch()
    assert "cannot be counted" in counted(two, tmp_path / "file", "1")


def test_messages_are_counted_where_their_process_is_killed(tmp_path):
    """A message counts before it is answered."""
    two = policy(max_rounds=2, max_messages=4)
    child = os.fork()
    if not child:
        counted(two, tmp_path, "11", "a", "train")
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not counted(two, tmp_path, "11", "a", "train")
    assert "max-rounds = 2, and this is number 3 of run 11" in counted(
        two, tmp_path, "11", "a", "train"
    )
    assert not counted(two, tmp_path, "11", "a", "query") and not counted(
        two, tmp_path, "11", "a", "query"
    )
    assert "max-messages = 4, and this is number 5" in counted(
        two, tmp_path, "11", "a", "query"
    )
    assert not counted(two, tmp_path, "11", "b", "train") and not counted(
        two, tmp_path, "12", "a", "train"
    )
    assert "no state-dir" in counted(two, None, "1", "a", "query")


# ---- What is printed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "warning"),
    [
        ({"require_dp": True}, "WARNING: require-dp alone bounds nothing"),
        ({"epsilon": 100.0}, "WARNING: epsilon = 100 is hardly a promise"),
        ({"epsilon": 3.0, "require_dp": True}, ""),
    ],
)
def test_the_page_warns_of_privacy_that_is_none(rules, warning):
    page = policy_page(policy(**rules))
    assert warning in page and page.count("WARNING") == bool(warning)
    assert "Seconds, and no metrics, leave with every method" in page


def test_the_page_has_every_rule_and_every_method():
    short = policy_page(Policy())
    assert all(f"  {Policy().line(name)} " in short for name in Rules.model_fields)
    assert len(short.splitlines()) < 50 and re.search("^Refused: apple, ", short, re.M)
    assert {*re.findall(r"[a-z][a-z-]+", short)} >= set(strategies())
    page = policy_page(Policy(), methods=True)
    lines = {line.split()[0]: line for line in page.splitlines() if line.startswith("  ")}
    assert set(strategies()) <= set(lines)
    assert "refused: its policy has peers = false" in lines["apple"]
    assert "Σ; may be all layers" in lines["fedavg"] and "never all layers" in lines["fedrep"]
    assert "nothing but metrics" in lines["local"]
    assert "d; counts as all layers from 1% of their numbers on" in lines["lp-proj"]
    assert "that the run's settings name by SHA-256" in lines["evaluate"]
    assert (
        f"(loss, score, over at least {Policy().min_metric_samples} patients)"
        in lines["evaluate"]
    )

    def methods(rules: Policy) -> str:
        return policy_page(rules, methods=True)

    assert "  evaluate          refused: " in methods(policy(methods=("fedavg",)))
    assert "handed to other hospitals under this one's name" in methods(policy(peers=True))
    assert "refused" not in methods(read_policy("public"))
    assert "fedrep.head-epochs = 10" in methods(policy(max_local_epochs=5))


def test_the_policy_needs_nothing_but_the_standard_library():
    """It runs where the name `client` must stay free for the app's own package."""
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'client/protocol')!r}); import private; sys.path.pop(0);"
        "private.load_site(); import silofl_site.site.gate as p; p.check_message;"
        "bad = {'client', 'numpy', 'torch', 'flwr', 'strategies'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# ---- Which policy is printed -----------------------------------------------------------------------------------------


def test_policy_and_budget_find_the_silo_that_joined_from_here(tmp_path, monkeypatch, capsys):
    """As `silofl audit` does; and it says so where there is none, or more than one."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("SILOFL_NAME", "SILOFL_POLICY"):
        monkeypatch.delenv(name, raising=False)

    def printed(*command):
        code = main(command)
        out, err = capsys.readouterr()
        return out if code == 0 else err

    assert printed("policy").startswith(
        "silofl's defaults, for no silo has joined from this machine:\n"
    )
    north = tmp_path / "silofl-site/north"
    (north / "state").mkdir(parents=True)
    (north / "policy.toml").write_text("peers = true\n")
    assert printed("policy").startswith(f"{north}/policy.toml:\n")
    asked = tmp_path / "ours.toml"
    asked.write_text("max-rounds = 7\n")
    (north / POLICY_ASKED).write_text(str(asked))
    assert printed("policy").startswith(f"{asked}:\n") and silo_at(None).policy.max_rounds == 7
    assert printed("budget").startswith("north: ")
    (tmp_path / "silofl-site/south/state").mkdir(parents=True)
    for command in ("policy", "budget", "audit"):
        assert "of silos that joined from this machine, these have: north, south" in printed(
            command
        )
