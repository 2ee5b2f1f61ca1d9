"""A trainer with Lightning: `--set trainer=trainers.lightning_loop:train`."""

import lightning


class Module(lightning.LightningModule):
    def __init__(self, task):
        super().__init__()
        self.task, self.network = task, task.network

    def training_step(self, batch, _):
        x, y = batch
        return self.task.loss(self.network(x), y)

    def configure_optimizers(self):
        return self.task.optimizer()


def train(task):
    on_gpu = task.device.type == "cuda"
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    lightning.Trainer(
        max_epochs=task.epochs,
        accelerator=task.device.type,
        devices=[task.device.index or 0] if on_gpu else 1,
        **dict.fromkeys(quiet, False),
    ).fit(Module(task), task.loader("train"))
