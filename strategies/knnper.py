"""kNN-Per: FedAvg's model, and in each silo the vote of the training samples whose features are nearest.

Marfoq, Neglia, Kameni and Vidal, ICML 2022, arXiv 2111.09360. w by FedAvg. φ(x) in R^K are the features, the input of
the last layer, z_j those of the silo's training samples under the received w, N(x) the k nearest of them:

    h_i(x)   = λ_i v(x) + (1 - λ_i) softmax(logits(x))
    v(x)[c]  = sum_{j in N(x)} [y_j = c] s_j / sum_{j in N(x)} s_j,    s_j = exp(-||φ(x) - z_j||² / (K ``scale``))
    λ_i      = of 0, 0.01, ..., 1 the smallest with the highest score on the silo's validation samples

Without validation samples λ_i is 1/2; ``share`` >= 0 fixes it. ``capacity`` is the part of the training samples that
vote, drawn once per silo.

Sent: Σ down, Σ up. Kept: server w; silo nothing: features and λ_i are computed when the model predicts. So an absent
silo loses nothing, and a newcomer needs no training. Personal in round t: the w that arrived, with the votes, so it is
what a run of t - 1 rounds ends with. No file holds that model, as it would hold the features of training samples.
Special cases: λ = 0 predicts as FedAvg's received model bit for bit. λ = 1 with k = 1 gives a sample its label.
k >= n_i with a large scale gives the shares of the classes.

Paper and code: the code mixes votes with logits, not with probabilities (``mix = "logits"``; its flag is a text, and
so is always true), and selects λ_i by test data. Scores of validation samples are of the λ_i that they selected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.features import all_features, seen_features
from models.training import Network, by_batch, generator
from strategies.base.client import SiloClient
from strategies.base.info import ONE_MODEL
from strategies.base.settings import setting
from strategies.base.strategy import PersonalizedStrategy

GRID = 100  # steps of λ
TINY = 1e-12  # in place of a probability of 0, whose logarithm is not finite


@dataclass(frozen=True)
class KnnSettings:
    """Settings of kNN-Per; k as in its script."""

    neighbours: int = setting(7, "how many samples vote", symbol="k", minimum=1)
    share: float = setting(
        -1.0, "share of the votes, -1: by validation samples", symbol="λ", minimum=-1, maximum=1
    )
    scale: float = setting(1.0, "how far a vote reaches", above=0)
    capacity: float = setting(
        1.0, "part of the training samples that vote", minimum=0, maximum=1
    )
    mix: str = setting(
        "probabilities", "what votes are mixed with", choices=("probabilities", "logits")
    )


class Neighbours(nn.Module):
    """Network with the outputs log h_i(x), or with ``mix = "logits"`` the mixture itself.

    While λ_i (``share``) is None, it puts out votes and logits (2, b, C).
    """

    def __init__(self, client: KnnClient) -> None:
        super().__init__()
        self.model, self.settings, silo = client.model, client.settings, client.silo
        self.network, self.vector = client.model.module, client.model.vector
        n = len(silo.train)
        rng = generator(client.common.seed, silo.name, "capacity")
        count = int(self.settings.capacity * n + 1e-9)
        taken = torch.randperm(n, generator=rng)[:count].sort().values.to(silo.train.y.device)
        self.features = all_features(client.model, silo.train).flatten(1)[taken]
        self.labels = silo.train.y[taken]
        self.share: float | None = max(self.settings.share, 0.0) if count else 0.0
        if count and self.settings.share < 0:
            self.share = None
            self.share = self.best_share(client)

    @property
    def module(self) -> nn.Module:
        return self

    def forward(self, x: Tensor) -> Tensor:
        votes, logits = self.both(x)
        if self.share is None:
            return torch.stack([votes, logits])
        return self.mix(votes, logits, self.share)

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return v(x) and the logits of a batch (b, C)."""
        with seen_features(self.model) as features:
            logits = self.network(x)
        return self.votes(features[-1].flatten(1), logits), logits

    def votes(self, z: Tensor, logits: Tensor) -> Tensor:
        k = min(self.settings.neighbours, len(self.labels))
        if not k:
            return torch.zeros_like(logits)
        exact = "donot_use_mm_for_euclid_dist"
        apart = torch.cdist(z, self.features, compute_mode=exact).square()
        near, index = apart.topk(k, largest=False)
        # The nearest one's distance cancels, and keeps the sum above 0
        weights = (-(near - near[:, :1]) / (z.shape[1] * self.settings.scale)).exp()
        result = torch.zeros_like(logits)
        result.scatter_add_(1, self.labels[index], weights / weights.sum(1, keepdim=True))
        return result

    def mix(self, votes: Tensor, logits: Tensor, share: float) -> Tensor:
        if not share:
            return logits
        if self.settings.mix == "logits":
            return share * votes + (1 - share) * logits
        return (share * votes + (1 - share) * logits.softmax(1)).clamp(min=TINY).log()

    def best_share(self, client: KnnClient) -> float:
        samples, task = client.silo.val, client.silo.task
        if not len(samples):
            return 0.5
        pairs = by_batch(self, samples, 512, lambda outputs, _: outputs)
        votes, logits = torch.cat(pairs, 1)
        y = samples.labels()
        scores = [
            task.measure(self.mix(votes, logits, i / GRID), y)[task.score]
            for i in range(GRID + 1)
        ]
        return scores.index(max(scores)) / GRID


class KnnClient(SiloClient):
    settings: KnnSettings
    no_file = "it would hold the features of training samples"

    def personal(self) -> Tensor:
        if self.shares_buffers:
            self.model.load(self.received, self.received_buffers, self.received_integers)
        return self.received

    def predicting(self) -> Network:
        return Neighbours(self)


class KnnPer(PersonalizedStrategy):
    info = ONE_MODEL(
        name="knn-per",
        title="The shared model, and votes of a silo's nearest samples",
        paper="Marfoq et al., ICML 2022, arXiv 2111.09360",
        spelling="kNN-Per",
        reports="personal",
        one_model=False,
        own_model="kept",
        note="it is the received model, with the features of the training samples, which no file holds",
        needs_classes=True,
    )
    client = KnnClient
    Settings = KnnSettings
    search = (("scale", 0.1, 10.0),)
