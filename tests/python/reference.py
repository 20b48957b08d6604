"""Attention in plain numpy, in any precision, and the bound of promise P1."""

import numpy as np


def attention(q, k, v, visible, sm_scale, dtype=np.float64):
    """q [n, heads, d], k and v [m, kv_heads, d], visible [n, m] -> o, lse; a row that sees nothing is 0, -inf."""
    q, k, v = (np.asarray(x, np.float32).astype(dtype) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    s = np.einsum("qhd,khd->qhk", q, k) * dtype(sm_scale)
    s = np.where(visible[:, None, :], s, -np.inf)
    m = np.maximum(s.max(-1, keepdims=True, initial=-np.inf), np.finfo(dtype).min)
    p = np.exp(s - m)
    total = p.sum(-1, keepdims=True)
    o = np.einsum("qhk,khd->qhd", np.where(visible[:, None, :], p, 0), np.where(visible.any(0)[:, None, None], v, 0))
    with np.errstate(divide="ignore", invalid="ignore"):
        o = np.where(total > 0, o / total, 0)
        lse = np.where(total > 0, m + np.log(total), -np.inf)[..., 0]
    return o, lse


def causal(qo_len, kv_len, window_left=-1):
    p = np.arange(qo_len)[:, None] + kv_len - qo_len
    j = np.arange(kv_len)[None, :]
    return (j <= p) & ((window_left < 0) | (j >= p - window_left))


def check(o, lse, q, k, v, visible, sm_scale, weights=24):
    """P1: within twice the largest error of naive float32 on the request, 2^-20 of the scale, and o's own rounding; and that
    of weights of fewer than 24 bits, of which each moves its value by so much."""
    exact_o, exact_lse = attention(q, k, v, visible, sm_scale)
    naive_o, naive_lse = attention(q, k, v, visible, sm_scale, np.float32)
    seen = np.isfinite(exact_lse)
    scale = np.abs(np.asarray(v, np.float32)[visible.any(0)]).max(initial=0)
    bound = 2 * np.abs(naive_o - exact_o).max(initial=0) + 2.0**-20 * scale
    if weights < 24:
        size = np.abs(np.asarray(v, np.float32))
        bound = bound + 2.0**-weights * attention(q, k, size, visible, sm_scale)[0] + 2.0**-118
        if weights == 11:  # of float16, which below 2^-14 have fewer bits
            seen_by = np.einsum("qk,khd->qhd", visible.astype(float), size.astype(float))
            bound = bound + 2.0**-25 * seen_by.repeat(q.shape[1] // v.shape[1], axis=1)
    bits = {"float32": 24, "float16": 11, "bfloat16": 8}[str(o.dtype)]
    rounding = np.abs(exact_o) * 2.0**-bits * 1.001 if bits < 24 else 0
    assert (np.abs(np.asarray(o, np.float32) - exact_o) <= bound + rounding).all()
    if lse is not None:
        bound = 2 * np.abs(naive_lse[seen] - exact_lse[seen]).max(initial=0)
        bound = bound + 2.0**-20 * np.maximum(1, np.abs(exact_lse[seen]))
        assert (np.abs(lse[seen] - exact_lse[seen]) <= bound).all()
        assert (lse[~seen] == -np.inf).all()


def weight_bits(plan):
    """What a plan's row keeps of the weights that multiply v (docs/numerics.md)."""
    return {"cpu-dpbf16-2/bf16": 8, "cpu-amx-2/bf16": 8, "cuda-mma-1/bf16": 8, "cuda-mma-1/f16": 11}.get(plan.numerics_id, 24)


class Batch:
    """A ragged batch over a paged cache.  NaN stands in every slot and wild ids in every entry that nobody may read."""

    def __init__(self, rng, *, dtype=np.float32, heads=(6, 2), head_dim=64, page_size=None, layout="NHD", batch=None,
                 spare_pages=3):
        n = batch or int(rng.integers(1, 7))
        self.heads, self.head_dim, self.layout = heads, head_dim, layout
        self.page_size = page_size or int(rng.choice([1, 5, 16, 32]))
        self.kv_len = rng.integers(1, 400, n).astype(np.int32)
        self.qo_len = np.minimum(rng.choice([1, 1, 2, 7, 40], n), self.kv_len).astype(np.int32)
        self.qo_indptr = np.concatenate([[0], np.cumsum(self.qo_len)]).astype(np.int32)
        pages = -(-self.kv_len // self.page_size)
        self.num_pages = int(pages.sum()) + spare_pages
        free = list(rng.permutation(self.num_pages))
        self.block_table = np.full((n, int(pages.max()) + 2), 0x7FFFFFF0, np.int32)
        shape = (self.num_pages, self.page_size, heads[1], head_dim)
        self.k_cache = np.full(shape, np.nan, np.float32).astype(dtype)
        self.v_cache = np.full(shape, np.nan, np.float32).astype(dtype)
        self.q = rng.standard_normal((self.qo_indptr[-1], heads[0], head_dim), np.float32).astype(dtype)
        self.k, self.v = [], []
        for r in range(n):
            self.block_table[r, : pages[r]] = [free.pop() for _ in range(pages[r])]
            k, v = (rng.standard_normal((self.kv_len[r], heads[1], head_dim), np.float32).astype(dtype) for _ in "kv")
            at = np.arange(self.kv_len[r])
            page = self.block_table[r, at // self.page_size]
            self.k_cache[page, at % self.page_size], self.v_cache[page, at % self.page_size] = k, v
            self.k.append(k)
            self.v.append(v)
        if layout == "HND":
            self.k_cache, self.v_cache = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (self.k_cache, self.v_cache))

    def plan(self, **more):
        import attnfold

        arguments = dict(
            qo_heads=self.heads[0], kv_heads=self.heads[1], head_dim=self.head_dim, dtype=self.q.dtype,
            page_size=self.page_size, num_pages=self.num_pages, kv_layout=self.layout, max_batch=16, max_qo_rows=512,
            max_kv_len=1024,
        )  # fmt: skip
        return attnfold.create(**(arguments | more))

    def update(self, plan, requests=None):
        """The whole batch, or only some of its requests."""
        if requests is None:
            requests = range(len(self.kv_len))
        requests = list(requests)
        indptr = np.concatenate([[0], np.cumsum(self.qo_len[requests])]).astype(np.int32)
        plan.update(indptr, self.kv_len[requests], self.block_table[requests])

    def rows(self, r):
        return slice(self.qo_indptr[r], self.qo_indptr[r + 1])

    def check(self, o, lse, weights=24):
        for r in range(len(self.kv_len)):
            visible = causal(self.qo_len[r], self.kv_len[r])
            part = None if lse is None else lse[self.rows(r)]
            check(o[self.rows(r)], part, self.q[self.rows(r)], self.k[r], self.v[r], visible, self.head_dim**-0.5, weights)


def same_bits(a, b):
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
