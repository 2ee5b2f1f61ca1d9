"""The memory of a hospital's survey answers: the same question gets the same answer, though a few patients changed.

The record in the state directory keeps each answer with the digests of its patients. The same patients
get the same answer. Data that differ in fewer than ``min-sum-samples`` patients get the earlier answer, with its day,
since the difference of two answers would be about those few. Another schema, recipe or policy makes another answer,
whose bins may differ. At most ``max-surveys`` answers are given in all.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from client.site.errors import SiteError
from client.site.record import Record, disclose
from client.site.trust.policy import Policy, PolicyRefusedError
from partitions.patients import fewest_changed
from strategies.base.survey import Answer

KIND = "survey"  # of the rows of `disclosed` in the record


def remembered(
    make: Callable[[], Answer], samples: Sequence[str], how: str, policy: Policy, state: str, silo: str
) -> tuple[Answer, dict[str, list[str]]]:
    """Return the answer and what more of it is withheld, by rule. ``samples``: the patients' digests, sorted.

    ``how``: a digest of what else the answer depends on. Raises PolicyRefusedError if another answer would reveal few
    patients, if ``max-surveys`` is reached, or if answers cannot be saved.
    """
    if not state:
        raise PolicyRefusedError(f"{silo} refuses: it has no state-dir to remember what it told in surveys")
    try:
        with Record(Path(state)).writing() as db:
            rows = db.execute("SELECT question, people, answer FROM disclosed WHERE kind = ?", (KIND,)).fetchall()
            given = [
                {"how": asked, "samples": people.split(), "answer": json.loads(text)} for asked, people, text in rows
            ]
            answer, note, new = _answer(make, Counter(samples), how, policy, silo, given)
            if new:
                disclose(db, KIND, question=how, answer=json.dumps(answer), people=samples)
            return answer, note
    except (OSError, SiteError, json.JSONDecodeError) as error:
        why = f"what it told in surveys before cannot be remembered ({error})"
        raise PolicyRefusedError(f"{silo} refuses: {why}") from None


def _answer(
    make: Callable[[], Answer],
    samples: Counter[str],
    how: str,
    policy: Policy,
    silo: str,
    given: Sequence[dict[str, Any]],
) -> tuple[Answer, dict[str, list[str]], bool]:
    """Return the answer, what is withheld, and whether it is a new one."""
    few, near = policy.line("min_sum_samples"), list[dict[str, Any]]()
    for earlier in given:
        before = Counter(earlier["samples"])
        changed = fewest_changed(samples, before)
        if not changed and earlier["how"] == how:
            return earlier["answer"], {}, False
        near += [earlier] if 0 < changed < policy.min_sum_samples else []
    for earlier in near:
        if earlier["how"] == how:
            day = earlier["answer"]["day"]
            return earlier["answer"], {"min-sum-samples": [f"changes of the data since {day}"]}, False
    if near:
        day = near[0]["answer"]["day"]
        raise PolicyRefusedError(
            f"{silo} refuses: its policy has {few}, fewer patients differ from those of its survey of {day}, and its "
            "schema, recipe or policy is another one"
        )
    if policy.max_surveys and len(given) >= policy.max_surveys:
        raise PolicyRefusedError(
            f"{silo} refuses: its policy has {policy.line('max_surveys')}, and this would be number {len(given) + 1}"
        )
    return make(), {}, True
