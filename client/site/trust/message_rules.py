"""Checks that a run stays within the policy: its settings, its method, its round."""

import math
from collections.abc import Mapping
from typing import Any

from ...protocol.methods import DEFAULTS, METHODS, NETWORKS, SETTINGS
from ...protocol.ours import messages
from ...protocol.policy import AMOUNT, APP_NETWORKS, LIMITS, Policy
from ...protocol.run_settings import (
    is_private,
    is_secure,
    number,
    of_method,
    owner,
    to_plain,
    uploads,
)

OWN_MODEL = messages.OWN_MODEL_KIND
PASSES = "patches-per-volume"


def run_faults(policy: Policy, run: Mapping[str, Any]) -> list[str]:
    """Return which of a run's settings exceed the policy, with rule and setting."""
    faults = method_faults(policy, str(run.get("strategy")), run)
    faults += filter(None, [network_fault(policy, run), trainer_fault(policy, run)])
    batch = number(run.get("batch-size"))
    if batch is None or batch < policy.min_batch_size:
        faults.append(
            f"its policy has {policy.line('min_batch_size')}, the run batch-size = {run.get('batch-size')}"
        )
    faults += secure_faults(policy, run)
    return faults + privacy_faults(policy, run) + setting_faults(policy, run)


def secure_faults(policy: Policy, run: Mapping[str, Any]) -> list[str]:
    """Return why a run's vectors may not leave as they would: under masks, or without."""
    secure, rule = is_secure(run), policy.secure_aggregation
    if (secure and rule == "off") or (not secure and rule == "required" and uploads(run)):
        setting = f"the run secure-aggregation = {str(secure).lower()}"
        return [f"its policy has {policy.line('secure_aggregation')}, {setting}"]
    group = number(run.get("secure-group")) or 1
    if secure and group < policy.secure_group:
        return [
            f"its policy has {policy.line('secure_group')}, the run secure-group = {group:g}"
        ]
    return []


def privacy_faults(policy: Policy, run: Mapping[str, Any]) -> list[str]:
    """Return where a run's differential privacy is weaker than the policy requires."""
    faults, method = [], str(run.get("strategy"))
    if not is_private(run):
        rule = "require_dp" if policy.require_dp else "epsilon"
        return (
            [f"its policy has {policy.line(rule)}, the run dp = false"]
            if policy.private_only
            else []
        )
    if policy.privacy_unit == "patient" and run.get("dp.unit") != "patient":
        faults.append(
            f"its policy has {policy.line('privacy_unit')}, the run dp.unit = {run.get('dp.unit')}"
        )
    if method in METHODS and not METHODS[method].get("dp"):
        faults.append(
            f"its policy knows no differential privacy of {method}, and the run has dp = true"
        )
    return faults


def setting_faults(policy: Policy, run: Mapping[str, Any]) -> list[str]:
    """Return the settings of a run, and of its method, that exceed the rule for their kind.

    A missing setting has silofl's default, except ``local-epochs``. Without a held-out hospital, ``hold-out-epochs``
    has no effect. A setting for a number of epochs, steps or rounds that no rule covers is refused. With patches, an
    epoch is so many passes over the samples.
    """
    faults, settings = [], of_method({**DEFAULTS, "local-epochs": None, **run})
    if not str(run.get("hold-out", "")).strip():
        del settings["hold-out-epochs"]
    passes = max(1.0, number(settings.get(PASSES)) or 1.0)
    for key, value in settings.items():
        kind, amount = SETTINGS.get(key, ""), number(value)
        if not kind and AMOUNT.search(key) and not isinstance(value, bool):
            faults.append(
                f"its policy knows no setting {key[:80]!r}, which may ask for any number: a newer silofl may"
            )
        limit = getattr(policy, LIMITS[kind]) if kind in LIMITS else math.inf
        no_limit = kind not in LIMITS or (kind == "rounds" and not limit)
        # Too many passes are one fault, not one of each training
        times = passes if kind == "epochs" and key != PASSES and passes <= limit else 1.0
        if not no_limit and (amount is None or amount * times > limit):
            by = f" x {PASSES} = {times:g}" if times > 1 else ""
            faults.append(
                f"its policy has {policy.line(LIMITS[kind])}, the run {key} = {value}{by}"
            )
    return faults + decay_faults(policy, settings)


def decay_faults(policy: Policy, settings: Mapping[str, Any]) -> list[str]:
    """Return where one step may replace more of a model than the policy allows: by zeros, or by a received model.

    Where learning rate times decay is 1, a step forgets all earlier ones: the reply is its last batch's gradient.
    """

    def of_kind(kind: str) -> dict[str, float | None]:
        return {
            key: number(value) for key, value in settings.items() if SETTINGS.get(key) == kind
        }

    faults, rates = [], of_kind("learning-rate")
    divisors = {owner(key): value for key, value in of_kind("decay-divisor").items()}
    largest = max(
        rates,
        key=lambda key: math.inf if rates[key] is None else rates[key] or 0,
        default="learning-rate",
    )
    rate = rates.get(largest)
    for key, decay in of_kind("decay").items():
        divisor = divisors.get(owner(key), 1.0)
        share = (
            math.inf if rate is None or decay is None or not divisor else rate * decay / divisor
        )
        if decay != 0 and not 0 <= share <= policy.max_decay:
            faults.append(
                f"its policy has {policy.line('max_decay')}, the run {largest} x {key} = {share:g}"
            )
    return faults


def network_fault(policy: Policy, run: Mapping[str, Any]) -> str:
    """Return why the run's network, of the app or of an installed package, may not be built here; empty: it may."""
    name = str(run.get("model", "auto"))
    return "" if name in NETWORKS else code_fault(policy, "networks", "model", name)


def trainer_fault(policy: Policy, run: Mapping[str, Any]) -> str:
    """Return why the run's trainer may not be called here; empty: it may, or there is none."""
    name = str(run.get("trainer", ""))
    return code_fault(policy, "trainers", "trainer", name) if name else ""


def code_fault(policy: Policy, rule: str, setting: str, name: str) -> str:
    """Return why MODULE:FUNCTION, or a module's name alone, is not among the modules of a rule; empty: it is."""
    module, colon, _ = name.partition(":")
    words = {"all", "app"} if colon and module.startswith(APP_NETWORKS) else {"all"}
    allowed = set(getattr(policy, rule))
    if words & allowed or module in allowed - {"all", "app"}:
        return ""
    return f"its policy has {policy.line(rule)}, the run {setting} = {name[:80]}, which is not among them"


def method_faults(policy: Policy, method: str, run: Mapping[str, Any]) -> list[str]:
    """Return why a method may not run here with these settings, in the order of the rules."""
    if method not in METHODS and not policy.public:
        return [f"its policy knows no method {method[:80]!r}: a newer silofl at this site may"]
    declared, faults = METHODS.get(method, {}), []
    if (
        method not in policy.methods
        and ("all" not in policy.methods or declared.get("listed"))
        and not policy.public
    ):
        by_name = ", which has to be listed by its name" if declared.get("listed") else ""
        faults.append(
            f"its policy has {policy.line('methods')}, the run strategy = {method}{by_name}"
        )
    if not policy.whole_model and (reason := sends_whole(method, run)):
        faults.append(f"its policy has {policy.line('whole_model')}, {reason}")
    return faults + [
        f"its policy has {policy.line(rule)}, the run strategy = {method}, {words}"
        for rule, words in declared.get("rules", {}).items()
        if not getattr(policy, rule)
    ]


def sends_whole(method: str, run: Mapping[str, Any]) -> str:
    """Return the setting by which a method may send all layers of a model; empty: it keeps some."""
    whole = METHODS[method].get("whole", True)
    if isinstance(whole, bool):
        return f"the run strategy = {method}, which sends all layers" if whole else ""
    for name, values in whole.items():
        key = f"{method}.{name}"
        value = run.get(key)
        if value is None or to_plain(value) in map(to_plain, values):
            return f"the run strategy = {method} with {key} = {value}, which sends all layers"
    return ""


def round_faults(
    policy: Policy, run: Mapping[str, Any], kind: str, sent: Mapping[str, Any]
) -> list[str]:
    """Return how a round exceeds the policy; ``sent`` is the config of its message."""
    present = number(sent.get("participants")) or 0
    if kind == "train" and uploads(run) and present < policy.min_silos:
        return [f"its policy has {policy.line('min_silos')}, the round {present:g} that train"]
    if kind == "evaluate" and not policy.peers and owner_of_model(run, sent):
        return [
            f"its policy has {policy.line('peers')}, and the model to evaluate is one silo's own (evaluate.models)"
        ]
    return []


def owner_of_model(run: Mapping[str, Any], sent: Mapping[str, Any]) -> str:
    """Return the silo whose own model a run of given models evaluates in this round, by its settings; empty: none."""
    if run.get("strategy") != "evaluate":
        return ""
    models, this = str(run.get("evaluate.models", "")), number(sent.get("round")) or 0
    entries = models.split(",")
    return (entries[int(this) - 1] if 1 <= this <= len(entries) else models).partition("@")[2]


def own_model_faults(
    policy: Policy, run: Mapping[str, Any], sent: Mapping[str, Any]
) -> list[str]:
    """Return why the silo's own model may not leave with this message; ``sent`` is its config.

    It has all layers, so the rule ``whole-model`` applies to it. It leaves once, after the run's last round, which may
    be earlier than planned with ``patience``. Only the server knows which rounds there were before.
    """
    asks = "and a message asks for this silo's own model"
    rules = [name for name in ("own_model", "whole_model") if not getattr(policy, name)]
    faults = [f"its policy has {policy.line(name)}, {asks}" for name in rules]
    if run.get("keep-models") != "reported":
        faults.append(f"the run has keep-models = {run.get('keep-models')}, {asks}")
    if is_private(run):
        faults.append(f"the run has dp = true, {asks}, which may be trained without noise")
    rounds, this = number(run.get("rounds")) or 0, number(sent.get("round"))
    first = 2 if number(run.get("patience")) else rounds + 1
    if this is None or not first <= this <= rounds + 1:
        faults.append(
            f"the run has rounds = {rounds:g}, {asks} in round {sent.get('round')!r:.20}"
        )
    return faults
