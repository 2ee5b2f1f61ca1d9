"""APPLE: each silo learns which other silos' core models help it, and mixes them.

Luo and Wu, IJCAI 2022, arXiv 2110.08394. Every silo i has a core model w_i^c, which the others may download, and a
directed relationship (DR) vector p_i, which never leaves it. Its personalised model is

    w_i^p = sum_j p_ij w_j^c                                                        (eq. 4)
    F_i   = f_i(w_i^p) + λ(r) (μ/2) ||p_i - p_0||²,   p_0 = [n_1/n, ..., n_N/n]      (eq. 7)

and per mini-batch, with the others' cores frozen and g = ∇f_i(w_i^p):

    w_i^c <- w_i^c - η1 p_ii g                                                      (eq. 5)
    p_ij  <- p_ij  - η2 (<g, w_j^c> + λ(r) μ (p_ij - p_0j))                          (eq. 6)

both by SGD with momentum, at the same time. p_i is never projected: it may be negative and need not sum to one.
λ(r) falls from 1 to 0 over the first L rounds (appendix A.1), cos: (cos(π r / L) + 1) / 2, exp: ε^(r/L), ε = 1e-3,
with r counted from 0. The server keeps the cores and aggregates nothing.

Download budget M (appendix A.2): the silo draws M others, those never downloaded first, else without replacement with
probability proportional to b(r)^|p_ij|, b(r) = max(1.5, r M / N) (eqs. 8, 9). It sends only their names to the server.
Cores that were not downloaded keep their cached value. The cores of round 1 are initial models, which all silos have
as if from shared seeds, and do not count as downloads.

Sent: M Σ down (N - 1 without a budget), Σ up, and in round 1 the initial cores of all. Kept: server the cores; silo
p_i, w_i^c, and under a budget the cache. An absent silo's last core stays on the server, and others may download it.
A silo whose update was not usable gets all cores in the next round, including its own: a silo that has lost its state
restarts from that core and p_0. A late joiner's core is the others' mean by samples and its p is p_0, now over N + 1.
The others' p_i get the entry p_0j, and their other entries are scaled by 1 - p_0j: a p_i at p_0 stays there.

Paper and code: the regulariser is μ/2 (paper), μ (code): double μ to repeat the code's numbers. Cores start
independently (both; ``common-init = false``), here from one model, which starts w^p far better (`azpro`, 16 hospitals,
20 rounds: R² .06 and .41). By eq. 5 a step is scaled by p_ii, which starts near 1/N: rates that fit are N times those
of other methods (.05 N: .50); at .5 N, or η2 = .1, it diverges there. p_i starts at p_0 (code; the paper has only
"initialise"). The code's budget draws uniformly because its record of downloads is never updated;
this implementation follows the paper's rule.
Special cases: p_i one-hot and η2 = 0 is Local bit for bit; p = 1/N frozen, equal n_i, one step per round, η1 = N η:
the mean of the cores follows one-step FedAvg.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from models.optimizers import Sgd
from models.training import MeanLoss, generator
from partitions.common.errors import DataError, UserError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_MIXTURE, OWN_RATE, OWN_STEPS
from strategies.base.plan import Relationships
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.state import Array, Arrays, ClientState, Item, Items, ServerState, State
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.kinds import Names
from strategies.base.transport.payload import Model, Payload, Update, model_of


@dataclass(frozen=True)
class AppleSettings:
    """Settings of APPLE; defaults but common-init are the paper's for practical CIFAR-10 and MNIST (appendix B.4)."""

    dr_learning_rate: float = setting(
        0.001, "learning rate of the DR vector", symbol="η2", minimum=0, kind="learning-rate"
    )
    mu: float = setting(
        0.01, "weight of the proximal term on the DR vector", symbol="μ", minimum=0
    )
    scheduler: str = setting("cos", "how λ(r) falls", symbol="λ", choices=("cos", "exp"))
    prox_share: float = setting(
        0.3, "share of the rounds after which λ is 0", symbol="L", minimum=0, maximum=1
    )
    max_downloads: int = setting(
        0, "core models a silo may download per round, 0: all others", symbol="M", minimum=0
    )
    common_init: bool = setting(True, "all core models start from one initial model")
    initial_dr: str = setting(
        "samples",
        "p_i at the start: p_0, 1/N, or one-hot",
        choices=("samples", "uniform", "own"),
    )


def loss_schedule(r: int, last: int, kind: str) -> float:
    """Return λ(r) of appendix A.1; ``r`` counts from 0, ``last`` is L in rounds."""
    if r >= last:
        return 0.0
    return (math.cos(math.pi * r / last) + 1) / 2 if kind == "cos" else 1e-3 ** (r / last)


class AppleClientState(ClientState):
    dr = Array()  # p_i (N,)
    # w_i^c (Σ,) and, under a budget, the others' as they were last downloaded
    cores = Arrays("core.")
    dr_history = Array()  # p_i after each round of dr_rounds (rounds, N)
    dr_rounds = Item[list[int]](list)
    # The silos that p_i is over; [] in a state of an earlier version
    dr_names = Item[list[str]](list)
    downloaded = Item[list[str]](list)  # silos whose core models were downloaded once


class AppleServerState(ServerState):
    rounds = Items[int]("round.")  # the round of each silo's core model
    wanted = Items[list[str]]("wanted.")  # silos whose core models each silo downloads next
    missed = Item[list[str]](list)  # silos whose last update was not usable


class AppleClient(SiloClient):
    state_type = AppleClientState
    state: AppleClientState
    settings: AppleSettings

    def receive(self) -> Tensor:
        samples: dict[str, int] = json.loads(cast(str, self.numbers["samples"]))
        self.names = sorted(samples)
        self.me = self.names.index(self.silo.name)
        total = sum(samples.values())
        self.p0 = torch.tensor(
            [samples[n] / total for n in self.names], device=self.model.device
        )
        self.cores = torch.stack([self._core(name) for name in self.names])
        dr = self.state.dr
        self.dr = (
            self._initial_dr()
            if dr is None
            else self._grow_dr(dr.to(self.model.device, copy=True))
        )
        return torch.mv(self.cores.t(), self.dr)

    def first_model(self) -> Tensor:
        purposes = ["" if self.settings.common_init else name for name in self.names]
        return torch.mv(torch.stack([self.silo.initial(p) for p in purposes]).t(), self.dr)

    def personalise(self) -> Tensor:
        """Train p_i and its own core; the others' cores are fixed."""
        self.local_update()
        return self.model.vector

    def _core(self, name: str) -> Tensor:
        """Return silo ``name``'s core model: its own from the state, another's as received or as last cached."""
        kept = self.state.cores.get(name)
        if model_of(name) in self.models and (name != self.silo.name or kept is None):
            return self.models[model_of(name)].vector
        if kept is None:
            raise UserError(
                f"the core model of {name} is not kept here: this silo has lost its state, and starts again next round "
                f"from what the server holds"
            )
        return kept.to(self.model.device)

    def _initial_dr(self) -> Tensor:
        if self.settings.initial_dr == "uniform":
            return torch.full_like(self.p0, 1 / len(self.p0))
        if self.settings.initial_dr == "own":
            return torch.nn.functional.one_hot(torch.tensor(self.me), len(self.p0)).to(self.p0)
        return self.p0.clone()

    def _grow_dr(self, dr: Tensor) -> Tensor:
        """Return p_i over ``self.names``: p_0j for late joiners, the others' entries scaled by 1 - sum_j p_0j."""
        known = self.state.dr_names or self.names
        new = [i for i, name in enumerate(self.names) if name not in known]
        if len(dr) != len(known) or len(known) + len(new) != len(self.names):
            raise UserError(
                f"{self.silo.name} keeps weights of {len(dr)} silos, and the message is of {len(self.names)}"
            )
        if not new:
            return dr
        old, grown = [i for i in range(len(self.names)) if i not in new], self.p0.clone()
        grown[old] = dr * (1 - self.p0[new].sum())
        if (history := self.state.dr_history) is not None:  # they had no weight before
            table = history.new_zeros(len(history), len(self.names))
            table[:, old] = history
            self.state.dr_history = table
        return grown

    def local_update(self) -> list[Tensor]:
        c, s = self.common, self.settings
        last = int(c.rounds * s.prox_share)
        prox = loss_schedule(self.round - 1, last, s.scheduler) * s.mu
        core, cores, dr, model = self.cores[self.me], self.cores, self.dr, self.model
        core_step = self.optimizer()
        dr_step = Sgd(self.learning_rate(s.dr_learning_rate), c.momentum)
        losses = MeanLoss()
        for x, y in self.batches():
            torch.mv(cores.t(), dr, out=model.vector)
            losses.add(self.gradient(x, y))
            dr_gradient = torch.mv(cores, model.gradient)
            if prox:
                dr_gradient.add_(dr - self.p0, alpha=prox)
            core_step.step(core, model.gradient.mul_(dr[self.me]))
            dr_step.step(dr, dr_gradient)
        torch.mv(cores.t(), dr, out=model.vector)
        self.keep_optimizer(core_step)
        self.tell_loss(losses)
        self._keep_cores(core.clone())
        return [self.state.cores[self.silo.name]]

    def _keep_cores(self, core: Tensor) -> None:
        """Store p_i after every round, the own core, and under a budget the others' cores and the next downloads."""
        state = self.state
        state.dr, state.dr_names = self.dr.clone(), self.names
        state.cores[self.silo.name] = core
        history = self._initial_dr()[None] if state.dr_history is None else state.dr_history
        state.dr_history = torch.cat([history, self.dr[None]])
        state.dr_rounds = [*(state.dr_rounds or [self.round - 1]), self.round]
        budget = self.settings.max_downloads
        if 0 < budget < len(self.names) - 1:
            arrived = [
                n for n in self.names if model_of(n) in self.models and n != self.silo.name
            ]
            state.cores.update({n: self.models[model_of(n)].vector for n in arrived})
            seen = set(state.downloaded)
            # Not the initial cores, which come all at once
            if len(arrived) < len(self.names) - 1:
                seen |= set(arrived)
            state.downloaded = sorted(seen)
            self.replies["wanted"] = self.choose_downloads(seen, budget)

    def choose_downloads(self, seen: set[str], budget: int) -> list[str]:
        """Return the ``budget`` silos to download from next: unseen ones first, then by b(r)^|p_ij| (eqs. 8, 9)."""
        rng = generator(self.common.seed, self.silo.name, self.round, "downloads")
        others = [n for n in self.names if n != self.silo.name]
        unseen = [n for n in others if n not in seen]
        chosen = [
            unseen[i] for i in torch.randperm(len(unseen), generator=rng)[:budget].tolist()
        ]
        rest = [n for n in others if n not in chosen]
        if len(chosen) < budget:
            # Of the next round: r counts from 0 there
            base = max(1.5, self.round * budget / len(self.names))
            strength = torch.tensor(
                [float(self.dr[self.names.index(n)].abs()) for n in rest], dtype=torch.float64
            )
            # Base ** |p|, normalised; no overflow
            weights = (strength * math.log(base)).softmax(0)
            drawn = torch.multinomial(
                weights, budget - len(chosen), replacement=False, generator=rng
            )
            chosen += [rest[i] for i in drawn.tolist()]
        return sorted(chosen)


def over(names: Sequence[str], state: State) -> np.ndarray:
    """Return a silo's history of p_i (rounds, N) over these silos; 0 for those that joined after its last round."""
    history = state.arrays["dr_history"].numpy()
    known = state.numbers.get("dr_names") or []
    if len(known) != history.shape[1] or not set(known) <= set(names):
        return history
    table = np.zeros((len(history), len(names)))
    table[:, [names.index(name) for name in known]] = history
    return table


class Apple(PersonalizedStrategy):
    info = OWN_MIXTURE(
        name="apple",
        title="Adaptive personalised cross-silo learning",
        paper="Luo and Wu, IJCAI 2022, arXiv 2110.08394",
        spelling="APPLE",
        sends=("M Σ", "Σ"),
        sends_numbers={"wanted": Names("which silos' models it wants")},
        own_model="kept",
        receives="models",
        keeps=("its relationship vector",),
        late="grows",
        relationships="row i shows how much silo i takes of each silo's core model (its directed relationships, p_ij)",
        trainer=OWN_STEPS,
        block_rates=OWN_RATE,
        ala=False,
    )
    client = AppleClient
    Settings = AppleSettings
    search = (("learning-rate", 0.01, 0.2), ("dr-learning-rate", 0.0001, 0.03))
    rate_times_silos = True
    state_type = AppleServerState
    state: AppleServerState
    settings: AppleSettings

    @classmethod
    def read_relationships(cls, states: Mapping[str, State]) -> Relationships | None:
        known = {name: state for name, state in states.items() if "dr_history" in state.arrays}
        histories = {name: over(sorted(known), state) for name, state in known.items()}
        rounds = {name: state.numbers["dr_rounds"] for name, state in known.items()}
        return Relationships.of(histories, rounds)

    def start_state(self, initial: Callable[[str], Tensor]) -> None:
        for name in self.silos:
            self.state.models[name] = initial("" if self.settings.common_init else name)

    def welcome(self, silo: str, *, trains: bool) -> None:
        """Store the others' mean by samples as this silo's core; with it p_0 yields the same mean of all cores."""
        cores = self.state.models
        cores[silo] = weighted_mean(cores.values(), [self.plan.samples[name] for name in cores])

    def payload(self, silo: str) -> Payload:
        samples = json.dumps(self.plan.samples)
        state = self.state
        names = state.wanted.get(silo) or [n for n in self.silos if n != silo]
        if silo not in state.rounds or silo in state.missed:
            # Including its own core: it has none yet, or may have lost it
            names = list(self.silos)
        new = [n for n, first in self.plan.joined.items() if state.rounds.get(silo, 0) < first]
        # Whatever the budget: it has none of these
        names = [*names, *(n for n in new if n not in names and n != silo)]
        models = {
            model_of(n): Model(state.models[n], n, state.rounds.get(n, 0), self.plan.samples[n])
            for n in names
        }
        return Payload(models, {"samples": samples})

    def check(self, update: Update) -> None:
        wanted = update.numbers.get("wanted", [])
        if not isinstance(wanted, list) or not all(isinstance(name, str) for name in wanted):
            raise DataError(f"'wanted' is {wanted!r}, not a list of silos")

    def aggregate(self, updates: Sequence[Update]) -> None:
        self.state.missed = sorted(self.rejected)
        for update in updates:
            self.state.models[update.silo] = update.vector
            self.state.rounds[update.silo] = self.round
            if "wanted" in update.numbers:
                named = dict.fromkeys(cast(list[str], update.numbers["wanted"]))  # each once
                wanted = [n for n in named if n in self.silos and n != update.silo]
                self.state.wanted[update.silo] = wanted
