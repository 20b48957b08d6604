#!/usr/bin/env python3
"""Time in attention inside vLLM's CPU engine, with its own backend or with attnfold's.

    vllm_engine.py own|attnfold [--context N] [--batch N] [--steps N]

A random Llama of two layers, 32 query and 8 kv heads of 128, bf16, in this process.  First the prompts are prefilled,
`--context` tokens a step, then all requests decode.  Attention is what a backend does in a step: its metadata, the
cache update and the answers of both layers.
"""

import argparse
import os
import statistics
import tempfile
import time

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch  # noqa: E402
import transformers  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402


def timed(owner, name, spent):
    """Adds the time of a method's calls to spent[0]."""
    inner = getattr(owner, name)

    def outer(*arguments, **named):
        begun = time.perf_counter()
        answer = inner(*arguments, **named)
        spent[0] += time.perf_counter() - begun
        return answer

    setattr(owner, name, outer)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=["own", "attnfold"])
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    if options.backend == "attnfold":
        import attnfold.integrations.vllm

        attnfold.integrations.vllm.register()
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=512, max_position_embeddings=65536, initializer_range=0.05, dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
        llm = LLM(
            folder, dtype="bfloat16", enforce_eager=True, skip_tokenizer_init=True, max_num_seqs=options.batch,
            max_model_len=options.context + options.steps, max_num_batched_tokens=options.context,
            enable_prefix_caching=False,
        )  # fmt: skip
    layers = list(llm.llm_engine.vllm_config.compilation_config.static_forward_context.values())
    backend, spent = layers[0].attn_backend, [0.0]
    timed(backend.get_builder_cls(), "build", spent)
    timed(backend.get_impl_cls(), "do_kv_cache_update", spent)
    timed(backend.get_impl_cls(), "forward", spent)
    print(
        f"{backend.__module__}.{backend.__name__}, torch {torch.__version__}, {torch.get_num_threads()} threads",
        flush=True,
    )
    how = SamplingParams(temperature=0, max_tokens=options.steps, ignore_eos=True, detokenize=False)
    for r in range(options.batch):
        prompt = torch.randint(3, 512, (options.context,), generator=torch.Generator().manual_seed(r)).tolist()
        llm.llm_engine.add_request(str(r), dict(prompt_token_ids=prompt), how)
    prefills, decodes, begun = {"attention": [], "all": []}, {"attention": [], "all": []}, set()
    while llm.llm_engine.has_unfinished_requests():
        spent[0], start = 0.0, time.perf_counter()
        outputs = llm.llm_engine.step()
        kind = decodes if len(begun) == options.batch else prefills
        if kind is prefills or len(outputs) == options.batch:
            kind["attention"].append(spent[0])
            kind["all"].append(time.perf_counter() - start)
        begun |= {o.request_id for o in outputs}
    print(
        f"{options.batch} prompts of {options.context} tokens, ms in {len(prefills['all'])} steps (with some decodes):"
    )
    print("   ", ", ".join(f"{what} {sum(seconds) * 1e3:.0f}" for what, seconds in prefills.items()))
    print(f"{options.batch} decodes, ms a step, median (quartiles) of {len(decodes['all'])}:")
    for what, seconds in decodes.items():
        low, middle, high = (x * 1e3 for x in statistics.quantiles(seconds, n=4))
        print(f"    {what} {middle:.2f} ({low:.2f}..{high:.2f})")


main()
