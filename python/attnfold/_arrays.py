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
INT64 = 17  # codes of arrays.h that are no type of q, k or v
_MORE_NAMES = {INT64: "int64"}
_new_dtypes: dict[tuple[str, int], Any] = {}


def dtype_code(name: str, dtype: Any) -> int:
    """The code of a type that is given as a string, or as a dtype of numpy, ml_dtypes, torch or jax."""
    text = dtype if isinstance(dtype, str) else str(getattr(dtype, "__name__", dtype))
    code = _CODES.get(text.rpartition(".")[2])
    if code is None:
        try:
            code = _CODES.get(np.dtype(dtype).name)
        except (TypeError, ValueError):
            pass
    if code is None:
        raise ValueError(f"{name}: expected one of {', '.join(_NAMES)}, got {shown(dtype)}")
    return code


def dtype_name(name: str, dtype: Any) -> str:
    """The name of a type that is given in one of these ways."""
    return _NAMES[dtype_code(name, dtype)]


def shown(value: Any) -> str:
    """A value in an error: as it is written, or its type where that is long."""
    try:
        text = repr(value)
    except RecursionError:
        return type(value).__name__
    return text if len(text) <= 60 and "\n" not in text else type(value).__name__


def flag(name: str, value: Any) -> bool:
    """A bool; TypeError for what is none, such as a mask given in the place of `causal`."""
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name}: expected True or False, got {shown(value)}")


def int32_of(name: str, value: Any) -> int:
    """An int of 32 bits; TypeError for what is none, ValueError for a larger one."""
    return _core.int_of(name, value, -(2**31), 2**31 - 1)


def shape_of(name: str, array: Any) -> tuple[int, ...]:
    """The shape of an array; TypeError for what is none."""
    shape = getattr(array, "shape", None)
    return shape if isinstance(shape, tuple) else _core.describe(name, array)[0]


def dtype_of(name: str, array: Any) -> Any:
    """The type of an array's elements, as its framework or the extension calls it."""
    dtype = getattr(array, "dtype", None)
    return _core.describe(name, array)[1] if dtype is None or isinstance(array, type) else dtype


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


class _OnDevice:
    """An array of jax on a GPU that is being written.  `finish` makes it an array again, which jax takes for written as
    soon as the stream is that it names for such events: all calls on arrays of jax run on that one."""

    def __init__(self, array: Any) -> None:
        self._array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        return self._array.__dlpack__(stream=stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def _new_dtype(kind: str, code: int) -> Any:
    known = _new_dtypes.get((kind, code))
    if known is not None:
        return known
    name = _MORE_NAMES.get(code) or _NAMES[code]
    if kind == "torch":
        import torch

        made: Any = getattr(torch, name)
    elif code < 2 or code >= 5:
        made = np.dtype(name)
    else:
        try:
            import ml_dtypes
        except ImportError:
            raise NotImplementedError(f"o in {name}: numpy needs the package ml_dtypes for it") from None
        made = np.dtype(getattr(ml_dtypes, name))
    _new_dtypes[kind, code] = made
    return made


def new_array(like: Any, kind: str, shape: tuple[int, ...], code: int, name: str = "q") -> Any:
    """An array of `kind`, not initialised, where the argument `name` lies.  For jax: what `finish` makes an array of."""
    made: Any
    if kind == "numpy":
        return np.empty(shape, _new_dtype(kind, code))
    if kind == "torch":
        import torch

        return torch.empty(shape, dtype=_new_dtype(kind, code), device=like.device)
    if kind == "jax" and cuda_device(name, like) is None:
        return _Lent(shape, code)
    if kind == "jax":
        import jax

        return _OnDevice(jax.numpy.empty(shape, _new_dtype(kind, code), device=_device_of_jax(like)))
    import cupy

    with like.device:
        return cupy.empty(shape, _new_dtype(kind, code))


def finish(kind: str, array: Any) -> Any:
    """What the caller gets of a new array once it is written."""
    if isinstance(array, _OnDevice):
        import jax

        # Waits: jax cannot be told that a stream of others still reads q, k and v, and might give their memory away.
        return jax.dlpack.from_dlpack(array).block_until_ready()
    if isinstance(array, _Lent):
        import jax

        return jax.dlpack.from_dlpack(array)
    return array


def memory(like: Any, kind: str, num_bytes: int) -> Any:
    """Device memory for the calls of one stream, where `like` lies."""
    if kind == "torch":
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
    if kind == "jax":
        import jax

        return _OnDevice(jax.numpy.empty(num_bytes, "uint8", device=_device_of_jax(like)))
    import cupy

    with like.device:
        return cupy.empty(num_bytes, "uint8")


def zero_and(n: int, like: Any, kind: str) -> Any:
    """[0, n] as int32 where `like` lies on a GPU, made there: nothing waits for a copy."""
    if kind == "torch":
        import torch

        return torch.arange(2, dtype=torch.int32, device=like.device).mul_(n)
    if kind == "jax":
        import jax

        return jax.numpy.asarray([0, n], "int32", device=_device_of_jax(like))
    import cupy

    with like.device:
        return cupy.arange(2, dtype="int32") * np.int32(n)


def check_no_gradient(**arrays: Any) -> None:
    """attnfold has no backward pass: a tensor that wants a gradient is refused, not silently cut off."""
    for name, array in arrays.items():
        if array is None or getattr(array, "requires_grad", False) is not True:
            continue
        import torch

        if torch.is_grad_enabled():
            raise NotImplementedError(f"{name}: expected no gradient to be wanted (use torch.no_grad()), got requires_grad")


def _device_of_jax(array: Any) -> Any:
    (device,) = array.devices()
    return device


def cuda_device(name: str, array: Any) -> int | None:
    """The number of the CUDA device that an array lies on; None for the CPU's memory, lists too."""
    kind = framework(array)
    if kind == "torch":  # or a thing of torch that is no tensor, for the call to refuse
        return array.device.index if getattr(array, "is_cuda", False) is True else None
    if kind == "cupy":
        return int(array.device.id)
    if isinstance(array, (np.ndarray, type)) or not hasattr(array, "__dlpack_device__"):
        return None
    try:
        place, number = array.__dlpack_device__()
    except Exception as error:  # a deleted array of jax
        got = f"{type(array).__name__}: {error}"
        raise ValueError(f"{name}: expected an array whose memory DLPack can lend, got {got}") from error
    return int(number) if int(place) in (2, 13) else None  # kDLCUDA, kDLCUDAManaged


def place(name: str, array: Any, stream: int | None = None) -> dict[str, int]:
    """The fields of an execution where an array lies: of a GPU its number and `stream`, else the framework's current one."""
    device = cuda_device(name, array)
    if device is None:
        if stream is not None:
            raise ValueError(f"stream: expected None with memory of the CPU, got {stream!r}")
        return {}
    if stream is None:
        stream = current_stream(framework(array), array)
    return {"backend": 1, "device": device, "stream": stream or 0}


def current_stream(kind: str, array: Any) -> int | None:
    """The stream on which the framework works with arrays of this device; None for the default one."""
    if kind == "torch":
        import torch

        return int(torch.cuda.current_stream(array.device).cuda_stream)
    if kind == "cupy":
        import cupy

        with array.device:
            return int(cupy.cuda.get_current_stream().ptr)
    if kind == "jax":
        return int(_device_of_jax(array).get_stream_for_external_ready_events())
    return None
