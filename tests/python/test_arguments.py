"""What every call does with what it cannot take, and with nothing: errors that name the argument, arrays without elements."""

import attnfold
import attnfold.call_file
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

jax.config.update("jax_platforms", "cpu")


def floats(*shape):
    return np.ones(shape, np.float32)


def ints(*values):
    return np.array(values, np.int32)


TABLE = np.array([[2, 0], [1, -1]], np.int32)


def plan(**more):
    problem = dict(qo_heads=2, kv_heads=1, head_dim=64, dtype="float32", num_pages=4, max_batch=2, max_qo_rows=8, max_kv_len=64)
    return attnfold.create(**(problem | more))


def run(**arrays):
    p = plan()
    p.update([0, 1, 4], [20, 3], TABLE)
    return p.run(**arrays)


def copy_pages(from_k, from_v, to_k, to_v, pairs):
    attnfold.copy_pages((from_k, from_v), (to_k, to_v), pairs)


def merge(o, lse, second_o, second_lse, out_o, out_lse, row_mask):
    attnfold.merge([(o, lse), (second_o, second_lse)], (out_o, out_lse), row_mask=row_mask)


def convert(from_o, from_lse, to_o, to_lse):
    attnfold.convert_state(attnfold.State(from_o, from_lse), attnfold.State(to_o, to_lse, log_base="2"))


# call, sound arguments, {parameter: the name in errors} of its arrays (None: optional)
CALLS = {
    "attention": (attnfold.attention, lambda: dict(q=floats(3, 2, 64), k=floats(5, 2, 64), v=floats(5, 2, 64)), "q k v", ""),
    "run": (
        run,
        lambda: dict(q=floats(4, 2, 64), k=floats(4, 16, 1, 64), v=floats(4, 16, 1, 64)),
        "q k", "v o lse alibi_slopes sink_logits workspace",
    ),
    "update": (
        lambda **lengths: plan().update(**lengths),
        lambda: dict(qo_indptr=ints(0, 1, 4), kv_len=ints(20, 3), block_table=TABLE.copy()),
        "qo_indptr", "kv_len block_table visible_prefix prefix_keys mask_width mask_indptr mask_bits kv_indptr kv_indices",
    ),
    "append": (
        attnfold.append,
        lambda: dict(k_cache=floats(4, 16, 2, 64), v_cache=floats(4, 16, 2, 64), k=floats(3, 2, 64), v=floats(3, 2, 64),
                     slots=np.arange(3)),
        "k_cache k v slots", "v_cache",
    ),
    "slot_mapping": (
        attnfold.slot_mapping,
        lambda: dict(qo_indptr=ints(0, 1, 4), kv_len=ints(6, 3), block_table=TABLE.copy(), page_size=4, num_pages=3),
        "qo_indptr", "kv_len block_table positions kv_indptr",
    ),
    "map_to_kernel_pages": (
        attnfold.map_to_kernel_pages,
        lambda: dict(block_table=ints([3, 1]), used=ints(2), block_size=32, page_size=16, num_blocks=4),
        "block_table", "used",
    ),
    "copy_pages": (
        copy_pages,
        lambda: dict(from_k=floats(3, 4, 1, 8), from_v=floats(3, 4, 1, 8), to_k=floats(3, 4, 1, 8), to_v=floats(3, 4, 1, 8),
                     pairs=ints([0, 2])),
        "from_k to_k pairs", "from_v to_v",
    ),
    "merge": (
        merge,
        lambda: dict(o=floats(3, 2, 64), lse=floats(3, 2), second_o=floats(3, 2, 64), second_lse=floats(3, 2),
                     out_o=floats(3, 2, 64), out_lse=floats(3, 2), row_mask=np.ones(3, bool)),
        "o lse second_o second_lse out_o out_lse", "row_mask",
    ),
    "convert_state": (
        convert,
        lambda: dict(from_o=floats(3, 2, 64), from_lse=floats(3, 2), to_o=floats(3, 2, 64), to_lse=floats(3, 2)),
        "from_o from_lse to_o to_lse", "",
    ),
    "data_pointer": (attnfold.data_pointer, lambda: dict(array=floats(3)), "array", ""),
}  # fmt: skip
NAMES = {
    "from_k": "from_pool.k_cache", "from_v": "from_pool.v_cache", "to_k": "to_pool.k_cache", "to_v": "to_pool.v_cache",
    "o": "states[0].o", "lse": "states[0].lse", "second_o": "states[1].o", "second_lse": "states[1].lse",
    "out_o": "out.o", "out_lse": "out.lse", "from_o": "from.o", "from_lse": "from.lse", "to_o": "to.o", "to_lse": "to.lse",
}  # fmt: skip
ARRAYS = [(call, name) for call in CALLS for name in f"{CALLS[call][2]} {CALLS[call][3]}".split()]


class Broken:
    """Says that it is an array, and lends nothing."""

    shape, dtype = (3, 2, 64), np.dtype("float32")

    def __dlpack__(self, **_):
        raise BufferError("nothing to lend")

    def __dlpack_device__(self):
        return (1, 0)


def error_of(call, name, value):
    function, sound, _, _ = CALLS[call]
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as caught:
        function(**(sound() | {name: value}))
    text = str(caught.value)
    expected = name if call == "run" else NAMES.get(name, name)
    assert text.startswith(f"{expected}: expected "), text
    return caught.type, text


@pytest.mark.parametrize("call", CALLS)
def test_the_sound_arguments_are_sound(call):
    function, sound, _, _ = CALLS[call]
    function(**sound())


@pytest.mark.parametrize("call, name", ARRAYS)
def test_what_is_no_array_is_a_type_error_that_names_the_argument(call, name):
    values = {"str": "words", "object": object(), "dict": {}, "float": 1.5, "type": np.ndarray}
    if name in CALLS[call][2].split():
        values["NoneType"] = None
    for kind, value in values.items():
        error, text = error_of(call, name, value)
        assert error is TypeError and f"got {kind}" in text, text


@pytest.mark.parametrize("call, name", ARRAYS)
def test_an_array_without_memory_is_a_value_error_that_names_the_argument(call, name):
    arrays = [torch.empty(3, 2, 64, device="meta")] + [torch.empty(3, dtype=torch.int32, device="meta")] * (
        call != "attention" and name != "q"
    )
    deleted = jnp.ones((3, 2, 64))
    deleted.delete()
    for array in (*arrays, torch.ones(3, 2, 64).to_sparse(), Broken(), deleted):
        if call == "attention" and name == "v":  # whose rows k is held to
            array = {"k": array, "v": array}
            with pytest.raises(ValueError, match="^[kv]: expected an array whose memory DLPack can lend, got "):
                attnfold.attention(floats(3, 2, 64), **array)
        elif call == "attention" and name == "k":
            with pytest.raises(ValueError, match="^k: expected an array whose memory DLPack can lend, got "):
                attnfold.attention(floats(3, 2, 64), array, floats(3, 2, 64))
        else:
            error, text = error_of(call, name, array)
            assert error is ValueError and f"got {type(array).__name__}" in text, text
    if call not in ("attention", "map_to_kernel_pages"):
        assert "on meta" in error_of(call, name, arrays[0])[1]


@pytest.mark.parametrize("call, name", ARRAYS)
def test_a_masked_array_is_a_value_error_that_names_the_argument(call, name):
    extra = {"v": floats(4, 16, 1, 64), "o": floats(4, 2, 64), "lse": floats(4, 2), "workspace": np.zeros(64, np.uint8)}
    value = CALLS[call][1]().get(name, extra.get(name, floats(2)) if call == "run" else ints(0, 1))
    values = [np.ma.array(value, mask=mask) for mask in (False, True, np.ma.nomask)]
    if value.dtype == np.int32 and call != "data_pointer":  # in a list numpy drops the masks
        values += [list(values[1])]
    for masked in values:
        error, text = error_of(call, name, masked)
        assert error is ValueError and text.endswith(": expected an array without a mask, got a masked array"), text


def test_call_files_hold_no_masked_arrays(tmp_path):
    with pytest.raises(ValueError, match="^q: expected an array without a mask, got a masked array"):
        attnfold.call_file.save(tmp_path / "x.safetensors", {"q": np.ma.array(floats(3), mask=True)}, {})


@pytest.mark.parametrize("call, name", [(c, n) for c, n in ARRAYS if c != "data_pointer"])
def test_a_type_that_is_not_taken_is_named(call, name):
    function, sound, _, _ = CALLS[call]
    for dtype in ("float64", "complex64", "uint32", "float128"):
        shape = np.shape(sound().get(name, floats(2)))
        text = error_of(call, name, np.zeros(shape, dtype))[1]
        assert "shape" in text or dtype in text, text


@pytest.mark.parametrize("value", ["words", None, 1.5, object(), [], np.zeros(2)])
def test_what_is_no_number_is_a_type_error_that_names_the_argument(value):
    for name in ("qo_heads", "page_size", "num_pages", "window_left", "max_batch", "max_kv_len", "sparse_block_size"):
        with pytest.raises(TypeError, match=f"^{name}: expected an integer, got "):
            plan(**{name: value})
    sound = CALLS["slot_mapping"][1]()
    for name in ("page_size", "num_pages"):
        with pytest.raises(TypeError, match=f"^{name}: expected an integer, got "):
            attnfold.slot_mapping(**(sound | {name: value}))
    sound = CALLS["map_to_kernel_pages"][1]()
    for name in ("block_size", "page_size", "num_blocks"):
        with pytest.raises(TypeError, match=f"^{name}: expected an integer, got "):
            attnfold.map_to_kernel_pages(**(sound | {name: value}))
    if value is not None:
        for name in ("num_threads", "num_workers", "cut_seed"):
            with pytest.raises(TypeError, match=f"^{name}: expected an integer, got "):
                plan(**{name: value})
        with pytest.raises(TypeError, match="^num_slots: expected an integer, got "):
            attnfold.slot_mapping(**(CALLS["slot_mapping"][1]() | {"num_slots": value}))
    if value != 1.5 if not isinstance(value, np.ndarray) else True:
        with pytest.raises(TypeError, match="^logits_softcap: expected a number, got "):
            plan(logits_softcap=value)
        state = attnfold.State(floats(3, 2, 64), floats(3, 2), empty_value=value)
        with pytest.raises(TypeError, match=r"^states\[0\].empty_value: expected a number, got "):
            attnfold.merge([state])


def test_numbers_out_of_range_are_named():
    sound = CALLS["slot_mapping"][1]()
    for name, value in (("num_slots", -1), ("num_slots", 2**31), ("num_slots", 2**70), ("page_size", 0), ("page_size", -4),
                        ("num_pages", -1), ("page_size", 2**40)):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{name}: expected "):
            attnfold.slot_mapping(**(sound | {name: value}))
    with pytest.raises(ValueError, match=r"^positions\[0\]: expected "):
        attnfold.slot_mapping(**(sound | {"positions": [2**63 - 1, 0, 1, 2]}))
    with pytest.raises(ValueError, match=r"^block_table\[0\]: expected a number of 32 bits, got 4294967296"):
        attnfold.map_to_kernel_pages([[2**32]], block_size=4, page_size=4, num_blocks=9)
    with pytest.raises(ValueError, match="^block_table: expected a packed array of int32, got float64"):
        attnfold.map_to_kernel_pages([[1.5]], block_size=4, page_size=4, num_blocks=9)
    for scale in (-1, -0.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="^sm_scale: expected a finite number >= 0"):
            plan(sm_scale=scale)


def test_a_flag_that_is_none_is_named():
    one = [floats(3, 2, 64)] * 3
    for value in ("yes", None, 2, np.ones((3, 3), bool), torch.ones(3, 3)):  # a mask is no flag
        with pytest.raises(TypeError, match="^causal: expected True or False, got "):
            attnfold.attention(*one, value)
        with pytest.raises(TypeError, match="^return_lse: expected True or False, got "):
            attnfold.attention(*one, return_lse=value)
        with pytest.raises(TypeError, match="^v_in_k: expected True or False, got "):
            plan(v_in_k=value)
        with pytest.raises(TypeError, match=r"^states\[0\].sink_included: expected True or False, got "):
            attnfold.merge([attnfold.State(floats(3, 2, 64), floats(3, 2), sink_included=value)])
    assert attnfold.attention(*one, np.True_, 1)[1].shape == (3, 2)


def test_pools_and_states_of_another_form_are_named():
    pool = (floats(3, 4, 1, 8), floats(3, 4, 1, 8))
    for value in (None, 3, (pool[0],), (*pool, pool[0]), "kv" * 2):
        with pytest.raises(TypeError, match="^to_pool: expected"):
            attnfold.copy_pages(pool, value, [[0, 2]])
        with pytest.raises(TypeError, match=r"^states\[0\]: expected a State or \(o, lse\), got "):
            attnfold.merge([value])
    with pytest.raises(ValueError, match="^to_pool.v_cache: expected None"):
        attnfold.copy_pages((pool[0], None), pool, [[0, 2]])
    with pytest.raises(TypeError, match="^states: expected"):
        attnfold.merge(None)
    with pytest.raises(TypeError, match="^from: expected"):
        attnfold.convert_state(pool, attnfold.State(*pool))
    with pytest.raises(ValueError, match=r"^states\[0\].o: expected shape \[any, any, any\], got \[1, 1, 1, 1, 1, 1, 1\]"):
        attnfold.merge([(jnp.ones((1,) * 7), jnp.ones((1, 1)))])
    for message, name in (("kv_indptr: expected an array beside kv_indices", "kv_indices"),):
        with pytest.raises(ValueError, match="^" + message):
            attnfold.slot_mapping(**(CALLS["slot_mapping"][1]() | {name: ints(0)}))
    with pytest.raises(ValueError, match="^prefix_keys: expected an array beside"):
        plan().update([0, 1], [20], TABLE, prefix_requests=[0])


def test_a_wanted_gradient_is_an_error_in_every_call():
    wants = lambda *shape: torch.ones(*shape, requires_grad=True)  # noqa: E731
    for call, names in (("attention", "qkv"), ("append", ("k", "v", "k_cache")), ("merge", ("o", "second_o", "second_lse")),
                        ("convert_state", ("from_o", "from_lse"))):  # fmt: skip
        function, sound, _, _ = CALLS[call]
        for name in names:
            arrays = {n: torch.from_numpy(x) for n, x in sound().items() if x.dtype != bool}
            arrays |= {name: wants(*arrays[name].shape)} | ({"row_mask": None} if call == "merge" else {})
            with pytest.raises(NotImplementedError) as caught:
                function(**arrays)
            assert str(caught.value).startswith(f"{NAMES.get(name, name)}: expected no gradient"), caught.value
            with torch.no_grad():
                function(**arrays)


def test_an_object_with_dlpack_and_nothing_else_is_an_array():
    class Lender:
        def __init__(self, x):
            self.x = x

        def __dlpack__(self, **how):
            return self.x.__dlpack__(**how)

        def __dlpack_device__(self):
            return (1, 0)

    q, k, v = (Lender(floats(3, 2, 64)) for _ in "qkv")
    assert (attnfold.attention(q, k, v) == 1).all()
    o, lse = attnfold.merge([(q, Lender(floats(3, 2)))] * 2)
    assert (o == 1).all() and lse.shape == (3, 2)
    p = plan()
    p.update([0, 1, 4], [20, 3], TABLE)
    assert (p.run(Lender(floats(4, 2, 64)), Lender(floats(4, 16, 1, 64)), Lender(floats(4, 16, 1, 64))) == 1).all()


KINDS = {"numpy": lambda x: x, "torch": torch.from_numpy, "jax": jnp.asarray}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_nothing_is_an_array_too(kind, dtype):
    if dtype == "int64" and kind is jnp.asarray:
        pytest.skip("jax has no int64 unless told so")
    number = lambda *shape: kind(np.zeros(shape, np.float32))  # noqa: E731
    whole = lambda *values: kind(np.array(values, dtype))  # noqa: E731
    table = lambda *shape: kind(np.zeros(shape, dtype))  # noqa: E731
    writable = kind if kind is not jnp.asarray else KINDS["numpy"]
    pool = lambda *shape: writable(np.zeros(shape, np.float32))  # noqa: E731

    for indptr, kv_len, block_table in (  # no request; no tokens; no keys either
        (whole(0), whole(), table(0, 3)), (whole(0), whole(), table(0, 0)), (whole(0, 0, 0), whole(20, 3), table(2, 2)),
        (whole(0, 0, 0), whole(0, 0), table(2, 0)), (whole(0, 0), whole(0), table(1, 0)), ([0], [], np.zeros((0, 0), int)),
    ):  # fmt: skip
        slots = attnfold.slot_mapping(indptr, kv_len, block_table, page_size=16, num_pages=4)
        assert slots.shape == (0,) and slots.dtype == np.int64
        none = kind(np.zeros(0, np.int64)) if kind is not jnp.asarray else []
        assert attnfold.slot_mapping(indptr, None, block_table, page_size=16, num_pages=4, positions=none).shape == (0,)
        padded = attnfold.slot_mapping(indptr, kv_len, block_table, page_size=16, num_pages=4, num_slots=2)
        assert padded.tolist() == [-1, -1]
        for given in (slots, none, []):
            attnfold.append(pool(4, 16, 1, 64), pool(4, 16, 1, 64), number(0, 1, 64), number(0, 1, 64), given)
        p = plan()
        p.update(indptr, kv_len, block_table)
        o, lse = p.run(number(0, 2, 64), number(4, 16, 1, 64), number(4, 16, 1, 64), return_lse=True)
        assert o.shape == (0, 2, 64) and lse.shape == (0, 2) and type(o) is type(number(0))

    listed = dict(kv_indptr=whole(0, 0, 0), kv_indices=whole())
    p.update(whole(0, 0, 0), whole(0, 0), **listed)
    assert attnfold.slot_mapping(whole(0, 0, 0), whole(0, 0), **listed, page_size=16, num_pages=4).shape == (0,)
    none_long = kind(np.zeros(3, np.int64)) if kind is not jnp.asarray else [0] * 3
    p.update(whole(0, 1, 2), whole(20, 3), table(2, 2), visible_prefix=whole(0, 0), mask_width=whole(0, 0),
             mask_indptr=none_long, mask_bits=kind(np.zeros(0, np.uint8)), prefix_keys=whole(), prefix_indptr=whole(0),
             prefix_requests=whole())  # fmt: skip

    empty_pool = plan(num_pages=0)
    empty_pool.update(whole(0, 1, 2), whole(0, 0), table(2, 0))
    o, lse = empty_pool.run(number(2, 2, 64), number(0, 16, 1, 64), number(0, 16, 1, 64), return_lse=True)
    assert not np.asarray(o).any() and np.isneginf(np.asarray(lse)).all()

    for qo_len, kv_len in ((0, 5), (0, 0), (3, 0)):
        o, lse = attnfold.attention(number(qo_len, 2, 64), number(kv_len, 2, 64), number(kv_len, 2, 64), return_lse=True)
        assert o.shape == (qo_len, 2, 64) and lse.shape == (qo_len, 2) and not np.asarray(o).any()

    merged, lse = attnfold.merge([(number(0, 2, 64), number(0, 2))] * 2)
    assert merged.shape == (0, 2, 64) and lse.shape == (0, 2)
    out = (pool(0, 2, 64), pool(0, 2))
    attnfold.merge([(number(0, 2, 64), number(0, 2))], out, row_mask=kind(np.zeros(0, bool)))
    attnfold.merge([], (pool(3, 2, 64), pool(3, 2)))
    attnfold.convert_state(attnfold.State(number(0, 2, 64), number(2, 0), lse_layout="heads_rows"), attnfold.State(*out))

    attnfold.copy_pages(*([pool(3, 4, 1, 8), pool(3, 4, 1, 8)] for _ in range(2)), table(0, 2))
    for shape in ((0, 3), (2, 0), (0, 0)):
        pages = attnfold.map_to_kernel_pages(table(*shape), block_size=32, page_size=16, num_blocks=4)
        assert pages.shape == (shape[0], 2 * shape[1]) and pages.dtype == np.int32
    assert attnfold.map_to_kernel_pages(table(0, 3), block_size=32, page_size=16, num_blocks=4, used=whole()).shape == (0, 6)
