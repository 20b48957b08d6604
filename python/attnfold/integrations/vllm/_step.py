"""A step of vLLM in attnfold's words: plans that layers share, the halves of a layer's cache, calls as files."""

from __future__ import annotations

import logging
import os
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import attnfold
import attnfold.call_file

logger = logging.getLogger("vllm.attnfold")


@dataclass(frozen=True)
class Layer:
    """What a layer asks of a plan; layers that ask the same share one."""

    qo_heads: int
    kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int = -1
    logits_softcap: float = 0.0


def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks, kv_heads, block_size, head_dim] of a cache of twice that width, over its memory."""
    head_dim = cache.shape[3] // 2
    return cache[..., :head_dim], cache[..., head_dim:]


def append(cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Writes rows of k and v [num_tokens, kv_heads, head_dim] to their slots; those behind the last are padding."""
    k_cache, v_cache = halves(cache)
    n, threads = len(slots), torch.get_num_threads()
    attnfold.append(k_cache, v_cache, k[:n], v[:n], slots, kv_layout="HND", num_threads=threads)


class Plans:
    """The plans of a group of layers, and for each the step that it was updated for.  Maxima are vLLM's own limits."""

    def __init__(self, max_batch: int, max_qo_rows: int, max_kv_len: int) -> None:
        self.maxima = dict(max_batch=max_batch, max_qo_rows=max_qo_rows, max_kv_len=max_kv_len)
        self.known: dict[Any, tuple[attnfold.Plan, list[Step]]] = {}

    def get(self, layer: Layer, q_dtype: torch.dtype, cache: torch.Tensor) -> tuple[attnfold.Plan, list[Step]]:
        num_blocks, _, block_size, _ = cache.shape
        key = layer, q_dtype, cache.dtype, num_blocks, block_size
        if key not in self.known:
            # The threads are torch's: this one may be bound to a CPU, which would be all that the default sees.
            plan = attnfold.create(
                qo_heads=layer.qo_heads, kv_heads=layer.kv_heads, head_dim=layer.head_dim, q_dtype=q_dtype,
                kv_dtype=cache.dtype, o_dtype=q_dtype, kv_layout="HND", page_size=block_size, num_pages=num_blocks,
                sm_scale=layer.sm_scale, window_left=layer.window_left, logits_softcap=layer.logits_softcap,
                num_threads=torch.get_num_threads(), **self.maxima,
            )  # fmt: skip
            logger.info("attention by attnfold %s, kernel %s", attnfold.__version__, plan.kernel)
            self.known[key] = plan, []
        return self.known[key]


@dataclass(eq=False)
class Step:
    """Lengths and page tables of a step, and its number in the group."""

    plans: Plans
    number: int
    qo_indptr: torch.Tensor  # [batch + 1] int32
    kv_len: torch.Tensor  # [batch] int32
    block_table: torch.Tensor  # [batch, max_blocks] int32

    def plan(self, layer: Layer, q_dtype: torch.dtype, cache: torch.Tensor) -> attnfold.Plan:
        """The layer's plan, updated by the first layer of the step that asks."""
        plan, updated_for = self.plans.get(layer, q_dtype, cache)
        if updated_for != [self]:
            updated_for.clear()
            plan.update(self.qo_indptr, self.kv_len, self.block_table)
            updated_for.append(self)
        return plan

    def run(
        self,
        layer: Layer,
        q: torch.Tensor,
        cache: torch.Tensor,
        o: torch.Tensor,
        record: pathlib.Path | None = None,
        **score_terms: torch.Tensor,
    ) -> None:
        """Answers q [num_tokens, qo_heads, head_dim] into o; rows behind the step's last one are left as is."""
        rows = int(self.qo_indptr[-1])
        plan = self.plan(layer, q.dtype, cache)
        k_cache, v_cache = halves(cache)
        lse = None if record is None else torch.empty((rows, layer.qo_heads))
        plan.run(q[:rows], k_cache, v_cache, o=o[:rows], lse=lse, **score_terms)
        if record is not None:
            by = f"vllm with attnfold, {plan.kernel}, numerics {plan.numerics_id}"
            self.save(record, layer, cache, dict(q=q[:rows], o=o[:rows], lse=lse, **score_terms), by)

    def save(self, path: pathlib.Path, layer: Layer, cache: torch.Tensor, tensors: dict[str, Any], by: str) -> None:
        """Writes a call with those blocks alone that some row sees, numbered anew."""
        block_size = cache.shape[2]
        qo_len, kv_len = np.diff(self.qo_indptr.numpy()), self.kv_len.numpy()
        first = np.maximum(kv_len - qo_len - layer.window_left, 0) if layer.window_left >= 0 else np.zeros_like(kv_len)
        at = np.arange(self.block_table.shape[1])
        seen = (at >= (first // block_size)[:, None]) & (at < -(-kv_len // block_size)[:, None]) & (qo_len > 0)[:, None]
        blocks, numbers = np.unique(self.block_table.numpy()[seen], return_inverse=True)
        table = np.full(seen.shape, -1, np.int32)
        table[seen] = numbers
        k_cache, v_cache = halves(cache[torch.from_numpy(blocks).long()])
        attnfold.call_file.save(
            path,
            dict(qo_indptr=self.qo_indptr, kv_len=self.kv_len, block_table=table, k_cache=k_cache, v_cache=v_cache)
            | tensors,
            dict(
                mask="causal", sm_scale=float(np.float32(layer.sm_scale)), page_size=block_size, kv_layout="HND",
                window_left=layer.window_left, logits_softcap=layer.logits_softcap, recorded_by=by,
            ),
        )  # fmt: skip


def record_path(layer_name: str, step: int) -> pathlib.Path | None:
    """Where the environment wants this call to be written; None if it does not."""
    folder, call = os.environ.get("ATTNFOLD_VLLM_RECORD"), os.environ.get("ATTNFOLD_VLLM_RECORD_CALL")
    if not folder:
        return None
    layer = next((int(part) for part in layer_name.split(".") if part.isdigit()), 0)
    if call:
        try:
            wanted = tuple(int(n) for n in call.split(","))
        except ValueError:
            wanted = ()
        if len(wanted) != 2:
            raise ValueError(f"ATTNFOLD_VLLM_RECORD_CALL: expected LAYER,STEP, two numbers, got {call!r}")
        if wanted != (layer, step):
            return None
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
    return pathlib.Path(folder, f"step{step:06}.layer{layer:03}.safetensors")
