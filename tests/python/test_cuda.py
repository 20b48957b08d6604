"""Arrays on a GPU: torch, cupy and jax on their own device and stream, nothing copied; operators, torch.compile, graphs."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch and cupy want some of the memory too

import attnfold
import attnfold.torch
import ml_dtypes
import numpy as np
import pytest
import torch
from reference import Batch, same_bits, weight_bits

WHY_NOT = next(row["why_not"] for row in attnfold.kernels() if row["name"] == "cuda/f16")
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=f"the CUDA backend cannot run: {WHY_NOT}")
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
LENGTHS = ("qo_indptr", "kv_len", "block_table")


def to_torch(x):
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(x).cuda()


def host(x):
    """The bits of a torch tensor as a numpy array."""
    x = x.detach().cpu().contiguous()
    return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()


class OnDevice:
    """A batch on the GPU, with a plan."""

    def __init__(self, rng, dtype="float16", kind=to_torch, **more):
        self.batch = b = Batch(rng, dtype=DTYPES[dtype], **more)
        self.q, self.k, self.v = (kind(x) for x in (b.q, b.k_cache, b.v_cache))
        self.lengths = [kind(getattr(b, name)) for name in LENGTHS]
        self.plan = b.plan(backend="cuda")

    def run(self, **more):
        self.plan.update(*self.lengths)
        return self.plan.run(self.q, self.k, self.v, return_lse=True, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_batch_of_torch_is_answered_where_it_lies(rng, dtype, layout):
    d = OnDevice(rng, dtype, layout=layout)
    assert attnfold.data_pointer(d.k) == d.k.data_ptr()
    o, lse = d.run()
    assert o.device == d.q.device and o.dtype == d.q.dtype and lse.dtype == torch.float32
    d.batch.check(host(o), host(lse), weights=weight_bits(d.plan))
    given = torch.zeros_like(o)
    assert d.run(o=given)[0] is given and torch.equal(given, o)
    for r in range(len(d.batch.kv_len)):  # a request alone
        n, rows = int(d.batch.qo_len[r]), d.batch.rows(r)
        d.plan.update(torch.tensor([0, n], dtype=torch.int32).cuda(), d.lengths[1][r : r + 1], d.lengths[2][r : r + 1])
        assert torch.equal(d.plan.run(d.q[rows], d.k, d.v), o[rows])


def test_halves_of_one_buffer_are_read_with_their_strides(rng):
    d = OnDevice(rng, page_size=32, layout="HND")
    o, _ = d.run()
    cache = torch.cat([d.k, d.v], dim=3)
    assert torch.equal(d.plan.run(d.q, cache[..., :64], cache[..., 64:]), o)


def test_calls_run_on_the_current_stream(rng):
    d = OnDevice(rng)
    expected, expected_lse = d.run()
    pool, k = torch.zeros(2, 4, 2, 64, device="cuda"), torch.ones(3, 2, 64, device="cuda")
    slots = torch.tensor([1, 2, 7], device="cuda")
    torch.cuda.synchronize()
    q, stream = torch.zeros_like(d.q), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what follows is late, and must be waited for
        q.copy_(d.q)
        d.plan.update(*d.lengths)
        o, lse = d.plan.run(q, d.k, d.v, return_lse=True)
        merged, _ = attnfold.merge([(o.float(), lse)])
        attnfold.append(pool, None, k * 2, None, slots)
    stream.synchronize()
    assert torch.equal(o, expected) and torch.equal(lse, expected_lse) and torch.equal(merged, expected.float())
    assert pool.sum() == 3 * 2 * 64 * 2
    torch.cuda._sleep(50_000_000)  # the default stream is busy, the one that is named is not
    o = d.plan.run(d.q, d.k, d.v, stream=stream.cuda_stream)
    stream.synchronize()
    early = not torch.cuda.current_stream().query()
    assert early and torch.equal(o, expected)


def test_one_call_for_one_request(rng):
    q, k, v = (torch.randn(n, h, 64, device="cuda", dtype=torch.float16) for n, h in ((5, 4), (300, 2), (300, 2)))
    o, lse = attnfold.attention(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = attnfold.attention(q.cpu(), k.cpu(), v.cpu(), causal=True, return_lse=True)
    assert (o.cpu() - expected).abs().max() < 4e-3 and (lse.cpu() - expected_lse).abs().max() < 1e-4
    used = torch.cuda.memory_allocated()
    for n in range(290, 300):
        attnfold.attention(q, k[:n], v[:n])
    assert torch.cuda.memory_allocated() == used  # nothing is kept
    assert attnfold.attention(q[:0], k, v).shape == (0, 4, 64)
    o, lse = attnfold.attention(q, k[:0], v[:0], return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()


def test_nothing_is_an_array_too():
    empty = lambda *shape, dtype=torch.float32: torch.zeros(*shape, dtype=dtype, device="cuda")  # noqa: E731
    ints = lambda *values: torch.tensor(values, dtype=torch.int32, device="cuda")  # noqa: E731
    plan = attnfold.create(qo_heads=2, kv_heads=1, head_dim=64, dtype="float16", max_batch=2, max_qo_rows=300, max_kv_len=64,
                           backend="cuda")  # fmt: skip
    pool = [empty(0, 16, 1, 64, dtype=torch.float16) for _ in "kv"]
    plan.update(ints(0), ints(), ints()[None, :0].reshape(0, 3))
    assert plan.run(empty(0, 2, 64, dtype=torch.float16), *pool).shape == (0, 2, 64)
    plan.update(ints(0, 2, 3), ints(0, 0), torch.empty(2, 0, dtype=torch.int32, device="cuda"))
    o, lse = plan.run(torch.ones(3, 2, 64, device="cuda", dtype=torch.float16), *pool, return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    attnfold.append(*pool, empty(0, 1, 64), empty(0, 1, 64), empty(0, dtype=torch.int64))
    merged, lse = attnfold.merge([(empty(0, 2, 64), empty(0, 2))] * 2)
    assert merged.shape == (0, 2, 64) and lse.shape == (0, 2)
    slots = attnfold.slot_mapping(ints(0), ints(), empty(0, 3, dtype=torch.int32), page_size=16, num_pages=0, num_slots=0)
    assert slots.shape == (0,)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_cache_round_a_call_has_the_bytes_of_the_cpu(rng, layout):
    k, v = (rng.standard_normal((23, 2, 64), np.float32) for _ in "kv")
    table = np.array([[5, 0, 3, 2, 7, 1]], np.int32)
    shape = (8, 4, 2, 64) if layout == "NHD" else (8, 2, 4, 64)
    pools = [[np.full(shape, 9, np.float16) for _ in "kv"] for _ in range(2)]
    on_gpu = [[to_torch(x) for x in pool] for pool in pools]
    indptr, kv_len = np.array([0, 23], np.int32), np.array([23], np.int32)
    slots = attnfold.slot_mapping(indptr, kv_len, table, page_size=4, num_pages=8, num_slots=25)
    lengths = [to_torch(x) for x in (indptr, kv_len, table)]
    slots_gpu = attnfold.slot_mapping(*lengths, page_size=4, num_pages=8, num_slots=25)
    assert slots_gpu.is_cuda and same_bits(host(slots_gpu), slots) and slots[-1] == attnfold.NO_SLOT
    positions = torch.arange(23, device="cuda")
    at = attnfold.slot_mapping(lengths[0], None, lengths[2], page_size=4, num_pages=8, positions=positions)
    assert same_bits(host(at), slots[:23])
    attnfold.append(*pools[0], k, v, slots[:23], kv_layout=layout)
    rows = [to_torch(x) for x in (k, v)]
    attnfold.append(*on_gpu[0], *rows, slots_gpu[:23], kv_layout=layout)
    pairs = np.array([[5, 1], [1, 4], [0, 5]], np.int32)
    attnfold.copy_pages(pools[0], pools[1], pairs, kv_layout=layout)
    attnfold.copy_pages(on_gpu[0], on_gpu[1], to_torch(pairs), kv_layout=layout)
    for there, here in zip(sum(on_gpu, []), sum(pools, [])):
        assert same_bits(host(there), here)
    before = host(on_gpu[0][0])
    attnfold.append(*on_gpu[0], *rows, torch.full((23,), 99, device="cuda"), kv_layout=layout)
    assert same_bits(host(on_gpu[0][0]), before)  # a slot that the pool does not have


def test_appending_to_eight_bits_writes_the_scales_of_the_cpu(rng):
    rows = [rng.standard_normal((3, 2, 64), np.float32) for _ in "kv"]
    pools, scales = [np.zeros((2, 4, 2, 64), np.int8) for _ in "kv"], [np.zeros((2, 4, 2), np.float32) for _ in "kv"]
    on_gpu = [[to_torch(x) for x in xs] for xs in (pools, rows, scales)]
    how = dict(k_scale_kind="per_token", v_scale_kind="per_token")
    attnfold.append(*pools, *rows, [7, -1, 0], k_scale=scales[0], v_scale=scales[1], **how)
    slots = torch.tensor([7, -1, 0], device="cuda")
    attnfold.append(*on_gpu[0], *on_gpu[1], slots, k_scale=on_gpu[2][0], v_scale=on_gpu[2][1], **how)
    for there, here in zip(on_gpu[0] + on_gpu[2], pools + scales):
        assert same_bits(host(there), here)


def test_states_are_merged_and_rewritten_with_the_bits_of_the_cpu(rng):
    states = [(rng.standard_normal((50, 3, 64), np.float32), rng.standard_normal((50, 3), np.float32)) for _ in range(4)]
    states[1][1][::7] = -np.inf
    mask = rng.random(50) < 0.5
    on_gpu = [tuple(to_torch(x) for x in s) for s in states]
    for there, here in zip(attnfold.merge(on_gpu), attnfold.merge(states)):
        assert same_bits(host(there), here)
    attnfold.merge(states[1:], out=states[0], row_mask=mask)
    attnfold.merge(on_gpu[1:], out=on_gpu[0], row_mask=to_torch(mask))
    for there, here in zip(on_gpu[0], states[0]):
        assert same_bits(host(there), here)
    o, lse = states[0][0], np.ascontiguousarray(states[0][1].T)
    convert = lambda kind, o, lse: attnfold.convert_state(  # noqa: E731
        attnfold.State(o, lse, lse_layout="heads_rows", log_base="2"),
        attnfold.State(kind(np.empty((50, 3, 64), np.float16)), kind(np.empty((50, 3), np.float32))),
    )
    here, there = convert(lambda x: x, o, lse), convert(to_torch, to_torch(o), to_torch(lse))
    assert same_bits(host(there.o), here.o) and same_bits(host(there.lse), here.lse)


def test_errors_name_the_argument_that_lies_elsewhere(rng):
    d = OnDevice(rng)
    d.plan.update(*d.lengths)
    b = d.batch
    rows, pool = torch.zeros(1, 2, 64, device="cuda"), torch.zeros(2, 4, 2, 64, device="cuda")
    state = torch.zeros(2, 2, 64, device="cuda"), torch.zeros(2, 2, device="cuda")
    for name, call in (
        ("kv_len", lambda: d.plan.update(d.lengths[0], b.kv_len, d.lengths[2])),
        ("q", lambda: d.plan.run(b.q, d.k, d.v)),
        ("v", lambda: d.plan.run(d.q, d.k, torch.from_numpy(b.v_cache))),
        ("o", lambda: d.plan.run(d.q, d.k, d.v, o=torch.from_numpy(b.q))),
        ("slots", lambda: attnfold.append(pool, None, rows, None, [0])),
        ("k", lambda: attnfold.append(pool, None, rows.cpu(), None, torch.zeros(1, dtype=torch.int64, device="cuda"))),
        (r"states\[1\].lse", lambda: attnfold.merge([state, (state[0], state[1].cpu())])),
    ):
        with pytest.raises(ValueError, match=f"^{name}: expected memory of cuda:0, where the call runs, got memory of the CPU"):
            call()
    with pytest.raises(ValueError, match="num_slots: expected a number"):
        attnfold.slot_mapping(*d.lengths, page_size=4, num_pages=8)
    with pytest.raises(ValueError, match="^q: expected memory of the CPU, where the call runs, got memory of cuda:0"):
        plan = b.plan()
        b.update(plan)
        plan.run(d.q, d.k, d.v)
    with pytest.raises(NotImplementedError, match="nearest: cuda/bf16: head_dim_vo"):
        attnfold.create(qo_heads=2, kv_heads=1, head_dim_qk=64, head_dim_vo=32, v_in_k=True, max_batch=1, max_qo_rows=1,
                        max_kv_len=9, backend="cuda")  # fmt: skip


def test_the_operators_pass_torchs_own_checks(rng):
    d = OnDevice(rng)
    d.plan.update(*d.lengths)
    one = [torch.randn(n, 2, 64, device="cuda", dtype=torch.float16) for n in (3, 9, 9)]
    checks = dict(test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(torch.ops.attnfold.attention, (*one, True, 0.3), **checks)
    torch.library.opcheck(torch.ops.attnfold.run, (d.q, d.k, d.v, attnfold.torch.handle(d.plan)), **checks)
    pool, rows = torch.zeros(2, 2, 4, 2, 64, device="cuda"), torch.randn(2, 2, 2, 64, device="cuda")
    torch.library.opcheck(torch.ops.attnfold.append, (*pool.clone(), *rows, torch.tensor([3, 6]).cuda()), **checks)
    o, lse = torch.ops.attnfold.attention(*one)
    torch.library.opcheck(torch.ops.attnfold.merge, ([o, o], [lse, lse]), **checks)


def test_compiled_layers_have_the_bits_of_eager_ones(rng):
    d = OnDevice(rng, page_size=16)
    handle, slots = attnfold.torch.handle(d.plan), d.lengths[2][0, :1].long() * 16
    d.plan.update(*d.lengths)

    def layer(q, k, v, new, slots, handle):
        torch.ops.attnfold.append(k, v, new, new * 2, slots)
        o, lse = torch.ops.attnfold.run(q, k, v, handle)
        merged, _ = torch.ops.attnfold.merge([o, o], [lse, lse])
        return merged.relu() + 1, lse

    compiled = torch.compile(layer, fullgraph=True)
    for i in range(3):
        new = torch.full((1, 2, 64), float(i), device="cuda", dtype=torch.float16)
        caches = [[x.clone() for x in (d.k, d.v)] for _ in range(2)]
        eager = layer(d.q, *caches[0], new, slots, handle)
        for x, y in zip((*eager, *caches[0]), (*compiled(d.q, *caches[1], new, slots, handle), *caches[1])):
            assert same_bits(host(x), host(y))


def test_torch_compile_puts_a_call_into_a_graph_of_its_own():
    f = torch.compile(lambda q, k, v: torch.ops.attnfold.attention(q * 2, k, v, True)[0] + 1, mode="reduce-overhead")
    for _ in range(5):
        q, k, v = (torch.randn(n, 2, 64, device="cuda", dtype=torch.float16) for n in (3, 200, 200))
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(f(q, k, v).clone(), attnfold.attention(q * 2, k, v, True) + 1)


def test_a_captured_step_answers_whatever_lengths_it_finds(rng):
    d = OnDevice(rng, page_size=16, batch=6)
    b, n = d.batch, 6
    rows = 64
    q, new = (torch.randn(rows, h, 64, device="cuda", dtype=torch.float16) for h in (6, 2))
    indptr, kv_len, table = (torch.zeros_like(x) for x in d.lengths)
    k, v = d.k.nan_to_num(0), d.v.nan_to_num(0)
    first = k.clone(), v.clone()

    def step():
        d.plan.update(indptr, kv_len, table)
        slots = attnfold.slot_mapping(indptr, kv_len, table, page_size=16, num_pages=b.num_pages, num_slots=rows)
        torch.ops.attnfold.append(k, v, new, new, slots)
        return torch.ops.attnfold.run(q, k, v, attnfold.torch.handle(d.plan))

    table.copy_(d.lengths[2])
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = step()
    for trial in range(12):
        qo_len = rng.integers(0, 11, n) if trial else np.zeros(n, int)  # none, decodes, chunks of a prefill
        kv_len.copy_(torch.from_numpy(np.where(qo_len > 0, rng.integers(qo_len, b.kv_len + qo_len), 0)).clamp(max=400))
        kv_len.copy_(torch.minimum(kv_len, d.lengths[1]))
        qo_len = np.minimum(qo_len, host(kv_len))
        indptr.copy_(torch.from_numpy(np.concatenate([[0], np.cumsum(qo_len)])))
        used = int(qo_len.sum())
        answers = []
        for run in (graph.replay, step):
            k.copy_(first[0])
            v.copy_(first[1])
            made = run()
            answers.append([host(x) for x in ((o, lse) if made is None else made)] + [host(k), host(v)])
        for x, y in zip(*answers):
            x, y = (z[:used] if len(z) == rows else z for z in (x, y))
            assert same_bits(x, y)


def test_a_graph_that_holds_a_whole_call_needs_one_before_it():
    q, k, v = (torch.randn(n, 2, 64, device="cuda", dtype=torch.float16) for n in (3, 77, 77))
    scale = 0.0625
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="attention: expected a call of this size before a graph is captured"):
        with torch.cuda.graph(graph):
            attnfold.attention(q, k, v, sm_scale=scale)
    attnfold.attention(q, k, v, sm_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [attnfold.attention(q, k[: 77 - i], v[: 77 - i], sm_scale=scale) for i in range(3)]
    for _ in range(3):
        for x in (q, k, v):
            x.normal_()
        for i in range(3):  # in the way of the graph, were the plan shared
            expected = [attnfold.attention(q, k[: 77 - i], v[: 77 - i], sm_scale=scale) for i in range(3)]
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(layers, expected))


def test_cupy_on_its_own_stream(rng):
    cupy = pytest.importorskip("cupy")
    d = OnDevice(rng)
    expected, expected_lse = d.run()
    stream = cupy.cuda.Stream(non_blocking=True)
    c = OnDevice(np.random.default_rng(0), kind=cupy.asarray)
    c.q, c.k, c.v = (cupy.asarray(x) for x in (d.batch.q, d.batch.k_cache, d.batch.v_cache))
    c.lengths, c.plan = [cupy.asarray(getattr(d.batch, name)) for name in LENGTHS], d.plan
    cupy.cuda.Device().synchronize()
    assert attnfold.data_pointer(c.k) == c.k.data.ptr
    with stream:
        o, lse = c.run()
        assert isinstance(o, cupy.ndarray) and o.dtype == np.float16
        total, _ = attnfold.merge([(o, lse)] * 2)
        k_cache = cupy.zeros((2, 4, 2, 64), "float16")
        attnfold.append(k_cache, None, cupy.ones((2, 2, 64), "float16"), None, cupy.asarray([5, -1]))
        one = attnfold.attention(c.q, c.q[:, :2], c.q[:, 4:])
    stream.synchronize()
    assert same_bits(o.get(), host(expected)) and same_bits(lse.get(), host(expected_lse)) and same_bits(total.get(), o.get())
    assert k_cache.sum() == 2 * 64 and k_cache[1, 1, 0, 0] == 1
    assert same_bits(one.get(), host(attnfold.attention(d.q, d.q[:, :2], d.q[:, 4:])))


@pytest.mark.parametrize("dtype", DTYPES)
def test_jax_on_its_own_stream(rng, dtype):
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as e:
        pytest.skip(f"jax sees no GPU: {e}")
    d = OnDevice(rng, dtype)
    d.run()
    j = OnDevice(np.random.default_rng(0), dtype, kind=lambda x: jax.device_put(x, device))
    put = lambda *arrays: [jax.device_put(x, device) for x in arrays]  # noqa: E731
    j.q, j.k, j.v = put(d.batch.q, d.batch.k_cache, d.batch.v_cache)
    j.lengths, j.plan = put(*(getattr(d.batch, name) for name in LENGTHS)), d.plan
    assert attnfold.data_pointer(j.k) == j.k.unsafe_buffer_pointer()
    for _ in range(3):
        j.q = (j.q * 3 - j.q * 2).astype(j.q.dtype)  # perhaps not there yet when the plan runs
        o, lse = j.run()
        assert isinstance(o, jax.Array) and o.devices() == {device} and o.dtype == j.q.dtype
    exact = d.plan.run(to_torch(np.asarray(j.q)), d.k, d.v)
    assert same_bits(np.asarray(o), host(exact)) and lse.shape == o.shape[:2]
    merged, _ = attnfold.merge([(o, lse)] * 2)
    assert same_bits(np.asarray(merged), np.asarray(o))
    assert jax.jit(lambda x: x + 1)(o).devices() == {device}  # an array like any other
    one = attnfold.attention(j.q, j.q[:, :2], j.q[:, 4:])
    q = to_torch(np.asarray(j.q))
    assert same_bits(np.asarray(one), host(attnfold.attention(q, q[:, :2], q[:, 4:])))
    with pytest.raises(NotImplementedError, match="qo_indptr: expected an array of torch or cupy on a GPU"):
        attnfold.slot_mapping(*j.lengths, page_size=4, num_pages=8, num_slots=3)
    with pytest.raises(ValueError, match="k_cache: expected an array that may be written"):
        attnfold.append(j.k, j.v, j.k[0], j.v[0], j.lengths[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_transformers_on_a_gpu(dtype):
    transformers = pytest.importorskip("transformers")
    import attnfold.integrations.transformers

    attnfold.integrations.transformers.register()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(hidden_size=256, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
                                      num_key_value_heads=2, vocab_size=500)  # fmt: skip
    exact = transformers.LlamaForCausalLM(config).eval()
    tokens, how = torch.randint(0, 500, (3, 40)), dict(max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    padded = torch.ones_like(tokens)
    padded[1, :13] = 0  # on the left, as generate does it
    with torch.no_grad():
        expected = exact(tokens, attention_mask=padded).logits
        seen, error = padded.bool(), {}
        for name in ("eager", "attnfold"):
            model = transformers.LlamaForCausalLM(config).eval()
            model.load_state_dict(exact.state_dict())
            model = model.to("cuda", dtype)
            model.set_attn_implementation(name)
            whole = model(tokens.cuda(), attention_mask=padded.cuda()).logits.cpu().float()
            error[name] = (whole - expected)[seen].abs().max()
            made = model.generate(tokens.cuda(), attention_mask=padded.cuda(), **how)
            assert made.shape == (3, 46)
        assert error["attnfold"] <= 1.5 * error["eager"]
        step = made[:1, :41]  # prefill and a decode through the cache
        cache = transformers.DynamicCache(config=config)
        model(step[:, :40], past_key_values=cache)
        last = model(step[:, 40:], past_key_values=cache).logits
        whole = model(step).logits[:, -1:]
        assert (last - whole).abs().max() <= 1.5 * error["eager"]
