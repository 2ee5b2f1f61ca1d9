"""Hugging Face's Trainer: `--set trainer=trainers.huggingface:train`. With LoRA of peft, for texts, besides:

`--set model=trainers.huggingface:network --set 'trainable=*lora_*,*score*'`: what is trained is what is sent.
"""

import tempfile

from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers import BertConfig, BertModel, Trainer, TrainingArguments


class OwnTrainer(Trainer):
    task = None

    def get_train_dataloader(self):
        return self.task.loader("train")

    def compute_loss(self, model, inputs, *_, **__):
        return self.task.loss(model(inputs[0]), inputs[1])


def train(task):
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
        quiet["lr_scheduler_type"] = "constant"
        own = {"num_train_epochs": task.epochs, "max_grad_norm": 0.0, "disable_tqdm": True}
        args = TrainingArguments(folder, use_cpu=task.device.type == "cpu", **own, **quiet)
        trainer = OwnTrainer(task.network, args, optimizers=(task.optimizer(), None))
        trainer.task = task
        trainer.train()


class LoraText(nn.Module):
    def __init__(self, words, outputs):
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        body = BertModel(BertConfig(vocab_size=words, intermediate_size=64, **sizes))
        lora = LoraConfig(r=4, target_modules=["query", "value"])
        self.body = inject_adapter_in_model(lora, body).requires_grad_(True)
        self.score = nn.Linear(32, outputs)

    def forward(self, tokens):
        return self.score(self.body(input_ids=tokens.long()).last_hidden_state[:, 0])


def network(input_shape, outputs):
    return LoraText(input_shape[2], outputs)
