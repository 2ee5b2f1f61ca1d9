"""MethodInfo's contract: a declared capability changes the result or is used, an undeclared one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import CASES, OPTIONS, typical
from failing import fails
from representatives import seldom
from tiny import federate, random_silos, same, settings_of
from two_layers import DEEP, replies_of

from partitions.common.errors import UserError
from strategies import strategies
from strategies.base import strategy
from strategies.base.info import MethodInfo
from strategies.base.settings import RULES
from strategies.base.state import BUFFERS
from strategies.base.strategy import PersonalizedStrategy

# One silo: no mean, no joint step
METHODS = [name for name, method in strategies().items() if not method.info.role.pooled]
# A method that takes no mean ignores both; each rule's numbers: test_robust.py
FEW_RULES = ("median", "krum")
LONGER = {"fedlama": 3, "lg-fedavg": 3}  # rounds before something is averaged


@pytest.fixture
def five(tmp_path):
    """Five silos, the fewest among which every rule identifies one attacker."""
    return random_silos(tmp_path, [6, 11, 8, 7, 9])


@pytest.fixture
def undeclared():
    """A method that declares no capability and is FedAvg otherwise."""
    before = dict(strategy._REGISTRY)

    class Undeclared(PersonalizedStrategy):
        info = MethodInfo(name="undeclared", title="None", paper="nobody's")

    yield Undeclared.info.name
    strategy._REGISTRY.clear()
    strategy._REGISTRY.update(before)


def options(name, **changes):
    return {**DEEP, **OPTIONS, **CASES[name][0], "rounds": LONGER.get(name, 2), **changes}


def differ(one, other, files):
    """Whether the server's states or the personal models of both runs differ."""
    arrays = one.held, other.held
    kept = all(
        name in arrays[1] and same(vector, arrays[1][name])
        for name, vector in arrays[0].items()
    )
    return not kept or not all(same(one.personal(silo), other.personal(silo)) for silo in files)


@typical([n for n in METHODS if strategies()[n].info.aggregation.robust])
@pytest.mark.parametrize("rules", [FEW_RULES, seldom(RULES)], ids=["few", "all"])
def test_a_declared_robust_rule_changes_the_result(five, name, rules, tiny_bn):
    # The server's state shows it after the first
    few = options(name, evaluate_every=0, rounds=LONGER.get(name, 1))
    plain = federate(five, **few)
    declared = [rule for rule in strategies()[name].info.aggregation.robust if rule in rules]
    assert declared
    for rule in declared:
        run = federate(five, **few, robust=rule, robust_attackers=1)
        assert differ(plain, run, five), rule


@pytest.mark.parametrize(
    "name", [n for n in METHODS if strategies()[n].info.receives != "nothing"]
)
def test_an_undeclared_robust_rule_is_refused(five, name, tiny_bn):
    for rule in set(RULES) - set(strategies()[name].info.aggregation.robust):
        with pytest.raises(UserError, match=rf"^robust = {rule}: {name} takes no mean [^\n]*$"):
            settings_of(five, **options(name, robust=rule, robust_attackers=1))


@typical(METHODS)
def test_a_lossy_codec_changes_the_result_or_is_refused(three, name, tiny_bn):
    info, lossy = strategies()[name].info, options(name, wire_dtype="topk", wire_topk=0.2)
    if info.aggregation.lossy:
        assert differ(federate(three, **options(name)), federate(three, **lossy), three)
    elif info.uploads:
        with pytest.raises(UserError, match=rf"^wire-dtype = topk: not for {name}: [^\n]*$"):
            settings_of(three, **lossy)


@typical(METHODS)
def test_batch_norm_statistics_travel_where_the_method_declares_it(three, name, tiny_bn):
    """With ``buffers = local``, and in a method of which they are part, they stay."""
    extra: dict[str, Any] = {"lg-fedavg.pretrain": 1} if name == "lg-fedavg" else {}
    if name == "fedex-lora":
        extra["trainable"] = "head,norm.*"  # else they are frozen
    for way in ("shared", "local"):
        network = CASES[name][0].get("model", "tiny-bn")
        run = federate(three, **options(name, model=network, buffers=way, **extra))
        travel = any(BUFFERS in payload.models for _, _, payload, _ in replies_of(run))
        assert travel == (way == strategies()[name].info.training.buffers == "shared"), way


def test_ala_is_for_those_that_declare_it(three):
    """That it changes each of these is in tests/strategies/test_ala.py."""
    for name in METHODS:
        if not strategies()[name].info.training.ala:
            fails(
                UserError, r"^ala = true: [^\n]*$", settings_of, three, strategy=name, ala=True
            )


def test_a_method_that_declares_nothing_gets_nothing(five, undeclared, tiny_bn):
    """Before, a method without a mean took ``robust = median`` and ignored it."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        *(
            ({"robust": r, "robust_attackers": 1}, f"robust = {r}: undeclared takes no mean")
            for r in RULES
        ),
        (
            {"wire_dtype": "int8"},
            "wire-dtype = int8: not for undeclared: its MethodInfo does not declare `lossy`",
        ),
        ({"ala": True}, "ala = true: undeclared has no received model"),
        ({"dp": True}, "dp = true: not with undeclared: its MethodInfo does not declare `dp`"),
        (
            {"hold_out": "e"},
            "hold-out = e: undeclared does not declare it (MethodInfo.newcomer)",
        ),
        (
            {"late_joiners": "e=2"},
            "late-joiners = e=2: not with undeclared: its MethodInfo does not declare `late`",
        ),
    )
    for given, message in cases:
        said = fails(UserError, None, settings_of, five, strategy=undeclared, **given)
        assert said.startswith(message)
    with pytest.raises(
        UserError,
        match=r"^buffers = shared: undeclared does not declare [^\n]*buffers = local keeps",
    ):
        federate(five, undeclared, rounds=1, model="tiny-bn")
    federate(five, undeclared, rounds=1, model="tiny-bn", buffers="local")
    assert torch.isfinite(federate(five, undeclared, rounds=1, **DEEP).personal("a")).all()
