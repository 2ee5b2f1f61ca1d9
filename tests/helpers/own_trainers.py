"""Trainers as hospitals write them, and as they should not."""

import locale
import os
from functools import partial
from typing import Any

import torch
from torch.optim import SGD


def closure(task: Any) -> None:
    """As Lightning does: the gradient is computed inside the step."""
    optimizer = task.attach(SGD(task.network.parameters(), task.learning_rate))
    for _ in range(task.epochs):
        for x, y in task.loader():
            optimizer.step(partial(gradient, task, optimizer, x, y))


def gradient(task: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = task.loss(task.network(x), y)
    loss.backward()
    return loss


def moves(task: Any) -> None:
    """As a library that puts the network elsewhere and back: its tensors are no views any more."""
    closure(task)
    for parameter in task.network.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = None


def thaws(task: Any) -> None:
    """Trains what the method froze."""
    for parameter in task.network.parameters():
        parameter.requires_grad_(True)
    closure(task)


def own_optimizer(task: Any) -> None:
    optimizer = task.optimizer()
    for _ in range(task.epochs):
        for x, y in task.loader("train"):
            optimizer.zero_grad()
            task.loss(task.network(x), y).backward()
            optimizer.step()


def forgets(task: Any) -> None:
    optimizer = SGD(task.network.parameters(), task.learning_rate)
    for x, y in task.loader("train"):
        task.loss(task.network(x), y).backward()
        optimizer.step()


def twice(task: Any) -> None:
    task.attach(task.optimizer())


def foreign(task: Any) -> None:
    task.attach(SGD([torch.nn.Parameter(torch.zeros(3))], 0.1))


def fails(task: Any) -> None:
    raise RuntimeError("first line\nsecond line")


def leaves(task: Any) -> None:
    raise SystemExit(3)


def nowhere(task: Any) -> None:
    task.loader("validation")


def copies(task: Any) -> None:
    optimizer = task.optimizer()
    for x, y in task.loader("train"):
        task.loss(task.network(x.clone()), y).backward()
        optimizer.step()


def replaces(task: Any) -> None:
    """Its own layer in the network's place, which no model's vector holds."""
    closure(task)
    name, layer = [*task.network.named_children()][-1]
    setattr(task.network, name, torch.nn.Linear(layer.in_features, layer.out_features))


def widens(task: Any) -> None:
    closure(task)
    next(iter(task.network.parameters())).data = torch.zeros(2, 2)


def leaves_device(task: Any) -> None:
    closure(task)
    task.network.to("meta")


def returns_text(task: Any) -> str:
    closure(task)
    return "done"


def leaves_hooks(task: Any) -> None:
    """What it puts into the network would change all later rounds, and other silos of the process."""
    closure(task)
    network = task.network.double()
    network.register_forward_hook(lambda module, given, found: found * 0)
    network.forward = lambda x: x
    trained = next(own for own in network.parameters() if own.requires_grad)
    trained.register_hook(lambda gradient: gradient * 0)
    network.add_module("more", torch.nn.Linear(2, 2))


def wanders(task: Any) -> None:
    """As Hydra's job.chdir does, and libraries that set what they read."""
    closure(task)
    os.chdir("/")
    os.environ["OMP_NUM_THREADS"] = "7"
    del os.environ["PATH"]
    locale.setlocale(locale.LC_ALL, "C")


def parametrises(task: Any) -> None:
    torch.nn.utils.parametrizations.weight_norm(next(task.network.children()))
    closure(task)
