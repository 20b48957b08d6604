"""Merging and converting results, on numpy and torch."""

import attnfold
import numpy as np
import pytest
import torch
from reference import check, same_bits


def parts_of(rng, cuts, kind=lambda x: x):
    q, k, v = (rng.standard_normal((n, 2, 64), np.float32) for n in (5, 90, 90))
    parts = [
        attnfold.attention(kind(q), kind(k[a:b]), kind(v[a:b]), return_lse=True) for a, b in zip(cuts, cuts[1:])
    ]
    return q, k, v, parts


@pytest.mark.parametrize("kind", [lambda x: x, torch.from_numpy])
def test_parts_merge_to_the_whole(rng, kind):
    q, k, v, parts = parts_of(rng, [0, 20, 21, 90], kind)
    o, lse = attnfold.merge(parts)
    assert type(o) is type(parts[0][0])
    check(np.asarray(o), np.asarray(lse), q, k, v, np.ones((5, 90), bool), 0.125)


def test_an_empty_side_changes_nothing_and_its_nan_is_not_used(rng):
    *_, (one,) = parts_of(rng, [0, 90])
    nothing = np.full_like(one[0], np.nan), np.full_like(one[1], -np.inf)
    for states in ([one, nothing], [nothing, one]):
        o, lse = attnfold.merge(states, num_threads=2)
        assert same_bits(o, one[0]) and same_bits(lse, one[1])
    o, lse = attnfold.merge([], out=(np.full_like(one[0], 7), np.full_like(one[1], 7)))
    assert (o == 0).all() and (lse == -np.inf).all()


def test_in_place_with_a_mask_of_rows(rng):
    *_, (a, b) = parts_of(rng, [0, 40, 90])
    expected = attnfold.merge([a, b])
    before = a[0].copy()
    mask = np.array([1, 0, 1, 0, 0], bool)
    attnfold.merge([a, b], out=a, row_mask=mask)
    assert same_bits(a[0][mask], expected[0][mask]) and same_bits(a[0][~mask], before[~mask])


def test_a_state_in_another_convention(rng):
    *_, (a, b) = parts_of(rng, [0, 40, 90])
    expected = attnfold.merge([a, b])
    theirs = attnfold.State(b[0], np.ascontiguousarray(b[1].T), lse_layout="heads_rows")
    o, lse = attnfold.merge([a, theirs])
    assert same_bits(o, expected[0]) and same_bits(lse, expected[1])
    base2 = attnfold.convert_state(
        attnfold.State(*a), attnfold.State(np.empty_like(a[0]), np.empty_like(a[1]), log_base="2")
    )
    assert np.allclose(base2.lse, a[1] / np.log(2), rtol=1e-6) and same_bits(base2.o, a[0])


def test_a_prefix_of_the_first_rows_only(rng):
    *_, (a, b) = parts_of(rng, [0, 40, 90])
    o, lse = attnfold.merge([attnfold.State(a[0][:2], a[1][:2], num_rows=2), b])
    both = attnfold.merge([a, b])
    assert same_bits(o[:2], both[0][:2]) and same_bits(o[2:], b[0][2:]) and same_bits(lse[2:], b[1][2:])


def test_a_bad_state_is_named(rng):
    *_, (a, b) = parts_of(rng, [0, 40, 90])
    with pytest.raises(ValueError, match=r"states\[1\].o: expected shape \[5, 2, 64\], got \[4, 2, 64\]"):
        attnfold.merge([a, (b[0][:4], b[1])])
    with pytest.raises(ValueError, match=r"states\[1\].lse: expected shape"):
        attnfold.merge([a, (b[0], b[1].T)])
    with pytest.raises(ValueError, match="log_base: expected e or 2, got '10'"):
        attnfold.merge([a, attnfold.State(*b, log_base="10")])
    with pytest.raises(ValueError, match="out: expected a State"):
        attnfold.merge([])
