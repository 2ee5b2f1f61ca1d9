"""What each method sends, for the site's own process (policy.py). Made by `make settings`.

``uploads``: vectors leave a silo; ``whole``: a message may hold all layers of a model, always or at these
values of the method's settings; ``peers``: a silo's model is handed to others by name; ``per_class``: means
or counts of each class leave. What is not named is not so.
"""

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "apfl": {"uploads": True, "whole": True},
    "apple": {"uploads": True, "whole": True, "peers": True},
    "ditto": {"uploads": True, "whole": True},
    "diversifed": {"uploads": True, "whole": True},
    "fedadmm": {"uploads": True, "whole": True},
    "fedala": {"uploads": True, "whole": True},
    "fedalt": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "fedamp": {"uploads": True, "whole": True},
    "fedapm": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "fedavg": {"uploads": True, "whole": True},
    "fedavg-ft": {"uploads": True, "whole": True},
    "fedbabu": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "fedbn": {"uploads": True},
    "fedcac": {"uploads": True, "whole": True},
    "fedcp": {"uploads": True, "whole": True},
    "feddbe": {"uploads": True, "whole": True},
    "feddyn": {"uploads": True, "whole": True},
    "fedfomo": {"uploads": True, "whole": True, "peers": True},
    "fedlama": {"uploads": True, "whole": True},
    "fedlp": {"uploads": True, "whole": True},
    "fedpac": {"uploads": True, "whole": True, "per_class": True},
    "fedper": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "fedphp": {"uploads": True, "whole": True},
    "fedproto": {"uploads": True, "per_class": True},
    "fedprox": {"uploads": True, "whole": True},
    "fedprox-ft": {"uploads": True, "whole": True},
    "fedrep": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "fedrod": {"uploads": True, "whole": True},
    "fedsim": {"uploads": True, "whole": {"personal": ("none", ""), "layers": (0,)}},
    "gpfl": {"uploads": True},
    "heurfedamp": {"uploads": True, "whole": True},
    "lg-fedavg": {"uploads": True, "whole": True},
    "local": {},
    "lp-proj": {"uploads": True},
    "partialfed": {"uploads": True, "whole": True},
    "per-fedavg": {"uploads": True, "whole": True},
    "pfedla": {"uploads": True, "whole": True},
    "pfedme": {"uploads": True, "whole": True},
    "player-fl": {"uploads": True, "whole": True},
    "player-fl-random": {"uploads": True, "whole": True},
    "pooled": {"uploads": True, "whole": True},
    "scaffold": {"uploads": True, "whole": True},
}
