"""Token roles, held against the sequence that a real model makes of an image, and against real tokenizers."""

import pytest
import rtdl_revisiting_models as rtdl
import timm
import torch
import transformers as tf
from torch import nn
from torchvision.models import VisionTransformer
from transformers import BeitConfig, DeiTConfig, Dinov2Config, Dinov2WithRegistersConfig, ViTMAEConfig

from dobnb.errors import ArgumentError
from dobnb.tokens import (
    CLS,
    CONTENT,
    DISTILLATION,
    PADDING,
    REGISTER,
    SEPARATOR,
    TokenError,
    content_mask,
    image_token_roles,
    name_special_tokens,
    role_map,
    token_roles,
)

TINY = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8)
TIMM = dict(embed_dim=32, depth=1, num_heads=4, img_size=32, patch_size=8)

# Each with its prefix tokens.
VISION = {
    "beit": (lambda: tf.BeitModel(BeitConfig(**TINY, intermediate_size=8)), [CLS]),
    "clip": (lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**TINY, intermediate_size=8)), [CLS]),
    "deit": (lambda: tf.DeiTModel(DeiTConfig(**TINY, intermediate_size=8)), [CLS, DISTILLATION]),
    "dinov2": (lambda: tf.Dinov2Model(Dinov2Config(**TINY)), [CLS]),
    "dinov2_with_registers": (
        lambda: tf.Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**TINY, num_register_tokens=3)),
        [CLS] + [REGISTER] * 3,
    ),
    "vit": (lambda: tf.ViTModel(tf.ViTConfig(**TINY, intermediate_size=8)), [CLS]),
    "timm beit": (lambda: timm.create_model("beit_base_patch16_224", **TIMM), [CLS]),
    "timm distilled": (lambda: timm.create_model("deit_tiny_distilled_patch16_224", **TIMM), [CLS, DISTILLATION]),
    "timm eva": (lambda: timm.create_model("eva02_tiny_patch14_224", **TIMM), [CLS]),
    "timm reg4": (lambda: timm.create_model("vit_small_patch14_reg4_dinov2", **TIMM), [CLS] + [REGISTER] * 4),
    "timm relpos": (lambda: timm.create_model("vit_relpos_base_patch16_cls_224", **TIMM), [CLS]),
    "timm rope": (lambda: timm.create_model("vit_betwixt_patch16_rope_reg4_gap_256", **TIMM), [REGISTER] * 4),
    "timm vit": (lambda: timm.create_model("vit_small_patch16_224", **TIMM), [CLS]),
    "timm without cls": (lambda: timm.create_model("vit_base_patch16_siglip_224", **TIMM), []),
    "torchvision": (
        lambda: VisionTransformer(32, 8, num_layers=1, num_heads=2, hidden_dim=32, mlp_dim=8),
        [CLS],
    ),
}


def first_layer(model):
    """The first module of the stack of layers."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    return next(stack[0] for stack in stacks if len(stack) == 1 and len(list(stack[0].children())) > 3)


@pytest.mark.parametrize("name", VISION)
@torch.no_grad()
def test_content_tokens_are_the_ones_an_image_reaches_before_attention(name):
    """With one pixel of each patch changed, exactly what content tokens bring to the first layer changes."""
    torch.manual_seed(0)
    make, prefix = VISION[name]
    model = make().eval()
    entering = []
    first_layer(model).register_forward_pre_hook(
        lambda module, args, kwargs: entering.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    blank = torch.zeros(1, 3, 32, 32)
    image = blank.clone()
    image[:, :, ::8, ::8] = 1
    model(blank), model(image)
    changed = (entering[0] != entering[1]).any(-1)[0].tolist()
    first, second = token_roles(model, torch.cat([blank, image]))
    assert first == second == (*prefix, *[CONTENT] * 16)
    assert changed == content_mask(first).tolist()


@pytest.mark.parametrize("name", ["vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224", "vitamin_small_224"])
@torch.no_grad()
def test_hybrids_cut_patches_out_of_a_map(name):
    """A convolutional network comes first; the map it makes is what is cut into patches."""
    model = timm.create_model(name, depth=1 if name.startswith("vit_") else 14).eval()
    entering = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: entering.append(args[0].shape[1]))
    images = torch.rand(1, 3, 224, 224)
    model(images)
    roles = token_roles(model, images)[0]
    assert len(roles) == entering[0] and roles.count(CONTENT) == entering[0] - model.num_prefix_tokens


def test_dinov2_at_224_px():
    size = dict(image_size=518, patch_size=14)
    assert image_token_roles(Dinov2Config(**size), 224) == (CLS,) + (CONTENT,) * 256
    assert image_token_roles(Dinov2WithRegistersConfig(**size), 224) == (CLS,) + (REGISTER,) * 4 + (CONTENT,) * 256
    assert len(image_token_roles(Dinov2Config(**size))) == 1 + 37 * 37


def test_deit_has_two_prefix_tokens():
    assert image_token_roles(DeiTConfig())[:3] == (CLS, DISTILLATION, CONTENT)
    assert len(image_token_roles(DeiTConfig())) == 2 + 196


def test_sides_may_differ():
    assert len(image_token_roles(Dinov2Config(patch_size=14), (28, 70))) == 1 + 2 * 5


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (ViTMAEConfig(), None, "'vit_mae' are not known"),
        (Dinov2Config(patch_size=14), 225, "225 x 225 px does not divide"),
        (Dinov2Config(patch_size=14), (224, 230), "224 x 230 px does not divide"),
        (Dinov2Config(patch_size=14), 0, "image size is 0"),
        (Dinov2Config(patch_size=14), (14, 14, 14), "image size is"),
    ],
)
def test_what_cannot_be_told_is_refused(config, size, message):
    with pytest.raises(TokenError, match=message):
        image_token_roles(config, size)


# Text

WORDS = ["a", "green", "idea", "sleeps"]
SIZE = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)


def bert_tokenizer(special):
    """BERT's tokenizer on few words, the special ones at the ids of `special`."""
    vocabulary = {f"w{number}": number for number in range(103)}
    taken = {number: word for word, number in special.items()}
    vocabulary = {taken.get(number, word): number for word, number in vocabulary.items()}
    return tf.BertTokenizer(vocab=vocabulary | {word: 103 + number for number, word in enumerate(WORDS)})


GOOGLE = {"[PAD]": 0, "[UNK]": 100, "[CLS]": 101, "[SEP]": 102}
OWN = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4}
DISTILBERT = dict(dim=8, n_layers=1, n_heads=2, hidden_dim=8)
SENTENCES = ["a green idea sleeps", "idea"]
PAIRS = [["a green idea", "sleeps"], ["idea", "a"]]


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    ("model", "special"),
    [
        (lambda: tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522)), GOOGLE),
        (lambda: tf.DistilBertModel(tf.DistilBertConfig(**DISTILBERT, vocab_size=28996)), GOOGLE),
        (lambda: tf.BertModel(tf.BertConfig(**SIZE, vocab_size=107)), OWN),
        (lambda: tf.DistilBertModel(tf.DistilBertConfig(**DISTILBERT, vocab_size=107)), OWN),
    ],
)
def test_bert_against_its_tokenizer(model, special, pairs):
    """The tokenizer knows its special tokens by name; the model's config names none of them but padding."""
    tokenizer = bert_tokenizer(special)
    batch = tokenizer(*([*zip(*PAIRS, strict=True)] if pairs else [SENTENCES]), padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    named = model()
    name_special_tokens(named, tokenizer.cls_token_id, tokenizer.sep_token_id)
    for roles, ids in zip(token_roles(named, dict(batch)), batch["input_ids"], strict=True):
        names = {"[CLS]": CLS, "[SEP]": SEPARATOR, "[PAD]": PADDING}
        assert roles == tuple(names.get(word, CONTENT) for word in tokenizer.convert_ids_to_tokens(ids))
        assert roles.count(CLS) == 1 and roles.count(SEPARATOR) == 1 + pairs


def test_roberta_against_its_tokenizer():
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "b", "\u0120"]
    tokenizer = tf.RobertaTokenizer(vocab={word: number for number, word in enumerate(words)}, merges=[])
    batch = tokenizer(["a b", "b"], ["b", "a a"], padding=True, return_tensors="pt")
    model = tf.RobertaModel(tf.RobertaConfig(**SIZE, vocab_size=8))
    names = {"<s>": CLS, "</s>": SEPARATOR, "<pad>": PADDING}
    for roles, ids in zip(token_roles(model, dict(batch)), batch["input_ids"], strict=True):
        assert roles == tuple(names.get(word, CONTENT) for word in tokenizer.convert_ids_to_tokens(ids))


def test_decoders():
    gpt2 = tf.GPT2Model(tf.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=50257))
    llama = tf.LlamaModel(tf.LlamaConfig(**SIZE, vocab_size=20))
    assert token_roles(gpt2, torch.tensor([[5, 6, 50256, 7]])) == ((CONTENT, CONTENT, SEPARATOR, CONTENT),)
    inputs = {"input_ids": torch.tensor([[0, 1, 5, 2]]), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    assert token_roles(llama, inputs) == ((PADDING, SEPARATOR, CONTENT, SEPARATOR),)


def test_padding_is_known_by_its_id_where_there_is_no_mask():
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522))
    assert token_roles(model, torch.tensor([[101, 999, 102, 0]])) == ((CLS, CONTENT, SEPARATOR, PADDING),)


def test_a_mask_goes_before_the_id():
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522))
    inputs = {"input_ids": torch.tensor([[101, 0, 102, 102]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    assert token_roles(model, inputs) == ((CLS, CONTENT, SEPARATOR, PADDING),)


@pytest.mark.parametrize("ids", [[[2, 7, 3]], [[2, 7, 3], [2, 8, 3]], [[2, 7, 3], [8, 7, 3]]])
def test_bert_with_an_unknown_vocabulary_is_refused_whatever_the_batch(ids):
    """The first and the last token might be words, and no batch shows that they are not."""
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=50))
    with pytest.raises(TokenError, match="set its cls_token_id and sep_token_id"):
        token_roles(model, torch.tensor(ids))
    model.config.cls_token_id, model.config.sep_token_id = 2, 3
    assert token_roles(model, torch.tensor(ids))[0] == (CLS, CONTENT, SEPARATOR)


def test_what_a_config_names_is_left_alone():
    model = tf.RobertaModel(tf.RobertaConfig(**SIZE, vocab_size=8))
    own = bert_tokenizer(OWN)
    name_special_tokens(model, own.cls_token_id, own.sep_token_id)
    assert getattr(model.config, "cls_token_id", None) is None


def test_the_tokenizer_goes_before_the_size_of_the_vocabulary():
    """PubMedBERT's has 30522 words, as Google's has, and begins with 2."""
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522))
    ids = torch.tensor([[2, 500, 501, 3]])
    with pytest.raises(TokenError, match=r"input 0 begins with the id 2, not with 101.*set its cls_token_id"):
        token_roles(model, ids)
    with pytest.raises(TokenError, match="input 1 begins with the id 500"):
        token_roles(model, torch.tensor([[0, 101, 500, 102], [0, 500, 101, 102]]))
    own = bert_tokenizer(OWN)
    name_special_tokens(model, own.cls_token_id, own.sep_token_id)
    assert token_roles(model, ids) == ((CLS, CONTENT, CONTENT, SEPARATOR),)


@pytest.mark.parametrize("named", [{"eos_token_id": 102}, {"sep_token_id": 102}, {"cls_token_id": 101}])
def test_a_config_that_names_but_one_special_token(named):
    ids = torch.tensor([[0, 101, 500, 102]])
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522, **named))
    assert token_roles(model, ids) == ((PADDING, CLS, CONTENT, SEPARATOR),)
    with pytest.raises(TokenError, match="begins with the id 500"):
        token_roles(model, ids[:, 2:])
    other = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=200, **named))
    with pytest.raises(TokenError, match="names but one of its special tokens; set its cls_token_id"):
        token_roles(other, ids)


@pytest.mark.parametrize("inputs", [None, torch.ones(1, 3).numpy(), {"input_ids": torch.ones(1, 3).numpy()}])
def test_inputs_of_another_kind_are_refused(inputs):
    with pytest.raises(ArgumentError, match="pass a"):
        token_roles(tf.BertModel(tf.BertConfig(**SIZE)), inputs)


def test_text_without_known_special_tokens_is_refused():
    config = tf.LlamaConfig(**SIZE, vocab_size=20, bos_token_id=None, eos_token_id=None)
    with pytest.raises(TokenError, match=r"'llama' names no special tokens; set its cls_token_id"):
        token_roles(tf.LlamaModel(config), torch.tensor([[5, 6]]))


def test_a_mask_of_another_shape_is_refused():
    model = tf.BertModel(tf.BertConfig(**SIZE, vocab_size=30522))
    inputs = {"input_ids": torch.tensor([[101, 7, 102]]), "attention_mask": torch.ones(1, 1, 3, 3)}
    with pytest.raises(TokenError, match=r"shape \(1, 1, 3, 3\), the ids \(1, 3\)"):
        token_roles(model, inputs)


# Tables, and what is unknown


@pytest.mark.parametrize(("continuous", "categories"), [(3, []), (3, [4, 5]), (0, [4, 5])])
def test_ft_transformer(continuous, categories):
    model = rtdl.FTTransformer(
        n_cont_features=continuous, cat_cardinalities=categories, d_out=1, **rtdl.FTTransformer.get_default_kwargs(1)
    )
    x = torch.rand(2, continuous) if continuous else None, torch.zeros(2, len(categories), dtype=torch.long)
    x = x if categories else (x[0], None)
    assert token_roles(model, x) == ((CLS,) + (CONTENT,) * (continuous + len(categories)),) * 2


def test_what_is_not_known_is_refused():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1, enable_nested_tensor=False)
    with pytest.raises(TokenError, match="TransformerEncoder are not known for these inputs; pass content="):
        token_roles(encoder, torch.rand(2, 3, 8))


# What roles are good for


def test_a_role_that_is_none_is_refused():
    with pytest.raises(TokenError, match="position 1 has the role 'patch'"):
        content_mask(["cls", "patch"])


def test_maps():
    roles = image_token_roles(Dinov2WithRegistersConfig(patch_size=14, num_register_tokens=4), (28, 42))
    assert role_map(roles, width=3) == "C R R R R\n. . .\n. . ."
    assert role_map(roles) == "C R R R R . . . . . ."
    assert role_map([CONTENT] * 4, width=2) == ". .\n. ."
    sentence = [CLS, CONTENT, SEPARATOR, PADDING, DISTILLATION]
    assert role_map(sentence, words=["<s>", "Hi", "</s>", "<pad>", "?"]) == "C <s>\n. Hi\n| </s>\n- <pad>\nD ?"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(width=2), "3 patches do not fill rows of 2"),
        (dict(width=0), "rows of 0"),
        (dict(words=["one"]), "1 words for 4 positions"),
    ],
)
def test_maps_that_do_not_come_out_even_are_refused(options, message):
    with pytest.raises(TokenError, match=message):
        role_map([CLS, CONTENT, CONTENT, CONTENT], **options)
