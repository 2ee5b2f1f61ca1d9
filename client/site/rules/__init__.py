"""The rules of a message to this site, in their order, each in the file of its name.

A rule is a function of a `SiteMessage`. It returns its fault in one line, which continues "SILO refuses:", or an empty
text, and leaves what the reply needs in the message's passage. The gate asks all in one transaction of the record. What
a rule has written stays where a later one refuses, so a refused message counts, too.
"""

from collections.abc import Callable

from ..message import SiteMessage
from .budget import budget_fault
from .counts import counts_fault
from .masks import masks_fault
from .own_model import own_model_fault
from .policy import policy_fault
from .receipt import receipt_fault
from .study import study_fault

Rule = Callable[[SiteMessage], str]
RULES: tuple[Rule, ...] = (
    policy_fault,
    study_fault,
    own_model_fault,
    counts_fault,
    masks_fault,
    receipt_fault,
    budget_fault,
)
