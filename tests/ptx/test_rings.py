"""The norm behind a ring in forms that a sample of its settings may miss: no GPU has run it yet."""

import pytest

from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.kernels import ring_norm_config
from gdntune.kernels.ring_config import Knobs
from gdntune.problem import Contract, Problem

from . import call

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

STEP = Contract(tokens=4, ring=16, norm="silu", norm_weight_dtype="bf16")
ONE = STEP.replace(tokens=1, norm="sigmoid", norm_weight_dtype="fp32", ring_dtype="bf16")
WIDE = STEP.replace(tokens=8, state_dtype="fp32", K=64, norm_weight_dtype="fp16")
FP16 = STEP.replace(tokens=6, V=64, K=64, layout="v_last", input_dtype="fp16", ring=32)
# what is padding, what is folded, and tensors with gaps
PADDED = {"padding": 0.4, "skipped": 0.2, "split": True, "slot_stride_pad": 64, "flush_min": 8}
GAPS = {**PADDED, "packed_qkv": True, "strided_gates": True, "null_index": 0}


@pytest.mark.parametrize(
    ("contract", "knobs", "options"),
    [
        (STEP, Knobs(32, 4, registers=96, shared=True, late=True, prefetch=2), GAPS),
        (STEP.replace(K=64), Knobs(16, 8, 256), {**PADDED, "extreme_gates": True}),
        (ONE, Knobs(32, 4, registers=128, late=True), GAPS),
        (WIDE, Knobs(16, 8, 256, registers=80, shared=True), PADDED),
        # warps without rows of their own normalise too
        (STEP.replace(V=32, K=64), Knobs(16, 2), GAPS),
        (FP16, Knobs(16, 2, 64, passes=2), PADDED | {"use_qk_l2norm": False}),
        (FP16, Knobs(16, 4), PADDED),
    ],
    ids=("T=4", "few heads", "T=1", "fp32, T=8", "V=32", "two passes", "V-last"),
)
def test_a_norm_behind_a_ring(contract, knobs, options, builder):
    """Right by the gate that every variant passes, with no access out of bounds and no race."""
    assert ring_norm_config.refuse(contract, knobs) is None
    truth = Truth(make_case(Problem(contract, 4, 1, 2), "cpu", 0, **options))
    case = truth.before.clone()
    compiled = builder.get(contract, ring_norm_config.KERNEL.variant(knobs))
    call.decode(compiled, contract)(*case.arguments())
    truth.judge(case).require()
