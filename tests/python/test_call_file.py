"""Call files: what Python writes, the command reads; what was recorded, Python answers."""

import json
import os
import pathlib
import subprocess

import attnfold.call_file
import ml_dtypes
import numpy as np
import pytest
import torch
from reference import Batch, causal, check, weight_bits

DATA = pathlib.Path(__file__).parents[1] / "data"
COMMAND = os.environ.get("ATTNFOLD_COMMAND")


def metadata(b, plan):
    return dict(mask="causal", sm_scale=b.head_dim**-0.5, page_size=b.page_size, kv_layout=b.layout, origin="a test",
                recorded_by=f"attnfold, {plan.kernel}, numerics {plan.numerics_id}")  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_command_verifies_what_was_saved(rng, tmp_path, dtype):
    b = Batch(rng, dtype=dtype)
    plan = b.plan()
    b.update(plan)
    o, lse = plan.run(b.q, b.k_cache, b.v_cache, return_lse=True)
    tensors = dict(q=b.q, qo_indptr=b.qo_indptr, k_cache=b.k_cache, v_cache=b.v_cache, block_table=b.block_table,
                   kv_len=b.kv_len, o=o, lse=lse)  # fmt: skip
    attnfold.call_file.save(tmp_path / "call.safetensors", tensors, metadata(b, plan))
    back, text = attnfold.call_file.load(tmp_path / "call.safetensors")
    assert all(back[n].tobytes() == x.tobytes() and back[n].dtype == x.dtype for n, x in tensors.items())
    assert np.float32(text["sm_scale"]) == np.float32(b.head_dim**-0.5)
    if COMMAND:
        done = subprocess.run([COMMAND, "verify", str(tmp_path / "call.safetensors")], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        tensors["o"] = (o.astype(np.float32) + 0.1).astype(dtype)
        attnfold.call_file.save(tmp_path / "wrong.safetensors", tensors, metadata(b, plan))
        assert subprocess.run([COMMAND, "verify", str(tmp_path / "wrong.safetensors")], capture_output=True).returncode == 1


def test_tensors_of_torch_are_saved_with_their_bits(tmp_path):
    q = torch.randn(1, 2, 64).to(torch.bfloat16)
    attnfold.call_file.save(tmp_path / "call.safetensors", dict(q=q[:, ::1]), {})
    tensors, _ = attnfold.call_file.load(tmp_path / "call.safetensors")
    assert tensors["q"].view(np.uint16).tobytes() == q.view(torch.int16).numpy().tobytes()
    with pytest.raises(ValueError, match="q: expected a type of call files"):
        attnfold.call_file.save(tmp_path / "call.safetensors", dict(q=q.double()), {})


@pytest.mark.parametrize("path", sorted(DATA.glob("*.safetensors")), ids=lambda p: p.stem)
def test_recorded_calls_are_answered(path):
    t, text = attnfold.call_file.load(path)
    layout = text["kv_layout"]
    pool = t["k_cache"] if layout == "NHD" else t["k_cache"].swapaxes(1, 2)
    num_pages, page_size, kv_heads, head_dim = pool.shape
    plan = attnfold.create(
        qo_heads=t["q"].shape[1], kv_heads=kv_heads, head_dim=head_dim, dtype=t["q"].dtype, kv_layout=layout,
        page_size=page_size, num_pages=num_pages, mask=text["mask"], sm_scale=float(text["sm_scale"]),
        max_batch=len(t["kv_len"]), max_qo_rows=len(t["q"]), max_kv_len=int(t["kv_len"].max()),
    )  # fmt: skip
    plan.update(t["qo_indptr"], t["kv_len"], t["block_table"])
    o, lse = plan.run(t["q"], t["k_cache"], t["v_cache"], return_lse=True)
    for r, n in enumerate(t["kv_len"]):
        rows = slice(*t["qo_indptr"][r : r + 2])
        if rows.start == rows.stop:
            continue
        at = np.arange(n)
        slot = t["block_table"][r, at // page_size], at % page_size
        v = (t["v_cache"] if layout == "NHD" else t["v_cache"].swapaxes(1, 2))[slot]
        visible = causal(rows.stop - rows.start, n)
        check(o[rows], lse[rows], t["q"][rows], pool[slot], v, visible, float(text["sm_scale"]), weight_bits(plan))


@pytest.mark.parametrize("dtype", ["f4", "f2", "i4"])
def test_arrays_of_another_byte_order_keep_their_values(tmp_path, dtype):
    x = np.arange(-6, 6).reshape(3, 4)
    for array in (x.astype(">" + dtype), x.astype("<" + dtype), x.astype(">" + dtype)[::-1, ::2]):
        attnfold.call_file.save(tmp_path / "call.safetensors", dict(q=array), {})
        back = attnfold.call_file.load(tmp_path / "call.safetensors")[0]["q"]
        assert back.dtype.isnative and np.array_equal(back, array)


NUMBERS = (
    0.1, 3, True, np.float16(0.1), np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True), np.array(0.1, np.float32),
    np.array([0.1], np.float16), ml_dtypes.bfloat16(0.1), torch.tensor(0.1), torch.tensor(0.1, dtype=torch.bfloat16),
    torch.tensor([3]), torch.tensor(0.1, requires_grad=True),
)  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}")
def test_numbers_read_back_exactly(tmp_path, number):
    path = tmp_path / "call.safetensors"
    attnfold.call_file.save(path, {}, dict(x=number))
    text = attnfold.call_file.load(path)[1]["x"]
    if isinstance(number, (bool, np.bool_)):
        assert text == "True"
    else:
        value = float(number.item() if hasattr(number, "ndim") else number)
        assert float(text) == value and text.isdigit() == (value == 3)
    with pytest.raises(ValueError, match="^x: expected a text or a number, got ndarray"):
        attnfold.call_file.save(path, {}, dict(x=np.ones(2)))


def test_verify_hints_at_recorded_by(rng, tmp_path):
    if not COMMAND:
        pytest.skip("ATTNFOLD_COMMAND is not set")
    b = Batch(rng)
    plan = b.plan()
    b.update(plan)
    o = plan.run(b.q, b.k_cache, b.v_cache) + 1
    tensors = dict(q=b.q, qo_indptr=b.qo_indptr, k_cache=b.k_cache, v_cache=b.v_cache, block_table=b.block_table,
                   kv_len=b.kv_len, o=o)  # fmt: skip
    path = tmp_path / "call.safetensors"
    for about in (metadata(b, plan), metadata(b, plan) | dict(recorded_by="somebody")):
        attnfold.call_file.save(path, tensors, about)
        done = subprocess.run([COMMAND, "verify", str(path)], capture_output=True, text=True)
        assert done.returncode == 1
        assert ("recorded_by names no numerics id" in done.stdout + done.stderr) == (about["recorded_by"] == "somebody")


def test_a_file_of_something_else_is_an_error(tmp_path):
    (tmp_path / "x").write_bytes(b"\0" * 20)
    with pytest.raises(ValueError, match="expected a safetensors header"):
        attnfold.call_file.load(tmp_path / "x")


def test_damaged_files_and_what_is_no_array_are_named(tmp_path):
    path = tmp_path / "call.safetensors"
    sound = {"dtype": "I32", "shape": [2], "data_offsets": [0, 8]}

    def loaded(header, data=b"\0" * 8):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
        return attnfold.call_file.load(path)[0]

    about = {"__metadata__": {"format": "attnfold-call-1"}}
    assert loaded(about | {"x": sound})["x"].tolist() == [0, 0]
    assert loaded(about | {"x": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [8, 8]}})["x"].shape == (0, 4)
    for header in (b"{", b"[1]", b"3", b"\xff\xfe", {"__metadata__": 3}, b'{"x":' + b"[" * 10**5):
        with pytest.raises(ValueError, match="call.safetensors: expected a JSON object as header, got"):
            loaded(header)
    for change in (
        {"dtype": "F64"}, {"dtype": None}, {"shape": [3]}, {"shape": [-1, -2]}, {"shape": 2}, {"shape": ["2"]}, {"shape": [2.0]},
        {"data_offsets": [0, 16]}, {"data_offsets": [4, 12]}, {"data_offsets": [-8, 0]}, {"data_offsets": [8, 0]},
        {"data_offsets": [0]}, {"data_offsets": [0, 8, 8]}, {"data_offsets": None}, {"shape": [2**62, 2]},
        {"dtype": ["I32"]}, {"dtype": {}}, {"shape": [0, 2**63], "data_offsets": [0, 0]}, {"shape": [2**70], "data_offsets": [0, 0]},
        {"shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}, {"shape": [0] * 99, "data_offsets": [0, 0]},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="call.safetensors: x: expected "):
            loaded(about | {"x": sound | change})
    for entry in (3, None, [], "x"):
        with pytest.raises(ValueError, match="call.safetensors: x: expected dtype, shape, data_offsets, got "):
            loaded(about | {"x": entry})
    for array in (None, object(), [[1], [1, 2]], torch.empty(3, device="meta"), torch.eye(3).to_sparse(), "words"):
        with pytest.raises(ValueError, match="^q: expected "):
            attnfold.call_file.save(path, dict(q=array), {})
    attnfold.call_file.save(path, dict(q=torch.zeros(0, 4), k=np.zeros((2, 0), np.int32)), {})
    back, _ = attnfold.call_file.load(path)
    assert back["q"].shape == (0, 4) and back["k"].shape == (2, 0)
