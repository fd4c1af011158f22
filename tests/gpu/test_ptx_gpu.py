"""The interpreter of tests/ptx against silicon: the same objects on the same cases."""

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from objects import interpreted_variants
from ptx import build, call

from gdntune.checking.cases import make_case, whole
from gdntune.checking.check import TOLERANCE, Truth, half_spacing, recipes
from gdntune.device.arch import detect
from gdntune.runtime.dispatch import runtime

pytestmark = pytest.mark.gpu

WRITTEN = ("output", "state", "intermediate")
# What rounds otherwise because of an approximation: one 16-bit value in ten at most.
SAME_BITS = 0.9


def compiled(contract, variant):
    """From the folder `ptx` of the bundle that tests/gpu/objects.py made, else compiled here."""
    spec = build.spec_of(contract, variant)
    bundle = os.environ.get("GDNTUNE_BUNDLE", "")
    if bundle and (found := build.find(spec, Path(bundle))):
        return found
    pytest.importorskip("cutlass", reason="no PTX in GDNTUNE_BUNDLE, and no compiler here")
    builder = build.Builder(workers=1)
    try:
        return builder.get(contract, variant)
    finally:
        builder.close()


def moved(case, device):
    """The same case on another device, strides and gaps included."""

    def copy(x):
        if not isinstance(x, torch.Tensor):
            return x
        return whole(x).to(device).as_strided(x.shape, x.stride(), x.storage_offset())

    return dataclasses.replace(case, **{name: copy(x) for name, x in case.tensors().items()})


def apart(mine, theirs, tokens):
    """Why two results differ by more than their arithmetic and a rounding each, or None."""
    for name in WRITTEN:
        a, b = getattr(mine, name), getattr(theirs, name)
        if a is None:
            continue
        if not torch.equal(a.isnan(), b.isnan()):
            return f"{name}: not the same places are NaN"
        x, y = a.double().nan_to_num(), b.double().nan_to_num()
        scale = x.abs() + 2 * x.pow(2).mean(-1, keepdim=True).sqrt()
        may = 2 * half_spacing(x, a.dtype) + 2 * TOLERANCE * tokens * scale
        if ((x - y).abs() > may).any():
            return f"{name}: {float((x - y).abs().max())} apart"
        if a.element_size() == 2 and float((x == y).double().mean()) < SAME_BITS:
            return f"{name}: {float((x == y).double().mean()):.1%} of the values are the same"
    return None


def test_the_interpreter_agrees_with_silicon():
    """Both are right by the check, and apart by no more than approximations and the order of sums
    explain.
    """
    if detect("cuda").arch != build.ARCH:
        pytest.skip(f"PTX is interpreted for {build.ARCH} alone")
    faults, seen = [], 0
    for contract, variant in interpreted_variants():
        mine = call.decode(compiled(contract, variant), contract)
        theirs = runtime("cuda").functions(contract, [variant])[0]
        problem, options = list(recipes(contract))[1]
        truth = Truth(make_case(problem, "cpu", 0, **options))
        interpreted, on_gpu = truth.before.clone(), moved(truth.before, "cuda")
        mine(*interpreted.arguments())
        theirs(*on_gpu.arguments())
        torch.cuda.synchronize()
        on_cpu = moved(on_gpu, "cpu")
        verdicts = [truth.judge(interpreted), truth.judge(on_cpu)]
        found = [v.worst for v in verdicts if not v.ok]
        if why := apart(interpreted, on_cpu, contract.tokens):
            found.append(why)
        faults += [f"{variant.id} {problem.key()}: {text}" for text in found]
        seen += 1
    assert seen and faults == []
