"""Types by name, and new arrays of the framework that an input came from."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from attnfold import _core

_CODES = {
    "float32": 0, "f32": 0, "float16": 1, "f16": 1, "half": 1, "bfloat16": 2, "bf16": 2,
    "float8_e4m3fn": 3, "e4m3": 3, "float8_e5m2": 4, "e5m2": 4, "int8": 5, "i8": 5,
}  # fmt: skip
_NAMES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
_new_dtypes: dict[tuple[str, int], Any] = {}


def dtype_code(name: str, dtype: Any) -> int:
    """The code of a type that is given as a string, or as a dtype of numpy, ml_dtypes, torch or jax."""
    text = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype))
    code = _CODES.get(text.rpartition(".")[2])
    if code is None:
        try:
            code = _CODES.get(np.dtype(dtype).name)
        except TypeError:
            pass
    if code is None:
        raise ValueError(f"{name}: expected one of {', '.join(_NAMES)}, got {dtype!r}")
    return code


def framework(array: Any) -> str:
    """numpy, torch, jax or cupy; arrays of others answer in numpy."""
    if isinstance(array, np.ndarray):
        return "numpy"
    for kind in type(array).__mro__:
        root = kind.__module__.partition(".")[0]
        if root in ("torch", "cupy"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
    return "numpy"


class _Lent:
    """Memory of the extension, for DLPack: jax takes it over without a copy."""

    def __init__(self, shape: Sequence[int], code: int) -> None:
        self._capsule = _core.new_dlpack(tuple(shape), code)

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _new_dtype(kind: str, code: int) -> Any:
    known = _new_dtypes.get((kind, code))
    if known is not None:
        return known
    name = _NAMES[code]
    if kind == "torch":
        import torch

        made: Any = getattr(torch, name)
    elif code < 2 or code == 5:
        made = np.dtype(name)
    else:
        try:
            import ml_dtypes
        except ImportError:
            raise NotImplementedError(f"o in {name}: numpy needs the package ml_dtypes for it") from None
        made = np.dtype(getattr(ml_dtypes, name))
    _new_dtypes[kind, code] = made
    return made


def new_array(like: Any, kind: str, shape: tuple[int, ...], code: int) -> Any:
    """An array of `kind`, not initialised, where `like` lies.  For jax: what `finish` makes an array of."""
    if kind == "numpy":
        return np.empty(shape, _new_dtype(kind, code))
    if kind == "torch":
        import torch

        return torch.empty(shape, dtype=_new_dtype(kind, code), device=like.device)
    if kind == "jax":
        return _Lent(shape, code)
    import cupy

    return cupy.empty(shape, _new_dtype(kind, code))


def finish(kind: str, array: Any) -> Any:
    """What the caller gets of a new array once it is written."""
    if isinstance(array, _Lent):
        import jax

        return jax.dlpack.from_dlpack(array)
    return array


def check_no_gradient(name: str, array: Any) -> None:
    """attnfold has no backward pass: a tensor that wants a gradient is refused, not silently cut off."""
    if array is not None and getattr(array, "requires_grad", False):
        import torch

        if torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: expected no gradient to be wanted (use torch.no_grad()), got requires_grad")


def current_stream(kind: str, array: Any) -> int | None:
    """The stream on which the framework works with arrays of this device; None for the default one."""
    if kind == "torch":
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    if kind == "cupy":
        import cupy

        return int(cupy.cuda.get_current_stream().ptr)
    if kind == "jax":
        raise NotImplementedError("jax on CUDA: its streams cannot be joined; pass torch or cupy arrays")
    return None
