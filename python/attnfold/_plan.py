"""Plans: create once, update once per step, run once per layer."""

from __future__ import annotations

from typing import Any, Mapping

from attnfold import _core
from attnfold._arrays import (
    check_no_gradient, current_stream, dtype_code, finish, flag, framework, memory, new_array, shape_of, shown,
)  # fmt: skip

Array = Any  # numpy, torch, jax or cupy arrays, or anything with __dlpack__

_MASKS = {"none": 0, "causal": 1}
_STORAGES = {"paged": 0, "ragged": 1}
_LAYOUTS = {"NHD": 0, "HND": 1}
_SCALES = {"none": 0, "per_tensor": 1, "per_head": 2, "per_token": 3}
_PREFIXES = {"auto": 0, "off": 1, "always": 2}
_BACKENDS = {"cpu": 0, "cuda": 1}


def choice(name: str, value: Any, choices: Mapping[str, int]) -> int:
    """The number of a choice by name."""
    try:
        return choices[value]
    except (KeyError, TypeError):
        raise ValueError(f"{name}: expected {' or '.join(choices)}, got {shown(value)}") from None


def execution_fields(num_threads: int | None, **more: Any) -> dict[str, Any]:
    fields = {name: value for name, value in more.items() if value is not None}
    if num_threads is not None:
        fields["num_threads"] = num_threads
    return fields


class Plan:
    """A plan: validated shapes, a kernel, and memory for schedules.  Made by `create`.

    Several threads may run one plan at once; an update waits for them.  Runs release the GIL.  On CUDA updates and runs
    only launch, so a captured graph of them answers whatever lengths it finds; the plan must live as long as the graph.
    """

    __slots__ = ("__weakref__", "_core", "_o_code", "_o_shape", "_workspaces")

    def __init__(self, problem: dict[str, Any], execution: dict[str, Any]) -> None:
        self._core = _core.Plan(problem, execution)
        p = self._core.problem()
        self._o_shape = (p["qo_heads"], p["head_dim_vo"])
        self._o_code = p["o_dtype"]
        self._workspaces: dict[Any, Any] = {}

    def update(
        self,
        qo_indptr: Array,
        kv_len: Array | None = None,
        block_table: Array | None = None,
        *,
        kv_indptr: Array | None = None,
        kv_indices: Array | None = None,
        num_kv_rows: int | None = None,
        prefix_keys: Array | None = None,
        prefix_indptr: Array | None = None,
        prefix_requests: Array | None = None,
        visible_prefix: Array | None = None,
        mask_width: Array | None = None,
        mask_indptr: Array | None = None,
        mask_bits: Array | None = None,
        block_indptr: Array | None = None,
        block_indices: Array | None = None,
        stream: int | None = None,
    ) -> None:
        """Plans one step; every layer of the step then runs on this schedule.

        Packed arrays of the engine's own type (int32; mask_indptr int64, mask_bits uint8) are used as they are: block_table,
        kv_indices, block_indices and mask_bits must then not change until the next update.  Lists, and int64 where int32
        is wanted or the other way round, are converted, on the CPU; no other types are.  The words are those of
        `attnfold_lengths` in attnfold.h.

        Args:
            qo_indptr: [batch + 1] row offsets of each request in q and o, from 0.  With backend "cuda" this and all other
                arrays are int32 on its device; what they hold is not looked at.
            kv_len: [batch] keys of each request, its new tokens' own included; may be None with ragged keys.
            block_table: [batch, max_pages] page ids; entries past a request's last page mean nothing.
            kv_indptr: [batch + 1] offsets into `kv_indices` (paged), or into the rows of k and v (ragged).
            kv_indices: [kv_indptr[batch]] page ids, request after request: instead of `block_table`.
            num_kv_rows: rows that ragged k and v hold.
            prefix_keys, prefix_indptr, prefix_requests: groups of requests with a common prefix; found if not given.
            visible_prefix: [batch] keys that every query of the request sees.
            mask_width, mask_indptr, mask_bits: bits for the last keys of each request (token trees), each query's of its
                own bytes: numpy.packbits(seen, axis=1, bitorder="little").
            block_indptr, block_indices: lists of blocks for each request and kv head (block-sparse).
            stream: CUDA: a cudaStream_t as an int; None is the framework's current stream.

        Raises:
            ValueError: names the argument and index; the plan keeps its last good schedule.

        >>> import attnfold, numpy as np
        >>> plan = attnfold.create(qo_heads=2, kv_heads=1, head_dim=64, dtype="float32", page_size=16, num_pages=4,
        ...                        max_batch=2, max_qo_rows=8, max_kv_len=32)
        >>> plan.update(qo_indptr=[0, 1, 4], kv_len=[20, 3], block_table=[[2, 0], [1, -1]])
        >>> plan.report()["num_requests"]
        2
        >>> plan.update(qo_indptr=[0, 1], kv_len=[20], block_table=[[2, 9]])
        Traceback (most recent call last):
        ValueError: block_table[0][1]: expected a page id, 0..3, got 9
        """
        lengths = {"qo_indptr": qo_indptr}
        if kv_len is not None:
            lengths["kv_len"] = kv_len
        if block_table is not None:
            lengths["block_table"] = block_table
        for name, value in (
            ("kv_indptr", kv_indptr), ("kv_indices", kv_indices), ("num_kv_rows", num_kv_rows),
            ("prefix_keys", prefix_keys), ("prefix_indptr", prefix_indptr), ("prefix_requests", prefix_requests),
            ("visible_prefix", visible_prefix), ("mask_width", mask_width), ("mask_indptr", mask_indptr),
            ("mask_bits", mask_bits), ("block_indptr", block_indptr), ("block_indices", block_indices),
        ):  # fmt: skip
            if value is not None:
                lengths[name] = value
        if stream is None and self._core.cuda:
            stream = current_stream(framework(qo_indptr), qo_indptr)
        self._core.update(lengths, stream)

    def run(
        self,
        q: Array,
        k: Array,
        v: Array | None = None,
        *,
        o: Array | None = None,
        lse: Array | None = None,
        return_lse: bool = False,
        alibi_slopes: Array | None = None,
        sink_logits: Array | None = None,
        k_scale: Array | float | None = None,
        v_scale: Array | float | None = None,
        o_scale: Array | float | None = None,
        workspace: Array | None = None,
        stream: int | None = None,
    ) -> Any:
        """Answers the batch of the last update.  Inputs are read where they lie, with their strides: nothing is copied.

        Args:
            q: [qo_rows, qo_heads, head_dim_qk] of q_dtype; any strides of rows and heads, the last axis contiguous.
            k: [num_pages, page_size, kv_heads, head_dim_qk], with layout HND [num_pages, kv_heads, page_size, head_dim_qk];
                ragged [rows, kv_heads, head_dim_qk] or [kv_heads, rows, head_dim_qk].  A half of a wider cache will do.
            v: likewise, head_dim_vo wide; None with v_in_k.
            o: [qo_rows, qo_heads, head_dim_vo] to write to; None makes one of q's framework.
            lse: [qo_rows, qo_heads] float32 to write to, natural log.
            return_lse: makes an lse if none is given, and returns it.
            alibi_slopes, sink_logits: [qo_heads] float32.
            k_scale, v_scale: float32 of the problem's kind: a number or [1], [kv_heads], or an axis-reduced k.
            o_scale: a number or [1], with o in float8_e4m3fn.
            workspace: uint8 memory of at least `workspace_bytes`; None uses the plan's own, on CUDA one of q's framework.
            stream: CUDA: a cudaStream_t as an int; None is the framework's current stream.

        Returns:
            o, or (o, lse) if an lse was given or asked for.

        Raises:
            ValueError: names the tensor: shape, type, place, strides, alignment (16 bytes), overlap; nothing is written.
            MemoryError: the workspace given is too small.

        >>> import attnfold, numpy as np
        >>> plan = attnfold.create(qo_heads=2, kv_heads=1, head_dim=64, dtype="float32", page_size=16, num_pages=4,
        ...                        max_batch=2, max_qo_rows=8, max_kv_len=32)
        >>> plan.update(qo_indptr=[0, 1, 4], kv_len=[20, 3], block_table=[[2, 0], [1, -1]])
        >>> cache = np.ones((4, 1, 16, 2 * 64), np.float32)            # keys and values side by side, head-major ..
        >>> k, v = (cache[..., :64].swapaxes(1, 2), cache[..., 64:].swapaxes(1, 2))  # .. as [pages, tokens, heads, 64]
        >>> o, lse = plan.run(np.zeros((4, 2, 64), np.float32), k, v, return_lse=True)
        >>> o.shape, np.exp(lse[:, 0]).round(3).tolist()               # scores are 0: the mass counts the visible keys
        ((4, 2, 64), [20.0, 1.0, 2.0, 3.0])
        """
        kind = framework(q)
        if kind == "torch":
            check_no_gradient(
                q=q, k=k, v=v, o=o, lse=lse, alibi_slopes=alibi_slopes, sink_logits=sink_logits, k_scale=k_scale,
                v_scale=v_scale, o_scale=o_scale,
            )  # fmt: skip
        made_o = o is None
        if o is None:
            o = new_array(q, kind, (_rows(q), *self._o_shape), self._o_code)
        if lse is None and flag("return_lse", return_lse):
            lse = new_array(q, kind, (_rows(q), self._o_shape[0]), 0)
        if self._core.cuda:
            stream = current_stream(kind, q) if stream is None else stream
            workspace = self._device_workspace(q, kind, stream) if workspace is None else workspace
        self._core.run(q, k, v, o, lse, alibi_slopes, sink_logits, k_scale, v_scale, o_scale, workspace, stream)
        if kind == "jax" and made_o:
            o = finish(kind, o)
        if lse is None:
            return o
        return o, (finish(kind, lse) if kind == "jax" else lse)

    def _device_workspace(self, q: Array, kind: str, stream: int | None) -> Any:
        """One for each stream: runs of one stream follow each other.  Of torch a new one each time, as its operators do
        it: its allocator knows streams, and graphs that are being captured."""
        if kind == "torch":
            return memory(q, kind, self.workspace_bytes)
        if kind == "numpy":  # of a framework that is not known, or not on the device
            return None
        workspace = self._workspaces.get(stream)
        if workspace is None:
            workspace = self._workspaces[stream] = memory(q, kind, self.workspace_bytes)
        return workspace

    @property
    def workspace_bytes(self) -> int:
        """Bytes that a run needs; constant for the plan's life."""
        return self._core.workspace_bytes

    @property
    def kernel(self) -> str:
        """Name of the kernel row, such as "cpu_avx512/bf16"."""
        return self._core.kernel

    @property
    def numerics_id(self) -> str:
        """Plans with equal ids give equal bits for equal requests, on any machine."""
        return self._core.numerics_id

    def report(self) -> dict[str, int]:
        """What the current schedule will do: units, items, cuts, bytes read, prefixes shared (`attnfold_plan_report`)."""
        return self._core.report()

    def problem(self) -> dict[str, Any]:
        """The fields of the problem, choices as the numbers of attnfold.h."""
        return self._core.problem()


def create(
    *,
    qo_heads: int,
    kv_heads: int,
    head_dim: int | None = None,
    head_dim_qk: int | None = None,
    head_dim_vo: int | None = None,
    dtype: Any = None,
    q_dtype: Any = None,
    kv_dtype: Any = None,
    o_dtype: Any = None,
    kv_storage: str = "paged",
    kv_layout: str = "NHD",
    page_size: int = 16,
    num_pages: int = 0,
    mask: str = "causal",
    window_left: int = -1,
    window_right: int = -1,
    sm_scale: float | None = None,
    max_batch: int,
    max_qo_rows: int,
    max_kv_len: int,
    logits_softcap: float = 0.0,
    attention_chunk: int = 0,
    sink_tokens: int = 0,
    k_scale_kind: str = "none",
    v_scale_kind: str = "none",
    v_in_k: bool = False,
    sparse_block_size: int = 0,
    sparse_local_blocks: int = 0,
    sparse_vertical_stride: int = 0,
    sparse_head_step: int = 0,
    num_threads: int | None = None,
    num_workers: int | None = None,
    cut_seed: int | None = None,
    isa: str | None = None,
    prefix_use: str = "auto",
    backend: str = "cpu",
    device: int = 0,
) -> Plan:
    """Validates a problem, chooses its kernel and reserves what updates need.

    Args:
        qo_heads, kv_heads: heads of q and of k and v; qo_heads is a multiple of kv_heads.
        head_dim: width of all rows, a multiple of 8 up to 576; or head_dim_qk and head_dim_vo apart.
        dtype: of q, k, v and o ("float32", "float16", "bfloat16", or a dtype of numpy, torch, jax); q_dtype, kv_dtype
            (also "float8_e4m3fn", "float8_e5m2", "int8", with scales) and o_dtype say them apart.
        kv_storage: "paged" or "ragged" (rows one after the other, also contiguous).
        kv_layout: "NHD" (token-major) or "HND" (head-major).
        page_size, num_pages: of the pool; page_size in tokens, any.
        mask: "causal" (bottom-right) or "none".
        window_left, window_right: keys left and right of the query that stay visible; -1 is off.
        sm_scale: factor on q.k; None is 1 / sqrt(head_dim_qk).
        max_batch, max_qo_rows, max_kv_len: what updates may ask for at most; they never change a bit.
        logits_softcap, attention_chunk, sink_tokens, v_in_k, sparse_*: see `attnfold_problem` in attnfold.h; 0 is off.
        k_scale_kind, v_scale_kind: "none", "per_tensor", "per_head" or "per_token".
        num_threads, num_workers, cut_seed, isa, prefix_use: how to execute; within one numerics id none of them changes a bit.
        backend, device: "cpu", or "cuda" with the device's number, where the library was built with it.

    Raises:
        ValueError: names the argument, what was expected and what came.
        NotImplementedError: no kernel of this build or machine serves the problem.

    >>> import attnfold
    >>> plan = attnfold.create(qo_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", num_pages=5, max_batch=2,
    ...                        max_qo_rows=25, max_kv_len=40)
    >>> plan.kernel.startswith("cpu_")
    True
    >>> attnfold.create(qo_heads=9, kv_heads=2, head_dim=64, max_batch=1, max_qo_rows=1, max_kv_len=1)
    Traceback (most recent call last):
    ValueError: kv_heads: expected a divisor of qo_heads (9), got 2
    """
    if sm_scale is not None:
        sm_scale = _core.number_of("sm_scale", sm_scale)
        if sm_scale < 0:  # -1 means the default in C
            raise ValueError(f"sm_scale: expected a finite number >= 0, or None, got {sm_scale}")
    q_code = dtype_code("dtype", dtype if dtype is not None else "bfloat16")
    if q_dtype is not None:
        q_code = dtype_code("q_dtype", q_dtype)
    problem = {
        "qo_heads": qo_heads,
        "kv_heads": kv_heads,
        "head_dim_qk": _width("head_dim_qk", head_dim, head_dim_qk),
        "head_dim_vo": _width("head_dim_vo", head_dim, head_dim_vo),
        "q_dtype": q_code,
        "kv_dtype": q_code if kv_dtype is None else dtype_code("kv_dtype", kv_dtype),
        "o_dtype": q_code if o_dtype is None else dtype_code("o_dtype", o_dtype),
        "kv_storage": choice("kv_storage", kv_storage, _STORAGES),
        "kv_layout": choice("kv_layout", kv_layout, _LAYOUTS),
        "page_size": page_size,
        "num_pages": num_pages,
        "mask": choice("mask", mask, _MASKS),
        "window_left": window_left,
        "window_right": window_right,
        "sm_scale": -1.0 if sm_scale is None else sm_scale,
        "max_batch": max_batch,
        "max_qo_rows": max_qo_rows,
        "max_kv_len": max_kv_len,
        "logits_softcap": logits_softcap,
        "attention_chunk": attention_chunk,
        "sink_tokens": sink_tokens,
        "k_scale_kind": choice("k_scale_kind", k_scale_kind, _SCALES),
        "v_scale_kind": choice("v_scale_kind", v_scale_kind, _SCALES),
        "v_in_k": flag("v_in_k", v_in_k),
        "sparse_block_size": sparse_block_size,
        "sparse_local_blocks": sparse_local_blocks,
        "sparse_vertical_stride": sparse_vertical_stride,
        "sparse_head_step": sparse_head_step,
    }
    execution = execution_fields(
        num_threads,
        num_workers=num_workers,
        cut_seed=cut_seed,
        isa=isa,
        prefix_use=choice("prefix_use", prefix_use, _PREFIXES),
        backend=choice("backend", backend, _BACKENDS),
        device=device,
    )
    return Plan(problem, execution)


def _rows(q: Any) -> int:
    shape = shape_of("q", q)
    if len(shape) != 3:
        raise ValueError(f"q: expected shape [any, any, any], got {list(shape)}")
    return shape[0]


def _width(name: str, both: int | None, own: int | None) -> int:
    width = both if own is None else own
    if width is None:
        raise ValueError(f"{name}: expected head_dim, or head_dim_qk and head_dim_vo, got None")
    return width
