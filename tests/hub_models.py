"""The hub's models as their repositories have them: config.json and preprocessor_config.json, without the weights.

Typed from the public repositories; of config.json, what transformers reads to build the model.
"""

import json
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, PreTrainedModel

_DINOV2 = {
    "apply_layernorm": True, "attention_probs_dropout_prob": 0.0, "drop_path_rate": 0.0, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0, "image_size": 518, "initializer_range": 0.02, "layer_norm_eps": 1e-06,
    "layerscale_value": 1.0, "mlp_ratio": 4, "num_channels": 3, "patch_size": 14, "qkv_bias": True,
    "reshape_hidden_states": True, "use_swiglu_ffn": False,
}  # fmt: skip
_REGISTERS = _DINOV2 | {
    "architectures": ["Dinov2WithRegistersModel"], "model_type": "dinov2_with_registers", "num_register_tokens": 4,
    "interpolate_antialias": True, "interpolate_offset": 0.0,
}  # fmt: skip
_VIT = {
    "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224, "initializer_range": 0.02,
    "intermediate_size": 3072, "layer_norm_eps": 1e-12, "model_type": "vit", "num_attention_heads": 12,
    "num_channels": 3, "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True,
}  # fmt: skip
CONFIGS = {
    "dinov2-small": _REGISTERS | {"hidden_size": 384, "num_attention_heads": 6, "num_hidden_layers": 12},
    "dinov2-base": _REGISTERS | {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12},
    "dinov2-large": _REGISTERS | {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 24},
    "dinov2-base-no-registers": _DINOV2 | {
        "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 768, "num_attention_heads": 12,
        "num_hidden_layers": 12,
    },
    "deit-base": _VIT,
    "vit-base": _VIT,
    "roberta-base": {
        "architectures": ["RobertaForMaskedLM"], "attention_probs_dropout_prob": 0.1, "bos_token_id": 0,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
        "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
        "model_type": "roberta", "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "type_vocab_size": 1, "vocab_size": 50265,
    },
    "distilbert-base": {
        "activation": "gelu", "architectures": ["DistilBertForMaskedLM"], "attention_dropout": 0.1, "dim": 768,
        "dropout": 0.1, "hidden_dim": 3072, "initializer_range": 0.02, "max_position_embeddings": 512,
        "model_type": "distilbert", "n_heads": 12, "n_layers": 6, "pad_token_id": 0, "qa_dropout": 0.1,
        "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True, "vocab_size": 30522,
    },
}  # fmt: skip
"""config.json by name in :data:`dobnb.models.MODELS`."""

_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_BIT = _IMAGENET | {
    "crop_size": {"height": 224, "width": 224}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_processor_type": "BitImageProcessor", "resample": 3,
    "rescale_factor": 1 / 255, "size": {"shortest_edge": 256},
}  # fmt: skip
PROCESSORS = {name: _BIT for name in CONFIGS if name.startswith("dinov2")} | {
    # as older versions of transformers wrote them
    "deit-base": _IMAGENET | {
        "crop_size": 224, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "ViTFeatureExtractor", "resample": 3, "size": 256,
    },
    "vit-base": {
        "do_normalize": True, "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "size": 224,
    },
}  # fmt: skip
"""preprocessor_config.json of the vision models."""


def _narrow(config: dict) -> dict:
    """The same depth and heads, two numbers a head."""
    heads = config.get("num_attention_heads", config.get("n_heads"))
    width = {"dim": 2 * heads, "hidden_dim": 8 * heads} if "dim" in config else {"hidden_size": 2 * heads}
    if "intermediate_size" in config:
        width["intermediate_size"] = 8 * heads
    return config | width


def build(name: str, narrow: bool = False) -> PreTrainedModel:
    """The architecture that the checkpoint was saved from, with random weights, in eval mode."""
    config = _narrow(CONFIGS[name]) if narrow else CONFIGS[name]
    kind = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    return kind(AutoConfig.for_model(**config)).eval()


def save(name: str, folder: Path) -> PreTrainedModel:
    """Write a narrow model as a repository has it: config, safetensors, processor or tokenizer."""
    model = build(name, narrow=True)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_narrow(CONFIGS[name])))  # as the repository has it
    if name in PROCESSORS:
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    else:
        _save_tokenizer(name, folder)
    return model


def _save_tokenizer(name: str, folder: Path) -> None:
    """A tokenizer of the model's kind that knows single letters; its special tokens have the ids of the real one's."""
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,"
    if name == "roberta-base":
        special = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(special | {byte: i for i, byte in enumerate(alphabet, 4)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
        names = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>",
                 "pad_token": "<pad>", "tokenizer_class": "RobertaTokenizer"}  # fmt: skip
    else:
        special = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102, "[MASK]": 103}
        pieces = [*letters, *(f"##{letter}" for letter in letters)]
        vocabulary = special | {piece: i for i, piece in enumerate(pieces, 1000)}
        tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 102), ("[CLS]", 101))
        names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]",
                 "mask_token": "[MASK]", "tokenizer_class": "DistilBertTokenizer"}  # fmt: skip
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names | {"model_max_length": 512}))
