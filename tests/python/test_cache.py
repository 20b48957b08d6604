"""The cache round a call: slots, appending with conversion, tables of pages, copies of pages."""

import attnfold
import ml_dtypes
import numpy as np
import pytest
import torch
from reference import same_bits


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("kind", [lambda x: x, torch.from_numpy])
def test_a_prompt_appended_in_pieces_is_the_cache_of_a_whole(rng, layout, kind):
    k, v = (rng.standard_normal((23, 2, 64), np.float32) for _ in "kv")
    table = np.array([[5, 0, 3, 2, 7, 1]], np.int32)
    shape = (8, 4, 2, 64) if layout == "NHD" else (8, 2, 4, 64)
    k_cache, v_cache = (np.full(shape, np.nan, np.float32) for _ in "kv")
    for begin, end in ((0, 10), (10, 11), (11, 23)):
        slots = attnfold.slot_mapping([0, end - begin], [end], table, page_size=4, num_pages=8)
        attnfold.append(kind(k_cache), kind(v_cache), kind(k[begin:end]), kind(v[begin:end]), slots, kv_layout=layout)
    at = np.arange(23)
    pages = k_cache if layout == "NHD" else k_cache.swapaxes(1, 2)
    assert same_bits(pages[table[0, at // 4], at % 4], k)
    assert np.isnan(pages[[4, 6]]).all() and np.isnan(pages[1, 3]).all()  # nothing else was written


def test_appending_rounds_to_the_type_of_the_pool(rng):
    k, v = (rng.standard_normal((3, 2, 64), np.float32) for _ in "kv")
    pool = [np.zeros((2, 4, 2, 64), ml_dtypes.bfloat16) for _ in "kv"]
    attnfold.append(*pool, k, v, [7, -1, 0])
    assert same_bits(pool[0][1, 3], k[0].astype(ml_dtypes.bfloat16))
    assert same_bits(pool[1][0, 0], v[2].astype(ml_dtypes.bfloat16))
    eight = [np.zeros((2, 4, 2, 64), np.int8) for _ in "kv"]
    scales = [np.zeros((2, 4, 2), np.float32) for _ in "kv"]
    attnfold.append(*eight, k, v, [7, -1, 0], k_scale_kind="per_token", v_scale_kind="per_token", k_scale=scales[0],
                    v_scale=scales[1])  # fmt: skip
    assert np.allclose(eight[0][1, 3] * scales[0][1, 3][:, None], k[0], atol=0.02)
    assert scales[0][0, 1, 0] == 0


def test_slots_of_given_positions_and_padding():
    slots = attnfold.slot_mapping([0, 2, 3], None, [[1, 2], [0, 0]], page_size=4, num_pages=3, positions=[7, 0, 3],
                                  num_slots=5)  # fmt: skip
    assert slots.tolist() == [11, 4, 3, attnfold.NO_SLOT, attnfold.NO_SLOT]


def test_tables_of_blocks_become_tables_of_pages():
    pages = attnfold.map_to_kernel_pages([[3, 1], [2, -1]], block_size=8, page_size=4, num_blocks=4, used=[2, 1])
    assert pages.tolist() == [[6, 7, 2, 3], [4, 5, -1, -1]]


def test_copies_of_pages_take_effect_in_order(rng):
    k, v = (rng.standard_normal((4, 2, 1, 64), np.float32) for _ in "kv")
    first = k[0].copy()
    attnfold.copy_pages((k, v), (k, v), [[0, 1], [1, 2]])
    assert same_bits(k[1], first) and same_bits(k[2], first)


def test_errors_name_the_argument_and_nothing_is_written(rng):
    k_cache, v_cache = (np.zeros((2, 4, 2, 64), np.float32) for _ in "kv")
    k, v = (np.ones((2, 2, 64), np.float32) for _ in "kv")
    read_only = np.broadcast_to(k_cache, k_cache.shape)
    for message, call in (
        ("slots[1]", lambda: attnfold.append(k_cache, v_cache, k, v, [0, 8])),
        ("k: expected shape [3, 2, 64], got [2, 2, 64]", lambda: attnfold.append(k_cache, v_cache, k, v, [0, 1, 2])),
        ("v_cache: expected shape", lambda: attnfold.append(k_cache, v_cache[:1], k, v, [0, 1])),
        ("k_cache: expected an array that may be written", lambda: attnfold.append(read_only, v_cache, k, v, [0, 1])),
        ("kv_layout: expected NHD or HND", lambda: attnfold.append(k_cache, v_cache, k, v, [0, 1], kv_layout="BHSD")),
        ("pairs", lambda: attnfold.copy_pages((k_cache, v_cache), (k_cache, v_cache), [[0, 2]])),
        ("block_table", lambda: attnfold.slot_mapping([0, 1], [9], [[0, 1]], page_size=4, num_pages=2)),
        ("page_size", lambda: attnfold.map_to_kernel_pages([[0]], block_size=4, page_size=3, num_blocks=1)),
    ):
        with pytest.raises(ValueError) as e:
            call()
        assert message in str(e.value)
        assert (k_cache == 0).all() and (v_cache == 0).all()
