"""SGLang's plug-in: its dispatchers, built after the hooks are applied, call ours, and are right
against their own kernels; what is not served goes on.

With an unpacked wheel of SGLang in the folder that GDNTUNE_ENGINE_SOURCES names, its own dispatchers,
backends and registry of hooks are used too; elsewhere stand-ins with their recorded signatures.
"""

import importlib
import logging
import os
import sys
from pathlib import Path

import calls
import pytest
import stand_ins
import theirs
import torch

from gdntune.engines import sglang as ours
from gdntune.engines import substitute
from gdntune.errors import ToolMissing, UnsupportedProblem

SIZES = calls.Sizes()
SOURCES = Path(os.environ.get("GDNTUNE_ENGINE_SOURCES", "none"))


@pytest.fixture(params=["stand-in", "their own"])
def sglang(request, tmp_path, monkeypatch):
    """A package sglang that can be imported, and the plug-in as in a new process."""
    real = SOURCES if request.param == "their own" else None
    if real is not None and not (real / "sglang").exists():
        pytest.skip("no unpacked sglang: GDNTUNE_ENGINE_SOURCES names none")
    for name, value in (("_null", None), ("_hooked", False), ("_choice_added", False)):
        monkeypatch.setattr(ours, name, value)
    monkeypatch.delenv("GDNTUNE_SGLANG", raising=False)
    stand_ins.write_sglang(tmp_path, real)
    with stand_ins.importable(tmp_path, "sglang"):
        theirs.CALLS.clear()
        yield importlib.import_module
        substitute._said.clear()


def dispatcher(sglang, op, decode="triton", verify="triton"):
    """A dispatcher as SGLang builds it after its plug-ins are loaded."""
    sglang("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    backend = sglang(f"{ours.LINEAR}.utils").LinearAttnKernelBackend
    built = getattr(sglang(f"{ours.LINEAR}.{op}_backend"), f"{op.upper()}KernelDispatcher")
    return built(backend(decode), backend("triton"), backend(verify))


@pytest.mark.parametrize("backend", ["triton", "gdntune"])
@pytest.mark.parametrize("method", ["decode", "packed_decode", "target_verify"])
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_calls_reach_ours_and_are_right(op, method, backend, sglang, monkeypatch):
    """Outputs, pools and buffers of each method are what SGLang's own kernel gives, by ours alone;
    --linear-attn-decode-backend gdntune is a choice that its dispatchers can be built with.
    """
    arguments, reference = calls.of_sglang(op, SIZES)[method], calls.of_sglang(op, SIZES)[method]()
    plain = dispatcher(sglang, op)
    expected = getattr(plain, method)(**reference)
    assert theirs.CALLS[f"{op}.{method}"] == 1
    # the hooks are applied once in a process: this one had none yet
    sglang("sglang.srt.plugins.hook_registry").HookRegistry._patched.clear()
    monkeypatch.setenv("GDNTUNE_SGLANG", "1")
    ours.plugin()
    ours.plugin()
    choices = sglang("sglang.srt.arg_groups.choices").LINEAR_ATTN_KERNEL_BACKEND_CHOICES
    assert choices.count("gdntune") == 1
    built = dispatcher(sglang, op, decode=backend, verify=backend)
    call = arguments()
    output = getattr(built, method)(**call)
    assert theirs.CALLS[f"{op}.{method}"] == 1
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=2e-5)
    for name in ("ssm_states", "intermediate_states_buffer"):
        if name in call:
            torch.testing.assert_close(call[name], reference[name], atol=2e-6, rtol=2e-5)
    assert type(built.decode_kernel) is type(plain.decode_kernel)
    assert built.supports_packed_decode


def test_off_without_the_variable(sglang, monkeypatch):
    """Unless GDNTUNE_SGLANG is 1 the entry point registers nothing."""
    for off in ("", "0"):
        monkeypatch.setenv("GDNTUNE_SGLANG", off)
        ours.plugin()
    assert not sglang("sglang.srt.plugins.hook_registry").HookRegistry._hooks
    with pytest.raises(ValueError, match="Unsupported|supports"):
        dispatcher(sglang, "gdn", decode="gdntune")


def test_without_the_library(monkeypatch):
    """Fault: enable() in a process without the library was a bare ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "sglang.srt.arg_groups.choices", None)
    monkeypatch.setattr(ours, "_choice_added", False)
    with pytest.raises(ToolMissing, match="a process that has SGLang; install it beside gdntune"):
        ours.enable()
    assert ours._null is None


def test_disable(sglang):
    """Dispatchers that are built after disable() are SGLang's own again, gdntune refused included."""
    ours.enable()
    assert dispatcher(sglang, "gdn").decode_kernel.decode.counts.served == 0
    ours.disable()
    assert not hasattr(dispatcher(sglang, "gdn").decode_kernel.decode, "counts")
    with pytest.raises(ValueError):
        dispatcher(sglang, "gdn", decode="gdntune")


def test_what_was_chosen_stays(sglang, monkeypatch):
    """A backend that is not Triton keeps its kernel; trees of drafts stay with Triton."""
    ours.enable()
    module = sglang(f"{ours.LINEAR}.gdn_backend")
    built = dispatcher(sglang, "gdn")
    assert not hasattr(built.tree_verify_kernel.target_verify, "counts")
    assert not hasattr(built.extend_kernel.decode, "counts")
    if hasattr(module, "Other"):
        other = dispatcher(sglang, "gdn", decode="flashinfer")
        assert type(other.decode_kernel) is module.Other
        assert other.supports_packed_decode is False
        assert other.verify_kernel.target_verify.counts.served == 0


@pytest.mark.parametrize(
    ("method", "change", "said"),
    [
        ("packed_decode", {"replayssm_d": torch.zeros(1)}, "replayssm_d: a ring of drafts"),
        ("target_verify", {"cache_steps": 17}, "max_tokens=17"),
        ("decode", {"query_start_loc": SIZES.indices(0, 3, 4)}, "4 rows of 2 requests"),
        (
            "decode",
            {"ssm_states": SIZES.pool().double()},
            "initial_state has dtype",
        ),
    ],
)
def test_what_is_not_served_is_theirs(method, change, said, sglang, caplog, monkeypatch):
    """SGLang's kernel gets the same arguments, with one line of log for all such calls."""
    given = []
    monkeypatch.setattr(theirs, "sglang", lambda *call: given.append(call) or "theirs")
    ours.enable()
    built = dispatcher(sglang, "gdn")
    call = calls.of_sglang("gdn", SIZES)[method]() | change
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert getattr(built, method)(**call) == "theirs"
    assert len(given) == 3
    there = given[0][2]["kwargs"] | given[0][2]
    assert all(there[name] is x for name, x in call.items())
    lines = [r.message for r in caplog.records if r.name == "gdntune.engines"]
    assert len(lines) == 1
    assert said in lines[0]


def test_null_index_is_an_argument(sglang):
    """With null_index=0 slot 0 is padding, and another one afterwards is refused."""
    ours.enable(null_index=0)
    call = calls.of_sglang("gdn", SIZES)["packed_decode"]()
    output = dispatcher(sglang, "gdn").packed_decode(**call)
    assert output[0, 1].abs().max() == 0
    with pytest.raises(UnsupportedProblem, match=r"null_index=-1: since enable\(\) it is 0"):
        ours.enable()
