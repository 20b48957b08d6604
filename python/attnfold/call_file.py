"""Attention calls as files of the format `attnfold-call-1`, which `attnfold run` and `attnfold verify` read."""

from __future__ import annotations

import json
import math
import struct
from os import PathLike
from typing import Any, Mapping

import numpy as np

from attnfold._arrays import shown

_CODES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int8": "I8", "int32": "I32", "uint8": "U8",
}  # fmt: skip


def _bytes_of(name: str, array: Any) -> tuple[str, list[int], bytes]:
    if isinstance(array, np.ma.MaskedArray):
        raise ValueError(f"{name}: expected an array without a mask, got a masked array")
    try:
        if type(array).__module__.partition(".")[0] == "torch":
            import torch

            array = array.detach().cpu().contiguous()
            dtype = str(array.dtype).rpartition(".")[2]
            data = array.reshape(-1).view(torch.uint8).numpy().tobytes()
        else:
            array = np.asarray(array)
            if not array.dtype.isnative:  # whose name does not say so
                array = array.astype(array.dtype.newbyteorder("="))
            dtype, data = array.dtype.name, np.ascontiguousarray(array).tobytes()
    except Exception as error:  # a tensor without memory, rows of several lengths
        why = str(error).partition("\n")[0]
        raise ValueError(f"{name}: expected an array of numpy or torch, got {type(array).__name__}: {why}") from error
    if dtype not in _CODES:
        raise ValueError(f"{name}: expected a type of call files ({', '.join(_CODES)}), got {dtype}")
    return _CODES[dtype], list(array.shape), data


def _text_of(key: str, value: Any) -> str:
    """A value of the metadata; numbers of any framework, arrays of one number too, so that they read back exactly."""
    if isinstance(value, str):
        return value
    number = value
    if hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__") or isinstance(value, np.generic):
        try:
            number = value.item()
        except Exception as error:  # several numbers, or none that can be looked at
            raise ValueError(f"{key}: expected a text or a number, got {type(value).__name__}: {error}") from error
    try:  # the scalars of ml_dtypes are none that Python knows
        return str(number) if isinstance(number, (bool, int)) else repr(float(number))
    except (TypeError, ValueError):
        return str(value)


def _array_of(where: str, entry: Any, data: memoryview) -> np.ndarray[Any, Any]:
    """The tensor that an entry of the header describes, a copy; `data` is what follows the header."""
    names = {code: name for name, code in _CODES.items()}
    keys = ("dtype", "shape", "data_offsets")
    dtype, shape, offsets = (entry.get(key) if isinstance(entry, dict) else None for key in keys)
    numbers = [*shape, *offsets] if isinstance(shape, list) and isinstance(offsets, list) else [None]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(offsets) != 2:
        raise ValueError(f"{where}: expected {', '.join(keys)}, got {shown(entry)}")
    if not isinstance(dtype, str) or dtype not in names:
        raise ValueError(f"{where}: expected a dtype of call files ({', '.join(names)}), got {shown(dtype)}")
    made: Any = names[dtype]
    if dtype in ("BF16", "F8_E4M3", "F8_E5M2"):
        import ml_dtypes

        made = getattr(ml_dtypes, made)
    num_bytes = math.prod(shape) * np.dtype(made).itemsize
    begin, end = offsets
    if end > len(data) or end - begin != num_bytes:
        raise ValueError(f"{where}: expected {num_bytes} bytes among {len(data)}, got data_offsets {offsets}")
    try:
        return np.frombuffer(data, np.uint8, end - begin, begin).copy().view(made).reshape(shape)
    except (ValueError, OverflowError) as error:  # without elements, but with axes that numpy cannot have
        raise ValueError(f"{where}: expected a shape of numpy, got {shape}: {error}") from error


def save(path: str | PathLike[str], tensors: Mapping[str, Any], metadata: Mapping[str, Any]) -> None:
    """Writes one attention call.

    Args:
        path: the file.
        tensors: by the names of docs/call-format.md: q, qo_indptr, k_cache, v_cache, kv_len, block_table, o, lse, ..; numpy
            or torch arrays, integers as int32.
        metadata: mask, sm_scale, page_size, kv_layout, ..; numbers are written so that they read back exactly.
            recorded_by: who answered.  An o of this library is judged by the bound of its kernel if that text ends in
            "numerics " and `Plan.numerics_id`, else by that of answers whose weights are not rounded, which kernels that
            round them (bf16 dot products, GPUs) need not keep.

    Raises:
        ValueError: names what the format lacks.

    >>> import attnfold.call_file, numpy as np, tempfile, os
    >>> path = os.path.join(tempfile.mkdtemp(), "call.safetensors")
    >>> pages = np.ones((5, 16, 2, 64), np.float32)
    >>> attnfold.call_file.save(path, {"q": np.ones((1, 4, 64), np.float32), "qo_indptr": np.array([0, 1], np.int32),
    ...     "k_cache": pages, "v_cache": pages, "block_table": np.array([[4, 1]], np.int32),
    ...     "kv_len": np.array([20], np.int32)}, dict(mask="causal", sm_scale=0.125, page_size=16, kv_layout="NHD"))
    >>> tensors, metadata = attnfold.call_file.load(path)
    >>> metadata["page_size"], tensors["q"].shape
    ('16', (1, 4, 64))
    """
    text = {"format": "attnfold-call-1"}
    for key, value in metadata.items():
        text[key] = _text_of(key, value)
    header: dict[str, Any] = {"__metadata__": text}
    blobs, at = [], 0
    for name, array in tensors.items():
        dtype, shape, data = _bytes_of(name, array)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 16 + 8)  # the tensors begin at a multiple of 16
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.writelines(blobs)


def load(path: str | PathLike[str]) -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    """Reads a file of `save`: its tensors (bfloat16 and float8 need ml_dtypes) and its metadata.

    Args:
        path: the file.

    Returns:
        arrays by name, and texts by key.

    Raises:
        ValueError: not a file of this kind.

    >>> import attnfold.call_file
    >>> attnfold.call_file.load("missing.safetensors")
    Traceback (most recent call last):
    FileNotFoundError: [Errno 2] No such file or directory: 'missing.safetensors'
    """
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack("<Q", data[:8]) if len(data) >= 8 else (0,)
    if not 0 < length <= len(data) - 8:
        raise ValueError(f"{path}: expected a safetensors header, got one of {length} bytes in a file of {len(data)}")
    try:
        header = dict(json.loads(data[8 : 8 + length]))
        metadata = dict(header.pop("__metadata__", {}))
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON object as header, got {error}") from error
    if metadata.get("format") != "attnfold-call-1":
        raise ValueError(f"{path}: metadata format: expected attnfold-call-1, got {metadata.get('format')!r}")
    rest = memoryview(data)[8 + length :]
    return {name: _array_of(f"{path}: {name}", entry, rest) for name, entry in header.items()}, metadata
