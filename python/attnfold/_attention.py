"""attention(): one request, one call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Callable

from attnfold._arrays import cuda_device, dtype_name, dtype_of, flag, framework, int32_of, shape_of, zero_and
from attnfold._core import number_of
from attnfold._plan import Array, Plan, create

_KEPT = 32


class _Plans(threading.local):
    """The plans of this thread's last problems, the latest one last."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Any, Plan] = OrderedDict()
        self.captured: dict[Any, Plan] = {}  # graphs hold their memory: kept for good, and used for nothing else


_local = _Plans()


def _plan(key: tuple[Any, ...], capturing: bool, make: Callable[[], Plan]) -> Plan:
    try:
        plan = _local.captured.get(key) if capturing else _local.plans.get(key)
    except TypeError:  # a type of elements that cannot be hashed, which is none that `create` takes
        return make()
    if plan is not None:
        if not capturing:
            _local.plans.move_to_end(key)
        return plan
    if capturing:
        plan = _local.plans.pop(key, None)
        if plan is None:
            raise RuntimeError("attention: expected a call of this size before a graph is captured, which reserves memory")
        _local.captured[key] = plan
        return plan
    plan = _local.plans[key] = make()
    if len(_local.plans) > _KEPT:
        _local.plans.popitem(last=False)
    return plan


def _capacity(n: int) -> int:
    """Maxima grow in powers of two, so that a growing request needs few plans; they never change a bit."""
    return max(16, 1 << (n - 1).bit_length()) if n > 0 else 16


def attention(
    q: Array,
    k: Array,
    v: Array,
    causal: bool = False,
    return_lse: bool = False,
    *,
    sm_scale: float | None = None,
    window_left: int = -1,
    window_right: int = -1,
    logits_softcap: float = 0.0,
    num_threads: int | None = None,
) -> Any:
    """Attention of one request.

    Args:
        q: [qo_len, qo_heads, head_dim].
        k, v: [kv_len, kv_heads, head_dim]; kv_heads divides qo_heads.
        causal: query i sees keys j <= kv_len - qo_len + i.
        return_lse: also returns the log of the sum of exp of the scaled scores.
        sm_scale: factor on q.k; None is 1 / sqrt(head_dim).
        window_left, window_right, logits_softcap, num_threads: as in `create`.

    Returns:
        o [qo_len, qo_heads, head_dim] of q's type and framework; with return_lse (o, lse), lse [qo_len, qo_heads] float32.

    Raises:
        ValueError: names the argument; NotImplementedError: no kernel serves these types or sizes.
        RuntimeError: a CUDA graph is being captured, and no call of this size went before.

    >>> import attnfold, numpy as np
    >>> q, k, v = (np.random.rand(n, h, 64).astype("float32") for n, h in ((5, 4), (9, 2), (9, 2)))
    >>> attnfold.attention(q, k, v, causal=True).shape
    (5, 4, 64)
    >>> o, lse = attnfold.attention(q, k, v, return_lse=True)
    >>> s = np.einsum("qhd,khd->qhk", q, k.repeat(2, axis=1)) / 8
    >>> p = np.exp(s - lse[..., None])
    >>> bool(np.allclose(o, np.einsum("qhk,khd->qhd", p, v.repeat(2, axis=1)), atol=1e-5))
    True
    """
    q_shape, k_shape, v_shape = shape_of("q", q), shape_of("k", k), shape_of("v", v)
    for name, shape in (("q", q_shape), ("k", k_shape), ("v", v_shape)):
        if len(shape) != 3:
            raise ValueError(f"{name}: expected shape [any, any, any], got {list(shape)}")
    (qo_len, qo_heads, head_dim_qk), (kv_len, kv_heads, head_dim_vo) = q_shape, v_shape
    if k_shape[0] != kv_len:
        raise ValueError(f"k: expected {kv_len} rows, those of v, got {k_shape[0]}")
    causal, return_lse = flag("causal", causal), flag("return_lse", return_lse)
    # Numbers as such: 1.0 and 1 are one key, but not both are a window.
    window_left, window_right = int32_of("window_left", window_left), int32_of("window_right", window_right)
    num_threads = None if num_threads is None else int32_of("num_threads", num_threads)
    sm_scale = None if sm_scale is None else number_of("sm_scale", sm_scale)
    logits_softcap = number_of("logits_softcap", logits_softcap)
    kind, device = framework(q), cuda_device("q", q)
    q_dtype, k_dtype = dtype_of("q", q), dtype_of("k", k)
    key = (
        qo_heads, kv_heads, head_dim_qk, head_dim_vo, q_dtype, k_dtype, causal, sm_scale, window_left, window_right,
        logits_softcap, num_threads, device, _capacity(qo_len), _capacity(kv_len),
    )  # fmt: skip
    make = lambda: create(  # noqa: E731
        qo_heads=qo_heads, kv_heads=kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
        q_dtype=dtype_name("q", q_dtype), kv_dtype=dtype_name("k", k_dtype),
        kv_storage="ragged", mask="causal" if causal else "none",
        window_left=window_left, window_right=window_right, sm_scale=sm_scale, logits_softcap=logits_softcap,
        max_batch=1, max_qo_rows=_capacity(qo_len), max_kv_len=_capacity(kv_len), num_threads=num_threads,
        backend="cpu" if device is None else "cuda", device=device or 0,
    )  # fmt: skip
    if device is None:
        plan = _plan(key, False, make)
        plan.update([0, qo_len], kv_indptr=[0, kv_len])
        return plan.run(q, k, v, return_lse=return_lse)
    plan = _plan(key, kind == "torch" and _capturing(), make)
    plan.update(zero_and(qo_len, q, kind), kv_indptr=zero_and(kv_len, q, kind))
    answer = plan.run(q, k, v, return_lse=return_lse)
    plan._core.forget()  # the lengths: memory of a graph that is being captured must not be held
    return answer


def _capturing() -> bool:
    import torch

    return torch.cuda.is_current_stream_capturing()
