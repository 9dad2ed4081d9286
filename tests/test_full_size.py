"""The hub's models at full size with random weights: loaded from safetensors and measured on two inputs.

What the real run needs but for the weights' values: shapes, memory and time. `make test-slow` prints a line a model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_models import CONFIGS, build

from dobnb import measure
from dobnb.inputs import photographs
from dobnb.models import MODELS

CHILD = """
import json, re, sys, time
import torch
from dobnb import MODELS, measure
from dobnb.inputs import from_tensors, photographs
from dobnb.models import load_model

name, folder = sys.argv[1:]
card = MODELS[name]
started = time.monotonic()
model = load_model(folder)
loaded = time.monotonic()
if card.preprocessing:
    inputs = photographs(2, preprocessing=card.preprocessing)
else:
    # any word pieces do; the special tokens are the real ones
    first, last = (0, 2) if name == "roberta-base" else (101, 102)
    words = torch.randint(1000, 30000, (2, card.content), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([torch.full((2, 1), first), words, torch.full((2, 1), last)], 1)
    inputs = from_tensors({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, "words")
measure(model, inputs, batch_size=1)  # warms up, so that the second run tells the time
warm = time.monotonic()
found = measure(model, inputs, batch_size=2)
print(json.dumps({
    "n": found.n, "heads": found.heads["tested"], "content": found.per_input["content"],
    "tokens": found.provenance["model"]["tokens"], "content_tokens": found.provenance["model"]["content_tokens"],
    "load": loaded - started, "seconds": (time.monotonic() - warm) / 2,
    # Linux's peak of this program; getrusage would give that of the process which started it, where that is larger
    "megabytes": int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024,
}))
"""


@pytest.fixture(scope="module")
def compiled() -> None:
    """The kernel is in its cache, so that no run's memory is the compiler's."""
    measure(build("dinov2-small", narrow=True), photographs(1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak of memory as Linux tells it")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.usefixtures("compiled")
def test_a_full_size_model_is_measured(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = MODELS[name]
    build(name).save_pretrained(tmp_path)
    # in a process of its own, whose peak memory is the run's
    command = [sys.executable, "-c", CHILD, name, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["n"] == [2] * card.layers
    assert found["heads"] == [2 * card.heads] * card.layers
    assert (found["tokens"], found["content_tokens"]) == (card.tokens, card.content)
    assert all(0 <= count <= 2 for count in found["content"])
    weights = (tmp_path / "model.safetensors").stat().st_size / 2**20
    # The weights, one layer's attention, and what torch and the kernel need: nothing that grows with depth.
    assert found["megabytes"] < 1.2 * weights + 1200
    with capsys.disabled():
        print(
            f"\n{name}: {weights:.0f} MB of weights, loaded in {found['load']:.1f} s, "
            f"{found['seconds']:.2f} s an input on one core, peak memory {found['megabytes']:.0f} MB"
        )
