"""What pip installed answers on the CPU, has the CUDA backend, and says what a machine lacks that cannot run it."""

import attnfold
import numpy as np

x = np.ones((2, 1, 64), np.float32)
assert (attnfold.attention(x, x, x) == 1).all()

rows = [row for row in attnfold.kernels() if row["isa"] == "cuda"]
assert {row["name"] for row in rows} == {"cuda/bf16", "cuda/f16"}, rows
assert not any("this build" in row["why_not"] for row in rows), rows

problem = dict(qo_heads=1, kv_heads=1, head_dim=64, dtype="float16", kv_storage="ragged", max_batch=1, max_qo_rows=1, max_kv_len=1)
try:
    print(attnfold.create(**problem, backend="cuda").kernel)
except NotImplementedError as error:  # no GPU, or one that is too old
    assert str(error).startswith("backend: expected one that this machine runs, got "), error
    assert not any(row["available"] for row in rows)
    print(error)
