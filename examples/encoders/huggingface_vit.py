"""An encoder of Hugging Face with a head: `--set model=encoders.huggingface_vit:network trainable=head`."""

from torch import nn
from transformers import ViTConfig, ViTModel

NAME = "facebook/deit-tiny-patch16-224"
CONFIG = ViTConfig(hidden_size=192, num_attention_heads=3, intermediate_size=768)
SIDE = 64  # smaller pictures are enlarged: a patch has 16 pixels a side


class Classifier(nn.Module):
    def __init__(self, encoder, outputs):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, outputs)

    def forward(self, x):  # grey pictures, too
        x = x.expand(-1, 3, -1, -1)
        if max(x.shape[2:]) < SIDE:
            x = nn.functional.interpolate(x, (SIDE, SIDE), mode="bilinear")
        states = self.encoder(x, interpolate_pos_encoding=True).last_hidden_state
        return self.head(states[:, 0])


def network(input_shape, outputs, pretrained=False):
    if pretrained:
        return Classifier(ViTModel.from_pretrained(NAME, add_pooling_layer=False), outputs)
    return Classifier(ViTModel(CONFIG, add_pooling_layer=False), outputs)
