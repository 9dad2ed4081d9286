"""Memory does not grow with depth: the resident set of a process that streams, and of one that keeps what it gets."""

import json
import subprocess
import sys

import pytest

# 2 images, 4 heads, 1025 tokens: a layer's attention takes 32 MiB, beside which the model is nothing.
LAYER = 2 * 4 * 1025**2 * 4
SCRIPT = """
import json, resource, sys
import torch

from dobnb.capture import stream_attention

SIZE = dict(hidden_size=16, num_attention_heads=4, intermediate_size=16, image_size=512, patch_size=16)


def transformers(layers):
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**SIZE, num_hidden_layers=layers), add_pooling_layer=False)


def timm(layers):
    import timm

    return timm.create_model("vit_small_patch16_224", img_size=512, embed_dim=16, num_heads=4, depth=layers)


def torchvision(layers):
    from torchvision.models import VisionTransformer

    return VisionTransformer(512, 16, num_layers=layers, num_heads=4, hidden_dim=16, mlp_dim=16)


def peak(layers, keep=False):
    kept = []
    model = globals()[sys.argv[1]](layers).eval()
    images = torch.rand(2, 3, 512, 512)
    stream_attention(model, images, lambda layer, weights: kept.append(weights if keep else layer))
    assert len(kept) == layers
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


torch.set_num_threads(1)
print(json.dumps([peak(2), peak(24), peak(24, keep=True)]))
"""


@pytest.mark.parametrize("library", ["transformers", "timm", "torchvision"])
def test_24_layers_take_no_more_than_2(library):
    """The high-water mark of one process: after 2 layers, after 24, and after 24 that are kept, the control."""
    run = subprocess.run([sys.executable, "-c", SCRIPT, library], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    two, many, kept = json.loads(run.stdout.splitlines()[-1])
    assert many - two <= 3 * LAYER
    assert kept - two > 15 * LAYER, "the control, which keeps 24 layers, would pass"
