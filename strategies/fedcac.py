"""FedCAC: a silo's critical parameters are averaged with similar silos only, and with fewer of them in each round.

Wu, Liu, Niu, Zhu and Tang, ICCV 2023, arXiv 2309.11103. After local training from w to w_i, in each tensor

    c = |(w_i - w) ⊙ w_i|,     m_i = 1 for the τ largest c, the critical parameters               (eqs. 5, 6)

and the server compares which ones they are; after the first round t = 0:

    O_ij = 1 - ||m_i - m_j||_1 / (2 ||m_i||_1),     Ō, O_max their mean and maximum over all i ≠ j
    C_i  = {j: O_ij >= Ō + (t + 1)/β (O_max - Ō)} and i,     u_i = mean of the w_j, j in C_i
    start of silo i:  m_i ⊙ u_i + (1 - m_i) ⊙ w̄,     w̄ = the sample-weighted mean of the round's w_i

After more than β rounds C_i is i alone. (The formula gives that too, unless all overlaps are equal, as with two silos.)

Sent: 2 Σ down (w̄, u_i; w̄ alone until the server has a model of the silo), up w_i and Σ bits: eight of them in a
number, Σ/8 numbers. Kept: server w̄, all w_i and m_i; silo m_i, committed once the server has counted it
(strategies/scaffold.py). An absent silo's last w_i and m_i stay in the comparison (the code has no absence).
Evaluated: the start, before local training. Special cases: τ = 0 is FedAvg bit for bit; τ = 1 is Local bit for bit
after round β, and before it the plain mean of all last models; one silo is Local.

Ties at the threshold are all critical, so there can be more than τ. A parameter that training has not moved is not
critical (unless τ = 1). The code's rule for thresholds under 1e-10, by which all that moved are critical, is omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.layout import Layout
from partitions.common.errors import DataError
from strategies.base.client import SiloClient
from strategies.base.info import OWN_MIXTURE
from strategies.base.robust import weighted_mean
from strategies.base.settings import setting
from strategies.base.state import GLOBAL, Array, Arrays, ClientState, ServerState
from strategies.base.strategy import PersonalizedStrategy
from strategies.base.transport.error_feedback import propose
from strategies.base.transport.kinds import CRITICAL, MODEL
from strategies.base.transport.payload import Payload, Update


@dataclass(frozen=True)
class CacSettings:
    """Settings of FedCAC; defaults of its official CIFAR-10 runs."""

    tau: float = setting(
        0.5, "share of critical parameters in a tensor", symbol="τ", minimum=0, maximum=1
    )
    beta: int = setting(
        100, "rounds over which ever fewer silos are like enough", symbol="β", minimum=1
    )


def critical(layout: Layout, before: Tensor, after: Tensor, tau: float) -> Tensor:
    """Return m_i (Σ,), boolean."""
    change = ((after - before) * after).abs()
    mask = torch.zeros_like(change, dtype=torch.bool)
    for entry in layout.parameters:
        values = change[entry.start : entry.stop]
        count = int(tau * len(values) + 1e-9)  # 0.29 of 100 is 29
        if count == len(values):
            mask[entry.start : entry.stop] = True
        elif count:
            threshold = values.topk(count).values[-1]
            mask[entry.start : entry.stop] = (values >= threshold) & (values > 0)
    return mask


def pack_bits(mask: Tensor) -> Tensor:
    """Pack booleans (Σ,) into numbers below 1 of eight binary digits, which every wire format holds exactly."""
    padded = torch.nn.functional.pad(mask.float(), (0, -len(mask) % 8)).view(-1, 8)
    return padded @ powers(mask.device)


def check_bits(_: object, update: Update) -> None:
    """Raise DataError for bits that :func:`pack_bits` does not make."""
    whole = update.vectors["critical"] * 256
    if bool(((whole < 0) | (whole > 255) | (whole != whole.floor())).any()):
        raise DataError("'critical' holds other numbers than those that bits are packed in")


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return the booleans (size,) that :func:`pack_bits` packed."""
    return ((packed.unsqueeze(1) / powers(packed.device)).floor() % 2).flatten()[:size] == 1


def powers(device: torch.device) -> Tensor:
    return 2.0 ** torch.arange(-8, 0, device=device)


class CacClientState(ClientState):
    critical = Array()  # m_i, packed


class CacServerState(ServerState):
    critical = Arrays("critical.")  # each silo's last m_i, packed


class FedCACClient(SiloClient):
    state_type = CacClientState
    state: CacClientState
    settings: CacSettings

    def receive(self) -> Tensor:
        shared, mask = super().receive(), self.state.critical
        if mask is None or "customised" not in self.models:
            return shared
        return torch.where(
            unpack_bits(mask, len(shared)), self.models["customised"].vector, shared
        )

    def local_update(self) -> list[Tensor]:
        before = self.model.vector.clone()
        self.train()
        mask = pack_bits(critical(self.layout, before, self.model.vector, self.settings.tau))
        propose(self.state, self.round, {"critical": mask})
        return [self.model.vector.clone(), mask]


class FedCAC(PersonalizedStrategy):
    info = OWN_MIXTURE(
        name="fedcac",
        title="Critical parameters shared among like silos",
        paper="Wu et al., ICCV 2023, arXiv 2309.11103",
        spelling="FedCAC",
        sends=("2 Σ", "Σ + Σ/8"),
        uploads={"model": MODEL, "critical": CRITICAL},
        reports="received",
        newcomer="copy",
    )
    client = FedCACClient
    Settings = CacSettings
    state_type = CacServerState
    state: CacServerState
    settings: CacSettings

    def begin_round(self) -> None:
        self._like = self.like()

    def payload(self, silo: str) -> Payload:
        vectors = {GLOBAL: self.state.model}
        if like := self._like.get(silo):
            vectors["customised"] = weighted_mean(self.state.models[n] for n in like)
        return self.pack(vectors)

    def like(self) -> dict[str, list[str]]:
        """Return C_i of every silo that has sent a model, by name."""
        names = [n for n in self.silos if n in self.state.models]
        if len(names) < 2 or self.round - 1 > self.settings.beta:
            return {n: [n] for n in names}
        masks = [unpack_bits(self.state.critical[n], self.layout.size) for n in names]
        overlaps = overlap(torch.stack(masks).float())
        itself = torch.eye(len(names), dtype=torch.bool, device=overlaps.device)
        mean, most = overlaps[~itself].mean(), overlaps[~itself].max()
        threshold = torch.minimum(
            mean + (self.round - 1) / self.settings.beta * (most - mean), most
        )
        near = (overlaps >= threshold) | itself
        return {
            i: [j for j, is_near in zip(names, row.tolist(), strict=True) if is_near]
            for i, row in zip(names, near, strict=True)
        }

    def centre(self, name: str, update: Update) -> Tensor | None:
        """Return the start that the silo was sent: the customised model at its critical parameters."""
        start, mask = super().centre(name, update), self.state.critical.get(update.silo)
        customised = self.sent.get(update.silo, {}).get("customised")
        if name != "model" or start is None or mask is None or customised is None:
            return start
        return torch.where(unpack_bits(mask, len(start)), customised.vector, start)

    def sizes(self, silo: str) -> dict[str, int]:
        return {"critical": -(-self.layout.size // 8)}

    check = check_bits

    def aggregate(self, updates: Sequence[Update]) -> None:
        super().aggregate(updates)
        for update in updates:
            self.state.models[update.silo] = update.vector
            self.state.critical[update.silo] = update.vectors["critical"]


def overlap(masks: Tensor) -> Tensor:
    """Return O_ij (n, n), float64, from 0/1 masks (n, Σ)."""
    common = (masks @ masks.T).double()  # counts, which are exact in float32 up to 16 million
    counts = common.diagonal().unsqueeze(1)
    return torch.where(counts > 0, 1 - (counts + counts.T - 2 * common) / (2 * counts), 0.0)
