"""Packed calls hand headers to the compiled function instead of views: the same bits, each call its
own headers, and views where a function or a version of tvm_ffi takes none.
"""

import threading

import pytest
import torch
from test_tensors import packed as right_call

import gdntune
from gdntune.runtime import call, headers, packed

decode = gdntune.gated_delta_rule_packed_decode


@pytest.fixture(autouse=True)
def forgotten():
    """Each test looks at calls anew."""
    call.forget()
    yield
    call.forget()


def differing(seed):
    """A right call whose numbers are its own."""
    one = right_call()
    make = torch.Generator().manual_seed(seed)
    for name in ("mixed_qkv", "a", "b", "initial_state"):
        one[name] = torch.randn(one[name].shape, generator=make).to(one[name].dtype)
    return one


def by_views(monkeypatch, seeds):
    """What the calls give where there are no headers."""
    with monkeypatch.context() as patched:
        patched.setattr(packed, "header", lambda *a: None)
        made = [differing(s) for s in seeds]
        for one in made:
            decode(**one)
        assert not packed._CALLS.recent.adapt.aims
    call.forget()
    return made


def assert_same(left, right):
    """Outputs and states, bit by bit."""
    for name in ("output", "initial_state"):
        assert torch.equal(left[name], right[name]), name


def test_headers_give_the_bits_of_views(monkeypatch):
    """Call after call at other addresses, rows wider than they need be among them."""
    wanted = by_views(monkeypatch, range(5))
    decode(**right_call())
    unpack = packed._CALLS.recent.adapt
    assert unpack.aims
    for seed, right in enumerate(wanted):
        one = differing(seed)
        output = one.pop("output") if seed % 2 else None
        returned = decode(**one)
        assert_same({**one, "output": returned}, right)
        assert output is None or returned is not output
    assert unpack.aims and len(unpack.idle) == 1
    wide = differing(0)
    wide["mixed_qkv"] = torch.cat(
        [wide["mixed_qkv"], torch.full((2, 32), torch.nan).bfloat16()], 1
    )[:, :160]
    for _ in range(2):
        again = {n: x.clone() if n != "mixed_qkv" else x for n, x in wide.items()}
        decode(**again)
        assert_same(again, wanted[0])
    assert packed._CALLS.recent.adapt is not unpack


def test_threads_have_headers_of_their_own(monkeypatch):
    """Calls that are under way at once never share headers: the lock is not held while they run."""
    wanted = by_views(monkeypatch, range(4))
    decode(**right_call())
    wrong, end = [], threading.Barrier(4)

    def work(seed):
        end.wait()
        for _ in range(200):
            one = differing(seed)
            decode(**one)
            if not all(torch.equal(one[n], wanted[seed][n]) for n in ("output", "initial_state")):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_function_that_takes_no_headers(monkeypatch):
    """It gets views, from then on."""
    wanted = by_views(monkeypatch, [3])[0]
    decode(**right_call())
    record, tried = packed._CALLS.recent, []

    def function(*arguments):
        if not isinstance(arguments[1], torch.Tensor):
            tried.append(1)
            raise TypeError("expected a tensor")
        return record.function(*arguments)

    packed._CALLS.recent = record._replace(function=function)
    for _ in range(3):
        one = differing(3)
        decode(**one)
        assert_same(one, wanted)
    assert len(tried) == 1


def test_a_wrong_call_says_which_argument():
    """A refusal by the compiled function is in the caller's words, and right calls go on."""
    decode(**right_call())
    odd = right_call()
    odd["mixed_qkv"] = torch.zeros(2 * 160 + 1, dtype=torch.bfloat16)[1:].view(2, 160)
    with pytest.raises(gdntune.UnsupportedProblem, match=r"q has .* is not a multiple of 16 bytes"):
        decode(**odd)
    one = right_call()
    decode(**one)
    assert packed._CALLS.recent.adapt.aims


def test_another_layout_of_tvm_ffi_has_no_headers(monkeypatch):
    """Where the header is not where the C API says, there is none."""
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert headers.header(x, (3, 2), (1, 3)).tensor.shape == (3, 2)
    monkeypatch.setattr(headers, "_OBJECT_BYTES", 16)
    assert headers.header(x, (3, 2), (1, 3)) is None
