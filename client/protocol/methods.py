"""What each method sends, and which settings the rules limit, for the site's own process (policy.py).

`methods.json` has the tables, made by `make settings` from the methods' classes, which this process does not import.

``silent``: no vectors leave a silo; ``whole``: a message never holds all layers of a model, or does at
these values of the method's settings alone; without it, it may; ``rules``: the policy's rules that must
be true for the kinds of what it sends (kinds.py), with the words of a refusal; ``dangers``: what `silofl
approve` warns of; ``adds``: the common setting that adds the method, and its own, to others; ``dp``: the
settings with the epochs of a round that ``dp = true`` trains with noise; or that sums over all records
leave with noise, once a message; or that nothing of the data leaves; ``listed``: a policy must name it,
``all`` does not mean it; ``sums``: how its secure sums weigh silos: samples, silos (equal), or the
setting with one of them. What else is not named is not so.
"""

import json
from pathlib import Path
from typing import Any

_TABLES: dict[str, Any] = json.loads(
    Path(__file__).with_name("methods.json").read_text("utf-8")
)
METHODS: dict[str, dict[str, Any]] = _TABLES["methods"]
# The names of silofl's own networks
NETWORKS: list[str] = _TABLES["networks"]
# The kind of each setting that a rule limits (KINDS in partitions/common/settings.py)
SETTINGS: dict[str, str] = _TABLES["settings"]
# Every setting with its default, which a study's run has where the study says nothing else
DEFAULTS: dict[str, bool | int | float | str] = _TABLES["defaults"]
# Metrics of all tasks, and the evidence on a reported model, which a policy allows by these names
METRICS: tuple[str, ...] = (*_TABLES["metrics"],)
# Those that are less when a model is better, and have no largest value
LOSSES: tuple[str, ...] = (*_TABLES["losses"],)
EVIDENCE: tuple[str, ...] = (*_TABLES["evidence"],)
