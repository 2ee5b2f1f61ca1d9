"""Names in messages that the methods, the app and the site's process share.

A hospital's own process loads this file, too (`client/protocol/ours.py`): it imports nothing.
"""

OWN_MODEL = "own_model"  # the action of the message that requests a silo's own model
OWN_MODEL_KIND = f"evaluate.{OWN_MODEL}"
# With secure sums: a silo's share, in its message; the record and the array of the integers, in its reply
SHARE, MASKED, INTEGERS = "secure_share", "masked", "sum"
