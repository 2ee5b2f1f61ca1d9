"""`silofl policy`: the rules of a hospital, and what each method would send under them, in words."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import wrap

from client.protocol.methods import EVIDENCE
from client.protocol.policy import RETIRED, Policy, Rules, parse_policy, read_policy
from client.site.trust.bundle import joined_silos, read_bundle
from client.site.trust.message_rules import (
    method_faults,
    own_model_faults,
    privacy_faults,
    sends_whole,
    setting_faults,
)
from client.studies import silo_at
from strategies import PersonalizedStrategy, strategies
from strategies.base.evaluation import EVALUATE
from strategies.base.info import MethodInfo
from strategies.base.run_settings import defaults
from strategies.base.survey import SURVEY


def policy_at(what: Path | None) -> Policy:
    """Return the policy of a bundle, its folder, or a file; None: of this container, or the silo that joined here."""
    if what is None:
        if os.environ.get("SILOFL_NAME") or os.environ.get("SILOFL_POLICY"):
            return read_policy(os.environ.get("SILOFL_POLICY", ""))
        if not joined_silos():
            return Policy(where="silofl's defaults, for no silo has joined from this machine")
        return silo_at(None).policy
    if what.suffix == ".tar" or what.is_dir():
        text = read_bundle(what).get("policy.toml")
        return (
            Policy()
            if text is None
            else parse_policy(text.decode(errors="replace"), f"{what}/policy.toml")
        )
    return read_policy(str(what))


def policy_page(policy: Policy, *, methods: bool = False) -> str:
    """Return the page with the rules and the allowed methods; with ``methods``, with what each would send."""
    lines = [f"{policy.where}:", ""]
    width = max(len(policy.line(name)) for name in Rules.model_fields if name != "methods")
    lines += [
        f"  {policy.line(name):<{width}}  # {rule.description}"
        for name, rule in Rules.model_fields.items()
        if not methods
    ]
    lines += [
        f"\n  {key} is no rule any more: {RETIRED[key]}; remove the line"
        for key in policy.retired
    ]
    refused = {
        name: faults for name in sorted(strategies()) if (faults := _faults(policy, name))
    }
    if not methods:
        return "\n".join([*lines, "", *_methods(refused), "", footnote(policy)])
    lines += [
        "What each method sends from here in a round, with its default settings (Σ: a whole model):",
        "",
    ]
    for name, strategy in sorted(strategies().items()):
        what = (
            f"refused: {refused[name][0]}"
            if name in refused
            else describe_sent(name, strategy, defaults())
        )
        lines += [f"  {name:<16}  {what}", f"  {'':<16}  {with_privacy(strategy.info)}"]
    lines += [
        "",
        "At the end of a run with keep-models = reported, once, and it trains no further here:",
        "",
        f"  {'own model':<16}  {describe_own_model(policy)}",
        "",
        "Without training:",
        "",
        f"  {EVALUATE:<16}  {describe_evaluation(policy)}",
        f"  {SURVEY:<16}  {describe_survey(policy)}",
    ]
    return "\n".join([*lines, "", footnote(policy)])


def _methods(refused: Collection[str]) -> Iterator[str]:
    """Yield the names of the allowed and of the refused methods, in lines of 100 characters."""
    allowed = [name for name in sorted(strategies()) if name not in refused]
    for title, names in (
        ("Allowed with their default settings", allowed),
        ("Refused", refused),
    ):
        line = f"{title}: {', '.join(names) or 'no method'}"
        yield from wrap(line, 100, break_on_hyphens=False)
    yield "silofl policy --methods prints what each would send, and why it is refused."


def _faults(policy: Policy, name: str) -> list[str]:
    """Return why the policy refuses a method with its default settings."""
    private = {"dp": policy.private_only, "dp.unit": policy.privacy_unit}
    settings = {**defaults(), **private, "strategy": name}
    return [
        *method_faults(policy, name, settings),
        *privacy_faults(policy, settings),
        *setting_faults(policy, settings),
    ]


def describe_own_model(policy: Policy) -> str:
    """Describe what leaves in a run that has silos send their own models."""
    run = {"keep-models": "reported", "rounds": 1, "dp": policy.private_only}
    if faults := own_model_faults(policy, run, {"round": 2}):
        return f"stays: {faults[0]}"
    whose = (
        "and goes to other hospitals"
        if policy.peers
        else "and no evaluation of it is answered here (peers = false)"
    )
    return f"leaves, with all its layers, to the server {whose}"


def describe_evaluation(policy: Policy) -> str:
    """Describe what leaves in a run that evaluates given models (``silofl evaluate``)."""
    if faults := method_faults(policy, EVALUATE, {**defaults(), "strategy": EVALUATE}):
        return f"refused: {faults[0]}"
    metrics = ", ".join(m for m in policy.metrics if m not in EVIDENCE) or "none"
    few = (
        "all"
        if policy.public
        else f"{metrics}, over at least {policy.min_metric_samples} patients"
    )
    whose = (
        "models that"
        if policy.peers
        else "models that are no silo's own (peers = false), and that"
    )
    return f"metrics of {whose} the run's settings name by SHA-256 ({few}); no model leaves, none is kept"


def describe_survey(policy: Policy) -> str:
    """Describe what leaves in a survey of the data (``silofl survey``)."""
    settings = {**defaults(), "strategy": SURVEY}
    if faults := [*method_faults(policy, SURVEY, settings), *privacy_faults(policy, settings)]:
        return f"refused: {faults[0]}"
    if policy.public:
        return "counts, means and deviations of each column, and class counts, as they are"
    sums = (
        f"mean and deviation over {policy.min_sum_samples} patients or more"
        if policy.sums
        else "no mean"
    )
    classes = "class counts too" if policy.class_means else "no class counts (class-means)"
    masks = (
        "refused under masks (secure-aggregation)"
        if policy.secure_aggregation == "off"
        else "under masks the same in a sum over hospitals, and then survival by time"
        + ("" if policy.class_means else ", which stays here (class-means)")
    )
    return (
        f"of each column counts of {policy.min_cell} patients or more, rounded; {sums}; {classes}; {masks}; "
        "no model"
    )


def describe_sent(
    name: str, strategy: type[PersonalizedStrategy], run: dict[str, bool | int | float | str]
) -> str:
    if not strategy.info.uploads:
        return "nothing but metrics"
    kinds = [*strategy.info.uploads.values()]
    share = min(kind.whole_from for kind in kinds)
    few = (
        "never all layers"
        if share == 1
        else f"counts as all layers from {share:.0%} of their numbers on"
    )
    words = [strategy.info.sends[1], "may be all layers" if sends_whole(name, run) else few]
    words += ["handed to other hospitals under this one's name"] * (
        strategy.info.receives == "models"
    )
    words += [kind.words for kind in kinds if kind.rules]
    words += [kind.words for kind in strategy.info.sends_numbers.values()]
    return "; ".join(words)


def with_privacy(info: MethodInfo) -> str:
    """Describe the effect of ``dp = true`` on what the method sends."""
    if not info.training.dp:
        return f"dp = true: not possible, {info.training.dp}"
    if info.training.dp == "nothing":
        return "dp = true: nothing of the data leaves"
    alone = (
        " A model that never leaves is trained without noise."
        if info.own_model == "kept"
        else ""
    )
    return f"dp = true: what leaves is made of clipped gradients with noise.{alone}"


WEAK = 10.0  # a larger epsilon hardly protects (docs/differential-privacy.md)


def footnote(policy: Policy) -> str:
    if policy.public:
        return "The data are public: nothing is held back."
    leaves = (
        "Seconds, and no metrics, leave" if policy.private_only else "Metrics and seconds leave"
    )
    return (
        f"{''.join(warnings(policy))}{leaves} with every method. The rules bind this site's own process and the app "
        "that it runs; what the server does with a model that it was given, no rule here can say."
    )


def warnings(policy: Policy) -> Iterator[str]:
    """Yield warnings about rules on differential privacy that protect less than they seem to."""
    if policy.require_dp and not policy.epsilon:
        yield "WARNING: require-dp alone bounds nothing: a run may ask for hardly any noise. Set epsilon.\n"
    if policy.epsilon > WEAK:
        yield f"WARNING: epsilon = {policy.epsilon:g} is hardly a promise: 1 is strong, 8 is weak.\n"
