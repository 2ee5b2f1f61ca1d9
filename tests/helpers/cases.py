"""Every method with settings under which it does what sets it apart; a new method is entered in CASES.

For the network of ``two_layers.DEEP``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from representatives import some

# Σ, fc1 and fc2 of the network in two_layers.py; by default fc2 is personal
FULL, BODY, HEAD = 31, 16, 15
K = 4  # features, the width of fc1
POLICY = FULL + 2 * K * K + 6 * K  # FedCP: with another head and a policy for the personal one
TABLE = 3 * (K + 1)  # C (K + 1): prototypes of three classes
VALVE = BODY + 3 * K + 2 * K * K + 6 * K  # GPFL: body, embeddings, valve
PAC = FULL + TABLE + 3 * K  # FedPAC: the model, prototypes, statistics
GAUSSIAN = BODY + 3 * K + K * (K + 1) // 2  # pFedFDA: body, means, covariance
POOLED = TABLE + K * (K + 1) // 2  # GH-OFL: shares and sums of classes, products
SIMPLEX = BODY + 2 * 3 * K + 3  # Floco: body, two corners, bias
ENSEMBLE, NEW_TREES = 60 * 3 * 4, 2 * 3 * 4  # of three classes, two iterations a round
# Scalars per silo in round 1, 2, ... (the last number holds for every later one); where they are drawn, of each silo.
Flow = tuple[int, ...] | Mapping[str, tuple[int, ...]]

OPTIONS: dict[str, Any] = {
    "local_epochs": 2,
    "batch_size": 4,
    "learning_rate": 0.1,
    "momentum": 0.9,
    "optimizer_state": "keep",
}


def case(
    strategy: str, down: Flow = (FULL, FULL), up: Flow = (FULL, FULL), **changes: Any
) -> tuple[dict[str, Any], Flow, Flow]:
    network: dict[str, Any] = {
        k: changes.pop(k) for k in ("model", "lora_rank", *OPTIONS) if k in changes
    }
    own = {
        k if "." in k else f"{strategy}.{k.rstrip('_').replace('_', '-')}": v
        for k, v in changes.items()
    }
    return {"strategy": strategy, **network, **own}, down, up


ALA: dict[str, Any] = {"fedala.max-epochs": 2, "fedala.eta": 5.0, "fedala.layers": 2}
PART: dict[str, Flow] = {"down": (BODY, BODY), "up": (BODY, BODY)}
TWO: dict[str, Flow] = {"down": (2 * FULL, 2 * FULL), "up": (2 * FULL, 2 * FULL)}
# 31 bits are in 4 numbers
MASKS: dict[str, Flow] = {"down": (FULL, 2 * FULL), "up": (FULL + 4, FULL + 4)}
LATER: dict[str, Flow] = {"down": (0, FULL)}  # nothing in a silo's first round
CUT: dict[str, Flow] = {"down": (FULL, BODY), "up": (FULL, BODY)}
CASES: dict[str, tuple[dict[str, Any], Flow, Flow]] = {
    "apfl": case("apfl", adapt="batch"),
    "apfl, logits": case("apfl", mix="logits"),
    "apple": case(
        "apple", down=(3 * FULL, 2 * FULL), dr_learning_rate=0.1, prox_share=1.0, mu=1.0
    ),
    "apple, budget": case(
        "apple", down=(3 * FULL, FULL), dr_learning_rate=0.1, max_downloads=1
    ),
    "condistfl": case("condistfl"),  # FedAvg but for outlines that a silo lacks
    "ditto": case("ditto", lambda_=0.5),
    "diversifed": case("diversifed", **LATER),
    "fedadmm": case("fedadmm", rho=0.2, eta=0.8),
    "fedadmm, own start": case("fedadmm", rho=0.2, eta=0.0, start="own", random_epochs=True),
    "fedadagrad": case("fedadagrad"),
    "fedadam": case("fedadam"),
    "fedala": case("fedala", **ALA),
    "fedalt": case("fedalt", **PART),
    "fedamp": case("fedamp", **LATER, sigma=2.0, step=1.0),
    "fedapm": case("fedapm", **PART, rho=0.2),
    "fedapm, input, accuracy": case(
        "fedapm",
        (HEAD, HEAD),
        (HEAD, HEAD),
        personal="input",
        rho=0.2,
        accuracy=1e-3,
        alpha="samples",
    ),
    "fedas": case("fedas", **PART, align_learning_rate=0.1),
    "fedavg": case("fedavg"),
    "fedavg-ft": case("fedavg-ft", epochs=2),
    "fedavgm": case("fedavgm"),
    "fedawa": case("fedawa", server_learning_rate=0.1, steps=2),
    "fedbabu": case("fedbabu", **PART, epochs=2),
    "fedbn": case("fedbn", model="tiny-bn"),  # Σ - Σ_bn = 16 + 15 there
    "fedcac": case("fedcac", **MASKS, tau=0.4, beta=3),
    "fedcp": case("fedcp", (POLICY, POLICY), (POLICY, POLICY), lambda_=1.0),
    "feddbe": case("feddbe", (FULL, FULL + K), (K, FULL)),
    "feddbe, kept": case(
        "feddbe", (FULL, FULL + K), (FULL + K, FULL), warm_up="keep", momentum=0.5
    ),
    "feddyn": case("feddyn", alpha=0.2),
    "feddyn, as its code": case("feddyn", alpha=0.2, weights="samples", clip=0.5),
    "fedem": case("fedem", **TWO, components=2),
    # fc1's A, B and R of rank 2, fc2: R is not sent
    "fedex-lora": case("fedex-lora", (41, 41), (29, 29), lora_rank=2),
    "fedfomo": case("fedfomo", down=(0, 2 * FULL)),
    "fedfomo, budget": case("fedfomo", **LATER, max_downloads=1, epsilon=0.5),
    "fedgh": case("fedgh", (HEAD, HEAD), (TABLE, TABLE), server_passes=2, server_batch_size=4),
    "fedlama": case("fedlama", (FULL, FULL, FULL, 7, FULL), (FULL, FULL, 7, FULL)),  # 7 biases
    "fedlp": case(
        "fedlp", up={"a": (15, 15, 0), "b": (0, 31, 31), "c": (15, 15, 31)}, keep=0.5
    ),
    "fedlp, tensors": case(
        "fedlp",
        up={"a": (19, 4, 0), "b": (3, 19, 16), "c": (7, 7, 16)},
        keep=0.5,
        unit="tensor",
    ),
    "fedlc": case("fedlc", tau=1.0),
    # FedAvg but for findings that a silo lacks; of classes the means are zeros
    "fedmlp": case("fedmlp", up=(FULL + 2 * TABLE,)),
    "fednova": case("fednova"),
    "fedntd": case("fedntd", temperature=2.0),
    "fedpac": case("fedpac", (FULL, FULL + TABLE), (PAC, PAC), head_epochs=2),
    "fedper": case("fedper", **PART),
    "fedphp": case("fedphp", lambda_=0.5),
    "fedphp, distillation": case("fedphp", lambda_=0.5, transfer="distillation", clip=1.0),
    "fedproto": case("fedproto", (0, TABLE), (TABLE, TABLE)),
    "fedproto, trained, uniform": case(
        "fedproto",
        (0, TABLE),
        (TABLE, TABLE),
        features="trained",
        weighting="uniform",
        predict="head",
    ),
    "fedprox": case("fedprox", mu=0.5),
    "fedprox-ft": case("fedprox-ft", mu=0.5),
    # Mean and deviation of three columns, of three silos
    "fedrdn": case("fedrdn", (FULL, FULL + 18), (FULL + 6, FULL + 6)),
    "fedrep": case("fedrep", **PART, head_epochs=2),
    "fedrod": case("fedrod"),
    # A of rank 2 of fc1, which has three inputs
    "fedsa-lora": case("fedsa-lora", (6, 6), (6, 6), lora_rank=2),
    "fedselect": case(
        "fedselect", up=(FULL + 4, FULL + 4), passes=1, every=1, share=0.5, limit=0.9
    ),
    "fedsim": case("fedsim", **PART),
    "fedxgb": case(
        "fedxgb",
        (ENSEMBLE, ENSEMBLE),
        (NEW_TREES, NEW_TREES),
        model="trees",
        momentum=0.0,
        optimizer_state="reset",
        **{"trees.capacity": 60, "trees.depth": 1},
    ),
    "fedyogi": case("fedyogi"),
    # Two corners and the bias; a silo's point from round 2 on
    "floco": case("floco", (SIMPLEX, SIMPLEX + 2), (SIMPLEX, SIMPLEX), corners=2, tau=1),
    "gh-ofl": case("gh-ofl", (0, HEAD), (POOLED, POOLED)),
    "gh-ofl, nb": case("gh-ofl", (0, 27), (27, 27), head="nb"),
    "gh-ofl, qda": case("gh-ofl", (0, 63), (45, 45), head="qda"),
    "gpfl": case("gpfl", (VALVE, VALVE), (VALVE, VALVE)),
    "gpfl, own contexts": case("gpfl", (VALVE, VALVE), (VALVE, VALVE), contexts="own"),
    "heurfedamp": case("heurfedamp", **LATER, sigma=3.0),
    "ifca": case("ifca", down=(2 * FULL, 2 * FULL)),
    "knn-per": case("knn-per"),
    "lg-fedavg": case("lg-fedavg", (HEAD,), (HEAD,), layers=1),
    "lg-fedavg, pretrain": case(
        "lg-fedavg", (FULL, FULL, HEAD), (FULL, HEAD), layers=1, pretrain=1
    ),
    "lg-mix": case("lg-mix"),
    "local": case("local", (0, 0), (0, 0)),
    "lp-proj": case("lp-proj", (5, 5), (5, 5), dimension=5, lambda_=2.0, inner_steps=2),
    "lp-proj, squared": case(
        "lp-proj",
        (7, 7),
        (7, 7),
        dimension=7,
        distance="squared",
        projection="orthogonal",
        beta=0.5,
        clip=0.5,
    ),
    "moon": case("moon", mu=2.0),
    "partialfed": case("partialfed"),
    "per-fedavg": case("per-fedavg", step=0.2),
    "per-fedavg, hf": case("per-fedavg", variant="hf", step=0.2, delta=0.1),
    "pfedfda": case("pfedfda", (GAUSSIAN, GAUSSIAN), (GAUSSIAN, GAUSSIAN)),
    "pfedfda, one": case("pfedfda", (GAUSSIAN, GAUSSIAN), (GAUSSIAN, GAUSSIAN), betas="one"),
    "pfedla": case("pfedla", embedding=5, hidden=6, hyper_learning_rate=0.5),
    "pfedme": case("pfedme", beta=0.7, lambda_=3.0),
    "player-fl": case("player-fl", **CUT, threshold=1.0),
    "player-fl-random": case("player-fl-random", (FULL, BODY), (FULL, BODY), threshold=1e9),
    "scaffold": case("scaffold", **TWO, server_learning_rate=0.7),
    "scaffold, option I": case("scaffold", **TWO, option="I"),
}
WITH_ALA = {
    f"{name} with ALA": ({**CASES[name][0], **ALA, "ala": True}, *CASES[name][1:])
    for name in ("fedavg", "ditto", "fedapm", "player-fl", "heurfedamp", "apfl, logits")
}


# The first case of each method.
ONE_OF_EACH = {settings["strategy"]: name for name, (settings, _, _) in reversed(CASES.items())}
# A method of each kind: what travels, what a silo keeps, what the server makes of it.
TYPICAL = (
    *("local", "fedavg", "fedala", "apple", "ditto", "fedper", "fedbn", "scaffold", "ifca"),
    *("fedproto", "fedxgb"),
)


def every(cases: Mapping[str, Any] | Iterable[str]) -> pytest.MarkDecorator:
    """A test for each case; what is another variant of a method that is there, `make test-all` runs."""
    return some("name", cases, lambda name: "," not in name)


def typical(
    cases: Mapping[str, Any] | Iterable[str], argument: str = "name"
) -> pytest.MarkDecorator:
    """A test for each case, of which `make test` runs those of TYPICAL: each takes several whole runs."""
    return some(argument, cases, lambda name: name in TYPICAL)
