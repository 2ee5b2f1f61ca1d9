"""A trainer in plain PyTorch: `silofl simulate --set trainer=trainers.plain:train`, with `examples` on PYTHONPATH."""

import torch


def train(task):
    """Train `task.network` in place; return the mean loss, which the round reports."""
    optimizer = task.attach(torch.optim.SGD(task.network.parameters(), task.learning_rate))
    total, steps = 0.0, 0
    for _ in range(task.epochs):
        for x, y in task.loader("train"):
            optimizer.zero_grad()
            loss = task.loss(task.network(x), y)
            loss.backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1
    return float(total) / steps if steps else None
