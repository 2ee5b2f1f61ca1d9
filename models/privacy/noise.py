"""Secret random numbers from a key: Gaussian noise on a grid, Poisson samples, seeds.

All come from ChaCha20 key streams (RFC 8439). Each purpose has its own key: HMAC-SHA256 of the silo's key and of the
purpose. So numbers for the same purpose are the same, and cannot be computed without the key.

**On a grid.** A floating-point Gaussian added to a floating-point number has gaps that depend on the number, and
disclose it (Mironov, CCS 2012). So the sum of gradients and the noise are rounded to multiples of a grid step, and
added as whole numbers. The result lies on the same grid for every sum; later operations on it are post-processing. The
noise has 53 random bits; a step is 2^-36 of its standard deviation. Rounding changes each of d numbers by at most half
a step: in norm 2^-37 sqrt(d) of the standard deviation, about 1e-8 for a million parameters.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

GRID = 2.0**-36  # in standard deviations of the noise
BITS = 53  # of a uniform number
BLOCK = 2**15  # numbers computed at once: they fit a core's cache
LARGEST = 2.0**61  # of a sum, in grid steps: with the noise it is a whole number of 64 bits


def derive_key(key: bytes, *purpose: str | int | bytes) -> bytes:
    """Return the key (32 bytes) for a purpose; the silo's key cannot be computed from it."""
    message = b"".join(len(part).to_bytes(8, "big") + part for part in map(_bytes, purpose))
    return hmac.new(key, message, hashlib.sha256).digest()


def _bytes(part: str | int | bytes) -> bytes:
    return part if isinstance(part, bytes) else str(part).encode()


def digest_of(tensors: Iterable[Tensor]) -> bytes:
    """Return the SHA-256 (32 bytes) of tensors, with their types and shapes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().numpy().view(np.uint8).data)
    return digest.digest()


def uniforms(key: bytes, count: int) -> np.ndarray:
    """Return ``count`` whole numbers, uniform in 0..2^53 - 1; equal keys give equal numbers."""
    return _draw_numbers(key_stream(key), count)


def key_stream(key: bytes) -> CipherContext:
    """Return the key stream: the encryption of zeros."""
    return Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()


def _draw_numbers(stream: CipherContext, count: int) -> np.ndarray:
    """Return the next numbers of a key stream."""
    numbers: np.ndarray = np.frombuffer(
        stream.update(bytes(8 * count)), dtype="<u8"
    ) >> np.uint64(64 - BITS)
    return numbers


def poisson_sample(key: bytes, units: int, rate: float) -> np.ndarray:
    """Return the indices of the sampled units, each drawn independently with probability ``rate``."""
    return np.flatnonzero(uniforms(key, units) < np.uint64(round(rate * 2**BITS)))


def gaussians(key: bytes, count: int) -> Iterator[Tensor]:
    """Yield standard normal numbers (Box and Muller 1958), float64, in blocks of at most :data:`BLOCK`."""
    stream = key_stream(key)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        pairs = (size + 1) // 2
        drawn = torch.from_numpy(_draw_numbers(stream, 2 * pairs).astype(np.float64))
        radius = drawn[:pairs].add_(1.0).mul_(2.0**-BITS).log_().mul_(-2.0).sqrt_()  # of (0, 1]
        angle = drawn[pairs:].mul_(2 * math.pi * 2.0**-BITS)
        yield torch.cat([angle.cos().mul_(radius), angle.sin_().mul_(radius)])[:size]


def add_noise(total: Tensor, deviation: float, key: bytes) -> Tensor:
    """Return ``total`` (d,) plus noise of this standard deviation, on the grid, rounded to the type of ``total``.

    Raises ValueError for a number that the grid does not have: nan and infinity would become whole numbers without
    noise.
    """
    step = deviation * GRID
    result = torch.empty(total.numel(), dtype=total.dtype)
    parts = (torch.split(vector, BLOCK) for vector in (total.cpu(), result))
    blocks = zip(*parts, gaussians(key, total.numel()), strict=True)
    for sum_, values, noise in blocks:
        on_grid = (sum_.double() / step).round_()
        if not bool((on_grid.abs() <= LARGEST).all()):
            raise OverflowError(
                "a sum of clipped gradients that is not finite, or too large for its noise"
            )
        values.copy_(
            on_grid.long().add_(noise.mul_(1 / GRID).round_().long()).double().mul_(step)
        )
    return result.to(total.device)


def seed(key: bytes) -> int:
    """Return a seed for a PyTorch generator."""
    return int.from_bytes(key[:8], "big") >> 1
