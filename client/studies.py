"""`silofl study show`, `approve`, `studies`, `revoke`: a study in words, and a hospital's decision about it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client.protocol.envelope import STUDY, signer_of
from client.protocol.methods import DEFAULTS
from client.protocol.node import Site
from client.protocol.policy import Policy, read_policy
from client.protocol.run_settings import owner
from client.protocol.study import StudyLimits, StudyProtocol, parse_study, values, words
from client.site.counts import count_used_up, read_released
from client.site.study import approvals
from client.site.study.dangers import dangers, of_weights, sums_text
from client.site.trust.bundle import POLICY_ASKED, find_state
from client.site.trust.message_rules import run_faults
from client.site.trust.signing import UNSIGNED, read_signer, wanted_key
from partitions.common.errors import DataError, UserError
from partitions.common.output import text_page, wrap
from partitions.common.parsed import MOST_TEXT, text_in
from strategies import strategies
from strategies.base.declarations import seen_and_inferred
from strategies.base.transport.kinds import MODEL

WIDTH = 100
KIND = re.compile(rb"^\s*kind\s*=", re.MULTILINE)  # a line that every study has
UNREGISTERED = (
    "Nothing ([analysis] is missing): whatever its report says of a gain is exploratory."
)
METRIC_WORDS = "counts of samples, the metrics {metrics}, seconds and bytes"


@dataclass(frozen=True)
class JoinedSilo:
    """A silo of this site: its name, its state directory, its policy, and the signer of its bundles, if known."""

    name: str
    state: Path
    policy: Policy
    signer: str = ""


def silo_at(state: Path | None, policy: Path | None = None) -> JoinedSilo:
    """Return the silo of a state directory, of this container, or the only one that joined from this machine.

    ``policy``: its policy's file, if not in the usual place. Raises UserError, one line, if there is no such silo, or
    more than one.
    """
    if state is None and os.environ.get("SILOFL_NAME"):
        site = Site.from_environment(os.environ)
        return JoinedSilo(site.name, site.state, read_policy(str(policy or site.policy)))
    state = find_state(state)
    if not state.is_dir():
        raise UserError(
            f"--state-dir {state}: there is no such directory; it is the one that the silo keeps its state in"
        )
    state = state.absolute()
    # The first by `silofl join`, the second by `silofl up`
    folder = state.parent if state.name == "state" else state
    note = folder / POLICY_ASKED  # what `silofl join --policy` named
    named = note.read_text("utf-8") if note.is_file() else ""
    bundled = (
        policy
        or named
        or (folder / "policy.toml" if (folder / "policy.toml").is_file() else "")
    )
    return JoinedSilo(
        folder.name, state, read_policy(str(bundled)), read_signer(folder / "signed-by")
    )


def read_study(file: Path) -> tuple[str, StudyProtocol]:
    """Return a study file's text and the parsed study. Raises SiteError, DataError or OSError."""
    with file.open("rb") as opened:  # once: it may be a pipe
        content = opened.read(MOST_TEXT + 1)
    if not KIND.search(content):
        raise DataError(
            f'{file} is no study: a text with kind = "{STUDY}" is expected, as `silofl study new` writes it'
        )
    text = text_in(content, file)
    return text, parse_study(text, str(file))


# --- a study in words -------------------------------------------------------------------------------------------------


PAGE = """\
Study {{ study.name }}
  {{ "signed by " ~ signer if signer else "NOT SIGNED" }}; SHA-256 {{ study.digest }}

{% for name, text in about.items() %}
{{ text|wrap("  %-10s "|format(name), "", 100) }}
{% endfor %}

What leaves the hospital, and what can be inferred from it
{% for text in leaves %}
{{ text|wrap("  ", "    ", 100) }}
{% endfor %}

At most, in the whole study, from one hospital
{% for name, found in limits.items() %}
  {{ "{:>14,}".format(study.limits[name]) }}  {{ found.description }}
{% endfor %}
  No training with fewer than {{ study.participants }} hospitals in a round.
  No first model but {{ "that of the approved weights" if study.weights else "the seed" }}; later none that is
  more than {{ "%g"|format(study.step) }} lengths away from this hospital's last one.
{% if true in values(study, "dp") %}
  With dp = true later ones are not checked; only epsilon bounds what they can read.
{% endif %}

Software: {{ study.apps|length }} build(s), SHA-256 of what it holds, or of how it is shipped
{% for one in study.apps %}
  {{ one }}
{% endfor %}
{% for what, digest in sums.items() if digest %}
{{ what }}, SHA-256
  {{ digest }}
{% endfor %}
{% if study.datasets %}
Own data sets' source, SHA-256
{% for name, found in study.datasets|dictsort(true) %}
  {{ name }}: {{ found }}
{% endfor %}
{% endif %}
{% if study.held_out %}
Evaluated and not trained on: {{ study.held_out|join(", ") }}
{% endif %}

Settings (every other setting has silofl's default)
{% for key, allowed in study.settings.items() %}
  {{ key }} = {{ words(allowed) }}
{% endfor %}

What is tested, fixed in advance
{% for text in tested %}
{{ text|wrap("  ", "    ", 100) }}
{% endfor %}

{{ noise|wrap("", "", 100) }}
{{ masked|wrap("", "", 100) }}
{% for name, own in study.peers|dictsort(true) %}
  {{ name }} {{ own }}
{% endfor %}
{% if study.settings["secure-group"]|default(1) > 1 %}
A sum has all hospitals of a group, or none of them (secure-group):
{% for group in study.groups %}
{{ group|join(", ")|wrap("  ", "    ", 100) }}
{% endfor %}
{% endif %}"""


def study_page(study: StudyProtocol, signer: str) -> str:
    """Return the page for a committee: the question, what leaves, what can be inferred, the limits, the settings."""
    about = {
        "purpose": study.purpose,
        "contact": study.contact,
        "runs from": f"{study.start} to {study.end}",
        "results": study.results,
        "retention": study.retention,
    }
    sums = {
        "Data schema (columns, labels, how inputs were made)": study.schema_digest,
        "Initial weights": study.weights,
        "Trainer's source": study.trainer,
    }
    return text_page(
        PAGE,
        study=study,
        signer=signer,
        about=about,
        leaves=list(leaves(study)),
        limits=StudyLimits.model_fields,
        sums=sums,
        values=values,
        words=words,
        noise=noise_text(study),
        masked=sums_text(study),
        tested=study.analysis.in_words() if study.analysis else [UNREGISTERED],
    ).rstrip("\n")


def noise_text(study: StudyProtocol) -> str:
    """Describe whether noise protects what leaves: only if the study's settings require it in every run."""
    if all(value is True for value in values(study, "dp")):
        keys = [key for key in DEFAULTS if owner(key) == "dp"]
        noise = ", ".join(
            f"{key} = {words(study.settings.get(key, DEFAULTS[key]))}" for key in keys
        )
        return (
            f"Training adds noise here (dp = true; {noise}). "
            "docs/differential-privacy.md says what that promises, and what else leaves without noise."
        )
    return (
        "Nothing here adds noise to what leaves. The party that runs the server can read training records from "
        "updates; the limits above bound how much is asked, not what one reply gives away (docs/attacks.md)."
    )


def leaves(study: StudyProtocol) -> Iterator[str]:
    """Yield what leaves with each method, and what can be inferred from it."""
    for name in study.methods:
        sent, inferred = seen_and_inferred(strategies()[name].info)
        yield f"{name}: {sent or 'no model'}. Can be inferred: {inferred}."
    if "reported" in values(study, "keep-models"):
        whole = "at the end of a run, where the policy has own-model = true: the hospital's own model, whole"
        yield f"{whole}. Can be inferred: {', '.join(MODEL.infers)}."
    text = METRIC_WORDS.format(metrics=", ".join(study.metrics) or "(none)")
    yield f"with every method: {text}."


def known_dangers(study: StudyProtocol) -> list[str]:
    """Return the warnings of a study under silofl's default policy."""
    return dangers(study, Policy())


def review(study: StudyProtocol, place: JoinedSilo, samples: int | None = None) -> list[str]:
    """Return the warnings for a hospital. Raises UserError if its policy refuses every run of a method."""
    lines = []
    for name in study.methods:
        faults = [run_faults(place.policy, corner) for corner in corners(study, name)]
        if all(faults):
            raise UserError(f"the study cannot run under {place.policy.where}: {faults[0][0]}")
        lines += [
            f"your policy refuses a part of it: {fault}"
            for of_corner in faults
            for fault in of_corner
        ]
    lines += _peer_faults(study, place)
    earlier = approvals.list_approved(place.state)
    return [*dict.fromkeys(lines), *dangers(study, place.policy, earlier, samples)]


def _peer_faults(study: StudyProtocol, place: JoinedSilo) -> Iterator[str]:
    """Yield why no masked vector of a study could leave here."""
    training, policy = study.training_peers, place.policy
    if True not in values(study, "secure-aggregation") or place.name in study.held_out:
        return
    if place.name not in training:
        yield f"[peers] does not name {place.name}: no message with secure-aggregation = true is answered here"
    elif (others := len(study.summed_with(place.name)) - 1) < policy.secure_peers:
        where = "[peers]" if others + 1 == len(training) else "the group of silos"
        yield (
            f"your policy has {policy.line('secure_peers')}, and {where} {others} besides {place.name}: no "
            "message with secure-aggregation = true is answered here"
        )


def corners(study: StudyProtocol, method: str) -> list[dict[str, Any]]:
    """Return two runs of a method: every setting at its first or least value, and at its last or largest."""
    runs = []
    for end in (0, -1):
        run = {
            **DEFAULTS,
            **{key: values(study, key)[end] for key in study.settings},
            "strategy": method,
        }
        runs.append({**run, "study": study.name})
    return runs


def approve_study(
    file: Path,
    state: Path | None,
    *,
    policy: Path | None = None,
    by: str,
    signed_by: str,
    ask: Callable[[str], str] | None,
    echo: Callable[[str], None],
    samples: int | None = None,
    weights: Path | None = None,
) -> StudyProtocol:
    """Show a study, warn, ask, and store it as approved. ``ask``: None to skip the question (--yes).

    Raises UserError, DataError, SiteError or OSError, one line, if it cannot be approved; nothing is stored then.
    """
    place, (text, study) = silo_at(state, policy), read_study(file)
    signer = signer_of(text)
    check_signer(signer, place, signed_by)
    echo(study_page(study, signer))
    warnings = review(study, place, samples) + (
        of_weights(weights, study.weights) if weights else []
    )
    echo(f"\nChecked against {place.policy.where}: {len(warnings)} warnings")
    for line in warnings:
        echo("\n".join(wrap(line, "  ! ", "", WIDTH)))
    if samples is None:
        echo(
            "  note: --samples N, your number of training samples, also warns of a cohort that is too small"
        )
    if ask is not None:
        by = by or ask("\nYour name, for the audit log: ").strip()
        if ask(f"Type the study's name to approve it for {place.name}: ").strip() != study.name:
            raise UserError(f"{study.name} is not approved: its name was not typed")
    if not by:
        raise UserError("--by NAME is missing: the audit log says who approved a study")
    return approvals.record_approval(place.state, place.name, text, by, signer, warnings)


def check_signer(signer: str, place: JoinedSilo, signed_by: str) -> None:
    """Raise DataError if a study is signed by another key than the expected one, or by none."""
    if signed_by == UNSIGNED:
        return
    wanted = wanted_key(signed_by) if signed_by else place.signer
    if not signer:
        raise DataError(
            f"this study is not signed: ask for a signed one (--signed-by {UNSIGNED} takes it all the same)"
        )
    if wanted and signer != wanted:
        raise DataError(
            f"this study is signed by {signer}, not by {wanted}: somebody else made it"
        )


def overview(state: Path | None) -> list[dict[str, Any]]:
    """Return the studies of this site, each with its state and the use of its limits."""
    place, today = silo_at(state), datetime.now(UTC).date()
    rows = []
    for approved in approvals.list_approved(place.state):
        study = approved.study
        now = "ended" if today > study.end else "waits" if today < study.start else "open"
        rows.append(
            {
                "name": study.name,
                "state": "revoked" if approved.revoked else now,
                "approved": approved.when,
                "by": approved.by,
                "signed_by": approved.signer,
                "revoked": approved.revoked,
                "start": study.start.isoformat(),
                "end": study.end.isoformat(),
                "digest": study.digest,
                "used": count_used_up(place.state, study),
                "limits": dict(study.limits),
            }
        )
    return rows


def list_released(state: Path | None) -> list[dict[str, Any]]:
    """Return what left of each data file of this silo, by its SHA-256, the oldest first. Raises SiteError."""
    released = read_released(silo_at(state).state).items()
    return sorted(
        ({"cohort": c, **row} for c, row in released), key=lambda row: str(row["from"])
    )


RELEASED = """\
{% if found %}

Training replies of this silo, answers to surveys, and models of its own, ever
{% endif %}
{% for one in found %}
  {{ "data " ~ one.cohort[:16] if one.cohort else "data not noted" }}: {{ "{:,}".format(one.models) }}
{%- if one.surveys %} and {{ "{:,}".format(one.surveys) }} to surveys{% endif %}
{%- if one.own_models %} and {{ "{:,}".format(one.own_models) }} own models{% endif %}
, {{ "{:,}".format(one.bytes) }} bytes, {{ one["from"][:10] }} to {{ one.to[:10] }}, {{ one.runs|length }} runs
{%- for name, count in one.studies|dictsort if count %}
{{ " (" if loop.first else ", " }}{{ count }} in {{ name or "no study" }}{{ ")" if loop.last }}
{%- endfor %}

{% endfor %}"""


def released_page(released: list[dict[str, Any]]) -> str:
    """Return the page with what left of each data file, a line each."""
    return text_page(RELEASED, found=released).rstrip("\n")


OVERVIEW = """\
{% for one in studies %}
{{ one.name }}: {{ one.state }} ({{ one.start }} to {{ one.end }}){{ ", revoked " ~ one.revoked[:10] if one.revoked }}
  approved {{ one.approved[:10] }} by {{ one.by }}
{% set used %}{% for name, most in one.limits.items() %}
{{ ", " if not loop.first }}{{ name }} {{ "{:,}".format(one.used[name]) }} of {{ "{:,}".format(most) }}
{%- endfor %}{% endset %}
{{ ("used: " ~ used)|wrap("  ", "    ", 100) }}
{% else %}
no study was approved here
{% endfor %}"""


def overview_page(studies: list[dict[str, Any]]) -> str:
    """Return the page with the studies of this site, a few lines each."""
    return text_page(OVERVIEW, studies=studies).rstrip("\n")


def revoke_study(name: str, state: Path | None, by: str) -> None:
    """End a study of this site at once. Raises SiteError if there is none of this name."""
    place = silo_at(state)
    approvals.record_revocation(place.state, place.name, name, by)
