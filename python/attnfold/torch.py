"""Operators of `torch.ops.attnfold`, with fake kernels: they stand in graphs of torch.compile and are traced without data.

    attnfold::attention(q, k, v, causal, sm_scale) -> (o, lse)     one request
    attnfold::run(q, k, v, plan) -> (o, lse)                       a plan's batch; `plan` is handle(plan)
    attnfold::append(k_cache!, v_cache!, k, v, slots, kv_layout)   writes in place
    attnfold::merge(o[], lse[]) -> (o, lse)

A plan is updated outside of the graph, once per step; the graph runs it in every layer.  There is no backward pass: where a
tensor wants a gradient and gradients are on, the operators raise NotImplementedError, compiled ones as they are traced.
On CUDA they launch on the current stream, so a CUDA graph that is captured round them replays them; one that holds `attention`
needs a call of the same size before it, and one that holds `Plan.update` answers the lengths that it finds.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Callable

import torch

import attnfold

_NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn")
_plans: weakref.WeakValueDictionary[int, attnfold.Plan] = weakref.WeakValueDictionary()
_handles: weakref.WeakKeyDictionary[attnfold.Plan, int] = weakref.WeakKeyDictionary()
_next_handle = 1
_lock = threading.Lock()

_lib = torch.library.Library("attnfold", "DEF")
_lib.define("attention(Tensor q, Tensor k, Tensor v, bool causal=False, float? sm_scale=None) -> (Tensor, Tensor)")
_lib.define("run(Tensor q, Tensor k, Tensor? v, int plan) -> (Tensor, Tensor)")
_lib.define(
    "append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor slots, str kv_layout='NHD') -> ()"
)
_lib.define("merge(Tensor[] o, Tensor[] lse) -> (Tensor, Tensor)")


def handle(plan: attnfold.Plan) -> int:
    """The number by which the operators know a plan, as long as the plan lives.

    Returns:
        always the same for one plan, from any thread.

    Raises:
        TypeError: not a plan.

    >>> import attnfold.torch, torch
    >>> plan = attnfold.create(qo_heads=2, kv_heads=1, head_dim=64, dtype=torch.float32, num_pages=4, max_batch=1,
    ...                        max_qo_rows=1, max_kv_len=64)
    >>> plan.update([0, 1], [20], [[2, 0]])
    >>> pages = torch.ones(2, 4, 16, 1, 64)
    >>> o, lse = torch.ops.attnfold.run(torch.ones(1, 2, 64), pages[0], pages[1], attnfold.torch.handle(plan))
    >>> o.shape
    torch.Size([1, 2, 64])
    """
    global _next_handle
    if not isinstance(plan, attnfold.Plan):
        raise TypeError(f"plan: expected a Plan, got {type(plan).__name__}")
    with _lock:
        known = _handles.get(plan)
        if known is None:
            known = _handles[plan] = _next_handle
            _plans[known] = plan
            _next_handle += 1
        return known


def _plan_of(number: int) -> attnfold.Plan:
    plan = _plans.get(int(number))
    if plan is None:
        raise ValueError(f"plan: expected the handle of a plan that lives, got {number}")
    return plan


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = attnfold.attention(q, k, v, causal, True, sm_scale=sm_scale)
    return o, lse


def _attention_fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, sm_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2])), q.new_empty(q.shape[:2], dtype=torch.float32)


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, plan: int) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = _plan_of(plan).run(q, k, v, return_lse=True)
    return o, lse


def _run_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, plan: int) -> tuple[torch.Tensor, torch.Tensor]:
    problem = _plan_of(plan).problem()
    dtype = getattr(torch, _NAMES[problem["o_dtype"]])
    o = q.new_empty((q.shape[0], q.shape[1], problem["head_dim_vo"]), dtype=dtype)
    return o, q.new_empty(q.shape[:2], dtype=torch.float32)


def _append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    attnfold.append(k_cache, v_cache, k, v, slots, kv_layout=kv_layout)


def _append_fake(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    return None


def _merge(o: list[torch.Tensor], lse: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(o) != len(lse):
        raise ValueError(f"lse: expected {len(o)} tensors, as many as o, got {len(lse)}")
    return attnfold.merge(list(zip(o, lse)))


def _merge_fake(o: list[torch.Tensor], lse: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return o[0].new_empty(o[0].shape), lse[0].new_empty(lse[0].shape)


def _wants_gradient(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(_wants_gradient(x) for x in value)


def _without_backward(name: str) -> Callable[..., Any]:
    """The operator's kernel under autograd, which would cut a gradient off without a word."""
    operator = getattr(torch.ops.attnfold, name).default

    def kernel(*arguments: Any, **named: Any) -> Any:
        if torch.is_grad_enabled() and any(map(_wants_gradient, (*arguments, *named.values()))):
            expected = "expected no gradient to be wanted (use torch.no_grad())"
            raise NotImplementedError(f"attnfold::{name}: {expected}, as it has no backward")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments, **named)

    return kernel


for _name, _real, _fake in (
    ("attention", _attention, _attention_fake),
    ("run", _run, _run_fake),
    ("append", _append, _append_fake),
    ("merge", _merge, _merge_fake),
):
    for _key in ("CPU", "CUDA"):
        _lib.impl(_name, _real, _key)
    torch.library.register_fake(f"attnfold::{_name}", _fake, lib=_lib)
    _lib.impl(_name, _without_backward(_name), "Autograd")
