#!/usr/bin/env python3
"""vLLM's CPU attention operator: blocks of 128 keys, permuted; the ISA that vLLM itself would choose.

    peer_vllm.py BATCH QO_LEN KV_LEN QO_HEADS KV_HEADS HEAD_DIM THREADS bf16|f16

The scheduler metadata is made beforehand, as for a step of many layers.  Lines in and out as in peer.h.
"""

import os
import sys
import time

BATCH, QO_LEN, KV_LEN, QO_HEADS, KV_HEADS, HEAD_DIM, THREADS = map(int, sys.argv[1:8])
os.environ["OMP_NUM_THREADS"] = str(THREADS)

import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402

BLOCK = 128
DTYPE = torch.bfloat16 if sys.argv[8] == "bf16" else torch.float16


def main():
    torch.set_num_threads(THREADS)
    torch.cpu._init_amx()  # asks the system for tiles; without them the operator's AMX code faults
    torch.manual_seed(1)
    per_request = -(-KV_LEN // BLOCK)
    num_blocks = per_request * BATCH
    cache = torch.empty(num_blocks, KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=DTYPE).uniform_(-1, 1)
    key_cache, value_cache = cache.chunk(2, dim=2)
    query = torch.empty(BATCH * QO_LEN, QO_HEADS, HEAD_DIM, dtype=DTYPE).uniform_(-1, 1)
    output = torch.empty_like(query)
    starts = torch.arange(0, BATCH + 1, dtype=torch.int32) * QO_LEN
    lengths = torch.full((BATCH,), KV_LEN, dtype=torch.int32)
    table = torch.randperm(num_blocks).to(torch.int32).view(BATCH, per_request)
    isa = _get_attn_isa(DTYPE, BLOCK, HEAD_DIM)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        BATCH, QO_HEADS, KV_HEADS, HEAD_DIM, lengths, DTYPE, starts, True, -1, isa, True)
    evictor = torch.ones(1250 << 17, dtype=torch.int64)

    def run():
        ops.cpu_attention_with_kv_cache(
            query, key_cache, value_cache, output, starts, lengths, HEAD_DIM**-0.5, True, None, -1, table, 0.0,
            metadata, None)

    run()
    print(isa, torch.__version__, file=sys.stderr)
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if len(words) < 2 or words[0] != "run":
            break
        times = []
        for _ in range(int(words[1])):
            if "cold" in words:
                evictor.sum()
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
        print(" ".join(f"{t:.1f}" for t in times), flush=True)


main()
