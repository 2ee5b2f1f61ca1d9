"""One shape that each built-in network is meant for."""

from __future__ import annotations

from models.shapes import Shape

TYPICAL: dict[str, Shape] = {
    "apple-cnn": (1, 28, 28),
    "fedala-cnn": (3, 32, 32),
    "diversifed-cnn": (3, 32, 32),
    "fedapm-cnn": (3, 32, 32),
    "player-cnn": (1, 28, 28),
    "player-heart": (10,),
    "mlp": (30,),
    "small-cnn": (1, 8, 8),
    "resnet8": (3, 32, 32),
    "resnet18": (3, 32, 32),
    "linear": (30,),
    "resnet50": (3, 32, 32),
    "densenet121": (3, 32, 32),
    "vit-s": (3, 32, 32),
    "unet": (3, 20, 28),
    "player-transformer": ("tokens", 9, 30),
    "fasttext": ("tokens", 9, 30),
    "fedapm-signals": (3, 40),
    "fedapm-image-text": ("tokens", 9, 30),
}
