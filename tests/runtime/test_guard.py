"""Calls are known again by torch's guards: two forms of them, and none."""

import logging
import sys

import pytest
import torch
from test_tensors import CALLS, MADE

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import call, dispatch, guard, memory


@pytest.fixture(params=["manager", "tensor guards", "none"])
def form(request, monkeypatch):
    """What this torch has: all, or the guards of torch._dynamo unloaded, or neither."""
    call.forget()
    dispatch.warn_once.cache_clear()
    if request.param == "manager":
        import torch._dynamo.guards  # noqa: F401
    else:
        monkeypatch.delitem(sys.modules, "torch._dynamo.guards", raising=False)
    if request.param == "none":
        monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")
    yield request.param
    call.forget()


@pytest.mark.parametrize("name", CALLS)
def test_each_form_gives_the_call(name, form, monkeypatch, caplog):
    """Right in all forms, as often as it is called; without guards each call is looked at whole,
    which is said once.
    """
    function, make = CALLS[name]
    looked, first = [], call.first
    monkeypatch.setattr(call, "first", lambda *a: looked.append(1) or first(*a))
    made = []
    with caplog.at_level(logging.WARNING, "gdntune"):
        for _ in range(3):
            one = make()
            made.append((function(**one).clone(), one["initial_state"]))
    assert all(torch.equal(x, y) for m in made[1:] for x, y in zip(made[0], m, strict=True))
    assert len(looked) == (3 if form == "none" else 1)
    assert ["looked at whole" in r.message for r in caplog.records] == [True] * (form == "none")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [k for k in MADE if k != "subclass"])
@pytest.mark.parametrize("name", ["gdn", "packed"])
def test_each_form_refuses_what_is_no_memory(name, kind, form):
    """Fault: torch's guards end the process at a nested tensor."""
    function, make = CALLS[name]
    function(**make())
    for argument in make():
        wrong = make()
        wrong[argument] = MADE[kind](wrong[argument])
        with pytest.raises(UnsupportedProblem):
            function(**wrong)


@pytest.mark.parametrize("made", [guard._manager, guard._tensor_guards])
def test_a_guard_tells_tensors_apart(made):
    """Types, dtypes, ranks, the sizes that count, requires_grad and what is not given."""
    x, index = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int32)
    patterns = {
        0: guard.pattern(x, sizes=True),
        1: guard.pattern(index, sizes=False),
        3: guard.pattern(x, sizes=False, strides=True),
        2: guard.pattern(None, sizes=True),
    }
    fits = made((x, index, None, x.clone()), patterns)
    like = (x.clone(), torch.zeros(5, dtype=torch.int32), None, torch.zeros(7, 3))
    assert fits(like) and fits((torch.zeros(3, 2).T, *like[1:]))
    unlike = {
        0: (torch.zeros(3, 3), x.half(), torch.nn.Parameter(x), x.clone().requires_grad_(), "x", None),
        1: (index.long(), index[None]),
        2: (index,),
        3: (torch.zeros(3, 7).T, torch._neg_view(x)),
    }  # fmt: skip
    for i, others in unlike.items():
        for other in others:
            assert not fits((*like[:i], other, *like[i + 1 :])), (i, other)


def test_views_without_torchs_own(monkeypatch):
    """The stand-in for a torch without the views of its compiled programs is the same view."""
    x = torch.arange(20.0)[3:]
    for view in (memory.view, memory._as_strided):
        y = view(x, (2, 3), (5, 2), 1)
        assert y.tolist() == [[4.0, 6.0, 8.0], [9.0, 11.0, 13.0]]


def test_records_keep_no_tensor_alive():
    """A pool whose memory an engine gives back is not held by what is known of its calls."""
    import gc
    import weakref

    function, make = CALLS["packed"]
    one = make()
    function(**one)
    alive = [weakref.ref(x) for x in one.values()]
    del one
    gc.collect()
    assert not any(r() is not None for r in alive)
