"""attention(): one request, one call."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from attnfold._arrays import framework
from attnfold._plan import Array, Plan, create

_KEPT = 32


class _Plans(threading.local):
    """The plans of this thread's last problems, the latest one last."""

    def __init__(self) -> None:
        self.plans: OrderedDict[Any, Plan] = OrderedDict()


_local = _Plans()


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
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 3:
            raise ValueError(f"{name}: expected shape [any, any, any], got {list(array.shape)}")
    (qo_len, qo_heads, head_dim_qk), (kv_len, kv_heads, head_dim_vo) = q.shape, v.shape
    if k.shape[0] != kv_len:
        raise ValueError(f"k: expected {kv_len} rows, those of v, got {k.shape[0]}")
    kind = framework(q)
    cuda = kind == "cupy" or (kind == "torch" and q.device.type == "cuda")
    device = (q.device.index or 0 if kind == "torch" else q.device.id) if cuda else 0
    key = (
        qo_heads, kv_heads, head_dim_qk, head_dim_vo, q.dtype, k.dtype, causal, sm_scale, window_left, window_right,
        logits_softcap, num_threads, cuda, device, _capacity(qo_len), _capacity(kv_len),
    )  # fmt: skip
    plan = _local.plans.get(key)
    if plan is None:
        plan = create(
            qo_heads=qo_heads, kv_heads=kv_heads, head_dim_qk=head_dim_qk, head_dim_vo=head_dim_vo,
            q_dtype=q.dtype, kv_dtype=k.dtype, kv_storage="ragged", mask="causal" if causal else "none",
            window_left=window_left, window_right=window_right, sm_scale=sm_scale, logits_softcap=logits_softcap,
            max_batch=1, max_qo_rows=_capacity(qo_len), max_kv_len=_capacity(kv_len), num_threads=num_threads,
            backend="cuda" if cuda else "cpu", device=device,
        )  # fmt: skip
        _local.plans[key] = plan
        if len(_local.plans) > _KEPT:
            _local.plans.popitem(last=False)
    else:
        _local.plans.move_to_end(key)
    indptr, kv_indptr = [0, qo_len], [0, kv_len]
    if cuda:
        indptr, kv_indptr = (_on_device(x, q, kind) for x in (indptr, kv_indptr))
    plan.update(indptr, kv_indptr=kv_indptr)
    return plan.run(q, k, v, return_lse=return_lse)


def _on_device(values: list[int], like: Any, kind: str) -> Any:
    if kind == "torch":
        import torch

        return torch.tensor(values, dtype=torch.int32, device=like.device)
    import cupy

    return cupy.asarray(values, "int32")
