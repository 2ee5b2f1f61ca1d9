"""A trainer with MONAI's engine and its handlers: `--set trainer=trainers.monai_engine:train`."""

from monai.engines import SupervisedTrainer


def train(task):
    trainer = SupervisedTrainer(
        device=task.device,
        max_epochs=task.epochs,
        train_data_loader=task.loader("train"),
        network=task.network,
        optimizer=task.optimizer(),
        loss_function=task.loss,
        prepare_batch=lambda batch, *_, **__: batch,
    )
    trainer.run()
