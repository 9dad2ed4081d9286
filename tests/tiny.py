"""Random models and inputs that take milliseconds, for the tests of measuring."""

import torch
from transformers import BertConfig, BertModel, Dinov2Config, Dinov2Model

from dobnb.inputs import from_tensors

SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 56, "patch_size": 14}


def tiny(kind=Dinov2Model, config=Dinov2Config, **more):
    """A vision transformer of 3 layers and 3 heads, on 16 patches, whose attention is far from uniform."""
    torch.manual_seed(0)
    model = kind(config(**SMALL, **more)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # larger than the initialisation
            parameter.normal_(0, 0.4)
    return model


def noise(n, size=56):
    pixels = torch.randn(n, 3, size, size, generator=torch.Generator().manual_seed(1))
    return from_tensors({"pixel_values": pixels}, "noise")


def tiny_bert():
    """A text model whose special tokens are 101 and 102, and whose padding is 0, as BERT's are."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30522, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32,
        max_position_embeddings=32,
    )  # fmt: skip
    model = BertModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "query" in name or "key" in name:
                parameter.normal_(0, 0.6)
    return model


def without_time(found):
    """A measurement without what differs between two runs of the same: when, how long, where."""
    from dataclasses import replace

    born = {
        name: value
        for name, value in found.provenance.items()
        if name not in ("started", "seconds", "machines", "commit")
    }
    return replace(found, provenance=born)
