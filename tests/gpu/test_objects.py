"""What is compiled ahead for a GPU machine, looked at without one."""

import random
from collections import Counter

import msgspec
import pytest
from objects import (
    DIFFERENTIAL_CONTRACTS,
    LEAST_OF_A_KERNEL,
    contracts,
    differential_variants,
    objects,
)
from test_kernels_gpu import random_problem

from gdntune import kernels
from gdntune.checking.cases import make_case
from gdntune.device import arch
from gdntune.problem import GATES, HEAD_SIZES_K, TYPES, contract_fault, problem_fault


@pytest.mark.parametrize("op", DIFFERENTIAL_CONTRACTS)
def test_the_differential_run_draws_from_the_whole_contract(op):
    """Every value of every field of the contract, every head size and T, and every kernel come at
    least thrice.
    """
    pairs = differential_variants(op)
    drawn = {
        f.name: Counter(getattr(c, f.name) for c, _ in pairs)
        for f in msgspec.structs.fields(pairs[0][0])
    }
    wanted = {
        **TYPES,
        "conv_window": ("ring",),
        "conv_input": ("packed",),
        # rings of corrections have contracts of their own: tests/runtime/test_rings.py
        "ring_dtype": ("fp32",),
        "ring_rounding": ("nearest",),
        "conv_width": (2, 3, 4),
        "op": (op,),
        "gate": GATES[op],
        "input_dtype": ("bf16", "fp16"),
        "accepted": (True, False),
    }
    wanted |= {"pool": (True, False), "ragged": (True, False), "tokens": (1, 2, 4, 8, 16)}
    wanted |= (
        {"K": HEAD_SIZES_K, "V": (32, 128, 192, 512)}
        if op == "gdn_decode"
        else {"K": (64, 128), "V": (64, 128)}
    )
    assert {n: v for n, values in wanted.items() for v in values if drawn[n][v] < 3} == {}
    served = Counter(v.kernel for _, v in pairs)
    others = [k.name for k in kernels.serving(arch.target("sm_90a"), "decode") if k.name in served]
    assert all(served[name] >= LEAST_OF_A_KERNEL for name in others)
    assert all(kernels.refuse(c, v) is None for c, v in pairs)


@pytest.mark.parametrize("op", DIFFERENTIAL_CONTRACTS)
def test_random_problems_are_legal(op):
    """Each contract's problems can be made."""
    pick = random.Random(1)
    for contract, _ in differential_variants(op):
        problem, options = random_problem(contract, pick)
        assert contract_fault(contract) is None and problem_fault(problem) is None
        if contract.K * contract.V * contract.tokens <= 2**14:
            assert make_case(problem, "cpu", 1, **options).output.isnan().all()


def test_every_object_once():
    """Each object of the tests is compiled once, under a name of its own, for one architecture."""
    found = objects(arch.target("sm_90a"))
    assert (
        len({spec.key for spec, _ in found}) == len({spec.name for spec, _ in found}) == len(found)
    )
    assert {spec.arch for spec, _ in found} == {"sm_90a"}
    assert len(set(contracts())) == len(contracts())
    assert any(spec.label == "flush" for spec, _ in found), (
        "a sweep reads its flush buffer by a kernel of its own"
    )
