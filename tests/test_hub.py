"""Loading from the hub without the hub: its real client against a server on the loopback, with every fault in turn.

The models are narrow, but have the depth, heads, config, processor and weights' names of the real repositories.
"""

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from hub_models import save
from hub_server import Commit, Hub, running
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from dobnb import cli, models
from dobnb.capture import stream_attention
from dobnb.inputs import read_inputs
from dobnb.models import MODELS, ModelError, is_cached, load_model, load_tokenizer, preprocessing, weights_identity

NAME, REPOSITORY = "dinov2-small", "facebook/dinov2-with-registers-small"
HUB_MODELS = [name for name, card in MODELS.items() if not card.embedded]


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if HF_ENDPOINT had been set before the client was imported."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(huggingface_hub.file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the client; its patience is cut to a third of a second."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for patience in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
        monkeypatch.setattr(huggingface_hub.constants, patience, 0.3)
    monkeypatch.setattr(huggingface_hub.file_download, "_ETAG_RETRY_TIMEOUT", 0.3, raising=False)
    for proxy in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(proxy, "127.0.0.1,localhost")
    huggingface_hub.close_session()  # a client made earlier has other proxies
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with running() as hub:
        point_at(hub.url, monkeypatch)
        yield hub
    huggingface_hub.close_session()


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited between tries, without waiting."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A narrow DINOv2-S as a repository has it."""
    folder = tmp_path_factory.mktemp("saved")
    save(NAME, folder)
    return folder


def no_residue(cache: Path) -> bool:
    """Whether the cache holds whole files only, each under its hash."""
    return not [path for path in cache.rglob("*.incomplete")] and all(
        path.exists() for path in (cache / "models--facebook--dinov2-with-registers-small" / "snapshots").rglob("*")
    )


def refusal(name: str = NAME, **options: str) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(name, **options)
    message = str(caught.value)
    assert "\n" not in message and name in message
    return message


def listed(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What `dobnb models` says of where the weights are."""
    assert cli.main(["models"]) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[0] == name)
    return next(cell for cell in re.split(r"  +", row) if "cached" in cell)


def downloads(hub: Hub) -> list[str]:
    return [request.removeprefix("GET ") for request in hub.requests if request.startswith("GET")]


# What works


@pytest.mark.parametrize("name", HUB_MODELS)
def test_every_model_is_downloaded_cached_and_measured(name: str, hub: Hub, tmp_path: Path) -> None:
    original = save(name, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle that nobody should touch")
    commit = hub.publish(MODELS[name].source, tmp_path)
    assert not is_cached(name)
    model = load_model(name)
    assert is_cached(name)
    assert sorted(downloads(hub)) == ["config.json", "model.safetensors"]
    assert weights_identity(name, model) == {"source": MODELS[name].source, "commit": commit.hash}
    base = getattr(original, original.base_model_prefix, original).state_dict()
    assert base.keys() >= model.state_dict().keys()
    assert all(torch.equal(value, base[key]) for key, value in model.state_dict().items())

    card, inputs = MODELS[name], read_inputs("embedded", name, 1)
    shapes = []
    stream_attention(model, inputs.batch(0, 1), lambda layer, weights: shapes.append(tuple(weights.shape)))
    assert shapes == [(1, card.heads, card.tokens, card.tokens)] * card.layers

    hub.requests.clear()
    again = load_model(name)
    assert downloads(hub) == []
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("dinov2-small", ["encoder.layer.0.attention.attention.query.weight", "encoder.layer.11.layer_scale1.lambda1",
                          "embeddings.register_tokens", "layernorm.weight"]),
        ("dinov2-base-no-registers", ["encoder.layer.0.attention.attention.key.bias", "encoder.layer.3.mlp.fc1.weight",
                                      "embeddings.patch_embeddings.projection.weight"]),
        ("vit-base", ["vit.encoder.layer.0.attention.attention.query.weight", "vit.encoder.layer.0.output.dense.bias",
                      "vit.encoder.layer.2.intermediate.dense.weight", "vit.layernorm.weight", "classifier.weight"]),
        ("roberta-base", ["roberta.encoder.layer.0.attention.self.query.weight", "lm_head.dense.weight",
                          "roberta.encoder.layer.1.attention.output.LayerNorm.weight"]),
        ("distilbert-base", ["distilbert.transformer.layer.0.attention.q_lin.weight", "vocab_transform.weight",
                             "distilbert.transformer.layer.5.ffn.lin2.bias"]),
    ],
)  # fmt: skip
def test_the_weights_here_have_the_names_that_they_have_on_the_hub(name: str, keys: list[str], tmp_path: Path) -> None:
    """The keys were typed from the repositories, so that what is loaded above is what will be loaded there."""
    save(name, tmp_path)
    assert set(keys) <= set(load_file(tmp_path / "model.safetensors"))


def test_the_preprocessing_is_what_the_repositories_state(hub: Hub, tmp_path: Path) -> None:
    for name in HUB_MODELS:
        folder = tmp_path / name
        folder.mkdir()
        save(name, folder)
        hub.publish(MODELS[name].source, folder)
        assert preprocessing(name) == MODELS[name].preprocessing
        assert preprocessing(f"hf:{MODELS[name].source}") == MODELS[name].preprocessing


@pytest.mark.parametrize(("name", "start", "stop"), [("roberta-base", 0, 2), ("distilbert-base", 101, 102)])
def test_text_stands_between_the_special_tokens(name: str, start: int, stop: int, hub: Hub, tmp_path: Path) -> None:
    save(name, tmp_path)
    hub.publish(MODELS[name].source, tmp_path)
    ids = read_inputs("embedded", name, 3, length=510).batch(0, 3)["input_ids"]
    assert ids.shape == (3, 512)
    assert ids[:, 0].tolist() == [start] * 3 and ids[:, -1].tolist() == [stop] * 3
    assert not ((ids[:, 1:-1] == start) | (ids[:, 1:-1] == stop)).any()
    assert not any("safetensors" in name for name in downloads(hub))
    assert load_tokenizer(name).model_max_length == 512


def test_a_vit_reads_other_sizes(hub: Hub, tmp_path: Path) -> None:
    save("vit-base", tmp_path)
    hub.publish(MODELS["vit-base"].source, tmp_path)
    model = pickle.loads(pickle.dumps(load_model("vit-base")))  # as a cluster's workers get it
    for size in (64, 224, 256):
        inputs = read_inputs("embedded", "vit-base", 1, size=size)
        assert model(**inputs.batch(0, 1)).last_hidden_state.shape[1] == 1 + (size // 16) ** 2


def test_a_branch_a_tag_and_a_commit(hub: Hub, saved: Path, tmp_path: Path) -> None:
    first = hub.publish(REPOSITORY, saved)
    hub.publish(REPOSITORY, saved, "v1")
    assert weights_identity(NAME, load_model(NAME))["commit"] == first.hash
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").unlink()
    changed = {key: value + 1 for key, value in load_file(saved / "model.safetensors").items()}
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    second = hub.publish(REPOSITORY, tmp_path)
    assert weights_identity(NAME, load_model(NAME))["commit"] == second.hash != first.hash
    for revision in ("v1", first.hash):
        assert weights_identity(NAME, load_model(NAME, revision=revision))["commit"] == first.hash


def test_a_model_in_several_files(hub: Hub, tmp_path: Path, cache: Path) -> None:
    whole = save(NAME, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = (tmp_path / "config.json").read_text()
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "config.json").write_text(config)
    shards = sorted(file.name for file in tmp_path.glob("*-of-*.safetensors"))
    assert len(shards) > 1
    hub.publish(REPOSITORY, tmp_path)
    model = load_model(NAME)
    assert sorted(downloads(hub)) == sorted(["config.json", "model.safetensors.index.json", *shards])
    assert is_cached(NAME)
    assert all(torch.equal(value, whole.state_dict()[key]) for key, value in model.state_dict().items())
    hub.repositories.clear()
    assert isinstance(load_model(NAME), PreTrainedModel)  # out of the cache
    next(cache.rglob(shards[1])).unlink()
    assert not is_cached(NAME)


def test_a_cut_connection_is_resumed(
    hub: Hub, saved: Path, waits: list[float], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last whole chunk, of which the client's have 10 MB and these 4 kB."""
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    half = (saved / "model.safetensors").stat().st_size // 2
    hub.publish(REPOSITORY, saved)
    hub.fault("GET model.safetensors", "cut")
    load_model(NAME)
    parts = [request for request in downloads(hub) if request.startswith("model.safetensors")]
    assert parts == ["model.safetensors", f"model.safetensors bytes={half // 4096 * 4096}-"]
    assert no_residue(cache)


def test_the_client_as_users_point_it_elsewhere(hub: Hub, saved: Path, tmp_path: Path) -> None:
    commit = hub.publish(REPOSITORY, saved)
    code = (
        "from dobnb.models import load_model, weights_identity\n"
        f"print(weights_identity({NAME!r}, load_model({NAME!r}))['commit'])"
    )
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [commit.hash], done.stderr


# timm


def test_a_model_of_timm(hub: Hub, tmp_path: Path) -> None:
    name, repository = "timm:test_vit", "timm/test_vit.r160_in1k"
    torch.manual_seed(1)
    original = timm.create_model("test_vit")
    save_file(original.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle that nobody should touch")
    commit = hub.publish(repository, tmp_path)
    assert not is_cached(name)
    before = torch.get_rng_state()
    model = load_model(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert is_cached(name) and downloads(hub) == ["model.safetensors"] and not model.training
    assert all(torch.equal(value, original.state_dict()[key]) for key, value in model.state_dict().items())
    assert weights_identity(name, model) == {"source": repository, "commit": commit.hash}
    inputs = read_inputs("embedded", name, 2)
    assert model(inputs.batch(0, 2)).shape == (2, 1000) and inputs.size == preprocessing(name).size == 160
    larger = read_inputs("embedded", name, 1, size=192)
    assert model(larger.batch(0, 1)).shape == (1, 1000)


@pytest.mark.parametrize("name", ["timm:test_vit", "hf:timm/test_vit.r160_in1k"])
def test_a_pickle_of_timm_is_not_even_downloaded(name: str, hub: Hub, tmp_path: Path) -> None:
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text('{"architecture": "test_vit"}')
    hub.publish("timm/test_vit.r160_in1k", tmp_path)
    assert "pickled weights are not read" in refusal(name)
    assert "pytorch_model.bin" not in downloads(hub)


def test_weights_that_do_not_fit_timms_model(hub: Hub, tmp_path: Path) -> None:
    state = timm.create_model("test_vit").state_dict()
    del state["norm.weight"]
    save_file(state, tmp_path / "model.safetensors")
    hub.publish("timm/test_vit.r160_in1k", tmp_path)
    assert "cannot load timm:test_vit with timm" in refusal("timm:test_vit")


# What does not


@pytest.mark.parametrize(
    ("where", "what", "times", "said"),
    [
        ("api", 401, 1, "gave HTTP 401: it is not there or not open to you; check the name, or run hf auth login"),
        ("api", (403, {"X-Error-Code": "GatedRepo"}), 1, "gave HTTP 403: it is not there or not open to you"),
        ("api", (404, {"X-Error-Code": "RepoNotFound"}), 1, "is not there (HTTP 404); check the name"),
        ("api", 429, 4, "gave HTTP 429: too many requests; try again in some minutes"),
        ("api", 500, 4, "gave HTTP 500; try again later"),
        ("api", "hang", 1, "check the network and try again, or take an embedded model (dinov2-small-saliency"),
        ("HEAD model.safetensors", 401, 1, "gave HTTP 401"),
        ("HEAD model.safetensors", 500, 7, "gave HTTP 500; try again later"),
        ("HEAD model.safetensors", "hang", 7, "Timeout"),
        ("GET model.safetensors", 404, 1, "is not there (HTTP 404)"),
        ("GET model.safetensors", 429, 6, "gave HTTP 429"),
        ("GET model.safetensors", 500, 1, "gave HTTP 500"),
        ("GET model.safetensors", "hang", 6, "Timeout"),
        ("GET model.safetensors", "cut", 20, "check the network and try again"),
        ("GET model.safetensors", "short", 1, "file should be of size"),
        ("GET config.json", "short", 1, "file should be of size"),
        ("GET model.safetensors", "wrong", 1, "model.safetensors whose hash is"),
        ("GET config.json", "wrong", 1, "config.json whose hash is"),
    ],
)  # fmt: skip
def test_a_fault_ends_in_one_line_and_the_next_try_works(
    where: str, what: object, times: int, said: str, hub: Hub, saved: Path, cache: Path, waits: list[float]
) -> None:
    commit = hub.publish(REPOSITORY, saved)
    hub.fault(where, what, times)
    message = refusal()
    assert message.startswith(f"cannot load {NAME}: {REPOSITORY} on the Hugging Face hub")
    assert said in message
    assert no_residue(cache)
    hub.faults.clear()
    assert weights_identity(NAME, load_model(NAME))["commit"] == commit.hash
    assert no_residue(cache)


@pytest.mark.parametrize(("status", "tries"), [(429, 3), (500, 1), (503, 3)])
def test_a_busy_hub_is_asked_again(status: int, tries: int, hub: Hub, saved: Path, waits: list[float]) -> None:
    hub.publish(REPOSITORY, saved)
    hub.fault("api", (status, {"Retry-After": "7"}), tries)
    load_model(NAME)
    assert waits == [7, 7, 16][:tries]  # as long as it asked, and at least as long as it takes to be modest
    assert hub.requests.count("api") == tries + 1


def test_a_repository_that_is_not_there(hub: Hub) -> None:
    assert "check the name, or run hf auth login" in refusal("hf:nobody/nothing")
    assert not is_cached("hf:nobody/nothing")


def test_a_revision_that_is_not_there(hub: Hub, saved: Path) -> None:
    hub.publish(REPOSITORY, saved)
    said = refusal(revision="v9")
    assert f"{REPOSITORY} at revision v9 on the Hugging Face hub" in said and "no such revision; pass another" in said


def test_pickled_weights_are_not_even_downloaded(hub: Hub, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    torch.save(load_file(saved / "model.safetensors"), tmp_path / "pytorch_model.bin")
    hub.publish(REPOSITORY, tmp_path)
    assert "holds no model.safetensors; pickled weights are not read" in refusal()
    assert downloads(hub) == []


def test_no_network(cache: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache that is said, and what to do; with one it does not matter."""
    with socket.socket() as closed:  # bound, but nobody listens
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        point_at(nowhere, monkeypatch)
        assert "ConnectError" in refusal() and "check the network" in refusal()
        with running() as hub:
            point_at(hub.url, monkeypatch)
            commit = hub.publish(REPOSITORY, saved)
            load_model(NAME)
        point_at(nowhere, monkeypatch)
        assert weights_identity(NAME, load_model(NAME))["commit"] == commit.hash
        assert weights_identity(NAME, load_model(NAME, revision=commit.hash))["commit"] == commit.hash
        assert "at revision v2" in refusal(revision="v2")
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        load_model(NAME)
        assert "HF_HUB_OFFLINE is set; unset it" in refusal("dinov2-base")


def test_no_network_and_half_a_cache(
    hub: Hub, saved: Path, cache: Path, waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.publish(REPOSITORY, saved)
    assert preprocessing(NAME) == MODELS[NAME].preprocessing  # the configs are cached now, the weights are not
    assert not is_cached(NAME)
    assert listed(NAME, capsys) == "hub, not cached"
    load_model(NAME)
    assert is_cached(NAME) and listed(NAME, capsys) == "cached"
    next(cache.rglob("config.json")).unlink()
    assert not is_cached(NAME)
    hub.fault("api", 500, 4)
    assert "gave HTTP 500" in refusal()


def test_a_damaged_cache_is_found_deleted_and_filled_again(hub: Hub, saved: Path, cache: Path) -> None:
    hub.publish(REPOSITORY, saved)
    load_model(NAME)
    (weights,) = cache.rglob("model.safetensors")
    blob = weights.resolve()
    content = blob.read_bytes()
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "it was refused and deleted: try again" in refusal()
    assert not blob.exists() and not is_cached(NAME)
    load_model(NAME)
    assert blob.read_bytes() == content


def test_a_branch_that_moves_during_the_download(hub: Hub, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = hub.publish(REPOSITORY, saved)
    download = models.hf_hub_download

    def moving(repository: str, file: str, **options: str) -> str:
        path = download(repository, file, **options)
        hub.repositories[repository] |= dict.fromkeys(("main", "f" * 40), Commit("f" * 40, first.files))
        return path

    monkeypatch.setattr(models, "hf_hub_download", moving)
    assert "changed while it was downloaded; try again, or pin a revision" in refusal()
