"""The terms of a message: policy and study, read once when it comes. Every check and its audit line use this value."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SiteError
from .study.approvals import study_for
from .study.protocol import Study, narrowed
from .trust.policy import Policy, PolicyRefusedError, policy_of


@dataclass(frozen=True)
class Terms:
    """The site's policy, and the approved study that the message's run names.

    ``error``: why one of them cannot be read, or there is no such study; then only refusals leave.
    """

    policy: Policy | None = None
    study: Study | None = None
    error: SiteError | None = None

    @property
    def rules(self) -> Policy:
        """The stricter of policy and study. Raises SiteError if they cannot be read."""
        if self.error is not None:
            raise self.error
        assert self.policy is not None
        return self.policy if self.study is None else narrowed(self.policy, self.study)


def read_terms(node: Mapping[str, Any], run: Mapping[str, Any]) -> Terms:
    """Read the terms of a message to the silo with this node config, of a run with these settings.

    A silo without a data file of its own, as in a simulation, has no study; nor has one whose data are public.
    """
    policy = None
    try:
        policy = policy_of(node)
        study = None if "data" not in node or policy.public else study_for(policy, node.get("state-dir"), run)
    except SiteError as error:
        refused = f"{node.get('name', 'this silo')} refuses: {error}"
        return Terms(policy, error=error if policy is None else PolicyRefusedError(refused))
    return Terms(policy, study)
