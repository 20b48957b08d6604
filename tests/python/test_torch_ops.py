"""torch.ops.attnfold: fake kernels, torch.compile, and the bits of the functions."""

import sys
import threading

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
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
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


def test_a_handle_names_one_plan_from_any_thread():
    def made():
        return attnfold.create(qo_heads=1, kv_heads=1, head_dim=64, max_batch=1, max_qo_rows=1, max_kv_len=1)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(100):
            plans = [made() for _ in range(8)]
            together, handles = threading.Barrier(16), {}

            def work(i):
                together.wait()
                handles[i] = attnfold.torch.handle(plans[i % 8])

            threads = [threading.Thread(target=work, args=(i,)) for i in range(16)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(set(handles.values())) == 8
            for i, handle in handles.items():
                assert attnfold.torch._plan_of(handle) is plans[i % 8]
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("thing", [None, 1, "plan", torch.ones(2)], ids=lambda x: type(x).__name__)
def test_a_handle_is_of_plans_alone(thing):
    with pytest.raises(TypeError, match=f"^plan: expected a Plan, got {type(thing).__name__}"):
        attnfold.torch.handle(thing)


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_a_gradient_is_not_cut_off_without_a_word(batch, backend):
    _, plan, (q, k, v) = batch
    handle, slots = attnfold.torch.handle(plan), torch.tensor([0])
    ops, new = torch.ops.attnfold, torch.ones(1, 2, 64)

    def append(x):
        ops.append(k.clone(), v.clone(), new * x.sum(), new, slots)
        return x * 2

    functions = dict(
        attention=lambda x: (x * 2).sum() + ops.attention(x, x, x)[0].sum(),
        run=lambda x: (x * 2).sum() + ops.run(x, k, v, handle)[0].sum(),
        append=append,
        merge=lambda x: (x * 2).sum() + ops.merge([x, x * 3], [x[..., 0].detach()] * 2)[0].sum(),
    )
    for name, function in functions.items():
        torch._dynamo.reset()
        called = torch.compile(function, backend=backend) if backend else function
        x = q.clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"attnfold::{name}: expected no gradient to be wanted"):
            called(x).sum().backward()
        assert x.grad is None
        for off in (torch.no_grad(), torch.inference_mode()):
            with off:
                assert torch.isfinite(called(x)).all()
        assert torch.isfinite(called(x.detach())).all()


def test_there_is_no_gradient():
    q, k, v = (torch.randn(2, 2, 64, requires_grad=True) for _ in range(3))
    with pytest.raises(NotImplementedError, match="no_grad"):
        torch.ops.attnfold.attention(q, k, v)
    assert np.isfinite(torch.ops.attnfold.attention(q.detach(), k.detach(), v.detach())[0]).all()
