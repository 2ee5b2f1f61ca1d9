"""Local federation: one SuperLink and one SuperNode per silo as processes of this machine, over gRPC with TLS.

    $XDG_STATE_HOME/silofl/NAME/        (~/.local/state/silofl/NAME)
        credentials/                    CA, certificates, node keys; kept
        data/                           the demo data, one file per silo; kept, and split again only if `demo` changes;
                                        manifest.json keeps each part's owner when silos come or go
        silos/SILO/                     a silo's state between rounds and runs; kept
        logs/PART.log                   kept, the previous one as PART.log.1; a new one begins after 10 MiB
        flower/PART/                    FLWR_HOME of each part
        federation.json  warm.sock ...  while it is up

`up` starts missing processes, ends those that are no longer in the file, and leaves the rest alone. So it also repairs
a federation that lost a part. It returns when every silo is online. The parts are not supervised afterwards. The
Control API listens on the loopback interface only.
"""

from server.deploy.local.demo_data import split_demo
from server.deploy.local.parts import PartFailedError, clear, down, last_lines, status
from server.deploy.local.record import (
    LocalFederation,
    LocalSilo,
    find_local,
    leftover,
    remote_keys,
    state_directory,
    state_root,
)
from server.deploy.local.start import up

__all__ = [
    "LocalFederation",
    "LocalSilo",
    "PartFailedError",
    "clear",
    "down",
    "find_local",
    "last_lines",
    "leftover",
    "remote_keys",
    "split_demo",
    "state_directory",
    "state_root",
    "status",
    "up",
]
