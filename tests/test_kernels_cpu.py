"""The CPU kernels: right in every contract and setting, careful with what they are given, and honest about missing tools."""

import dataclasses
import itertools
import random
import subprocess
import sys

import pytest
import torch

from gdntune import arch
from gdntune.build import compile_objects
from gdntune.cases import floor_case, make_case
from gdntune.check import check_variant
from gdntune.errors import BuildError, ToolMissing
from gdntune.kernels import cpu_object, cpu_recurrent, cpu_recurrent_config, cpu_stream_config
from gdntune.kernels.reference import DTYPES
from gdntune.kernels.spec import DECODE_ARGUMENTS
from gdntune.problem import GATES, HEAD_SIZES_K, Contract, Problem, contract_fault
from gdntune.sol import floor_form
from gdntune.store import Store, object_spec

DEVICE = arch.detect("cpu")
DECODE, FLOOR = cpu_recurrent_config.KERNEL, cpu_stream_config.KERNEL
BY_OP = [(op, gate) for op, gates in GATES.items() for gate in gates]


def draw(seed: int) -> tuple[Contract, cpu_recurrent_config.Knobs]:
    """A legal contract and a legal setting at random."""
    pick = random.Random(seed)
    op = pick.choice(sorted(GATES))
    intermediate = pick.choice(("none", "dense", "indexed", "slots"))
    dtypes = {f"{x}_dtype": pick.choice(sorted(DTYPES)) for x in ("state", "input", "gate", "beta", "A_log", "dt_bias")}
    contract = Contract(
        op=op,
        gate=pick.choice(GATES[op]),
        tokens=pick.choice((1, 1, 2, 3, 5, 16)),
        K=pick.choice(HEAD_SIZES_K),
        V=pick.choice((32, 64, 96, 128)),
        layout=pick.choice(("k_last", "v_last")),
        beta=pick.choice(("logit", "given")),
        mode=pick.choice(("update", "frozen")),
        intermediate=intermediate,
        accepted=intermediate == "slots" and pick.random() < 0.5,
        pool=intermediate == "slots" or pick.random() < 0.6,
        ragged=pick.random() < 0.4,
        **dtypes,
    )
    knobs = itertools.product((16, 32, 64, 128), (1, 2, 4, 8), (4, 8, 16), (False, True), (False, True))
    legal = [s for s in itertools.starmap(cpu_recurrent_config.Knobs, knobs) if not DECODE.refuse(contract, s)]
    return contract, pick.choice(legal)


CONTRACTS = {c.key(): (c, DECODE.variant(s)) for c, s in map(draw, range(44))}
PLAIN = Contract(state_dtype="fp32", input_dtype="fp32", gate_dtype="fp32", beta_dtype="fp32")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with the objects of CONTRACTS, compiled side by side."""
    store = Store(tmp_path_factory.mktemp("objects"))
    wanted = [(object_spec(DECODE, c, v, DEVICE), DECODE.compiler) for c, v in CONTRACTS.values()]
    failed = [built.reason for built in compile_objects(wanted, store) if not built.ok]
    assert failed == []
    return store


@pytest.fixture(scope="module")
def function(store):
    """function(kernel, contract, knobs): a compiled function."""

    def get(kernel, contract, knobs):
        spec = object_spec(kernel, contract, kernel.variant(knobs), DEVICE)
        compile_objects([(spec, kernel.compiler)], store, jobs=1)
        return store.load([spec])[spec.key]

    return get


def test_the_contracts_meet_each_other():
    """Every pair of values of the fields that share code stands in CONTRACTS, and every contract is legal."""
    contracts = [c for c, _ in CONTRACTS.values()]
    assert [contract_fault(c) for c in contracts if contract_fault(c)] == []
    fields = ("layout", "state_dtype", "K", "intermediate", "mode", "ragged", "pool", "op")
    for one, two in itertools.combinations(fields, 2):
        met = {(getattr(c, one), getattr(c, two)) for c in contracts}
        possible = set(itertools.product({getattr(c, one) for c in contracts}, {getattr(c, two) for c in contracts}))
        # slots are those of a pool
        assert met >= possible - {("slots", False)}, (one, two, possible - met)


@pytest.mark.parametrize("name", CONTRACTS)
def test_right(name, store):
    """Against fp64, with padding, strided and int64 indices, padded pools, packed q, k, v, poisoned outputs and untouched slots."""
    contract, variant = CONTRACTS[name]
    spec = object_spec(DECODE, contract, variant, DEVICE)
    check_variant(store.load([spec])[spec.key], contract, seeds=(0,)).require()
