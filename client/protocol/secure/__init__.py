"""Secure aggregation at a hospital: its keys, the lists that it accepts, its masks and its answers.

After Bonawitz et al. 2017. The server opens only sums over many hospitals, and each hospital checks that itself.

    query.secure_keys      fresh keys                                       (once, and before a repeat)
    query.secure_start     those of all; shares of the secrets behind them  (once, and before a repeat)
    train                  peers' statements and shares; the masked vector, and the next round's shares
    query.secure_unmask    who has sent a vector; a share of each one's self mask, or of the others' mask key

A survey under masks has `query.survey` in place of train, and no next round.

The SuperNode answers all this itself: the app gets no key, and adds no mask. Relative imports.
"""

from ..ours import messages

RECORD = "secure"  # the config record, in a message and in a reply
# The only array record of a masked reply, and its uint32 vector
ARRAYS, ARRAY = messages.MASKED, messages.INTEGERS
SHARE = messages.SHARE  # in a train message's config: this silo's weight as a share of all
# In what the app gets: which sum this round is of, and those that this silo's vectors are in
OWN, COUNTED = "secure_sum", "counted"
KEYS, START, UNMASK = "query.secure_keys", "query.secure_start", "query.secure_unmask"
SURVEY = "query.survey"
MOST_SILOS = 100  # in one list
OTHER_SUM = "was summed over other silos before"  # in a refusal that no repeat changes
