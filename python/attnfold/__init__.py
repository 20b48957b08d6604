"""attnfold: attention for LLM serving.  The bits of a request's answer depend on that request alone.

    plan = attnfold.create(..)        once              shapes, types, mask, maxima
    plan.update(..)                   once per step     lengths and page tables
    o = plan.run(q, k, v)             once per layer    arrays in, arrays out, nothing copied

    attention(q, k, v, causal=False)  one request, one call
    append, slot_mapping, map_to_kernel_pages, copy_pages   the paged cache round it
    merge, convert_state              results over disjoint keys, of any engine

Arrays are numpy's (bfloat16 and float8 through ml_dtypes), torch's, jax's or cupy's, or of anything with `__dlpack__`;
answers are of q's framework.  Shapes are written [slowest, .., fastest].  Errors are ValueError (a bad argument, named),
NotImplementedError (sound, but not served here), MemoryError (workspace too small) and RuntimeError (device, internal).

    attnfold.torch                      operators for torch.compile
    attnfold.integrations.transformers  attn_implementation="attnfold"
    attnfold.integrations.vllm          VLLM_PLUGINS=attnfold
    attnfold.call_file                  attention calls as files, for `attnfold verify`
"""

from attnfold._attention import attention
from attnfold._cache import NO_PAGE, NO_SLOT, append, copy_pages, map_to_kernel_pages, slot_mapping
from attnfold._core import data_pointer as _data_pointer
from attnfold._core import kernels as _kernels
from attnfold._core import version as _version
from attnfold._plan import Array, Plan, create
from attnfold._state import State, convert_state, merge

__version__: str = _version()


def kernels() -> list[dict[str, str | bool]]:
    """The rows of the kernel table, in order of preference: name, isa, q_dtypes, kv_dtype, numerics_id, available, why_not.

    >>> import attnfold
    >>> any(row["available"] for row in attnfold.kernels())
    True
    """
    return _kernels()


def data_pointer(array: Array) -> int:
    """The address of an array's first element, as the engine sees it.

    >>> import attnfold, numpy as np
    >>> x = np.zeros(3)
    >>> attnfold.data_pointer(x) == x.ctypes.data
    True
    """
    return _data_pointer(array)


__all__ = [
    "NO_PAGE", "NO_SLOT", "Array", "Plan", "State", "append", "attention", "convert_state", "copy_pages", "create",
    "data_pointer", "kernels", "map_to_kernel_pages", "merge", "slot_mapping",
]  # fmt: skip
