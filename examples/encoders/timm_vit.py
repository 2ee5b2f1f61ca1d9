"""An encoder of timm with a head of one's own: `--set model=encoders.timm_vit:network trainable=head`."""

import timm

NAME = "vit_tiny_patch16_224"


def network(input_shape, outputs, pretrained=False):
    any_size = {"dynamic_img_size": True, "dynamic_img_pad": True}
    own = {"in_chans": input_shape[0], "num_classes": outputs}
    return timm.create_model(NAME, pretrained, **own, **any_size)
