"""`silofl study show`, `approve`, `studies`, `revoke`: a study in words, and a hospital's decision about it."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from client.site.counts import count_used_up, read_released
from client.site.node import Site
from client.site.study import approvals
from client.site.study.dangers import dangers, of_weights, values
from client.site.study.protocol import StudyLimits, StudyProtocol, parse_study, signer_of, words
from client.site.trust.audit_page import wrap
from client.site.trust.bundle import POLICY_ASKED, find_state
from client.site.trust.message_rules import owner, run_faults
from client.site.trust.methods import DEFAULTS
from client.site.trust.policy import Policy, read_policy
from client.site.trust.signing import UNSIGNED, read_signer, wanted_key
from partitions.common.errors import DataError, UserError
from partitions.common.names import escape
from strategies import strategies
from strategies.base.declarations import NUMBERS, VECTORS

WIDTH = 100
ITEM = "  ", "    ", WIDTH  # of a list, as `wrap` takes it
METRIC_WORDS = "counts of samples, the metrics {metrics}, seconds and bytes"


@dataclass(frozen=True)
class JoinedSilo:
    """A silo of this site: its name, its state directory, its policy, and the signer of its bundles, if known."""

    name: str
    state: Path
    policy: Policy
    signer: str = ""


def place_of(state: Path | None, policy: Path | None = None) -> JoinedSilo:
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
    asked = folder / POLICY_ASKED  # what `silofl join --policy` named
    named = asked.read_text("utf-8") if asked.is_file() else ""
    own = (
        policy
        or named
        or (folder / "policy.toml" if (folder / "policy.toml").is_file() else "")
    )
    return JoinedSilo(
        folder.name, state, read_policy(str(own)), read_signer(folder / "signed-by")
    )


def read_file(file: Path) -> tuple[str, StudyProtocol]:
    """Return a study file's text and the parsed study. Raises SiteError or OSError."""
    text = file.read_text(encoding="utf-8")
    return text, parse_study(text, str(file))


# --- a study in words -------------------------------------------------------------------------------------------------


UNCHECKED = (
    "  With dp = true later ones are not checked; only epsilon bounds what they can read."
)


def study_page(study: StudyProtocol, signer: str) -> str:
    """Return the page for a committee: the question, what leaves, what can be inferred, the limits, the settings."""
    lines = [
        f"Study {study.name}",
        f"  {'signed by ' + signer if signer else 'NOT SIGNED'}; SHA-256 {study.digest}",
        "",
        *_pairs(
            {
                "purpose": study.purpose,
                "contact": study.contact,
                "runs from": f"{study.start} to {study.end}",
            }
        ),
        *_pairs({"results": study.results, "retention": study.retention}),
        "",
        "What leaves the hospital, and what can be inferred from it",
        *_leaves(study),
        "",
        "At most, in the whole study, from one hospital",
        *(
            f"  {getattr(study.limits, name):>14,}  {found.description}"
            for name, found in StudyLimits.model_fields.items()
        ),
        f"  No training with fewer than {study.participants} hospitals in a round.",
        f"  No first model but {'that of the approved weights' if study.weights else 'the seed'}; later none that is",
        f"  more than {study.step:g} lengths away from this hospital's last one.",
        *([UNCHECKED] if True in values(study, "dp") else []),
        "",
        f"Software: {len(study.apps)} build(s), SHA-256 of what it holds, or of how it is shipped",
        *(f"  {one}" for one in study.apps),
        *(["Data schema, SHA-256", f"  {study.schema_digest}"] if study.schema_digest else []),
        *(["Initial weights, SHA-256", f"  {study.weights}"] if study.weights else []),
        *(["Trainer's source, SHA-256", f"  {study.trainer}"] if study.trainer else []),
        *(["Own data sets' source, SHA-256"] if study.datasets else []),
        *(f"  {name}: {found}" for name, found in sorted(study.datasets.items())),
        *(
            [f"Evaluated and not trained on: {held}"]
            if (held := ", ".join(study.held_out))
            else []
        ),
        "",
        "Settings (every other setting has silofl's default)",
        *(f"  {key} = {words(allowed)}" for key, allowed in study.settings.items()),
        "",
        *textwrap.wrap(noise_text(study), WIDTH),
        *textwrap.wrap(sums_text(study), WIDTH),
        *(f"  {name} {own}" for name, own in sorted(study.peers.items())),
        *_groups(study),
    ]
    return "\n".join(map(escape, lines))


def noise_text(study: StudyProtocol) -> str:
    """Describe whether noise protects what leaves: only if the study's settings require it in every run."""
    if all(value is True for value in values(study, "dp")):
        given = {
            key: words(study.settings.get(key, DEFAULTS[key]))
            for key in DEFAULTS
            if owner(key) == "dp"
        }
        return (
            f"Training adds noise here (dp = true; {', '.join(f'{key} = {value}' for key, value in given.items())}). "
            "docs/differential-privacy.md says what that promises, and what else leaves without noise."
        )
    return (
        "Nothing here adds noise to what leaves. The party that runs the server can read training records from "
        "updates; the limits above bound how much is asked, not what one reply gives away (docs/attacks.md)."
    )


def sums_text(study: StudyProtocol) -> str:
    """Describe whether the server opens only sums of what hospitals send; empty: it opens each update."""
    if values(study, "secure-aggregation") != [True]:
        return ""
    return (
        "Vectors leave under masks (secure-aggregation = true): the server opens only sums over several hospitals. "
        "Counts, metrics and data summaries leave as they are. docs/security.md says what a server that lies can "
        "still open. The hospitals, and the keys that must sign for them:"
    )


def _groups(study: StudyProtocol) -> Iterator[str]:
    if study.settings.get("secure-group", 1) > 1:
        yield "A sum has all hospitals of a group, or none of them (secure-group):"
        for group in study.groups:
            yield from wrap(", ".join(group), *ITEM)


def _pairs(fields: Mapping[str, str]) -> Iterator[str]:
    for name, text in fields.items():
        yield from wrap(text, f"  {name:<10} ", "", WIDTH)


def _leaves(study: StudyProtocol) -> Iterator[str]:
    for name in study.methods:
        info = strategies()[name].info
        vectors = [VECTORS[one] for one in info.uploads]
        inferred = dict.fromkeys(word for _, found in vectors for word in found)
        sent = (
            "; ".join(
                [*(text for text, _ in vectors), *(NUMBERS[n] for n in info.sends_numbers)]
            )
            or "no model"
        )
        text = f"{name}: {sent}. Can be inferred: {', '.join(inferred) or 'nothing'}."
        yield from wrap(text, *ITEM)
    if "reported" in values(study, "keep-models"):
        text = "at the end of a run, where the policy has own-model = true: the hospital's own model, whole. Can be"
        text += f" inferred: {', '.join(VECTORS['model'][1])}."
        yield from wrap(text, *ITEM)
    text = METRIC_WORDS.format(metrics=", ".join(study.metrics) or "(none)")
    yield from wrap(f"with every method: {text}.", *ITEM)


# --- a hospital decides -----------------------------------------------------------------------------------------------


def review(study: StudyProtocol, place: JoinedSilo, samples: int | None = None) -> list[str]:
    """Return the warnings for a hospital. Raises UserError if its policy refuses every run of a method."""
    lines = []
    for name in study.methods:
        faults = [run_faults(place.policy, corner) for corner in corners(study, name)]
        if all(faults):
            raise UserError(f"the study cannot run under {place.policy.where}: {faults[0][0]}")
        lines += [
            f"your policy refuses a part of it: {fault}" for found in faults for fault in found
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
    elif len(training) - 1 < policy.secure_peers:
        yield (
            f"your policy has {policy.line('secure_peers')}, and [peers] {len(training) - 1} besides {place.name}: no "
            "message with secure-aggregation = true is answered here"
        )


def corners(study: StudyProtocol, method: str) -> list[dict[str, Any]]:
    """Return two runs of a method: every setting at its first or least value, and at its last or largest."""
    found = []
    for end in (0, -1):
        run = {
            **DEFAULTS,
            **{key: values(study, key)[end] for key in study.settings},
            "strategy": method,
        }
        found.append({**run, "study": study.name})
    return found


def approve(
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
    place, (text, study) = place_of(state, policy), read_file(file)
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
    return approvals.approve(place.state, place.name, text, by, signer, warnings)


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
    place, today = place_of(state), datetime.now(UTC).date()
    found = []
    for one in approvals.list_approved(place.state):
        study = one.study
        now = (
            "revoked"
            if one.revoked
            else "ended"
            if today > study.end
            else "waits"
            if today < study.start
            else "open"
        )
        found.append(
            {
                "name": study.name,
                "state": now,
                "approved": one.when,
                "by": one.by,
                "signed_by": one.signer,
                "revoked": one.revoked,
                "start": study.start.isoformat(),
                "end": study.end.isoformat(),
                "digest": study.digest,
                "used": count_used_up(place.state, study),
                "limits": dict(study.limits),
            }
        )
    return found


def list_released(state: Path | None) -> list[dict[str, Any]]:
    """Return what left of each data file of this silo, by its SHA-256, the oldest first. Raises SiteError."""
    found = [
        {"cohort": cohort, **one}
        for cohort, one in read_released(place_of(state).state).items()
    ]
    return sorted(found, key=lambda one: str(one["from"]))


def released_page(found: list[dict[str, Any]]) -> str:
    """Return the page with what left of each data file, a line each."""
    lines = (
        ["", "Training replies of this silo, answers to surveys, and models of its own, ever"]
        if found
        else []
    )
    for one in found:
        data = f"data {one['cohort'][:16]}" if one["cohort"] else "data not noted"
        names = ", ".join(
            f"{count} in {name or 'no study'}"
            for name, count in sorted(one["studies"].items())
            if count
        )
        asked = f" and {one['surveys']:,} to surveys" if one["surveys"] else ""
        asked += f" and {one['own_models']:,} own models" if one["own_models"] else ""
        span = f"{one['from'][:10]} to {one['to'][:10]}, {len(one['runs'])} runs"
        lines.append(
            f"  {data}: {one['models']:,}{asked}, {one['bytes']:,} bytes, {span}{f' ({names})' if names else ''}"
        )
    return "\n".join(map(escape, lines))


def overview_page(studies: list[dict[str, Any]]) -> str:
    """Return the page with the studies of this site, a few lines each."""
    if not studies:
        return "no study was approved here"
    lines = []
    for one in studies:
        ended = f", revoked {one['revoked'][:10]}" if one["revoked"] else ""
        lines.append(f"{one['name']}: {one['state']} ({one['start']} to {one['end']}){ended}")
        lines.append(f"  approved {one['approved'][:10]} by {one['by']}")
        used = (
            f"{name} {one['used'][name]:,} of {most:,}" for name, most in one["limits"].items()
        )
        lines += wrap(f"used: {', '.join(used)}", *ITEM)
    return "\n".join(map(escape, lines))


def revoke(name: str, state: Path | None, by: str) -> None:
    """End a study of this site at once. Raises SiteError if there is none of this name."""
    place = place_of(state)
    approvals.revoke(place.state, place.name, name, by)
