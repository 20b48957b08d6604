"""The paged cache round an attention call: slots for new tokens, writing them, moving pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnfold import _core
from attnfold._arrays import INT64, check_no_gradient, cuda_device, finish, framework, new_array, place, shape_of
from attnfold._plan import _LAYOUTS, _SCALES, Array, choice, execution_fields

NO_SLOT = -1
NO_PAGE = -1


def _pool(k_cache: Array, v_cache: Array | None, kv_layout: str, scales: tuple[str, str, Any, Any]) -> tuple[Any, ...]:
    k_kind, v_kind, k_scale, v_scale = scales
    return (
        k_cache, v_cache, choice("kv_layout", kv_layout, _LAYOUTS), choice("k_scale_kind", k_kind, _SCALES),
        choice("v_scale_kind", v_kind, _SCALES), k_scale, v_scale,
    )  # fmt: skip


def append(
    k_cache: Array,
    v_cache: Array | None,
    k: Array,
    v: Array | None,
    slots: Array,
    *,
    kv_layout: str = "NHD",
    k_scale_kind: str = "none",
    v_scale_kind: str = "none",
    k_scale: Array | float | None = None,
    v_scale: Array | float | None = None,
    num_threads: int | None = None,
    stream: int | None = None,
) -> None:
    """Writes rows of k and v into their slots of a paged pool, in place.

    Args:
        k_cache, v_cache: [num_pages, page_size, kv_heads, head_dim] (HND: heads before tokens), any strides; v_cache None
            is a pool of keys alone.
        k, v: [num_tokens, kv_heads, head_dim]; copied bit for bit if of the pool's type, else rounded to nearest even.
        slots: [num_tokens] page * page_size + offset, int64; NO_SLOT (-1) skips the token.
        kv_layout: "NHD" or "HND".
        k_scale_kind, v_scale_kind, k_scale, v_scale: with a pool of 8 bits.  Per tensor and per head: the caller's scale.
            Per token: written, [num_pages, page_size, kv_heads].
        num_threads: threads at most; the bytes are the same.
        stream: of a pool on a GPU, with all other arrays on it: a cudaStream_t as an int; None is the framework's current
            one.  The call only launches there, and slots that the pool does not have are passed over.

    Raises:
        ValueError: names the argument, and of a slot its index; nothing is written then.

    >>> import attnfold, numpy as np
    >>> k_cache, v_cache = np.zeros((2, 3, 4, 8, 64), np.float32)       # 3 pages of 4 tokens, 8 heads
    >>> k, v = np.ones((2, 2, 8, 64), np.float32)
    >>> attnfold.append(k_cache, v_cache, k, v, slots=[5, -1])
    >>> np.argwhere(k_cache[..., 0, 0]).tolist()
    [[1, 1]]
    """
    check_no_gradient(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    pool = _pool(k_cache, v_cache, kv_layout, (k_scale_kind, v_scale_kind, k_scale, v_scale))
    _core.append(pool, k, v, slots, execution_fields(num_threads, **place("k_cache", k_cache, stream)))


def slot_mapping(
    qo_indptr: Array,
    kv_len: Array | None,
    block_table: Array | None = None,
    *,
    kv_indptr: Array | None = None,
    kv_indices: Array | None = None,
    page_size: int,
    num_pages: int,
    positions: Array | None = None,
    num_slots: int | None = None,
    stream: int | None = None,
) -> Any:
    """The slots of a step's new tokens.

    Args:
        qo_indptr, kv_len, block_table, kv_indptr, kv_indices: as in `Plan.update`.
        page_size, num_pages: of the pool.
        positions: [qo_indptr[batch]] the position of each token in its request; None: they are its last ones.
        num_slots: length of the answer; what lies beyond the last token gets NO_SLOT.  None is qo_indptr[batch]; with
            arrays of a GPU, where that is not looked at, the length of positions, or an error.
        stream: as in `append`; int32 arrays on the device then, positions int64.

    Returns:
        [num_slots] int64: of numpy, or where qo_indptr lies on a GPU.

    Raises:
        ValueError: names the argument and index; on a GPU bad positions and pages get NO_SLOT instead.

    >>> import attnfold
    >>> attnfold.slot_mapping([0, 1, 4], [6, 3], [[2, 0], [1, -1]], page_size=4, num_pages=3).tolist()
    [1, 4, 5, 6]
    """
    where, slots = place("qo_indptr", qo_indptr, stream), None
    kind = framework(qo_indptr) if where else "numpy"
    if kind == "jax":  # which has no int64 unless told so, and no arrays to append to
        raise NotImplementedError("qo_indptr: expected an array of torch or cupy on a GPU, got one of jax")
    if where:
        if num_slots is not None:
            num_slots = _core.int_of("num_slots", num_slots, 0, 2**31 - 1)
        elif positions is not None:
            num_slots = shape_of("positions", positions)[0]
        else:
            raise ValueError("num_slots: expected a number with lengths on a GPU, got None")
        slots = new_array(qo_indptr, kind, (num_slots,), INT64)
    slots = _core.slot_mapping(
        qo_indptr, kv_len, block_table, kv_indptr, kv_indices, page_size, num_pages, positions, num_slots, slots,
        execution_fields(None, **where),
    )  # fmt: skip
    return finish(kind, slots)


def map_to_kernel_pages(
    block_table: Array, *, block_size: int, page_size: int, num_blocks: int, used: Array | None = None
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Tables of a manager's large blocks as tables of pages: block b is pages b * n .. b * n + n - 1.

    Args:
        block_table: [batch, width] block ids; NO_PAGE (-1) is padding.
        block_size, page_size: in tokens; block_size = n * page_size.
        num_blocks: of the pool.
        used: [batch] entries of each row that mean anything; None: all.

    Returns:
        [batch, width * n] int32; padding gets NO_PAGE.

    Raises:
        ValueError: names the argument and index.
        NotImplementedError: a table on a GPU.

    >>> import attnfold
    >>> attnfold.map_to_kernel_pages([[3, 1]], block_size=32, page_size=16, num_blocks=4).tolist()
    [[6, 7, 2, 3]]
    """
    if cuda_device("block_table", block_table) is not None:
        raise NotImplementedError("block_table: expected memory of the CPU, got memory of a GPU")
    return _core.map_to_kernel_pages(block_table, block_size, page_size, num_blocks, used)


def copy_pages(
    from_pool: tuple[Array, Array | None],
    to_pool: tuple[Array, Array | None],
    pairs: Array,
    *,
    kv_layout: str = "NHD",
    num_threads: int | None = None,
    stream: int | None = None,
) -> None:
    """Copies whole pages of k and v, bit for bit: within a pool (copy on write) or between two (swapping).

    Args:
        from_pool, to_pool: (k_cache, v_cache), the same pool or two of equal types and page shapes.
        pairs: [num_pairs, 2] page of from_pool, page of to_pool; they take effect one after the other.
        kv_layout: of both, "NHD" or "HND".
        num_threads: threads at most.
        stream: as in `append`; pairs are int32 on the device then.

    Raises:
        ValueError: names the argument and index; nothing is written then.

    >>> import attnfold, numpy as np
    >>> pool = np.arange(2 * 3 * 4 * 8, dtype=np.float32).reshape(2, 3, 4, 1, 8)
    >>> k_cache, v_cache = pool
    >>> attnfold.copy_pages((k_cache, v_cache), (k_cache, v_cache), [[0, 2]])
    >>> bool((k_cache[2] == k_cache[0]).all())
    True
    """
    none = ("none", "none", None, None)
    pools = []
    for name, pool in (("from_pool", from_pool), ("to_pool", to_pool)):
        try:
            k_cache, v_cache = pool
        except (TypeError, ValueError):
            raise TypeError(f"{name}: expected (k_cache, v_cache), got {type(pool).__name__}") from None
        pools.append(_pool(k_cache, v_cache, kv_layout, none))
    where = place("from_pool.k_cache", pools[0][0], stream)
    _core.copy_pages(pools[0], pools[1], pairs, execution_fields(num_threads, **where))
