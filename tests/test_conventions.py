"""Every reading against plain loops over a model's own eager attention, as the text of the chapter defines it."""

import numpy as np
import pytest
import torch
from tiny import noise, tiny, tiny_bert
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from dobnb.conventions import AVERAGED, HEADS, PER_INPUT, averaged_layers, by_convention, by_layer, shares
from dobnb.inputs import from_tensors
from dobnb.measurement import MeasurementError

SPECIAL = 5  # cls and four registers


@pytest.fixture(scope="module")
def model():
    return tiny(Dinov2WithRegistersModel, Dinov2WithRegistersConfig, num_register_tokens=SPECIAL - 1)


@pytest.fixture(scope="module")
def attention(model):
    """float64, (layers, inputs, heads, N, N), by transformers' own eager path."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(noise(5).batch(0, 5)["pixel_values"], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return torch.stack(layers).double().numpy()


def kappa(A):
    return max(0.5 * np.abs(A[i] - A[j]).sum() for i in range(len(A)) for j in range(i))


def tight(A):
    """The bound compared with the factor, with no theorem in between."""
    return abs(0.5 + 0.5 * kappa(A) - kappa((np.eye(len(A)) + A) / 2)) < 1e-9


def kept(A):
    return A[..., SPECIAL:, SPECIAL:]


def chain(A):
    return kept(A) / kept(A).sum(-1, keepdims=True)


def check(values, matrices):
    """Verdict and kappa of a stack of matrices; no margin so small that float32 attention could flip it."""
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    assert values["margin"].min() > 1e-6
    assert values["holds"].flatten().tolist() == [tight(A) for A in flat]
    np.testing.assert_allclose(values["kappa"].flatten(), [kappa(A) for A in flat], atol=1e-6)


@pytest.mark.parametrize("batch_size", [2, 8])
def test_every_reading_is_what_its_name_says(model, attention, batch_size):
    found = by_convention(model, noise(5), batch_size)
    mean = attention.mean(2)
    expected = (chain(mean), kept(mean), chain(attention).mean(2), mean)
    assert tuple(found.per_input) == PER_INPUT and tuple(found.heads) == HEADS and tuple(found.averaged) == AVERAGED
    for values, matrices in zip(found.per_input.values(), expected, strict=True):
        check(values, matrices)
    for values, matrices in zip(found.heads.values(), (chain(attention), kept(attention), attention), strict=True):
        check(values, matrices)
    whole = mean.mean(1)
    expected = (chain(whole), kept(whole), chain(mean).mean(1), chain(attention).mean((1, 2)), whole)
    for values, matrices in zip(found.averaged.values(), expected, strict=True):
        check(values, matrices)
    lost = attention[..., SPECIAL:, :SPECIAL].sum(-1)
    np.testing.assert_allclose(found.special, lost.mean(-1), atol=1e-6)
    np.testing.assert_allclose(found.spread, lost.mean(2).std(-1, ddof=1), atol=1e-6)


def test_the_tables_count_what_was_found(model):
    found = by_convention(model, noise(5))
    holds = [found.per_input[name]["holds"] for name in PER_INPUT]
    table = shares(found)
    assert table["holds"].iloc[1].startswith(f"{int(holds[1].sum())}/15 (")
    assert table["differ"].iloc[:4].tolist() == ["", *(str(int((one != holds[0]).sum())) for one in holds[1:])]
    assert table["holds"].iloc[4].split("/")[1].startswith("45 ")
    assert by_layer(found)[PER_INPUT[3]].tolist() == holds[3].sum(1).tolist()
    row = averaged_layers(found).iloc[-1]
    failing = [str(layer) for layer, one in enumerate(found.averaged[AVERAGED[-1]]["holds"].tolist(), 1) if not one]
    assert row["layers that fail"] == (", ".join(failing) or "none")
    assert row["exact layers"] == f"{3 - len(failing)}/3"


def test_inputs_that_differ_in_their_roles_are_refused():
    ids = torch.tensor([[101, 7, 8, 9, 102], [101, 7, 8, 102, 102]])
    texts = from_tensors({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "two kinds")
    with pytest.raises(MeasurementError, match="inputs differ in which tokens are content"):
        by_convention(tiny_bert(), texts)
