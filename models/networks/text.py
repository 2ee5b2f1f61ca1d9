"""Networks for texts: FedALA's fastText and PLayer-FL's transformer.

Both take tokens int32 (b, T), from 0 to vocabulary - 1; 0 is no word and pads the end (models/shapes.py). The input
shape states the size of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.shapes import Shape, real_steps
from partitions.common.errors import UserError
from partitions.common.settings import setting

WIDEST = 4096  # a limit, because a silo builds the network from a server's settings


@dataclass(frozen=True)
class FastTextSettings:
    """Width of the embeddings, and the mean's denominator."""

    width: int = setting(
        32, "width of the embedding and of the hidden layer", minimum=1, maximum=WIDEST
    )
    mean: str = setting(
        "all",
        "all: over every position, those behind the text too, as FedALA's code; words: over the words",
        choices=("all", "words"),
    )


class FastText(nn.Module):
    """The mean of the words' embeddings, a linear layer without activation, a linear layer (Joulin et al., EACL 2017).

    As in FedALA's code, the mean is over all T positions; those without a word are zeros (``mean = "all"``).
    Blocks: embedding, fc1, fc2 (FedALA, Table 5: embedding, hidden, output).
    """

    block_names = ("embedding", "fc1", "fc2")

    def __init__(self, input_shape: Shape, classes: int, settings: FastTextSettings) -> None:
        super().__init__()
        _, _, vocabulary = input_shape
        self.only_words = settings.mean == "words"
        self.embedding = nn.Embedding(vocabulary, settings.width, padding_idx=0)
        self.fc1 = nn.Linear(settings.width, settings.width)
        self.fc2 = nn.Linear(settings.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.embedding(x)  # of token 0: zeros
        if self.only_words:
            features = embedded.sum(-2) / (x != 0).sum(-1, keepdim=True).clamp(min=1)
        else:
            features = embedded.mean(-2)
        logits: Tensor = self.fc2(self.fc1(features))
        return logits


@dataclass(frozen=True)
class PlayerTransformerSettings:
    """Widths of PLayer-FL's transformer."""

    width: int = setting(768, "width of the embeddings", minimum=1, maximum=WIDEST)
    feed_forward: int = setting(
        3072, "width of the layer behind attention", minimum=1, maximum=4 * WIDEST
    )
    heads: int = setting(1, "of the attention; they divide the width", minimum=1, maximum=64)


class Embeddings(nn.Module):
    """Token and position embeddings; every row starts as a random direction of length 1."""

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width))
        with torch.no_grad():
            for table in (self.tokens.weight, self.positions):
                table.copy_(F.normalize(table, dim=1))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(x) + self.positions
        return embedded

    def own_gradients(self, d: Tensor) -> dict[str, Tensor]:
        """Return each sample's gradients (b, ...) of ``positions``, from ``d``, those of the outputs.

        Used by models/privacy/layers.py.
        """
        return {"positions": d}


class FirstAttention(nn.Module):
    """Attention of the first position to all (b, T, width) -> (b, width), projected; q, k and v have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (
            nn.Linear(width, width, bias=False) for _ in range(3)
        )
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        query = self.query(x[..., :1, :])
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).movedim(-2, -3)
            for part in (query, self.key(x), self.value(x))
        )
        weights = q @ k.mT * k.shape[-1] ** -0.5
        weights = weights.masked_fill(~real[..., None, None, :], -torch.inf).softmax(-1)
        projected: Tensor = self.proj((weights @ v).movedim(-2, -3).flatten(-2).squeeze(-2))
        return projected


class FeedForward(nn.Module):
    """Two fully connected layers."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.resid1 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.resid1(self.fc1(x).relu())
        return result


class PlayerTransformer(nn.Module):
    """PLayer-FL's transformer (Sent-140, MIMIC-III): one block of attention without normalisation.

    x = tokens + positions; x + proj(attention(x)); x + resid1(relu(fc1(x))). The last layer takes the first position,
    which a tokeniser gives to [CLS]. Only that position is used, so after the keys and values it alone is computed; the
    numbers are those of the whole sequence. Padding after the last word gets no attention.

    Blocks: embedding, attention, feedforward, fc2, as its sensitivity groups them. The saving on Sent-140 and MIMIC-III
    in the slides (16.3 and 13.6 %) is fc2 with one of the two layers of ``feedforward``; no cut between blocks gives
    that. Its size is not published. The megabytes of a round imply 14.49 million parameters (Sent-140) and 17.33
    million (MIMIC-III), and so vocabularies of about 9,520 and 12,835. Linear layers start Kaiming-normal, biases at
    zero. Its code starts the tokens from BERT's embeddings, normalised to length 1; here they are random.
    """

    block_names = ("embedding", "attention", "feedforward", "fc2")

    def __init__(
        self, input_shape: Shape, classes: int, settings: PlayerTransformerSettings
    ) -> None:
        super().__init__()
        _, length, vocabulary = input_shape
        width = settings.width
        if width % settings.heads:
            raise UserError(
                f"player-transformer.heads = {settings.heads} does not divide a width of {width}"
            )
        self.embedding = Embeddings(length, vocabulary, width)
        self.attention = FirstAttention(width, settings.heads)
        self.feedforward = FeedForward(width, settings.feed_forward)
        self.fc2 = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        real = real_steps(x)
        real[..., 0] = True  # of an empty text, too: attention needs at least one position
        embedded = self.embedding(x)
        first = embedded[..., 0, :] + self.attention(embedded, real)
        first = first + self.feedforward(first)
        logits: Tensor = self.fc2(first)
        return logits
