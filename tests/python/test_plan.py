"""Plans on numpy arrays: exact, the same bits whoever else is served, in place, and errors that name the argument."""

import threading

import attnfold
import ml_dtypes
import numpy as np
import pytest
from reference import Batch, causal, check, same_bits, weight_bits

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_ragged_batches_are_exact(rng, dtype, layout):
    for _ in range(4):
        b = Batch(rng, dtype=dtype, layout=layout)
        plan = b.plan()
        b.update(plan)
        o, lse = plan.run(b.q, b.k_cache, b.v_cache, return_lse=True)
        assert o.dtype == np.dtype(dtype) and lse.dtype == np.float32
        b.check(o, lse, weight_bits(plan))


def test_a_request_has_the_same_bits_alone_and_in_a_batch(rng):
    b = Batch(rng, batch=5)
    plan = b.plan()
    b.update(plan)
    o = plan.run(b.q, b.k_cache, b.v_cache)
    for r in range(5):
        alone = b.plan(num_threads=1 + r % 2, max_batch=1)
        b.update(alone, [r])
        assert same_bits(o[b.rows(r)], alone.run(b.q[b.rows(r)], b.k_cache, b.v_cache))


def test_a_decode_has_the_bits_of_a_prefill(rng):
    q, k, v = (rng.standard_normal((300, h, 64), np.float32) for h in (4, 2, 2))
    whole = attnfold.attention(q, k, v, causal=True)
    for i in (0, 127, 128, 299):
        assert same_bits(whole[i : i + 1], attnfold.attention(q[i : i + 1], k[: i + 1], v[: i + 1], causal=True))


def test_halves_of_one_head_major_cache_are_read_in_place(rng):
    b = Batch(rng, page_size=32, layout="HND")
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    cache = np.concatenate([b.k_cache, b.v_cache], axis=3)  # [num_pages, kv_heads, page_size, 2 * head_dim]
    k, v = cache[..., :64], cache[..., 64:]
    assert attnfold.data_pointer(v) == cache.ctypes.data + 64 * 4
    assert same_bits(expected, plan.run(b.q, k, v))


def test_strided_q_and_outputs(rng):
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    expected, expected_lse = plan.run(b.q, b.k_cache, b.v_cache, return_lse=True)
    rows = len(b.q)
    packed = np.full((rows, b.heads[0] + 4, 64), np.nan, np.float32)  # q, k and v of a fused projection
    packed[:, : b.heads[0]] = b.q
    o = np.full((b.heads[0], rows, 64), 7, np.float32)
    lse = np.full((b.heads[0], rows), 7, np.float32)
    got, got_lse = plan.run(packed[:, : b.heads[0]], b.k_cache, b.v_cache, o=o.swapaxes(0, 1), lse=lse.T)
    assert same_bits(expected, o.swapaxes(0, 1)) and same_bits(expected_lse, lse.T)
    assert got.base is o and got_lse.base is lse


def test_outputs_given_are_written_in_place_and_nothing_round_them(rng):
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    rows = len(b.q)
    o = np.full((rows + 2, b.heads[0], 64), 7, np.float32)
    assert plan.run(b.q, b.k_cache, b.v_cache, o=o[1:-1]).base is o
    assert same_bits(o[1:-1], plan.run(b.q, b.k_cache, b.v_cache))
    assert (o[0] == 7).all() and (o[-1] == 7).all()


def test_lists_and_wider_integers_are_converted(rng):
    b = Batch(rng, batch=3)
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    for kind in (lambda x: x.tolist(), lambda x: x.astype(np.int64), lambda x: x.copy()[::1]):
        plan.update(kind(b.qo_indptr), kind(b.kv_len), kind(b.block_table))
        assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache))
    wide = np.full((3, b.block_table.shape[1] * 2), 99, np.int32)
    wide[:, ::2] = b.block_table
    plan.update(b.qo_indptr, b.kv_len, wide[:, ::2])  # strided columns: converted
    assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache))
    wide[:, : b.block_table.shape[1]] = b.block_table
    plan.update(b.qo_indptr, b.kv_len, wide[:, : b.block_table.shape[1]])  # strided rows: in place
    assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache))


def test_page_ids_in_csr_form(rng):
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    pages = -(-b.kv_len // b.page_size)
    indices = np.concatenate([b.block_table[r, :n] for r, n in enumerate(pages)])
    plan.update(b.qo_indptr, b.kv_len, kv_indptr=np.concatenate([[0], np.cumsum(pages)]), kv_indices=indices)
    assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache))


def test_what_an_update_was_given_is_kept_alive(rng):
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    plan.update(b.qo_indptr.copy(), b.kv_len.copy(), b.block_table.copy())
    junk = [np.full_like(b.block_table, -7) for _ in range(100)]
    assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache)) and junk


def test_masks_and_score_terms(rng):
    q, k, v = (rng.standard_normal((n, h, 64), np.float32) for n, h in ((7, 4), (200, 2), (200, 2)))
    o, lse = attnfold.attention(q, k, v, causal=True, return_lse=True, window_left=33, sm_scale=0.2)
    check(o, lse, q, k, v, causal(7, 200, 33), 0.2)
    tree = rng.random((7, 7)) < 0.5
    plan = attnfold.create(qo_heads=4, kv_heads=2, head_dim=64, dtype="float32", kv_storage="ragged", max_batch=1,
                           max_qo_rows=7, max_kv_len=200)  # fmt: skip
    plan.update([0, 7], [200], kv_indptr=[0, 200], mask_width=[7], mask_indptr=[0, 7],
                mask_bits=np.packbits(tree, axis=1, bitorder="little").ravel())  # fmt: skip
    visible = np.ones((7, 200), bool)
    visible[:, 193:] = tree
    o, lse = plan.run(q, k, v, return_lse=True)
    check(o, lse, q, k, v, visible, 0.125)


def test_keys_of_8_bits_with_scales(rng):
    b = Batch(rng, page_size=16)
    stored = b.k_cache.astype(ml_dtypes.float8_e4m3fn), b.v_cache.astype(ml_dtypes.float8_e4m3fn)
    for kind, k_scale, v_scale in (
        ("per_tensor", 0.5, np.array([2], np.float32)),
        ("per_head", np.array([0.5, 2], np.float32), np.array([1, 3], np.float32)),
        ("per_token", *(rng.random(b.k_cache.shape[:3], np.float32) for _ in "kv")),
    ):
        plan = b.plan(kv_dtype="float8_e4m3fn", k_scale_kind=kind, v_scale_kind=kind)
        b.update(plan)
        o, lse = plan.run(b.q, *stored, k_scale=k_scale, v_scale=v_scale, return_lse=True)
        b.k, b.v = [], []
        for r, n in enumerate(b.kv_len):
            at = np.arange(n)
            slot = b.block_table[r, at // 16], at % 16
            for pool, scale, out in zip(stored, (k_scale, v_scale), (b.k, b.v)):
                if kind == "per_token":
                    factor = scale[slot][..., None]
                else:
                    factor = np.asarray(scale, np.float32).reshape(-1, 1)
                out.append(pool[slot].astype(np.float32) * factor)
        b.check(o, lse)


def test_values_in_the_columns_of_the_keys(rng):
    q, k = (rng.standard_normal((n, h, 96), np.float32) for n, h in ((3, 4), (50, 1)))
    plan = attnfold.create(qo_heads=4, kv_heads=1, head_dim_qk=96, head_dim_vo=64, v_in_k=True, dtype="float32",
                           kv_storage="ragged", max_batch=1, max_qo_rows=3, max_kv_len=50)  # fmt: skip
    plan.update([0, 3], kv_indptr=[0, 50])
    o, lse = plan.run(q, k, return_lse=True)
    check(o, lse, q, k, k[..., :64], causal(3, 50), 96**-0.5)


def test_an_empty_row_is_a_value_and_an_empty_batch_is_sound():
    q = np.ones((2, 1, 64), np.float32)
    o, lse = attnfold.attention(q, np.ones((1, 1, 64), np.float32), np.ones((1, 1, 64), np.float32), True, True)
    assert (o[0] == 0).all() and lse[0, 0] == -np.inf and (o[1] == 1).all()
    nothing = np.empty((0, 1, 64), np.float32)
    o, lse = attnfold.attention(q, nothing, nothing, return_lse=True)
    assert (o == 0).all() and (lse == -np.inf).all()
    plan = attnfold.create(qo_heads=1, kv_heads=1, head_dim=64, dtype="float32", num_pages=1, max_batch=1, max_qo_rows=1,
                           max_kv_len=16)  # fmt: skip
    plan.update([0], [], np.empty((0, 1), np.int32))
    assert plan.run(nothing, np.ones((1, 16, 1, 64), np.float32), np.ones((1, 16, 1, 64), np.float32)).shape == (0, 1, 64)


def test_threads_run_one_plan_at_once(rng):
    b = Batch(rng, batch=4)
    plan = b.plan(num_threads=1)
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    wrong = []

    def work():
        for _ in range(20):
            if not same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_updates_wait_for_runs_of_other_threads(rng):
    b = Batch(rng, batch=4)
    plan = b.plan()
    stop, failures = threading.Event(), []

    def update():
        while not stop.is_set():
            b.update(plan)

    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    thread = threading.Thread(target=update)
    thread.start()
    try:
        for _ in range(100):
            try:
                if not same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache)):
                    failures.append("other bits")
            except RuntimeError as e:  # the plan was updated between the checks and the run
                if "another thread" not in str(e):
                    failures.append(str(e))
    finally:
        stop.set()
        thread.join()
    assert not failures


SIZES = dict(qo_heads=4, kv_heads=2, head_dim=64, dtype="float32", num_pages=4, max_batch=2, max_qo_rows=8, max_kv_len=64)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(kv_heads=3), "kv_heads: expected a divisor of qo_heads (4), got 3"),
        (dict(head_dim=60), "head_dim_qk: expected "),
        (dict(max_kv_len=2**40), "max_kv_len: expected -2147483648..2147483647, got 1099511627776"),
        (dict(mask="diagonal"), "mask: expected none or causal, got 'diagonal'"),
        (dict(dtype="float64"), "dtype: expected one of float32, "),
        (dict(head_dim=None), "head_dim_qk: expected head_dim, "),
    ],
)
def test_a_bad_problem_is_a_value_error(change, message):
    with pytest.raises(ValueError) as e:
        attnfold.create(**(SIZES | change))
    assert message in str(e.value)


def test_what_this_build_does_not_serve_is_not_implemented():
    with pytest.raises(NotImplementedError) as e:
        attnfold.create(**SIZES, backend="cuda")  # float32, if this build has CUDA at all
    assert "expected " in str(e.value)


def test_a_small_workspace_is_a_memory_error(rng):
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    with pytest.raises(MemoryError) as e:
        plan.run(b.q, b.k_cache, b.v_cache, workspace=np.empty(64, np.uint8))
    assert "workspace" in str(e.value)
    big = np.empty(plan.workspace_bytes, np.uint8)
    assert same_bits(plan.run(b.q, b.k_cache, b.v_cache), plan.run(b.q, b.k_cache, b.v_cache, workspace=big))


def _aligned(shape, dtype, past=0):
    x = np.zeros(int(np.prod(shape)) * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -x.ctypes.data % 16 + past
    return x[start : start + x.size - 64].view(dtype).reshape(shape)


def test_a_bad_tensor_is_named_and_nothing_is_written(rng):
    b = Batch(rng, page_size=16)
    plan = b.plan()
    with pytest.raises(ValueError, match="plan"):
        plan.run(b.q, b.k_cache, b.v_cache)  # never updated
    b.update(plan)
    rows = len(b.q)
    read_only = np.zeros_like(b.q)
    read_only.flags.writeable = False
    o = np.full_like(b.q, 7)
    for message, arguments in (
        (f"q: expected shape [{rows}, 6, 64], got [{rows + 1}, 6, 64]", dict(q=np.zeros((rows + 1, 6, 64), np.float32))),
        ("q: expected elements of float32, got float16", dict(q=b.q.astype(np.float16))),
        ("q: expected elements of float32, got float64", dict(q=b.q.astype(np.float64))),
        ("q: expected a contiguous last axis", dict(q=np.zeros((rows, 6, 128), np.float32)[..., ::2])),
        ("q: expected elements in native byte order", dict(q=b.q.astype(">f4"))),
        ("q: expected an address that is a multiple of 16", dict(q=_aligned(b.q.shape, np.float32, 4))),
        ("k: expected shape", dict(k=b.k_cache[:-1])),
        ("v: expected an array, got None", dict(v=None)),
        ("repeated (stride 0)", dict(k=np.broadcast_to(b.k_cache[:1], b.k_cache.shape))),
        ("o: expected an array that may be written, got a read-only one", dict(o=read_only)),
        ("o: expected memory apart from q, got memory that overlaps it", dict(o=b.q)),
        ("lse: expected shape", dict(lse=np.zeros((rows, 5), np.float32))),
        ("sink_logits: expected shape [6], got [5]", dict(sink_logits=np.zeros(5, np.float32))),
        ("k_scale", dict(k_scale=np.zeros(1, np.float32))),
    ):
        given = dict(q=b.q, k=b.k_cache, v=b.v_cache, o=o) | arguments
        with pytest.raises(ValueError) as e:
            plan.run(given.pop("q"), given.pop("k"), given.pop("v"), **given)
        assert message in str(e.value)
        assert (o == 7).all()
    with pytest.raises(TypeError, match="q: expected an array"):
        plan.run([[1.0]], b.k_cache, b.v_cache, o=o)


def test_bad_lengths_are_named_and_the_last_schedule_stays(rng):
    b = Batch(rng, batch=2, page_size=16)
    plan = b.plan()
    b.update(plan)
    expected = plan.run(b.q, b.k_cache, b.v_cache)
    good = dict(qo_indptr=b.qo_indptr, kv_len=b.kv_len, block_table=b.block_table)
    pages = int(-(-b.kv_len.max() // 16))
    for message, change in (
        ("kv_len: expected shape [2], got [1]", dict(kv_len=b.kv_len[:1])),
        ("block_table: expected at least 2 rows, got 1", dict(block_table=b.block_table[:1])),
        (f"block_table: expected rows of at least {pages} pages", dict(block_table=b.block_table[:, : pages - 1])),
        ("kv_len[1]: expected a number of 32 bits, got 8589934592", dict(kv_len=np.array([1, 2**33]))),
        ("kv_len: expected a packed array of int32, got float32", dict(kv_len=b.kv_len.astype(np.float32))),
        ("qo_indptr", dict(qo_indptr=b.qo_indptr[::-1].copy())),
        ("kv_indices: expected at least 9 entries, got 1", dict(block_table=None, kv_indptr=[0, 4, 9], kv_indices=[1])),
        ("mask_bits: expected at least 8 entries, got 0", dict(mask_width=[1, 1], mask_indptr=[0, 4, 8])),
    ):
        with pytest.raises(ValueError) as e:
            plan.update(**(good | change))
        assert message in str(e.value)
        assert same_bits(expected, plan.run(b.q, b.k_cache, b.v_cache))


def test_a_report_names_shared_prefixes():
    plan = attnfold.create(**(SIZES | dict(max_kv_len=1024, num_pages=64)), prefix_use="always")
    table = np.tile(np.arange(40, dtype=np.int32), (2, 1))
    table[1, -1] = 63
    plan.update([0, 1, 2], [640, 640], table)
    assert plan.report()["num_prefix_groups"] == 1 and plan.problem()["num_pages"] == 64
