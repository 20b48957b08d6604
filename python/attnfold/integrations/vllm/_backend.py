"""The classes that vLLM asks of an attention backend."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from attnfold.integrations.vllm._step import Layer, Plans, Step, append, record_path


def expect(holds: bool, name: str, expected: str, got: Any) -> None:
    if not holds:
        raise NotImplementedError(f"{name}: expected {expected}, got {got}")


class Builder(AttentionMetadataBuilder[Step]):
    """Makes a `Step` of each batch, for the layers of one cache group."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        expect(device.type == "cpu", "device", "cpu", device.type)
        scheduler = vllm_config.scheduler_config
        self.plans = Plans(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, vllm_config.model_config.max_model_len
        )
        self.num_steps = 0

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Step:
        common = common_attn_metadata
        expect(common.causal is True, "causal", "True", common.causal)
        for name in ("mm_req_doc_ranges", "rswa_prefix_lens", "dcp_local_seq_lens"):
            expect(getattr(common, name) is None, name, "None", getattr(common, name))
        n = common.num_reqs
        step = Step(
            self.plans,
            self.num_steps,
            common.query_start_loc[: n + 1],
            common.seq_lens[:n],
            common.block_table_tensor[:n],
        )
        self.num_steps += 1
        return step


class Impl(AttentionImpl[Step]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **more: Any,
    ) -> None:
        config = get_current_vllm_config()
        dtypes = Backend.supported_kv_cache_dtypes
        expect(attn_type == AttentionType.DECODER, "attn_type", "decoder", getattr(attn_type, "value", attn_type))
        expect(kv_cache_dtype in dtypes, "kv_cache_dtype", " or ".join(dtypes), kv_cache_dtype)
        expect(config.kv_transfer_config is None, "kv_transfer_config", "None", config.kv_transfer_config)
        expect(self.total_cp_world_size == 1, "decode_context_parallel_size", "1", self.total_cp_world_size)
        for name, value in more.items():
            expect(value is None, name, "None", value)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        # vLLM's window counts the query's own position.
        window_left = -1 if sliding_window is None else sliding_window - 1
        self.layer = Layer(num_heads, self.num_kv_heads, head_size, scale, window_left, logits_soft_cap or 0.0)
        self.alibi_slopes, self.sinks = alibi_slopes, sinks

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        terms = dict(alibi_slopes=self.alibi_slopes, sink_logits=self.sinks)
        self.score_terms = {
            name: torch.as_tensor(term, dtype=torch.float32).contiguous()
            for name, term in terms.items()
            if term is not None
        }

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        append(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Step | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        expect(output_scale is None, "output_scale", "None", "a tensor")
        expect(output_block_scale is None, "output_block_scale", "None", "a tensor")
        if attn_metadata is None:  # a run without a batch: vLLM sizes or warms up
            return output.zero_()
        record = record_path(layer.layer_name, attn_metadata.number)
        attn_metadata.run(self.layer, query, kv_cache, output, record, **self.score_terms)
        return output


class Backend(AttentionBackend):
    """Stands for vLLM's CPU backend, whose name it keeps: vLLM looks backends up by it."""

    forward_includes_kv_cache_update = False
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(range(8, 577, 8))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)  # the heads of a block one after the other, as vLLM's own

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
