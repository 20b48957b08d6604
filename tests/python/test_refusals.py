"""What looks like an argument and is not quite one: elements without bytes, other byte orders, unpacked bits, numbers of
numpy, scales and outputs that nothing reads or writes."""

import gc
import subprocess
import sys
import weakref

import attnfold
import attnfold.call_file
import ml_dtypes
import numpy as np
import pytest
import torch


def floats(*shape):
    return np.ones(shape, np.float32)


def plan(**more):
    problem = dict(qo_heads=2, kv_heads=1, head_dim=64, dtype="float32", num_pages=4, max_batch=2, max_qo_rows=8, max_kv_len=64)
    return attnfold.create(**(problem | more))


TABLE = np.array([[2, 0], [1, -1]], np.int32)


def ran(p, **scales):
    dtype = {0: np.float32, 5: np.int8}[p.problem()["kv_dtype"]]
    p.update([0, 1, 4], [20, 3], TABLE)
    pages = np.ones((4, 16, 1, 64), dtype)
    return p.run(floats(4, 2, 64), pages, pages, **scales)


@pytest.mark.parametrize("dtype", ["V0", "S0", "U0", []], ids=["V0", "S0", "U0", "struct"])
def test_elements_without_bytes_are_named(dtype):
    def none(*shape):  # numpy makes one byte of S0 and U0 where it can
        return np.ndarray(shape, np.dtype(dtype), np.zeros(0, np.uint8), strides=(0,) * len(shape))

    assert none(3).itemsize == 0
    p = plan()
    p.update([0, 1, 4], [20, 3], TABLE)
    q, pages = floats(4, 2, 64), floats(4, 16, 1, 64)
    for name, call in (
        ("array", lambda: attnfold.data_pointer(none(3))),
        ("q", lambda: p.run(none(4, 2, 64), pages, pages)),
        ("k", lambda: p.run(q, none(4, 16, 1, 64), pages)),
        ("lse", lambda: p.run(q, pages, pages, lse=none(4, 2))),
        ("workspace", lambda: p.run(q, pages, pages, workspace=none(9))),
        ("qo_indptr", lambda: p.update(none(3), [20, 3], TABLE)),
        ("block_table", lambda: p.update([0, 1, 4], [20, 3], none(2, 2))),
        ("mask_bits", lambda: p.update([0, 1, 4], [20, 3], TABLE, mask_bits=none(4))),
        ("k_cache", lambda: attnfold.append(none(2, 3, 4, 64), None, floats(2, 4, 64), None, [0, 1])),
        ("slots", lambda: attnfold.append(floats(2, 3, 4, 64), None, floats(2, 4, 64), None, none(2))),
        ("pairs", lambda: attnfold.copy_pages((pages, None), (pages, None), none(1, 2))),
        (r"states\[0\].lse", lambda: attnfold.merge([(floats(3, 2, 64), none(3, 2))])),
        ("row_mask", lambda: attnfold.merge([(floats(3, 2, 64), floats(3, 2))], (floats(3, 2, 64), floats(3, 2)), row_mask=none(3))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: expected elements of at least one byte, got "):
            call()


def test_a_type_is_told_before_its_byte_order():
    p = plan()
    with pytest.raises(ValueError, match="^kv_len: expected elements in native byte order, got swapped ones"):
        p.update([0, 1], np.array([20], ">i4"), TABLE)
    with pytest.raises(ValueError, match="^kv_len: expected a packed array of int32, got >f8"):
        p.update([0, 1], np.array([20], ">f8"), TABLE)


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist], ids=["numpy", "torch", "list"])
def test_bits_that_are_not_packed_are_refused(kind):
    seen = np.tril(np.ones((3, 3), bool))
    lengths = dict(qo_indptr=[0, 3], kv_len=[3], block_table=TABLE, mask_width=[3])
    with pytest.raises(ValueError, match=r'^mask_bits: expected packed bits, .*packbits\(.., bitorder="little"\).*, got bool'):
        plan().update(**lengths, mask_indptr=[0, 9], mask_bits=kind(seen.ravel()))
    plan().update(**lengths, mask_indptr=[0, 3], mask_bits=np.packbits(seen, axis=1, bitorder="little").ravel())


def test_a_row_mask_needs_an_out_whose_rows_can_stay():
    o, lse = floats(3, 2, 64), floats(3, 2)
    for mask in (np.ones(3, bool), np.zeros(3, np.uint8)):
        with pytest.raises(ValueError, match="^out: expected a State beside row_mask"):
            attnfold.merge([(o, lse)], row_mask=mask)
    out = attnfold.merge([(o, lse)], (np.full_like(o, 7), lse.copy()), row_mask=np.array([1, 0, 1], bool))
    assert out[0][:, 0, 0].tolist() == [1, 7, 1]


NUMBERS = (np.float16, np.float32, np.float64, np.longdouble, np.int32, np.int64, np.uint8, ml_dtypes.bfloat16, float, int)


@pytest.mark.parametrize("kind", NUMBERS, ids=lambda kind: kind.__name__)
def test_numbers_of_numpy_are_numbers(kind):
    p = plan(kv_dtype="int8", k_scale_kind="per_tensor", v_scale_kind="per_tensor")
    assert np.array_equal(ran(p, k_scale=kind(2), v_scale=kind(3)), ran(p, k_scale=2.0, v_scale=3.0))
    pool, same = np.zeros((2, 2, 3, 4, 64), np.int8)
    for into, scale in ((pool, kind(2)), (same, 2.0)):
        attnfold.append(into, None, floats(2, 4, 64) * 9, None, [0, 5], k_scale_kind="per_tensor", k_scale=scale)
    assert pool.any() and np.array_equal(pool, same)
    x = floats(3, 1, 64)
    assert np.array_equal(attnfold.attention(x, x, x, sm_scale=kind(2)), attnfold.attention(x, x, x, sm_scale=2.0))
    fp8 = plan(o_dtype="float8_e4m3fn")
    assert np.array_equal(ran(fp8, o_scale=kind(2)).view(np.uint8), ran(fp8, o_scale=2.0).view(np.uint8))
    if np.iinfo(kind).min < 0 if np.issubdtype(kind, np.integer) else True:
        for create in (lambda scale: plan(sm_scale=scale), lambda scale: attnfold.attention(x, x, x, sm_scale=scale)):
            for scale in (kind(-1), kind(-2)):  # -1 is the default in C
                with pytest.raises(ValueError, match="^sm_scale: expected a finite number >= 0"):
                    create(scale)


@pytest.mark.parametrize("value", [np.bool_(True), np.complex64(2), np.str_("2")], ids=repr)
def test_other_scalars_of_numpy_are_no_scales(value):
    with pytest.raises((TypeError, ValueError), match="^k_scale: expected "):
        ran(plan(kv_dtype="int8", k_scale_kind="per_tensor", v_scale_kind="per_tensor"), k_scale=value, v_scale=1.0)


def test_a_scale_or_a_v_that_nothing_reads_is_refused():
    for scale in (2.0, np.float32(2), floats(1), torch.ones(1)):
        for name in ("k_scale", "v_scale"):
            with pytest.raises(ValueError, match=f'^{name}: expected None \\({name}_kind is "none"\\), got '):
                ran(plan(), **{name: scale})
            with pytest.raises(ValueError, match=f'^{name}: expected None \\({name}_kind is "none"\\), got '):
                pool, rows = floats(2, 3, 4, 64), floats(2, 4, 64)
                attnfold.append(pool, pool.copy(), rows, rows, [0, 1], **{name: scale})
    with pytest.raises(ValueError, match=r"^v: expected None \(v_cache is None\), got ndarray"):
        attnfold.append(floats(2, 3, 4, 64), None, floats(2, 4, 64), floats(2, 4, 64), [0, 1])


def test_a_plan_that_is_kept_does_not_let_other_types_of_numbers_in():
    x = floats(3, 1, 64)
    attnfold.attention(x, x, x, window_left=1, window_right=2, num_threads=1)
    for name in ("window_left", "window_right", "num_threads"):
        with pytest.raises(TypeError, match=f"^{name}: expected an integer, got float"):
            attnfold.attention(x, x, x, **{"window_left": 1, "window_right": 2, "num_threads": 1} | {name: 1.0})
    scale = torch.tensor(0.5)  # a number when the call is made, whatever becomes of it
    first = attnfold.attention(x, x, x, sm_scale=scale)
    assert np.array_equal(first, attnfold.attention(x, x, x, sm_scale=0.5))
    scale.fill_(-1)
    with pytest.raises(ValueError, match="^sm_scale: expected a finite number >= 0"):
        attnfold.attention(x, x, x, sm_scale=scale)


def test_a_gradient_that_an_output_or_a_scale_wants_is_an_error():
    p = plan(kv_dtype="int8", k_scale_kind="per_tensor", v_scale_kind="per_tensor")
    p.update([0, 1], [20], TABLE)
    sound = dict(q=torch.ones(1, 2, 64), k=torch.ones(4, 16, 1, 64, dtype=torch.int8), v=torch.ones(4, 16, 1, 64, dtype=torch.int8),
                 o=torch.ones(1, 2, 64), lse=torch.ones(1, 2), k_scale=torch.ones(1), v_scale=torch.ones(1))  # fmt: skip
    p.run(**sound)
    for name in ("q", "o", "lse", "k_scale", "v_scale"):
        with pytest.raises(NotImplementedError, match=f"^{name}: expected no gradient"):
            p.run(**sound | {name: sound[name].clone().requires_grad_()})


def test_a_workspace_is_apart_from_the_tensors():
    p = plan()
    p.update([0, 1, 4], [20, 3], TABLE)
    n = p.workspace_bytes
    for name, shape in (("q", (4, 2, 64)), ("k", (4, 16, 1, 64)), ("v", (4, 16, 1, 64)), ("o", (4, 2, 64)), ("lse", (4, 2))):
        arrays = dict(q=floats(4, 2, 64), k=floats(4, 16, 1, 64), v=floats(4, 16, 1, 64), o=floats(4, 2, 64), lse=floats(4, 2))
        arena = np.zeros(n + 4096 + 4 * int(np.prod(shape)), np.uint8)
        arena = arena[-arena.ctypes.data % 64 :]
        size = 4 * int(np.prod(shape))
        arrays[name] = arena[:size].view(np.float32).reshape(shape)
        with pytest.raises(ValueError, match="^workspace: expected memory apart from "):
            p.run(**arrays, workspace=arena[size - 1 : size - 1 + n])
        p.run(**arrays, workspace=arena[size : size + n])


def test_what_is_of_torch_and_no_tensor_is_a_type_error():
    rows = floats(2, 4, 64)
    for thing in (torch.float32, torch.Size([2]), torch.Tensor, torch.device("cpu")):
        for call, name in (
            (lambda x: attnfold.append(x, None, rows, None, [0, 1]), "k_cache"),
            (lambda x: attnfold.append(floats(2, 3, 4, 64), None, x, None, [0, 1]), "k"),
            (lambda x: attnfold.attention(x, x, x), "q"),
            (lambda x: attnfold.merge([(x, x)], (rows, rows[..., 0])), r"states\[0\].o"),
            (lambda x: attnfold.copy_pages((x, None), (x, None), [[0, 1]]), "from_pool.k_cache"),
            (lambda x: plan().run(x, x, x), "q"),
        ):
            with pytest.raises(TypeError, match=f"^{name}: expected an array"):
                call(thing)


def test_an_empty_list_is_none_of_whatever_it_is():
    p = plan()
    p.update([0], [], [])
    assert p.run(floats(0, 2, 64), floats(4, 16, 1, 64), floats(4, 16, 1, 64)).shape == (0, 2, 64)
    p.update([0, 1, 4], [20, 3], TABLE, mask_width=[0, 0], mask_indptr=[0, 0, 0], mask_bits=[], prefix_keys=[],
             prefix_indptr=[0], prefix_requests=[])  # fmt: skip
    assert attnfold.slot_mapping([0], [], [], page_size=4, num_pages=3).shape == (0,)
    assert attnfold.map_to_kernel_pages([], block_size=4, page_size=4, num_blocks=3).shape == (0, 0)
    pool = np.arange(3, dtype=np.float32).repeat(4 * 8).reshape(3, 4, 1, 8)
    attnfold.copy_pages((pool, None), (pool, None), [])
    assert pool[:, 0, 0, 0].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"^pairs: expected shape \[any, 2\]"):
        attnfold.copy_pages((pool, None), (pool, None), [[0, 1, 2]])


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_pairs_of_pages_may_have_strides(dtype):
    pairs = np.array([[0, 2, 9], [1, 0, 9]], dtype)
    for given in (pairs[:, :2], np.asfortranarray(pairs[:, :2]), pairs[::-1, 1::-1][::-1, ::-1], torch.from_numpy(pairs)[:, :2]):
        pool = np.arange(3, dtype=np.float32).repeat(4 * 8).reshape(3, 4, 1, 8)
        attnfold.copy_pages((pool, None), (pool, None), given)
        assert pool[:, 0, 0, 0].tolist() == [1, 1, 0]


def test_a_class_of_the_caller_is_free_to_go():
    x = floats(3, 1, 64)

    def use():
        class Lends:
            shape, dtype = x.shape, x.dtype

            def __dlpack__(self, **how):
                return x.__dlpack__(**how)

            def __dlpack_device__(self):
                return x.__dlpack_device__()

        attnfold.attention(x, Lends(), Lends())
        dtype = np.dtype([("x", "f4")])
        with pytest.raises(ValueError):
            attnfold.attention(x, x.view(dtype), x)
        return weakref.ref(Lends)

    gone = use()
    gc.collect()
    assert gone() is None
    script = ("import attnfold, numpy as np\nx = np.ones((3, 1, 64), np.float32)\n"
              "p = attnfold.create(qo_heads=1, kv_heads=1, head_dim=64, max_batch=1, max_qo_rows=1, max_kv_len=1)\n"
              "class Lends:\n shape, dtype, p = x.shape, x.dtype, p\n def __dlpack__(self, **how): return x.__dlpack__(**how)\n"
              " def __dlpack_device__(self): return (1, 0)\n"
              "attnfold.attention(x, Lends(), Lends())")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "leaked" not in done.stderr, done.stderr
