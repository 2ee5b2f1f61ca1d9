"""The terms of a message: policy and study, read once when it comes. Every check and its audit line use this value.

The gate passes them on to the app's process, in the node config of the message's context there. The server cannot write
that; an app could, in its own process, but what leaves is checked with the gate's own value.
"""

import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ..protocol.launch import TERMS as GIVEN
from ..protocol.parsed import SiteError
from ..protocol.policy import Policy, PolicyRefusedError, policy_of
from ..protocol.run_settings import is_secure
from ..protocol.study import StudyProtocol
from .study.approvals import study_for


@dataclass(frozen=True)
class Terms:
    """The site's policy, and the approved study that the message's run names.

    ``error``: why one of them cannot be read, or there is no such study; then only refusals leave.
    """

    policy: Policy | None = None
    study: StudyProtocol | None = None
    error: SiteError | None = None

    @property
    def rules(self) -> Policy:
        """The stricter of policy and study. Raises SiteError if they cannot be read."""
        if self.error is not None:
            raise self.error
        assert self.policy is not None
        return self.policy if self.study is None else narrow_policy(self.policy, self.study)


def read_terms(node: Mapping[str, Any], run: Mapping[str, Any]) -> Terms:
    """Read the terms of a message to the silo with this node config, of a run with these settings.

    A silo without a data file of its own, as in a simulation, has no study. Nor has one whose data are public, where
    it needs no list of peers.
    """
    policy = None
    try:
        policy = policy_of(node)
        open_data = policy.public and not is_secure(run)
        study = (
            None
            if "data" not in node or open_data
            else study_for(policy, node.get("state-dir"), run)
        )
    except SiteError as error:
        refused = f"{node.get('name', 'this silo')} refuses: {error}"
        return Terms(policy, error=error if policy is None else PolicyRefusedError(refused))
    return Terms(policy, study)


def written_terms(terms: Terms) -> str:
    """Return terms as a text for the app's process."""
    assert terms.policy is not None  # else the gate has refused the message
    return json.dumps(
        [terms.policy.model_dump_json(), terms.study and terms.study.model_dump_json()]
    )


def take_terms(node: MutableMapping[str, Any]) -> Terms | None:
    """Take the gate's terms out of a message's node config; None where no gate has checked the message."""
    text = node.pop(GIVEN, None)
    if text is None:
        return None
    policy, study = json.loads(str(text))
    return Terms(
        Policy.model_validate_json(policy), study and StudyProtocol.model_validate_json(study)
    )


def narrow_policy(policy: Policy, study: StudyProtocol) -> Policy:
    """Return the stricter of policy and study where both have a rule: fewest silos, and metrics that may leave."""
    metrics = tuple(metric for metric in policy.metrics if metric in study.metrics)
    return policy.model_copy(
        update={"metrics": metrics, "min_silos": max(policy.min_silos, study.participants)}
    )
