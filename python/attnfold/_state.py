"""Merging attention results, and rewriting them from one engine's convention to another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from attnfold import _core
from attnfold._arrays import check_no_gradient, dtype_code, dtype_of, finish, flag, framework, new_array, place, shape_of
from attnfold._plan import Array, choice, execution_fields

_LSE_LAYOUTS = {"rows_heads": 0, "heads_rows": 1}
_LOG_BASES = {"e": 0, "2": 1}
_EMPTY = {"inf": 0, "nan": 1, "finite": 2}


@dataclass(frozen=True, slots=True)
class State:
    """An attention result over one set of keys, of any engine, and the convention it is in.

    o: [rows, heads, head_dim_vo].  lse: [rows, heads] float32, or [heads, rows] with lse_layout "heads_rows".
    log_base: "e" or "2".  empty: which lse marks a row without keys: "inf" (both infinities), "nan" (NaN too) or "finite"
    (empty_value too).  sink_included: lse counts a learned sink.  l: with it the result is not normalised.
    num_rows: -1 is all; else the other rows saw no key.

    >>> import attnfold, numpy as np
    >>> flash = attnfold.State(np.zeros((3, 2, 64), np.float32), np.zeros((2, 3), np.float32), lse_layout="heads_rows")
    """

    o: Array
    lse: Array
    lse_layout: str = "rows_heads"
    log_base: str = "e"
    empty: str = "inf"
    empty_value: float = 0.0
    sink_included: bool = False
    l: Array | None = None  # noqa: E741
    num_rows: int = -1


def _fields(name: str, state: State) -> tuple[Any, ...]:
    return (
        state.o, state.lse, choice(name + ".lse_layout", state.lse_layout, _LSE_LAYOUTS),
        choice(name + ".log_base", state.log_base, _LOG_BASES), choice(name + ".empty", state.empty, _EMPTY),
        state.empty_value, flag(name + ".sink_included", state.sink_included), state.l, state.num_rows,
    )  # fmt: skip


def _as_state(name: str, state: Any) -> State:
    if not isinstance(state, State):
        if not isinstance(state, (tuple, list)) or len(state) != 2:
            got = f"{len(state)} of them" if isinstance(state, (tuple, list)) else type(state).__name__
            raise TypeError(f"{name}: expected a State or (o, lse), got {got}")
        state = State(*state)
    check_no_gradient(**{name + ".o": state.o, name + ".lse": state.lse})
    return state


def merge(
    states: Sequence[State | tuple[Array, Array]],
    out: State | tuple[Array, Array] | None = None,
    *,
    row_mask: Array | None = None,
    num_threads: int | None = None,
    stream: int | None = None,
) -> tuple[Array, Array]:
    """Folds attention results over disjoint keys into one, as if computed over their union.

    Args:
        states: each (o, lse) in attnfold's own convention, or a `State` that says its own.
        out: where to; may be one of the states (in place).  None makes arrays like those of the first state.
        row_mask: [rows] bool or uint8; a row with 0 stays as it is in `out`, which has to be given then.
        num_threads: threads at most; the bits are the same.
        stream: of states on a GPU, 32 at most: a cudaStream_t as an int; None is the framework's current one.  The call
            only launches there.

    Returns:
        (o, lse).  An empty side leaves the other unchanged, bit for bit.

    Raises:
        ValueError: names the state and field; nothing is written then.

    >>> import attnfold, numpy as np
    >>> q, k, v = (np.random.rand(n, 2, 64).astype("float32") for n in (3, 10, 10))
    >>> whole = attnfold.attention(q, k, v)
    >>> parts = [attnfold.attention(q, k[s], v[s], return_lse=True) for s in (slice(0, 4), slice(4, 10))]
    >>> o, lse = attnfold.merge(parts)
    >>> bool(np.allclose(o, whole, atol=1e-6))
    True
    """
    try:
        given = list(states)
    except TypeError:
        raise TypeError(f"states: expected a list of states, got {type(states).__name__}") from None
    given = [_as_state(f"states[{i}]", s) for i, s in enumerate(given)]
    kind = "numpy"
    if out is None:
        if row_mask is not None:
            raise ValueError("out: expected a State beside row_mask, whose rows of 0 stay as they are, got None")
        if not given:
            raise ValueError("out: expected a State, with no states to make one like, got None")
        i = next((i for i, s in enumerate(given) if isinstance(s.num_rows, int) and s.num_rows < 0), 0)
        name, first = f"states[{i}].o", given[i]
        kind, shape = framework(first.o), tuple(shape_of(name, first.o))
        if len(shape) != 3:
            raise ValueError(f"{name}: expected shape [any, any, any], got {list(shape)}")
        o = new_array(first.o, kind, shape, dtype_code(name, dtype_of(name, first.o)), name)
        to = State(o, new_array(first.o, kind, shape[:2], 0, name))
    else:
        to = _as_state("out", out)
    where = place("states[0].o", given[0].o, stream) if given else place("out.o", to.o, stream)
    fields = [_fields(f"states[{i}]", s) for i, s in enumerate(given)]
    _core.merge(fields, _fields("out", to), row_mask, execution_fields(num_threads, **where))
    return finish(kind, to.o), finish(kind, to.lse)


def convert_state(
    from_state: State, to_state: State, *, num_threads: int | None = None, stream: int | None = None
) -> State:
    """Rewrites a result from the convention of `from_state` to that of `to_state`, into whose arrays it goes.

    Args:
        from_state: what an engine answered, and how it writes.
        to_state: arrays to write to and the convention wanted; may share arrays with from_state (in place).
        num_threads: threads at most.
        stream: as in `merge`.

    Returns:
        to_state.

    Raises:
        ValueError: names the field; nothing is written then.

    >>> import attnfold, numpy as np
    >>> o, lse = np.ones((3, 2, 64), np.float32), np.full((2, 3), 4.0, np.float32)
    >>> theirs = attnfold.State(o, lse, lse_layout="heads_rows", log_base="2")
    >>> ours = attnfold.State(np.empty_like(o), np.empty((3, 2), np.float32))
    >>> print(attnfold.convert_state(theirs, ours).lse[0])      # 4 ln 2
    [2.7725887 2.7725887]
    """
    for name, state in (("from", from_state), ("to", to_state)):
        if not isinstance(state, State):
            raise TypeError(f"{name}: expected a State, got {type(state).__name__}")
        check_no_gradient(**{name + ".o": state.o, name + ".lse": state.lse})
    execution = execution_fields(num_threads, **place("to.o", to_state.o, stream))
    _core.convert_state(_fields("from", from_state), _fields("to", to_state), execution)
    return to_state
