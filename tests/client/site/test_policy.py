"""The hospital's policy: what its file may say, what holds without one, and that nothing a run says gets around it."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import models.tasks
from client.policies import policy_at, policy_page
from client.site import policy as site_policy
from client.site.doctor import policy_check
from client.site.methods import METHODS
from client.site.policy import (
    Policy,
    count_run,
    default_file,
    method_faults,
    parse_policy,
    policy_of,
    read_policy,
    rules,
    run_faults,
)
from strategies import strategies
from strategies.base.run_settings import defaults, facts, facts_text
from strategies.base.settings import keys_of

ROOT = Path(__file__).parents[3]
RUN: dict[str, Any] = {**defaults(), "strategy": "fedavg"}


def policy(**rules: Any) -> Policy:
    return Policy(**rules)


# ---- The file --------------------------------------------------------------------------------------------------------


def test_the_default_file_says_the_defaults() -> None:
    assert parse_policy(default_file(), "f") == Policy(where="f")
    assert parse_policy("", "f") == Policy(where="f")


def test_defaults_are_safe() -> None:
    """What a data officer who has written no file can rely on."""
    p = Policy()
    assert not p.peers and not p.class_means and not p.public
    assert (p.min_metric_samples, p.min_silos, p.floor, p.min_sum_samples) == (10, 3, 10, 50)
    assert (p.min_batch_size, p.max_local_epochs, p.runs_per_day) == (8, 20, 20)


BAD = {
    "unknown": ("peer = true", r"'peer' is no rule; the rules are methods, whole-model, networks, peers"),
    "no toml": ("peers: true", r"is no TOML .* a rule is a line such as peers = false"),
    "a text for a truth": ('peers = "false"', r"peers = 'false': true or false is wanted here"),
    "a number for a truth": ("sums = 0", r"sums = 0: true or false is wanted here"),
    "a truth for a number": ("floor = true", r"floor = True: a whole number of at least 1 is wanted here"),
    "no floor": ("floor = 0", r"floor = 0: a whole number of at least 1"),
    "a broken number": ("min-silos = 2.5", r"min-silos = 2.5: a whole number of at least 1"),
    "a method that is none": (
        'methods = ["fedavgg"]',
        r"methods = \['fedavgg'\]: a list of these is wanted here: all,",
    ),
    "a text for a list": ('methods = "fedavg"', r"methods = 'fedavg': a list"),
    "a metric that is none": ('metrics = ["f1"]', r"a list of these is wanted here: loss, accuracy, balanced_accuracy"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_policy_is_one_line(case: str, tmp_path: Path) -> None:
    """And what is no policy allows nothing: reading it raises, wherever it is read."""
    text, reason = BAD[case]
    file = tmp_path / "policy.toml"
    file.write_text(text)
    for read in (lambda: read_policy(str(file)), lambda: policy_of({"policy": str(file)}), lambda: policy_at(file)):
        with pytest.raises(ValueError, match=reason) as caught:
            read()
        assert "\n" not in str(caught.value)
    check = policy_check(str(file))
    assert not check.ok and check.fix and "\n" not in check.detail


def test_a_file_that_is_named_and_not_there_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file or directory; write the policy there: without it"):
        read_policy(str(tmp_path / "policy.toml"))
    assert not policy_check(str(tmp_path / "policy.toml")).ok
    assert policy_check("").ok and "peers = false" in policy_check("").detail


def test_the_silos_own_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "policy.toml"
    file.write_text("floor = 77\n")
    monkeypatch.setenv("SILOFL_POLICY", str(file))
    assert policy_of({}).floor == 77 and policy_of({"policy": "public"}).public
    monkeypatch.delenv("SILOFL_POLICY")
    assert policy_of({}) == Policy()


# ---- What each method sends ------------------------------------------------------------------------------------------


def test_the_table_is_what_the_methods_declare() -> None:
    assert facts() == METHODS
    assert (ROOT / "client/site/methods.py").read_text() == facts_text(), "run: make settings"


def test_declared_settings_are_the_methods_own() -> None:
    for name, strategy in strategies().items():
        if not isinstance(strategy.whole, bool):
            keys = keys_of(strategy.Settings, name)
            assert all(f"{name}.{key}" in keys for key in strategy.whole), name


def test_who_hands_models_to_peers_and_who_sends_means_of_classes() -> None:
    assert {name for name, known in METHODS.items() if known.get("peers")} == {"apple", "fedfomo"}
    assert {name for name, known in METHODS.items() if known.get("per_class")} == {"fedproto", "fedpac"}
    assert {name for name, known in METHODS.items() if not known.get("uploads")} == {"local"}


def test_a_method_that_the_site_does_not_know_is_refused() -> None:
    assert method_faults(Policy(), "fednew", RUN) == [
        "its policy knows no method 'fednew': a newer silofl at this site may"
    ]
    assert not method_faults(read_policy("public"), "fednew", RUN)


# ---- A server that chooses every setting -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [1000, "1000", 1e3, "1e3", " 1000 ", math.inf, math.nan, "nan", True, None, "many", []]
)
def test_epochs_in_whatever_form(given: Any) -> None:
    """A number as text is a number to the app; what is none is refused here, whatever the app makes of it."""
    assert run_faults(Policy(), {**RUN, "local-epochs": given}) == [
        f"its policy has max-local-epochs = 20, the run local-epochs = {given}"
    ]


@pytest.mark.parametrize("given", [1, "1", 7.0, "-64", 0, False, math.nan])
def test_batches_in_whatever_form(given: Any) -> None:
    assert len(run_faults(Policy(), {**RUN, "batch-size": given})) == 1


def test_what_the_rules_allow() -> None:
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
def test_a_partial_method_that_is_set_to_send_all(changes: dict[str, Any]) -> None:
    strict = policy(whole_model=False)
    run = {**RUN, "strategy": "fedrep"}
    assert not method_faults(strict, "fedrep", run)
    (fault,) = method_faults(strict, "fedrep", {**run, **changes})
    assert fault.startswith("its policy has whole-model = false, the run strategy = fedrep with fedrep.")
    assert method_faults(strict, "fedavg", RUN) and not method_faults(strict, "local", RUN)


def test_runs_are_counted_by_the_day(tmp_path: Path) -> None:
    """A run counts once, however many messages it has; what a crash cut off counts for nothing."""
    two, state = policy(runs_per_day=2), tmp_path / "state"
    assert not any(count_run(two, state, run) for run in ("11", "12", "11", "12"))
    assert "runs-per-day = 2, and this is run 3 of " in count_run(two, state, "13")
    file = state / "runs-by-day"
    assert file.stat().st_mode & 0o777 == 0o600 and len(file.read_text().splitlines()) == 2
    file.write_text(file.read_text().replace(file.read_text()[:4], "1999"))
    assert not count_run(two, state, "13")
    assert "no state-dir" in count_run(two, None, "1")
    (tmp_path / "file").touch()
    assert "cannot be counted" in count_run(two, tmp_path / "file", "1")


# ---- What is printed -------------------------------------------------------------------------------------------------


def test_the_page_has_every_rule_and_every_method() -> None:
    page = policy_page(Policy())
    assert all(f"  {Policy().says(f.name)} " in page for f in rules().values())
    lines = {line.split()[0]: line for line in page.splitlines() if line.startswith("  ")}
    assert set(strategies()) <= set(lines)
    assert "refused: its policy has peers = false" in lines["apple"]
    assert "Σ; may be all layers" in lines["fedavg"] and "never all layers" in lines["fedrep"]
    assert "nothing but metrics" in lines["local"]
    assert "handed to other hospitals under this one's name" in policy_page(policy(peers=True))
    assert "refused" not in policy_page(read_policy("public"))


def test_the_policy_needs_nothing_but_the_standard_library() -> None:
    """It runs where the name `client` must stay free for the app's own package."""
    code = (
        "import sys; sys.path.insert(0, 'client/site'); import private; private.load_site();"
        "import silofl_site.policy as p; p.check_message;"
        "bad = {'client', 'numpy', 'torch', 'flwr', 'strategies'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code.replace("'client/site'", repr(str(ROOT / "client/site")))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_its_metrics_are_those_that_there_are() -> None:
    """The process at the hospital imports nothing of the app's, so the list stands there a second time."""
    assert models.tasks.all_metrics() == site_policy.METRICS
