"""torch.ops.attnfold: fake kernels, torch.compile, and the bits of the functions."""

import attnfold
import attnfold.torch
import numpy as np
import pytest
import torch
from reference import Batch


@pytest.fixture
def batch(rng):
    b = Batch(rng, page_size=16)
    plan = b.plan()
    b.update(plan)
    return b, plan, [torch.from_numpy(x) for x in (b.q, b.k_cache, b.v_cache)]


def test_the_operators_pass_torchs_own_checks(batch):
    _, plan, (q, k, v) = batch
    one = torch.randn(3, 2, 64), torch.randn(9, 2, 64), torch.randn(9, 2, 64)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.attnfold.attention, (*one, True, 0.3), test_utils=checks)
    torch.library.opcheck(torch.ops.attnfold.run, (q, k, v, attnfold.torch.handle(plan)), test_utils=checks)
    pool = torch.zeros(2, 4, 2, 64), torch.zeros(2, 4, 2, 64)
    rows = torch.randn(2, 2, 64), torch.randn(2, 2, 64), torch.tensor([3, 6])
    torch.library.opcheck(torch.ops.attnfold.append, (*pool, *rows), test_utils=checks)
    o, lse = torch.ops.attnfold.attention(*one)
    torch.library.opcheck(torch.ops.attnfold.merge, ([o, o], [lse, lse]), test_utils=checks)


def test_compiled_layers_have_the_bits_of_eager_ones(batch):
    b, plan, (q, k, v) = batch
    handle = attnfold.torch.handle(plan)
    assert attnfold.torch.handle(plan) == handle
    slots = torch.tensor([int(b.block_table[0, 0]) * 16])

    def layer(q, k, v, new, slots, handle):
        torch.ops.attnfold.append(k, v, new, new * 2, slots)  # in place, in front of the read
        o, lse = torch.ops.attnfold.run(q, k, v, handle)
        merged, _ = torch.ops.attnfold.merge([o, o], [lse, lse])
        return merged.relu() + 1, lse

    compiled = torch.compile(layer, fullgraph=True)
    for i in range(3):
        new = torch.full((1, 2, 64), float(i))
        k1, v1, k2, v2 = k.clone(), v.clone(), k.clone(), v.clone()
        eager, traced = layer(q, k1, v1, new, slots, handle), compiled(q, k2, v2, new, slots, handle)
        for x, y in zip((*eager, k1, v1), (*traced, k2, v2)):
            assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))
    plan.update([0, 1], [1], [[int(b.block_table[0, 0])]])  # another step through the same graph, with another q
    eager = layer(q[:1], k1, v1, new, slots, handle)
    assert torch.equal(eager[0], compiled(q[:1], k1, v1, new, slots, handle)[0])


def test_a_handle_dies_with_its_plan(batch):
    _, _, (q, k, v) = batch
    handle = attnfold.torch.handle(attnfold.create(qo_heads=1, kv_heads=1, head_dim=64, max_batch=1, max_qo_rows=1,
                                                   max_kv_len=1))  # fmt: skip
    with pytest.raises(ValueError, match="plan: expected the handle of a plan that lives"):
        torch.ops.attnfold.run(q, k, v, handle)


def test_there_is_no_gradient():
    q, k, v = (torch.randn(2, 2, 64, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="no_grad"):
        torch.ops.attnfold.attention(q, k, v)
    assert np.isfinite(torch.ops.attnfold.attention(q.detach(), k.detach(), v.detach())[0]).all()
