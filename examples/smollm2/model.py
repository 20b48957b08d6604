"""A Llama-style model in numpy: everything but attention.

Each row of activations is computed in a block of ROWS rows, whatever the batch: matrix products of one shape then do the
same to a row wherever it stands (OpenBLAS for AVX2 not beyond 8 rows), so no bit of it depends on the other requests.
"""

from types import SimpleNamespace

import numpy as np

ROWS = 8


def matmul(x, matrix):
    """Weights that a file has in blocks of fewer bits multiply rows that are rounded to 8 bits in such blocks, as in ggml."""
    weights, block = matrix
    if block > 1:
        blocks = x.reshape(len(x), -1, block)
        largest = np.abs(blocks).max(axis=2, keepdims=True) + 1e-30
        scale = (largest / 127).astype(np.float16 if block == 32 else np.float32)  # of its Q8_0 and Q8_1; of Q8_K
        x = (np.rint(blocks * (127 / largest)) * scale).reshape(x.shape)
    return x @ weights


class Model:
    """Weights as [in, out] float32, of blocks of a size.  attention(layer, q, k, v) -> o is the caller's."""

    def __init__(self, config, tensor, block_size):
        def matrix(*names):
            weights = np.concatenate([tensor(n + ".weight") for n in names])
            return np.ascontiguousarray(weights.T, np.float32), max(block_size(n + ".weight") for n in names)

        self.config, self.layers = config, []
        self.embedding, self.norm = np.ascontiguousarray(tensor("token_embd.weight"), np.float32), tensor("output_norm.weight")
        self.output = matrix("token_embd")
        for i in range(config.layers):
            b = f"blk.{i}."
            self.layers.append((
                tensor(b + "attn_norm.weight"), matrix(b + "attn_q", b + "attn_k", b + "attn_v"), matrix(b + "attn_output"),
                tensor(b + "ffn_norm.weight"), matrix(b + "ffn_gate", b + "ffn_up"), matrix(b + "ffn_down"),
            ))  # fmt: skip
        self.frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)

    def forward(self, tokens, positions, wanted, attention):
        """tokens, positions [n] of a step; wanted: rows whose logits are wanted.  -> [len(wanted), vocabulary]"""
        c = self.config
        x = self.embedding[tokens]
        turn = np.exp(1j * positions[:, None] * self.frequencies).astype(np.complex64)[:, None, :]
        for layer, (norm1, qkv_w, o_w, norm2, up_w, down_w) in enumerate(self.layers):

            def after(x, o):
                x = x + matmul(o, o_w)
                gate, up = np.split(matmul(self._rms(x, norm2), up_w), 2, axis=1)
                return x + matmul(gate / (1 + np.exp(-gate)) * up, down_w)

            qkv = in_blocks(lambda x: matmul(self._rms(x, norm1), qkv_w), x).reshape(len(x), -1, c.head_dim)
            rotated = qkv[:, : c.heads + c.kv_heads].view(np.complex64)  # pairs of neighbours turn
            rotated *= turn
            q, k, v = np.split(qkv, [c.heads, c.heads + c.kv_heads], axis=1)
            x = in_blocks(after, x, attention(layer, q, k, v).reshape(len(x), -1))
        return in_blocks(lambda x: matmul(self._rms(x, self.norm), self.output), x[wanted])

    def _rms(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(self.config.epsilon)) * weight


def in_blocks(f, *arrays):
    """f on blocks of exactly ROWS rows; the last one is filled up with zeros."""
    n = len(arrays[0])
    fill = np.zeros((-n % ROWS or ROWS * (n == 0), arrays[0].shape[1]), np.float32)
    blocks = (np.concatenate([a, fill]).reshape(-1, ROWS, a.shape[1]) for a in arrays)
    return np.concatenate([f(*rows) for rows in zip(*blocks)])[:n]


class Chat:
    """The tokenizer in a GGUF file, and the chat format of SmolLM2."""

    def __init__(self, fields):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens, merges, kinds, self.end = (
            fields["tokenizer.ggml." + name].contents() for name in ("tokens", "merges", "token_type", "eos_token_id")
        )
        bpe = models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in merges])
        self._t = Tokenizer(bpe)
        self._t.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._t.decoder = decoders.ByteLevel()
        self._t.add_special_tokens([AddedToken(t) for t, kind in zip(tokens, kinds) if kind == 3])

    def chat(self, text):
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        turns = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self._t.encode(turns).ids

    def decode(self, tokens):
        return self._t.decode(tokens)


def load(path):
    """The model and tokenizer of a GGUF file; "tiny" is a random model on bytes, to try things out."""
    if path == "tiny":
        rng = np.random.default_rng(7)
        shapes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64), "ffn_gate": (96, 64),
                  "ffn_up": (96, 64), "ffn_down": (64, 96), "token_embd": (257, 64)}  # fmt: skip

        def random(name):
            shape = shapes.get(name.split(".")[-2])
            return rng.standard_normal(shape, np.float32) / 8 if shape else np.ones(64, np.float32)

        tiny = SimpleNamespace(layers=3, heads=4, kv_heads=2, head_dim=16, rope_base=1e4, epsilon=1e-5)
        of_bytes = SimpleNamespace(end=256, chat=lambda text: list(text.encode()),
                                   decode=lambda tokens: bytes(tokens).decode(errors="replace"))  # fmt: skip
        return Model(tiny, random, lambda name: 1), of_bytes
    from gguf import GGML_QUANT_SIZES, GGUFReader, dequantize

    reader = GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    field = {name: f.contents() for name, f in reader.fields.items() if name.startswith("llama.")}
    heads = field["llama.attention.head_count"]
    config = SimpleNamespace(
        layers=field["llama.block_count"], heads=heads, kv_heads=field["llama.attention.head_count_kv"],
        head_dim=field["llama.embedding_length"] // heads, rope_base=field["llama.rope.freq_base"],
        epsilon=field["llama.attention.layer_norm_rms_epsilon"],
    )  # fmt: skip
    tensor = lambda name: dequantize(tensors[name].data, tensors[name].tensor_type)  # noqa: E731
    return Model(config, tensor, lambda name: GGML_QUANT_SIZES[tensors[name].tensor_type][0]), Chat(reader.fields)
