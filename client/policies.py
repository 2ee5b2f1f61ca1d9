"""`silofl policy`: the rules of a hospital, and what each method would send under them, in words."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from textwrap import wrap

from client.protocol.methods import EVIDENCE
from client.protocol.policy import Policy, Rules, parse_policy, read_policy
from client.site.trust.bundle import joined_silos, read_bundle
from client.site.trust.message_rules import (
    method_faults,
    own_model_faults,
    privacy_faults,
    sends_whole,
    setting_faults,
)
from client.studies import silo_at
from partitions.common.output import text_page
from strategies import strategies
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


PAGE = """\
{% set blank = " " * 16 %}
{{ policy.where }}:

{% if not methods %}
{% for name, rule in rules.items() %}
  {{ ("%-" ~ width ~ "s")|format(policy.line(name)) }}  # {{ rule.description }}
{% endfor %}

{% for line in names %}
{{ line }}
{% endfor %}
{% else %}
What each method sends from here in a round, with its default settings (Σ: a whole model):

{% for name, strategy in strategies|dictsort(true) %}
{% set info = strategy.info %}
  {{ "%-16s"|format(name) }}  {{ "refused: " ~ refused[name][0] if name in refused else sent(name, info) }}
  {{ blank }}  dp = true:
{%- if not info.training.dp %} not possible, {{ info.training.dp }}
{%- elif info.training.dp == "nothing" %} nothing of the data leaves
{%- elif info.training.dp == "sums" %} what leaves are sums of clipped features with noise.
{%- else %} what leaves is made of clipped gradients with noise.
{{- " A model that never leaves is trained without noise." if info.own_model == "kept" }}
{%- endif +%}
{% endfor %}

At the end of a run with keep-models = reported, once, and it trains no further here:

  {{ "%-16s"|format("own model") }}
{%- if own_model %}  stays: {{ own_model[0] }}
{%- else %}  leaves, with all its layers, to the server {{ "and goes to other hospitals" if policy.peers
  else "and no evaluation of it is answered here (peers = false)" }}
{%- endif +%}

Without training:

  {{ "%-16s"|format(EVALUATE) }}
{%- if evaluation %}  refused: {{ evaluation[0] }}
{%- else %}  metrics of models that {{ "are no silo's own (peers = false), and that " if not policy.peers
  }}the run's settings name by SHA-256 ({{ "all" if policy.public
  else metrics ~ ", over at least " ~ policy.min_metric_samples ~ " patients" }}); no model leaves, none is kept
{%- endif +%}
  {{ "%-16s"|format(SURVEY) }}
{%- if survey %}  refused: {{ survey[0] }}
{%- elif policy.public %}  counts, means and deviations of each column, and class counts, as they are
{%- else %}  of each column counts of {{ policy.min_cell }} patients or more, rounded; {{
  "mean and deviation over %s patients or more"|format(policy.min_sum_samples) if policy.sums else "no mean" }}; {{
  "class counts too" if policy.class_means else "no class counts (class-means)" }}; {{
  "refused under masks (secure-aggregation)" if policy.secure_aggregation == "off"
  else "under masks the same in a sum over hospitals, and then survival by time"
  ~ ("" if policy.class_means else ", which stays here (class-means)") }}; no model
{%- endif +%}
{% endif %}

{% if policy.public %}
The data are public: nothing is held back.
{% else %}
{% if policy.require_dp and not policy.epsilon %}
WARNING: require-dp alone bounds nothing: a run may ask for hardly any noise. Set epsilon.
{% endif %}
{% if policy.epsilon > weak %}
WARNING: epsilon = {{ "%g"|format(policy.epsilon) }} is hardly a promise: 1 is strong, 8 is weak.
{% endif %}
{{ "Seconds, and no metrics, leave" if policy.private_only else "Metrics and seconds leave" }} with every method. {{
"The rules bind this site's own process and the app that it runs; what the server does with a model that it was given, "
"no rule here can say." }}
{% endif %}"""
WEAK = 10.0  # a larger epsilon hardly protects (docs/differential-privacy.md)


def policy_page(policy: Policy, *, methods: bool = False) -> str:
    """Return the page with the rules and the allowed methods; with ``methods``, with what each would send."""
    survey = {**defaults(), "strategy": SURVEY}
    refused = {
        name: faults for name in sorted(strategies()) if (faults := _faults(policy, name))
    }
    return text_page(
        PAGE,
        policy=policy,
        methods=methods,
        rules=Rules.model_fields,
        width=max(len(policy.line(name)) for name in Rules.model_fields if name != "methods"),
        names=list(_methods(refused)),
        strategies=strategies(),
        refused=refused,
        sent=describe_sent,
        # Of runs that have silos send their own models, and that train nothing
        own_model=own_model_faults(
            policy,
            {"keep-models": "reported", "rounds": 1, "dp": policy.private_only},
            {"round": 2},
        ),
        evaluation=method_faults(policy, EVALUATE, {**defaults(), "strategy": EVALUATE}),
        survey=[*method_faults(policy, SURVEY, survey), *privacy_faults(policy, survey)],
        metrics=", ".join(m for m in policy.metrics if m not in EVIDENCE) or "none",
        EVALUATE=EVALUATE,
        SURVEY=SURVEY,
        weak=WEAK,
    ).rstrip("\n")


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


def describe_sent(name: str, info: MethodInfo) -> str:
    """Describe what a method sends in a round, with its default settings."""
    if not info.uploads:
        return "nothing but metrics"
    kinds = [*info.uploads.values()]
    share = min(kind.whole_from for kind in kinds)
    few = (
        "never all layers"
        if share == 1
        else f"counts as all layers from {share:.0%} of their numbers on"
    )
    words = [info.sends[1], "may be all layers" if sends_whole(name, defaults()) else few]
    words += ["handed to other hospitals under this one's name"] * (info.receives == "models")
    words += [kind.words for kind in kinds if kind.rules]
    words += [kind.words for kind in info.sends_numbers.values()]
    return "; ".join(words)
