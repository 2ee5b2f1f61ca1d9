"""FedPHP: a moving average of the silo's own models as personal model and teacher of the trained model.

Li, Zhan, Shao, Li and Song, ECML-PKDD 2021. w by FedAvg, but each silo trains its copy w_i by the loss

    (1 - λ) L(w_i) + λ T(w_i, p_i),     p_i <- μ p_i + (1 - μ) w_i after the last step

with its history p_i fixed in training. φ is the input of the last layer block, z its outputs, B a batch:

    T = MMD: mean over B x B of k(φ_w, φ_w') + k(φ_p, φ_p') - 2 k(φ_w, φ_p),
             k(a, b) = sum over five widths or four of exp(-||a - b||² / 2s)                          (``kernels``)
    T = distillation: -mean over B of sum_c softmax_c(z_p / 4) log softmax_c(z_w)

μ grows with the silo's own rounds: 0.9 times those before this one over max(1, C T), at most 0.9, with C the
participation and T the rounds, so that in a silo's first round p_i becomes w_i. (PFLlib uses the number of the round,
and evaluates w_i.) BatchNorm statistics are mixed with the same μ; p_i computes in evaluation mode.

Sent: Σ down, Σ up (w_i). Kept: server w; silo p_i, which starts at the common initial model, and its number of rounds.
An absent silo keeps both. Personal: p_i. Special cases: with λ = 0, w is FedAvg's bit for bit; with μ = 0 as well, p_i
is FedAvg's locally trained model.

The paper's text was not available: all this is from its first author's code, which also clips at norm 100 (``clip``)
and uses at least five batches a round. Its kernels have 2s = 1/4, 1/2, 1, 2 and 4 times the mean ||a - b||² of two
different samples of the batch's features, both models' together (``kernels = "batch"``). The fixed s of 10, 15, 20 and
50, which earlier runs have and which stay the default, are PFLlib's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from models.features import compute_frozen
from models.metrics import mmd
from models.training import clip_norm, feature_gradient
from strategies.base.client import SiloClient
from strategies.base.info import OWN_COPY, OWN_LOSS, No
from strategies.base.settings import setting
from strategies.base.state import ClientState, Item
from strategies.base.strategy import PersonalizedStrategy

TEMPERATURE = 4.0


@dataclass(frozen=True)
class PhpSettings:
    """Settings of FedPHP; defaults of its first author's code."""

    mu: float = setting(
        0.9, "largest share of the history in its update", symbol="μ", minimum=0, maximum=1
    )
    lambda_: float = setting(
        0.1, "share of the transfer term in the loss", symbol="λ", minimum=0, maximum=1
    )
    transfer: str = setting("mmd", "what the history teaches", choices=("mmd", "distillation"))
    kernels: str = setting(
        "fixed",
        "widths of mmd's kernels: PFLlib's fixed ones, or the authors', from each batch's distances",
        choices=("fixed", "batch"),
    )
    clip: float = setting(0.0, "largest norm of a step's gradient, 0: any", minimum=0)


class PhpClientState(ClientState):
    visits = Item(int)  # how many rounds the silo took part in


class FedPHPClient(SiloClient):
    state_type = PhpClientState
    state: PhpClientState
    settings: PhpSettings

    def local_update(self) -> list[Tensor]:
        model, clip = self.model, self.settings.clip
        kept = self.state.personal_buffers
        buffers = model.buffers.clone() if kept is None else kept
        self._history, self._history_buffers = self.previous(), buffers
        self._tensors = model.layout.unflatten(self._history, buffers)
        self.train(correction=(lambda w, g: clip_norm(g, clip)) if clip else None)
        return [model.vector.clone()]

    def gradient(self, x: Tensor, y: Tensor) -> Tensor:
        share = self.settings.lambda_
        if not share:
            return super().gradient(x, y)
        old, taught = compute_frozen(self.model, self._tensors, x)

        def loss(logits: Tensor, z: Tensor, y: Tensor) -> Tensor:
            transfer = self.term(z.flatten(1), logits, old.flatten(1), taught)
            return (1 - share) * self.loss(logits, y) + share * transfer

        return feature_gradient(self.model, x, y, loss)

    def term(
        self, features: Tensor, logits: Tensor, old_features: Tensor, old_logits: Tensor
    ) -> Tensor:
        if self.settings.transfer == "mmd":
            return mmd(features, old_features, of_batch=self.settings.kernels == "batch")
        soft = (old_logits / TEMPERATURE).softmax(1)
        return -(soft * logits.log_softmax(1)).sum(1).mean()

    def personal(self) -> Tensor:
        state, c = self.state, self.common
        mu = self.settings.mu * min(1.0, state.visits / max(1, int(c.participation * c.rounds)))
        state.visits += 1
        mixed = torch.lerp(self.model.vector, self._history, mu)
        self.model.load(mixed, torch.lerp(self.model.buffers, self._history_buffers, mu))
        return mixed

    def personalise(self) -> Tensor:
        """Train one round, with the received model as the history's start."""
        self.state.personal = self.received
        self.local_update()
        return self.personal()


class FedPHP(PersonalizedStrategy):
    info = OWN_COPY(
        name="fedphp",
        title="Personal models that inherit a silo's history",
        paper="Li et al., ECML-PKDD 2021",
        spelling="FedPHP",
        dp=No("its transfer loss compares the records of a batch with one another"),
        own_model="kept",
        note="the own model is a running mean of models that were sent and of received ones",
        plain_loss=False,
        trainer=OWN_LOSS,
    )
    client = FedPHPClient
    Settings = PhpSettings
