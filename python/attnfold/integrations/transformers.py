"""attn_implementation="attnfold" for transformers.

    import attnfold.integrations.transformers
    attnfold.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(.., attn_implementation="attnfold")

Keys and values are read where transformers' cache classes keep them, [batch, kv_heads, capacity, head_dim] with any
strides: a request is a range of rows, from its first visible key to its last one, so that neither padding nor the free end
of a static cache is read.  Each mask that transformers makes for a step is looked at once; causal ones and sliding windows
are told to the engine as such, all others as bits.  Works without gradients, on CPUs and on GPUs (float16 and bfloat16,
masks that need no bits); there a step waits once for each of its masks.  Masks made under torch.inference_mode, which does not
count their changes, are compared with copies of them in each layer; on a GPU each layer waits then.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import attnfold


def register(name: str = "attnfold") -> None:
    """Makes the attention implementation known to transformers, under `name`.

    Args:
        name: what `attn_implementation` takes.

    >>> import attnfold.integrations.transformers, torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> attnfold.integrations.transformers.register()
    >>> config = LlamaConfig(hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    ...                      num_key_value_heads=2, vocab_size=99, attn_implementation="attnfold")
    >>> model = LlamaForCausalLM(config).eval()
    >>> model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False, pad_token_id=0).shape
    torch.Size([1, 7])
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _mask)


def _mask(*arguments: Any, **named: Any) -> torch.Tensor:
    """A mask [batch, 1, q_len, kv_len] of bools, always: `attention` finds out what it means."""
    named["allow_is_causal_skip"] = named["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*arguments, **named)


class _Lengths:
    """What a mask says: for each request the range of keys that some row sees, and if need be the bits inside."""

    def __init__(self, mask: torch.Tensor | None, batch: int, q_len: int, kv_len: int, causal: bool, window: int) -> None:
        self.window = -1
        self.begin, self.count = np.zeros(batch, np.int64), np.full(batch, kv_len, np.int32)
        self.bits: dict[str, np.ndarray[Any, Any]] = {}
        if mask is None:
            mask = torch.ones((1, 1, q_len, kv_len), dtype=torch.bool)
            mask = mask.tril(kv_len - q_len) if causal else mask
        if mask.dtype != torch.bool or mask.shape[1] != 1:
            got = f"{mask.dtype} {list(mask.shape)}"
            raise NotImplementedError(f"attention_mask: expected bools [batch, 1, q_len, kv_len], got {got}")
        seen = mask[:, 0, :, :kv_len].expand(batch, -1, -1).cpu().numpy()
        any_row = seen.any(1)
        self.begin = np.where(any_row.any(1), any_row.argmax(1), 0)
        self.count = np.where(any_row.any(1), kv_len - any_row[:, ::-1].argmax(1) - self.begin, 0).astype(np.int32)
        for self.window in (-1, window) if window >= 0 else (-1,):
            if all(self._is_causal(seen[r], r) for r in range(batch)):
                return
        self.window = -1
        parts = []
        for r in range(batch):
            part = seen[r, :, self.begin[r] : self.begin[r] + self.count[r]]
            parts.append(np.packbits(part, axis=1, bitorder="little").ravel())
        indptr = np.concatenate([[0], np.cumsum([len(p) for p in parts])])
        self.bits = dict(mask_width=self.count, mask_indptr=indptr, mask_bits=np.concatenate(parts))

    def _is_causal(self, seen: np.ndarray[Any, Any], r: int) -> bool:
        n = self.count[r]
        p = n - len(seen) + np.arange(len(seen))[:, None]
        j = np.arange(n)
        expected = (j <= p) & (j >= p - self.window) if self.window >= 0 else j <= p
        return bool((seen[:, self.begin[r] : self.begin[r] + n] == expected).all())


_KEPT = 3  # masks: models have one of each kind of layer


class _Seen:
    """A mask as it was when it was looked at."""

    def __init__(self, mask: torch.Tensor | None, more: tuple[Any, ...]) -> None:
        self.mask, self.more, self.lengths = mask, more, _Lengths(mask, *more)
        # A tensor of inference mode has no version, so that a change in place shows in its elements alone.
        self.copy = mask.clone() if mask is not None and mask.is_inference() else None
        self.version = mask._version if mask is not None and self.copy is None else 0

    def is_of(self, mask: torch.Tensor | None, more: tuple[Any, ...]) -> bool:
        if self.mask is not mask or self.more != more:
            return False
        if mask is None:
            return True
        return self.version == mask._version if self.copy is None else torch.equal(self.copy, mask)


class _Step(threading.local):
    """The last masks, the latest one first, and the plans of this thread with the lengths that each was updated for."""

    def __init__(self) -> None:
        self.seen: list[_Seen] = []
        self.plans: dict[tuple[Any, ...], tuple[attnfold.Plan, list[Any]]] = {}

    def lengths_of(self, mask: torch.Tensor | None, *more: Any) -> _Lengths:
        for seen in self.seen:
            if seen.is_of(mask, more):
                return seen.lengths
        self.seen = [_Seen(mask, more), *self.seen[: _KEPT - 1]]
        return self.seen[0].lengths


_step = _Step()


def rows_of(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """[batch, kv_heads, capacity, head_dim] as rows [n, kv_heads, head_dim] over the same memory, and the rows from one
    request to the next."""
    batch, heads, capacity, width = cache.shape
    to_request, to_head, to_token, to_element = cache.stride()
    if batch == 1:
        to_request = capacity * to_token
    if to_element != 1 or to_token <= 0 or to_request % to_token or to_request // to_token < capacity:
        cache = cache.contiguous()
        to_request, to_head, to_token, _ = cache.stride()
    step = to_request // to_token
    return cache.as_strided(((batch - 1) * step + capacity, heads, width), (to_token, to_head, 1)), step


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query: [batch, qo_heads, q_len, head_dim]; key, value: [batch, kv_heads, kv_len, head_dim], as the cache has them.
        attention_mask: [batch, 1, q_len, kv_len] bool, True where a key is seen; None is causal or none by `is_causal`.
        scaling, sliding_window, softcap, s_aux: score factor, window, soft-cap, sink logits.

    Returns:
        o [batch, q_len, qo_heads, head_dim], and None for the weights.  A row that sees no key gives 0.
    """
    if position_bias is not None:
        raise NotImplementedError("position_bias: expected None (no additive bias), got a tensor")
    if output_attentions:
        raise NotImplementedError("output_attentions: expected False (weights are not kept), got True")
    if dropout:
        raise NotImplementedError(f"dropout: expected 0, got {dropout}")
    batch, heads, q_len, width = query.shape
    kv_len = key.shape[2]
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    window = -1 if sliding_window is None else sliding_window - 1
    lengths = _step.lengths_of(attention_mask, batch, q_len, kv_len, bool(causal), window)
    (k, k_step), (v, v_step) = rows_of(key), rows_of(value)
    if k_step != v_step:
        v, v_step = rows_of(value.contiguous())
        k, k_step = rows_of(key.contiguous())
    capacity = _capacity(batch * q_len), _capacity(kv_len)
    sizes = heads, key.shape[1], width, value.shape[3], batch, *capacity
    device = query.device.index
    name = (*sizes, query.dtype, key.dtype, scaling, softcap, lengths.window, device)
    plan, updated = _step.plans.get(name, (None, []))
    if plan is None:
        if len(_step.plans) >= 64:
            _step.plans.clear()
        plan = attnfold.create(
            qo_heads=heads, kv_heads=key.shape[1], head_dim_qk=width, head_dim_vo=value.shape[3], q_dtype=query.dtype,
            kv_dtype=key.dtype, kv_storage="ragged", sm_scale=scaling, logits_softcap=softcap or 0.0,
            window_left=lengths.window, max_batch=batch, max_qo_rows=capacity[0], max_kv_len=capacity[1],
            backend="cpu" if device is None else "cuda", device=device or 0,
        )  # fmt: skip
        _step.plans[name] = plan, updated
    if updated != [lengths, k_step, len(k)]:
        begin = lengths.begin + np.arange(batch) * k_step
        kv_indptr = np.concatenate([begin, begin[-1:] + lengths.count[-1:]])
        arrays: list[Any] = [np.arange(batch + 1) * q_len, lengths.count, kv_indptr]
        if device is not None:
            if lengths.bits:
                raise NotImplementedError("attention_mask: expected a causal mask or a window on a GPU, got another one")
            arrays = [torch.from_numpy(x.astype(np.int32)).to(query.device) for x in arrays]
        plan.update(arrays[0], arrays[1], kv_indptr=arrays[2], **lengths.bits)
        updated[:] = lengths, k_step, len(k)
    q = query.transpose(1, 2).reshape(batch * q_len, heads, width)
    o = plan.run(q, k, v, sink_logits=None if s_aux is None else s_aux.float().contiguous())
    return o.view(batch, q_len, heads, -1), None


def _capacity(n: int) -> int:
    return max(16, 1 << max(n - 1, 0).bit_length())
