"""The CuTe kernels on the GPU: a random differential run over the whole contract, the awkward
sizes, CUDA graphs.

The differential run draws other problems each time and prints its seed; GDNTUNE_TEST_SEED draws the
same again.
"""

import os
import random
from collections import Counter

import msgspec
import pytest
import torch
from objects import DEPENDENT_CONTRACTS, FLOOR_CONTRACTS, differential_variants, floors

import gdntune
from gdntune import kernels
from gdntune.checking.cases import floor_case, make_case
from gdntune.checking.check import Truth, compare
from gdntune.device.arch import detect
from gdntune.problem import Contract, Problem
from gdntune.runtime.dispatch import runtime
from gdntune.sol import floor_form

pytestmark = pytest.mark.gpu

SEED = int(os.environ.get("GDNTUNE_TEST_SEED") or random.SystemRandom().randrange(2**31))
# Problems of the differential run for each op; the full run of a release sets more.
PROBLEMS = {
    "gdn_decode": int(os.environ.get("GDNTUNE_GDN_PROBLEMS", "300")),
    "kda_decode": int(os.environ.get("GDNTUNE_KDA_PROBLEMS", "150")),
}


def random_problem(contract: Contract, pick: random.Random) -> tuple[Problem, dict]:
    """Sizes and make_case's options for a contract."""
    H = pick.choice([1, 2, 3, 4])
    problem = Problem(contract, pick.choice([1, 2, 3, 5, 9]), H, H * pick.choice([1, 2, 3, 4]))
    options = {
        "index_dtype": pick.choice([torch.int32, torch.int64]),
        "strided_indices": pick.random() < 0.3,
        "slot_stride_pad": pick.choice([0, 0, 64]),
        "packed_qkv": pick.random() < 0.4,
        "strided_gates": pick.random() < 0.4,
        "extra_steps": pick.choice([0, 0, 2]),
        "extra_rows": pick.choice([0, 2]),
        "use_qk_l2norm": pick.random() < 0.7,
        "neg_eigval": pick.random() < 0.3,
        "parameters_by_head": pick.choice(["HV", "H"]) if contract.op == "kda_decode" else "HV",
        "scale": pick.choice([None, 0.5]),
        "permute": pick.random() < 0.8,
        "softplus_beta": pick.choice([1.0, 1.0, 1.5]),
        "softplus_threshold": pick.choice([20.0, 20.0, 0.5]),
        "lower_bound": pick.choice([-5.0, -1.0]),
        "gate_shift": 0.0 if contract.gate == "lower_bound" else pick.choice([0.0, 2.0]),
        "extreme_gates": pick.random() < 0.3,
    }
    if contract.pool:
        options |= {
            "padding": pick.choice([0.0, 0.3, 1.0]),
            "skipped": pick.choice([0.0, 0.3]),
            "out_of_range": pick.random() < 0.3,
            "split": pick.random() < 0.5,
            "null_index": pick.choice([-1, -1, 0]),
        }
    if contract.ragged:
        options |= {
            "lengths": [pick.randint(0, contract.tokens) for _ in range(problem.B)],
            "tail_rows": pick.choice([0, 3]),
        }
    return problem, options


def described(counts: dict[str, Counter]) -> str:
    """`K: 64 31, 96 20; ...`: how often each value was drawn."""
    return "; ".join(
        f"{name}: " + ", ".join(f"{v} {n}" for v, n in sorted(c.items(), key=str))
        for name, c in counts.items()
    )


def counted(counts: dict[str, Counter], values: dict) -> None:
    """Adds one problem's values."""
    for name, value in values.items():
        counts.setdefault(name, Counter())[str(value)] += 1


@pytest.mark.parametrize("op", PROBLEMS)
def test_random_differential_run(op, capsys):
    """Problems drawn from the whole contract agree with the fp64 reference, whatever the variant.
    Prints how often each value came.
    """
    device = detect("cuda")
    pairs = differential_variants(op)
    functions = [runtime("cuda").functions(c, [v])[0] for c, v in pairs]
    pick = random.Random(f"problems {op} {SEED}")
    faults, counts = [], {}
    for n in range(PROBLEMS[op]):
        at = n % len(pairs)
        contract, variant = pairs[at]
        problem, options = random_problem(contract, pick)
        sizes = {"kernel": variant.kernel, "group": problem.HV // problem.H, "B": problem.B}
        counted(
            counts,
            {
                **msgspec.structs.asdict(contract),
                **sizes,
                **{k: v for k, v in options.items() if k != "lengths"},
            },
        )
        truth = Truth(make_case(problem, "cuda", pick.randrange(2**31), **options))
        case = truth.before.clone()
        functions[at](*case.arguments())
        torch.cuda.synchronize()
        verdict = truth.judge(case)
        if not verdict.ok:
            faults.append(f"{n}: {variant.id} {problem.key()} {options}: {verdict.worst}")
    with capsys.disabled():
        print(
            f"\n{op}: {PROBLEMS[op]} problems over {len(pairs)} variants, GDNTUNE_TEST_SEED={SEED}\n{described(counts)}"
        )
    assert faults == [], (
        f"GDNTUNE_TEST_SEED={SEED}: {len(faults)} of {PROBLEMS[op]} on {device.name}: {faults[:3]}"
    )


def test_large_offsets():
    """Fault: bf16, intermediate states, B*T*HV >= 131072 (B=512, T=8, HV=64) was an illegal memory
    access: 32-bit offsets.
    """
    contract = Contract(tokens=8, intermediate="dense", mode="update")
    problem = Problem(contract, 512, 16, 64)
    function = runtime("cuda").bind(contract).at(problem.work_units)
    before = make_case(problem, "cuda", seed=1)
    after = before.clone()
    function(*after.arguments())
    compare(before, after, requests=[0, 1, 255, 510, 511]).require()


def test_high_slots():
    """Fault: slot index >= 4096 at HV=32, slot stride 540672: the wrong slot, or an illegal access."""
    contract = Contract()
    before = make_case(
        Problem(contract, 4, 16, 32), "cuda", seed=2, slots=4200, slot_stride_pad=16384
    )
    assert before.state.stride(0) == 540672
    index = torch.tensor([4199, 4096, 4095, 3], dtype=torch.int32, device="cuda")
    before.read_index.copy_(index)
    before.write_index.copy_(index)
    after = before.clone()
    runtime("cuda").bind(contract).at(128)(*after.arguments())
    compare(before, after).require()


@pytest.mark.parametrize("tokens", [1, 4])
def test_cuda_graph_replays_with_changed_indices(tokens):
    """Fault: a CUDA-graph padded batch: the captured call follows indices written later, padding
    (-1) included, on a side stream.
    """
    contract = Contract(tokens=tokens)
    bound = runtime("cuda").bind(contract)
    bound.load_all()
    before = make_case(Problem(contract, 6, 2, 4), "cuda", seed=3, slots=9)
    case = before.clone()
    function, stream, graph = bound.at(24), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    arguments = case.arguments()
    with torch.cuda.graph(graph, stream=stream):
        function(*arguments)
    index = torch.tensor([-1, 8, 2, -1, 0, 5], dtype=torch.int32, device="cuda")
    for c in (before, case):
        c.read_index.copy_(index)
        c.write_index.copy_(index)
    graph.replay()
    torch.cuda.synchronize()
    assert (case.output[0] == 0).all() and (case.output[3] == 0).all()
    live = [1, 2, 4, 5]
    compare(before, case, requests=live).require()


@pytest.mark.parametrize("tokens", [1, 4])
def test_same_inputs_same_bits(tokens):
    """Deterministic: the same inputs give the same bits, ten times."""
    contract = Contract(tokens=tokens)
    before = make_case(Problem(contract, 16, 4, 8), "cuda", seed=4)
    function = runtime("cuda").bind(contract).at(128)
    results = []
    for _ in range(10):
        case = before.clone()
        function(*case.arguments())
        results.append((case.output, case.state))
    assert all(torch.equal(o, results[0][0]) and torch.equal(s, results[0][1]) for o, s in results)


@pytest.mark.parametrize("contract", DEPENDENT_CONTRACTS, ids=Contract.key)
def test_calls_that_start_early_read_what_is_written_before_them(contract):
    """dependent_launch=True in a CUDA graph of calls that each read the last one's output and
    state: the bits of calls that wait for their turn.
    """
    first = make_case(Problem(contract, 5, 2, 4), "cuda", seed=6)

    def chained(**options):
        case, stream, graph = first.clone(), torch.cuda.Stream(), torch.cuda.CUDAGraph()

        def layers():
            v = case.v
            for _ in range(8):
                v = gdntune.gated_delta_rule_decode(
                    case.q, case.k, v, A_log=case.A_log, a=case.a, dt_bias=case.dt_bias, b=case.b,
                    initial_state=case.state, initial_state_indices=case.read_index, **options,
                )  # fmt: skip
            return v

        gdntune.prepare(contract, **options)
        with torch.cuda.graph(graph, stream=stream):
            output = layers()
        graph.replay()
        torch.cuda.synchronize()
        return output, case.state

    (output, state), (early, left) = chained(), chained(dependent_launch=True)
    torch.testing.assert_close(early, output, rtol=0, atol=0)
    torch.testing.assert_close(left, state, rtol=0, atol=0, equal_nan=True)
    named = first.read_index.long()
    assert not torch.equal(left[named], first.state[named])


@pytest.mark.parametrize("contract", FLOOR_CONTRACTS, ids=Contract.key)
def test_the_floor_moves_the_slots_that_are_named(contract):
    """By its index in its order, else from 0 on; what is not named stays, and what is moved is
    multiplied by the factor.
    """
    problem = Problem(contract, 5, 1, 2)
    for variant in floors(contract, detect("cuda")):
        state, slots, buffer, _, sink = floor_case(problem, floor_form(contract), "cuda")
        assert slots.tolist() != list(range(5))
        before, (function,) = state.clone(), runtime("cuda").functions(contract, [variant])
        function(state, slots[:3], None if buffer is None else buffer[:3], 0.5, sink)
        moved = slots[:3].long() if variant.knobs["indexed"] else torch.arange(3, device="cuda")
        rest = torch.tensor([n not in moved.tolist() for n in range(5)], device="cuda")
        assert torch.equal(
            state[moved], before[moved] * (0.5 if contract.mode == "update" else 1.0)
        )
        assert torch.equal(state[rest], before[rest])
        if buffer is not None:
            assert torch.equal(buffer[:3], (before[moved] * 0.5)[:, None].expand_as(buffer[:3]))
            assert buffer[3:].isnan().all()


def test_registry_serves_this_device():
    """The device at hand has kernels of both roles."""
    device = detect("cuda")
    assert kernels.serving(device, "decode") and kernels.serving(device, "floor")
