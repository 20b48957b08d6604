"""Arrays of torch and jax: the same memory, the same bits, answers of their own kind."""

import subprocess
import sys

import attnfold
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from reference import Batch, same_bits

jax.config.update("jax_platforms", "cpu")
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def bits(x):
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_torch_answers_with_the_bits_of_numpy_on_the_same_memory(rng, dtype):
    b = Batch(rng, dtype=dtype)
    plan = b.plan(dtype=TORCH[np.dtype(dtype).name])
    b.update(plan)
    expected, expected_lse = plan.run(b.q, b.k_cache, b.v_cache, return_lse=True)
    q, k, v = (to_torch(x) for x in (b.q, b.k_cache, b.v_cache))
    for t, x in ((q, b.q), (k, b.k_cache)):
        assert attnfold.data_pointer(t) == t.data_ptr() == x.ctypes.data
    plan.update(torch.from_numpy(b.qo_indptr), torch.from_numpy(b.kv_len), torch.from_numpy(b.block_table))
    o, lse = plan.run(q, k, v, return_lse=True)
    assert isinstance(o, torch.Tensor) and o.dtype == q.dtype and bits(o) == expected.tobytes()
    assert bits(lse) == expected_lse.tobytes()
    given = torch.zeros_like(o)
    assert plan.run(q, k, v, o=given) is given and bits(given) == expected.tobytes()


def test_views_of_torch_are_read_with_their_strides_and_offsets(rng):
    b = Batch(rng, page_size=32, layout="HND")
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    cache = torch.cat([to_torch(b.k_cache), to_torch(b.v_cache)], dim=3)  # one buffer, as vLLM's CPU engine keeps it
    v = cache[..., 64:]
    assert attnfold.data_pointer(v) == v.data_ptr() == cache.data_ptr() + 64 * 4
    assert bits(plan.run(to_torch(b.q), cache[..., :64], v)) == expected.tobytes()


def test_a_parameter_without_gradient_is_an_array_and_a_wanted_gradient_an_error():
    q, k, v = (torch.randn(3, 2, 64) for _ in range(3))
    with pytest.raises(NotImplementedError, match="q: expected no gradient"):
        attnfold.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert attnfold.attention(q, torch.nn.Parameter(k), v).shape == (3, 2, 64)


def test_float8_of_torch(rng):
    q = torch.randn(2, 2, 64)
    k, v = (torch.randn(9, 2, 64).to(torch.float8_e4m3fn) for _ in "kv")
    plan = attnfold.create(qo_heads=2, kv_heads=2, head_dim=64, q_dtype=torch.float32, kv_dtype=torch.float8_e4m3fn,
                           kv_storage="ragged", max_batch=1, max_qo_rows=2, max_kv_len=9, k_scale_kind="per_tensor",
                           v_scale_kind="per_tensor")  # fmt: skip
    plan.update([0, 2], kv_indptr=[0, 9])
    o = plan.run(q, k, v, k_scale=1.0, v_scale=1.0)
    assert bits(o) == bits(attnfold.attention(q, k.float(), v.float(), causal=True))


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_jax_arrays_in_and_out_without_a_copy(rng, dtype):
    b = Batch(rng, dtype=dtype)
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    q, k, v = (jnp.asarray(x) for x in (b.q, b.k_cache, b.v_cache))
    assert attnfold.data_pointer(k) == k.unsafe_buffer_pointer()
    o, lse = plan.run(q, k, v, return_lse=True)
    assert isinstance(o, jax.Array) and o.dtype == q.dtype and same_bits(np.asarray(o), expected)
    assert lse.shape == o.shape[:2]
    out = np.zeros_like(b.q)
    assert plan.run(q, k, v, o=out) is out and same_bits(out, expected)
    with pytest.raises(ValueError, match="o: expected an array that may be written"):
        plan.run(q, k, v, o=o)
    assert same_bits(np.asarray(attnfold.attention(q, q, q)), np.asarray(attnfold.attention(b.q, b.q, b.q)))


def test_memory_that_jax_got_outlives_everything_else():
    x = jnp.ones((5, 2, 64))
    o = attnfold.attention(x, x, x)
    del x
    junk = [np.full((5, 2, 64), 9, np.float32) for _ in range(50)]
    assert (np.asarray(o) == 1).all() and junk


def test_any_object_with_dlpack_is_an_array(rng):
    class Array:
        def __init__(self, x):
            self.x, self.shape, self.dtype = x, x.shape, x.dtype

        def __dlpack__(self, *, stream=None):  # an exporter of the time before versions
            return self.x.__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

    q = rng.standard_normal((4, 2, 64), np.float32)
    o = attnfold.attention(Array(q), Array(q), Array(q))
    assert isinstance(o, np.ndarray) and same_bits(o, attnfold.attention(q, q, q))


def test_arrays_give_their_memory_back(rng):
    x = rng.standard_normal((4, 2, 64), np.float32)
    t = torch.from_numpy(x)
    j = jnp.asarray(x)
    counts = []
    for n in (1, 10):  # the first time fills caches
        for y in (x, t, j):
            for _ in range(n):
                attnfold.attention(y, y, y)
        counts = counts or [sys.getrefcount(y) for y in (x, t, j)]
    assert [sys.getrefcount(y) for y in (x, t, j)] == counts


def test_importing_needs_numpy_alone():
    code = (
        "import sys; sys.modules.update(torch=None, jax=None, ml_dtypes=None, cupy=None)\n"
        "import attnfold, numpy as np; x = np.ones((2, 1, 64), 'f')\n"
        "assert (attnfold.attention(x, x, x) == 1).all()\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'scipy', 'nanobind', 'pytest'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "[]\n", done.stderr
