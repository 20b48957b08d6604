"""The part of the vLLM adapter that knows no vLLM: halves of a cache, plans of a step, recorded calls."""

import os
import subprocess

import attnfold
import attnfold.call_file
import numpy as np
import pytest
import torch
from attnfold.integrations.vllm import _step
from attnfold.integrations.vllm._step import Layer, Plans, Step
from reference import causal, check, same_bits

BLOCK, HEADS, KV_HEADS, DIM = 32, 6, 2, 64
LAYER = Layer(HEADS, KV_HEADS, DIM, DIM**-0.5)


class Batch:
    """Three requests in vLLM's words, over a cache whose unwritten slots hold NaN.  A row of padding stands behind."""

    def __init__(self, rng, dtype=torch.float32):
        self.qo_len, self.kv_len = [1, 40, 3], [70, 40, 130]
        self.qo_indptr = np.cumsum([0, *self.qo_len])
        blocks = rng.permutation(12)
        table = [[*blocks[:3], 99, 99], [*blocks[3:5], 99, 99, 99], [*blocks[5:10]]]
        self.table = torch.tensor(np.array(table), dtype=torch.int32)
        self.cache = torch.full((12, KV_HEADS, BLOCK, 2 * DIM), float("nan"), dtype=dtype)
        self.q = torch.from_numpy(rng.standard_normal((45, HEADS, DIM), np.float32)).to(dtype)
        self.k, self.v = [], []
        for r, n in enumerate(self.kv_len):
            k, v = torch.from_numpy(rng.standard_normal((2, n, KV_HEADS, DIM), np.float32)).to(dtype)
            at = np.arange(n)
            slots = torch.from_numpy(self.table[r].numpy()[at // BLOCK] * BLOCK + at % BLOCK).long()
            _step.append(self.cache, k, v, slots)
            self.k.append(k)
            self.v.append(v)
        self.plans = Plans(max_batch=4, max_qo_rows=64, max_kv_len=160)

    def step(self, number=0):
        indptr, kv_len = (torch.tensor(x, dtype=torch.int32) for x in (self.qo_indptr, self.kv_len))
        return Step(self.plans, number, indptr, kv_len, self.table)

    def run(self, layer=LAYER, step=None, **more):
        o = torch.full(self.q.shape, 7.0, dtype=self.q.dtype)
        (step or self.step()).run(layer, self.q, self.cache, o, **more)
        assert (o[44] == 7).all()  # padding
        return o[:44]

    def check(self, o, window_left=-1):
        for r, (n, m) in enumerate(zip(self.qo_len, self.kv_len)):
            rows = slice(self.qo_indptr[r], self.qo_indptr[r + 1])
            check(o.numpy()[rows], None, self.q[rows].numpy(), self.k[r].numpy(), self.v[r].numpy(),
                  causal(n, m, window_left), LAYER.sm_scale)  # fmt: skip


def test_the_halves_are_views_and_appending_writes_to_them(rng):
    cache = torch.zeros(3, KV_HEADS, BLOCK, 2 * DIM)
    k_cache, v_cache = _step.halves(cache)
    assert attnfold.data_pointer(k_cache) == cache.data_ptr()
    assert attnfold.data_pointer(v_cache) == cache.data_ptr() + 4 * DIM
    k, v = torch.randn(2, 5, KV_HEADS, DIM)
    _step.append(cache, k, v, torch.tensor([40, -1, 0]))  # -1 skips; the rows behind the last slot are padding
    assert torch.equal(cache[1, :, 8, :DIM], k[0]) and torch.equal(cache[1, :, 8, DIM:], v[0])
    assert torch.equal(cache[0, :, 0, :DIM], k[2]) and torch.equal(cache[0, :, 0, DIM:], v[2])
    assert torch.count_nonzero(cache) == 2 * KV_HEADS * 2 * DIM


@pytest.mark.parametrize("window", [-1, 0, 17])
def test_answers_are_within_the_bound(rng, window):
    b = Batch(rng)
    b.check(b.run(Layer(HEADS, KV_HEADS, DIM, DIM**-0.5, window_left=window)), window)


def test_a_plan_is_updated_once_per_step_and_shared_by_equal_layers(rng, monkeypatch):
    updates = []
    update = attnfold.Plan.update
    monkeypatch.setattr(attnfold.Plan, "update", lambda plan, *a, **k: (updates.append(plan), update(plan, *a, **k)))
    b = Batch(rng)
    window = Layer(HEADS, KV_HEADS, DIM, DIM**-0.5, window_left=17)
    first, second = b.step(0), b.step(1)
    for step in (first, second):
        for layer in (LAYER, window, LAYER, window):
            b.run(layer, step)
    assert len(updates) == 4 and len(set(map(id, updates))) == 2
    b.check(b.run(LAYER, first))  # a step that comes back is planned again
    assert len(updates) == 5


@pytest.mark.parametrize("window", [-1, 17])
def test_recorded_calls_hold_the_blocks_that_are_seen_and_are_verified(rng, tmp_path, window):
    b = Batch(rng)
    layer = Layer(HEADS, KV_HEADS, DIM, DIM**-0.5, window_left=window)
    terms = dict(alibi_slopes=torch.full((HEADS,), 0.01), sink_logits=torch.zeros(HEADS))
    path = tmp_path / "call.safetensors"
    o = b.run(layer, record=path, **terms)
    tensors, metadata = attnfold.call_file.load(path)
    assert same_bits(tensors["o"], o.numpy())
    seen = 3 + 2 + 5 if window < 0 else 2 + 2 + 2
    assert len(tensors["k_cache"]) == seen and (tensors["block_table"] >= 0).sum() == seen
    assert metadata["window_left"] == str(window) and metadata["kv_layout"] == "HND"
    command = os.environ.get("ATTNFOLD_COMMAND")
    if not command:
        pytest.skip("built without the command")
    assert subprocess.run([command, "verify", path]).returncode == 0
    tensors["o"][3, 1, 5] += 0.01
    attnfold.call_file.save(path, tensors, metadata)
    assert subprocess.run([command, "verify", path]).returncode == 1


def test_the_environment_chooses_what_is_recorded(tmp_path, monkeypatch):
    name = "model.layers.4.self_attn.attn"
    monkeypatch.delenv("ATTNFOLD_VLLM_RECORD", raising=False)
    assert _step.record_path(name, 7) is None
    monkeypatch.setenv("ATTNFOLD_VLLM_RECORD", str(tmp_path / "calls"))
    assert _step.record_path(name, 7) == tmp_path / "calls" / "step000007.layer004.safetensors"
    monkeypatch.setenv("ATTNFOLD_VLLM_RECORD_CALL", "4,8")
    assert _step.record_path(name, 7) is None and _step.record_path(name, 8) is not None
    monkeypatch.setenv("ATTNFOLD_VLLM_RECORD_CALL", "4")
    with pytest.raises(ValueError, match="ATTNFOLD_VLLM_RECORD_CALL: expected LAYER,STEP, two numbers, got '4'"):
        _step.record_path(name, 7)
