"""attnfold inside vLLM, beside its own CPU backend: calls of layers, small random models, recorded calls, errors."""

import collections
import contextlib
import functools
import gc
import os
import pathlib
import re
import subprocess
import sys
import types

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the tests can look into it
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import attnfold  # noqa: E402
import attnfold.call_file  # noqa: E402
import attnfold.integrations.vllm as integration  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from attnfold.integrations.vllm import _backend, _step  # noqa: E402
from reference import causal, check, same_bits  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402

COMMAND = os.environ.get("ATTNFOLD_COMMAND")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# ---- one layer ----

BLOCK, NUM_BLOCKS, HEADS, KV_HEADS, DIM = 128, 12, 8, 2, 64


class Layer:
    """What vLLM's backend reads of a layer."""

    isa, _k_scale_float, _v_scale_float, layer_name = "vec", 1.0, 1.0, "model.layers.0.self_attn.attn"


@functools.cache
def config():
    """vLLM's configuration without a model, of which its backend reads the type alone."""
    made = VllmConfig()
    object.__setattr__(made, "model_config", types.SimpleNamespace(dtype=torch.float32))
    return made


class Call:
    """A mixed batch: a decode, a prompt, a chunk behind cached keys.  Scores are spread enough to show each key."""

    qo_len, kv_len = [1, 50, 64], [300, 50, 250]

    def __init__(self, rng, dtype):
        self.indptr = torch.tensor(np.cumsum([0, *self.qo_len]), dtype=torch.int32)
        self.seq_lens = torch.tensor(self.kv_len, dtype=torch.int32)
        self.table = torch.tensor(rng.permutation(NUM_BLOCKS).reshape(3, 4), dtype=torch.int32)
        self.q = torch.from_numpy(2 * rng.standard_normal((115, HEADS, DIM), np.float32)).to(dtype)
        self.k, self.v, slots = [], [], []
        for r, n in enumerate(self.kv_len):
            k, v = torch.from_numpy(rng.standard_normal((2, n, KV_HEADS, DIM), np.float32)).to(dtype)
            self.k.append(k)
            self.v.append(v)
            at = np.arange(n)
            slots.append(torch.from_numpy(self.table[r].numpy()[at // BLOCK] * BLOCK + at % BLOCK).long())
        self.slots = torch.cat(slots)

    def answer(self, impl_class, **features):
        """What a backend's layer answers, over a cache that it wrote itself."""
        with set_current_vllm_config(config()):
            required = dict(alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto")
            impl = impl_class(HEADS, DIM, DIM**-0.5, KV_HEADS, **(required | features))
        cache = torch.zeros(NUM_BLOCKS, KV_HEADS, BLOCK, 2 * DIM, dtype=self.q.dtype)
        o = torch.empty_like(self.q)
        impl.do_kv_cache_update(Layer, torch.cat(self.k), torch.cat(self.v), cache, self.slots)
        if impl_class is _backend.Impl:
            impl.process_weights_after_loading(self.q.dtype)
            plans = _step.Plans(max_batch=4, max_qo_rows=128, max_kv_len=512)
            metadata = _step.Step(plans, 0, self.indptr, self.seq_lens, self.table)
        else:
            metadata = self.metadata_of_vllm(features)
        impl.forward(Layer, self.q, None, None, cache, metadata, o)
        return o.float()

    def metadata_of_vllm(self, features):
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

        schedule = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=3, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, seq_lens=self.seq_lens,
            dtype=self.q.dtype, query_start_loc=self.indptr, causal=True,
            sliding_window_size=features.get("sliding_window", -1), isa=Layer.isa, enable_kv_split=True,
            dynamic_causal=None, kv_cache_dtype="auto",
        )  # fmt: skip
        return CPUAttentionMetadata(115, 64, self.indptr, 300, self.seq_lens, self.table, self.slots, schedule)


FEATURES = {
    "causal": {},
    "window": dict(sliding_window=40),
    "softcap": dict(logits_soft_cap=5.0),
    "alibi": dict(alibi_slopes=[2.0**-i for i in range(1, 9)]),
    "sinks": dict(sinks=torch.linspace(-1, 3, 8)),
    "window_softcap_sinks": dict(sliding_window=33, logits_soft_cap=8.0, sinks=torch.linspace(3, -1, 8)),
}
# Wrong enough to show in bfloat16 too: the window one key wider, and so on.
WRONG = {
    "window": dict(sliding_window=41),
    "softcap": dict(logits_soft_cap=6.0),
    "alibi": dict(alibi_slopes=[1.2 * 2.0**-i for i in range(1, 9)]),
    "sinks": dict(sinks=torch.linspace(-1, 4, 8)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_layer_answers_as_vllms_own(rng, feature, dtype):
    """In float32 both round some 300 terms of at most max |v|, each to 2^-24: far inside 2^-16 of it.  In bfloat16
    either may round weights and answer to 8 bits: 4 roundings of 2^-9 of max |v|."""
    call = Call(rng, DTYPES[dtype])
    own = call.answer(CPUAttentionBackendImpl, **FEATURES[feature])
    bound = max(v.abs().max().item() for v in call.v) * {"float32": 2.0**-16, "bfloat16": 2.0**-7}[dtype]
    assert (call.answer(_backend.Impl, **FEATURES[feature]) - own).abs().max() <= bound
    if feature in WRONG:
        assert (call.answer(_backend.Impl, **WRONG[feature]) - own).abs().max() > bound
    call.table[:, 1] = call.table[:, 1].roll(1)  # requests read each other's second block
    assert (call.answer(_backend.Impl, **FEATURES[feature]) - own).abs().max() > bound


def test_a_layer_is_within_the_bound(rng):
    call = Call(rng, torch.float32)
    o = call.answer(_backend.Impl, sliding_window=40).numpy()
    for r in range(3):
        rows = slice(call.indptr[r], call.indptr[r + 1])
        visible = causal(call.qo_len[r], call.kv_len[r], 39)
        check(o[rows], None, call.q[rows].numpy(), call.k[r].numpy(), call.v[r].numpy(), visible, DIM**-0.5)


@pytest.mark.parametrize(
    "features, message",
    [
        (dict(attn_type=AttentionType.ENCODER_ONLY), "attn_type: expected decoder, got encoder_only"),
        (dict(kv_cache_dtype="fp8"), "kv_cache_dtype: expected auto or float16 or bfloat16, got fp8"),
        (dict(q_lora_rank=512), "q_lora_rank: expected None, got 512"),
    ],
)
def test_what_a_layer_may_not_ask_is_an_error(features, message):
    with pytest.raises(NotImplementedError, match=message), set_current_vllm_config(config()):
        _backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS, **features)


def test_a_quantised_output_is_an_error(rng):
    with set_current_vllm_config(config()):
        impl = _backend.Impl(HEADS, DIM, DIM**-0.5, KV_HEADS)
    with pytest.raises(NotImplementedError, match="output_scale: expected None"):
        impl.forward(Layer, None, None, None, None, None, None, output_scale=torch.ones(1))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("causal", False, "causal: expected True, got False"),
        ("mm_req_doc_ranges", {0: [(1, 2)]}, "mm_req_doc_ranges: expected None"),
        ("dcp_local_seq_lens", torch.ones(1), "dcp_local_seq_lens: expected None"),
    ],
)
def test_what_a_batch_may_not_ask_is_an_error(field, value, message):
    batch = dict(causal=True, mm_req_doc_ranges=None, rswa_prefix_lens=None, dcp_local_seq_lens=None) | {field: value}
    builder = object.__new__(_backend.Builder)
    with pytest.raises(NotImplementedError, match=message):
        builder.build(0, types.SimpleNamespace(**batch))


# ---- whole models ----

SMALL = dict(
    hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2,
    head_dim=32, vocab_size=512, max_position_embeddings=2048, initializer_range=0.08,
)  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig(**SMALL),
    "mistral_window": transformers.MistralConfig(**SMALL, sliding_window=47),
    "gemma2_softcap": transformers.Gemma2Config(**SMALL, sliding_window=61, query_pre_attn_scalar=32),
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Folders with random models, by name; with a tokenizer of numbers."""

    def make(name):
        folder = tmp_path_factory.getbasetemp() / name
        if not folder.exists():
            torch.manual_seed(0)
            transformers.AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(folder)
            from tokenizers import Tokenizer, models, pre_tokenizers

            words = Tokenizer(models.WordLevel({str(i): i for i in range(512)}, unk_token="0"))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="2").save_pretrained(folder)
        return str(folder)

    return make


@contextlib.contextmanager
def engine(folder, backend, dtype="float32"):
    """An engine that prefills in pieces of 64 tokens, with the backend given; None is vLLM's own.  One at a time."""
    selector._cached_get_attn_backend.cache_clear()
    AttentionBackendEnum.CPU_ATTN.clear_override()
    if backend is _backend.Backend:
        integration.register()
    llm = LLM(
        folder, dtype=dtype, enforce_eager=True, max_model_len=1024, max_num_batched_tokens=64, max_num_seqs=8, seed=0
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    assert {layer.attn_backend for layer in layers} == {AttentionBackendEnum.CPU_ATTN.get_class()}
    assert (AttentionBackendEnum.CPU_ATTN.get_class() is _backend.Backend) == (backend is _backend.Backend)
    yield llm
    llm.llm_engine.engine_core.shutdown()
    gc.collect()


def prompts_of(rng):
    """Short and long; the last three begin like the fourth, with two cached blocks of 128 in the second round."""
    prompts = [rng.integers(3, 512, n).tolist() for n in (5, 200, 33, 300, 1)]
    return [*prompts, prompts[3][:260], prompts[3][:257] + [7, 8], prompts[3] + [9]]


HOW = dict(temperature=0, ignore_eos=True, detokenize=False)


def generate(llm, prompts):
    """Two rounds, the second on a cache that the first has filled: [(tokens, log-probabilities of the best 20)]."""
    answers = []
    for _ in range(2):
        how = SamplingParams(max_tokens=6, logprobs=20, **HOW)
        out = llm.generate([dict(prompt_token_ids=p) for p in prompts], how, use_tqdm=False)
        for one in (o.outputs[0] for o in out):
            answers.append((one.token_ids, [{t: x.logprob for t, x in step.items()} for step in one.logprobs]))
    assert max(o.num_cached_tokens for o in out) >= 256
    return answers


def largest_difference(a, b):
    """Of log-probabilities of tokens that both name, as long as both have chosen the same tokens; inf if few are."""
    worst = 0.0
    for (tokens_a, steps_a), (tokens_b, steps_b) in zip(a, b, strict=True):
        for i, (x, y) in enumerate(zip(steps_a, steps_b, strict=True)):
            if tokens_a[:i] == tokens_b[:i]:
                common = x.keys() & y.keys()
                worst = max(worst, *(abs(x[t] - y[t]) for t in common)) if len(common) >= 10 else np.inf
    return worst


@functools.cache
def answers_of_vllm(folder):
    """What vLLM's own backend answers in float32, and to which prompts."""
    prompts = prompts_of(np.random.default_rng(1))
    with engine(folder, None) as llm:
        return prompts, generate(llm, prompts)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_answers_as_with_vllms_own_backend(checkpoint, name, monkeypatch):
    """Chunked prefills, cached prefixes and mixed batches, in float32.  Log-probabilities of about 5 come from three
    layers of sums of some hundred terms, rounded to 2^-24: 2^-14 is ample, and a wrong page is far outside."""
    prompts, own = answers_of_vllm(checkpoint(name))
    plan = _step.Step.plan

    def of_others(step, *layer):  # requests read each other's second block
        if len(step.block_table) > 1:
            step.block_table = step.block_table.clone()
            step.block_table[:, 1] = step.block_table[:, 1].roll(1)
        return plan(step, *layer)

    with engine(checkpoint(name), _backend.Backend) as llm:
        ours = generate(llm, prompts)
        monkeypatch.setattr(_step.Step, "plan", of_others)
        wrong = generate(llm, prompts)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in own]
    assert largest_difference(ours, own) <= 2.0**-14
    assert largest_difference(wrong, own) > 2.0**-7


def test_a_model_in_bfloat16_is_as_near_to_float32_as_with_vllms_own_backend(checkpoint):
    (prompts, exact), answers = answers_of_vllm(checkpoint("llama")), []
    for backend in (None, _backend.Backend):
        with engine(checkpoint("llama"), backend, "bfloat16") as llm:
            answers.append(generate(llm, prompts))
    own, ours = answers
    assert largest_difference(ours, exact) <= 2 * largest_difference(own, exact)


# ---- recorded calls ----


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def recorded(request, checkpoint, tmp_path_factory):
    """Folders of calls: eight requests at once, and one of them alone, with the tokens of each."""
    folders = []
    prompts = prompts_of(np.random.default_rng(3))
    how = SamplingParams(max_tokens=24, **HOW)  # the first still decodes when the last is prefilled
    with pytest.MonkeyPatch.context() as patch, engine(checkpoint("llama"), _backend.Backend, request.param) as llm:
        for chosen in (prompts, prompts[1:2]):
            folder = tmp_path_factory.mktemp("calls")
            patch.setenv("ATTNFOLD_VLLM_RECORD", str(folder))
            llm.generate([dict(prompt_token_ids=p) for p in chosen], how, use_tqdm=False)
            assert llm.reset_prefix_cache()  # the request alone is prefilled as a whole
            folders.append(sorted(folder.glob("*.safetensors")))
    return folders


def test_recorded_calls_are_the_mixed_batches_meant_and_are_verified(recorded):
    kinds = collections.Counter()
    for path in recorded[0]:
        call, _ = attnfold.call_file.load(path)
        qo_len = np.diff(call["qo_indptr"])
        kinds["decodes and prefills at once"] += (qo_len == 1).any() and (qo_len > 1).any()
        kinds["a chunk behind earlier keys"] += ((qo_len > 1) & (call["kv_len"] > qo_len)).any()
        kinds["eight requests"] += len(qo_len) == 8
    assert len(kinds) == 3 and all(kinds.values()), kinds
    if not COMMAND:
        pytest.skip("built without the command")
    # Each file is held to the oracle; that schedules give the same bits other tests say.
    files = [*recorded[0], *recorded[1]]
    done = subprocess.run([COMMAND, "verify", "--schedules", "2", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def request_of(call, r):
    """A request's q, its keys and values in order [kv_len, kv_heads, head_dim], and the recorded o and lse."""
    rows = slice(call["qo_indptr"][r], call["qo_indptr"][r + 1])
    pages = call["block_table"][r][: -(-call["kv_len"][r] // BLOCK)]
    k, v = (
        call[name][pages].swapaxes(1, 2).reshape(-1, *call[name].shape[1:2], call[name].shape[3])[: call["kv_len"][r]]
        for name in ("k_cache", "v_cache")
    )
    return call["q"][rows], k, v, call["o"][rows], call["lse"][rows]


def test_each_requests_answer_has_the_bits_of_the_request_alone(recorded):
    """Every request of every call at load 8, answered again at load 1 from the recorded q, k and v, without pages."""
    num_requests = 0
    for path in recorded[0]:
        call, metadata = attnfold.call_file.load(path)
        for r in range(len(call["kv_len"])):
            q, k, v, o, lse = request_of(call, r)
            alone = attnfold.attention(q, k, v, causal=True, return_lse=True, sm_scale=float(metadata["sm_scale"]))
            assert same_bits(alone[0], o) and same_bits(alone[1], lse)
            num_requests += 1
    assert num_requests > 100


def test_a_request_has_the_same_bits_at_loads_1_and_8(recorded):
    """vLLM's linear layers may round a request differently by load; its rows whose q, k and v are equal in both runs
    have equal answers."""
    alone = {}
    for path in recorded[1]:
        call, _ = attnfold.call_file.load(path)
        q, k, v, o, _ = request_of(call, 0)
        for i in range(len(q)):
            seen = len(k) - len(q) + i + 1
            alone[q[i].tobytes(), k[:seen].tobytes(), v[:seen].tobytes()] = o[i].tobytes()
    found = 0
    for path in recorded[0]:
        call, _ = attnfold.call_file.load(path)
        for r in range(len(call["kv_len"])):
            q, k, v, o, _ = request_of(call, r)
            for i in range(len(q)):
                seen = len(k) - len(q) + i + 1
                same = alone.get((q[i].tobytes(), k[:seen].tobytes(), v[:seen].tobytes()))
                found += same is not None
                assert same is None or same == o[i].tobytes()
    print("rows with equal inputs:", found, "of", len(alone))
    assert found > 50


# ---- the plugin ----


def test_the_snippet_of_the_readme_runs_and_the_plugin_is_found(checkpoint, tmp_path):
    """In a process of its own, with vLLM's processes below it: they find the plugin by the environment alone."""
    text = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S) if "from vllm" in b)
    block = re.sub(r'LLM\("[^"]*"', f'LLM("{checkpoint("llama")}", max_model_len=512', block)
    script = tmp_path / "snippet.py"
    script.write_text(re.sub(r'"Why[^"]*"', '"5 6 7"', block))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    environment |= dict(
        VLLM_CPU_KVCACHE_SPACE="1", ATTNFOLD_VLLM_RECORD=str(tmp_path / "calls"), ATTNFOLD_VLLM_RECORD_CALL="1,2"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "attention by attnfold" in done.stdout + done.stderr
    (path,) = (tmp_path / "calls").iterdir()
    assert path.name == "step000002.layer001.safetensors"
    if COMMAND:
        assert subprocess.run([COMMAND, "verify", path]).returncode == 0


def test_the_plugin_does_nothing_unless_it_is_named(monkeypatch):
    AttentionBackendEnum.CPU_ATTN.clear_override()
    for plugins in (None, "", "other,attnfold2"):
        monkeypatch.delenv("VLLM_PLUGINS", raising=False)
        if plugins is not None:
            monkeypatch.setenv("VLLM_PLUGINS", plugins)
        integration.plugin()
        assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    monkeypatch.setenv("VLLM_PLUGINS", "other,attnfold")
    integration.plugin()
    assert AttentionBackendEnum.CPU_ATTN.get_class() is _backend.Backend
