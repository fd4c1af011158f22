"""The CPU kernels: right in every contract and setting, careful with what they are given, and
honest about missing tools.
"""

import dataclasses
import functools
import itertools
import random
import subprocess

import msgspec
import pytest
import torch
import tvm_ffi

from gdntune.checking.cases import floor_case, make_case
from gdntune.checking.check import check_variant
from gdntune.checking.reference import DTYPES
from gdntune.device import arch
from gdntune.errors import BuildError, ToolMissing
from gdntune.kernels import (
    cpu_object,
    cpu_recurrent,
    cpu_recurrent_config,
    cpu_stream,
    cpu_stream_config,
)
from gdntune.kernels.spec import DECODE_ARGUMENTS, Variant
from gdntune.objects.build import compile_objects
from gdntune.objects.store import Store, link, object_spec
from gdntune.problem import GATES, HEAD_SIZES_K, Contract, Problem
from gdntune.sol import floor_form

DEVICE = arch.detect("cpu")
DECODE, FLOOR = cpu_recurrent_config.KERNEL, cpu_stream_config.KERNEL
BY_OP = [(op, gate) for op, gates in GATES.items() for gate in gates]


@functools.cache
def draw(seed: int) -> tuple[Contract, cpu_recurrent_config.Knobs]:
    """A legal contract and a legal setting at random."""
    pick = random.Random(seed)
    op = pick.choice(sorted(GATES))
    intermediate = pick.choice(("none", "dense", "indexed", "slots"))
    dtypes = {
        f"{x}_dtype": pick.choice(sorted(DTYPES))
        for x in ("state", "input", "gate", "beta", "A_log", "dt_bias")
    }
    contract = Contract(
        op=op,
        gate=pick.choice(GATES[op]),
        tokens=pick.choice((1, 1, 2, 3, 4, 9)),
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
    knobs = itertools.product(
        (16, 32, 64, 128), (1, 2, 4, 8), (4, 8, 16), (False, True), (False, True)
    )
    legal = [
        s
        for s in itertools.starmap(cpu_recurrent_config.Knobs, knobs)
        if not DECODE.refuse(contract, s)
    ]
    return contract, pick.choice(legal)


FIELDS = (
    "layout",
    "state_dtype",
    "K",
    "intermediate",
    "mode",
    "ragged",
    "pool",
    "gate",
    "beta",
    "tokens",
)


def covering() -> dict[str, tuple[Contract, Variant]]:
    """Contracts, each with a variant, in which every two values of FIELDS meet; greedily, so some
    thirty suffice.
    """
    met, found = set(), {}
    for least in (12, 8, 4, 2, 1):
        for seed in range(400):
            contract, knobs = draw(seed)
            pairs = {
                (x, y, getattr(contract, x), getattr(contract, y))
                for x, y in itertools.combinations(FIELDS, 2)
            }
            if len(pairs - met) >= least:
                met |= pairs
                found[contract.key()] = contract, DECODE.variant(knobs)
    return found


CONTRACTS = covering()
PLAIN = Contract(state_dtype="fp32", input_dtype="fp32", gate_dtype="fp32", beta_dtype="fp32")


@pytest.fixture(scope="module")
def store():
    """A store with the objects of CONTRACTS, compiled side by side."""
    store = Store()
    wanted = [(object_spec(DECODE, c, v, DEVICE), DECODE.compiler) for c, v in CONTRACTS.values()]
    failed = [built.reason for built in compile_objects(wanted, store) if not built.ok]
    assert failed == []
    return store


@pytest.fixture(scope="module")
def function(tmp_path_factory):
    """function(kernel, contract, knobs): a compiled function, made in this process."""
    folder, made = tmp_path_factory.mktemp("functions"), {}

    def get(kernel, contract, knobs):
        compiler = cpu_recurrent.compile if kernel is DECODE else cpu_stream.compile
        key = kernel.name, tuple(sorted(kernel.facts(contract).items())), knobs
        if key not in made:
            name = f"f{len(made)}"
            file = compiler(kernel.facts(contract), dataclasses.asdict(knobs), name, folder)
            link([file], folder / f"{name}.so", "cpu")
            made[key] = tvm_ffi.load_module(str(folder / f"{name}.so"))[name]
        return made[key]

    return get


@pytest.mark.parametrize("key", CONTRACTS, ids=list(CONTRACTS))
def test_right(key, store):
    """Against fp64, with padding, strided and int64 indices, padded pools, packed q, k, v, poisoned
    outputs and untouched slots.
    """
    contract, variant = CONTRACTS[key]
    spec = object_spec(DECODE, contract, variant, DEVICE)
    check_variant(store.load([spec])[spec.key], contract, seeds=(0,)).require()


# A small call that is easy to spoil: B=2, T=2, H=1, HV=2, with a buffer of intermediate states.
SPOILT = PLAIN.replace(tokens=2, K=64, V=32, intermediate="indexed", ragged=False)
SPOILT_KNOBS = cpu_recurrent_config.Knobs(32, 4, 16)
FAULTS = {
    "q": (
        lambda q: q[..., :32],
        ValueError,
        r"q: shape \[2, 2, 1, 32\].*expected \[B, T, H, K\] = \[any, any, any, 64\]",
    ),
    "k": (lambda k: k[:1], ValueError, r"k: shape \[1, 2, 1, 64\].*\[2, 2, 1, 64\]"),
    "v": (
        lambda v: v.transpose(2, 3).contiguous().transpose(2, 3),
        ValueError,
        "v: a last stride of 2",
    ),
    "a": (lambda a: a.double(), TypeError, "a: dtype code 2 of 64 bits.*float32 bfloat16 float16"),
    "b": (lambda b: None, TypeError, r"b: None was given, expected a tensor \[B, T, HV\]"),
    "A_log": (
        lambda x: x.repeat(2),
        ValueError,
        "A_log: 4 heads were given, expected HV=2 or H=1",
    ),
    "dt_bias": (lambda x: x[None], ValueError, "dt_bias: shape"),
    "state": (
        lambda s: s.bfloat16(),
        TypeError,
        "state: dtype code 4 of 16 bits was given, expected float32",
    ),
    "read_index": (
        lambda x: x.long(),
        TypeError,
        "read_index: dtype code 0 of 64 bits.*int64 as its low words",
    ),
    "write_index": (lambda x: None, TypeError, "write_index: None"),
    "accepted": (
        lambda x: torch.ones(2, dtype=torch.int32),
        TypeError,
        "accepted: a tensor was given",
    ),
    "slot_index": (lambda x: x[:1], ValueError, r"slot_index: shape \[1\]"),
    "intermediate": (
        lambda x: x[:, :1],
        ValueError,
        "intermediate: 1 steps were given, expected T=2 or more",
    ),
    "output": (lambda x: x[:, :1], ValueError, "output: shape"),
    "scale": (lambda x: None, TypeError, "scale: no number"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_wrong_arguments_are_refused_by_name(name, function):
    """Fault: a tensor of another dtype, shape or stride was read as if it were the right one. The
    message says what is expected.
    """
    case = make_case(Problem(SPOILT, 2, 1, 2))
    spoil, error, message = FAULTS[name]
    arguments = list(case.arguments())
    place = DECODE_ARGUMENTS.index(name)
    arguments[place] = spoil(arguments[place])
    with pytest.raises(error, match=message):
        function(DECODE, SPOILT, SPOILT_KNOBS)(*arguments)
    assert case.output.isnan().all()


def test_a_wrong_number_of_arguments_is_refused(function):
    """The convention has 22 arguments."""
    with pytest.raises(
        TypeError, match="3 arguments were given, expected 22: state to use_qk_l2norm"
    ):
        function(DECODE, SPOILT, SPOILT_KNOBS)(1, 2, 3)


def test_a_head_in_pieces_is_refused(function):
    """Rows of a head must lie side by side: a view of a larger state is not copied behind the
    caller's back.
    """
    case = make_case(Problem(SPOILT, 2, 1, 2))
    wide = torch.zeros(2, 2, 32, 128)[..., :64]
    with pytest.raises(ValueError, match="state: rows 128 elements apart were given, expected 64"):
        function(DECODE, SPOILT, SPOILT_KNOBS)(*dataclasses.replace(case, state=wide).arguments())


def test_no_requests_is_no_work(function):
    """B=0 returns at once and touches nothing."""
    case = make_case(Problem(SPOILT, 2, 1, 2))
    nobody = {
        x: getattr(case, x)[:0]
        for x in "q k v a b output read_index write_index slot_index".split()
    }
    before = case.clone()
    function(DECODE, SPOILT, SPOILT_KNOBS)(*dataclasses.replace(case, **nobody).arguments())
    assert torch.equal(case.state, before.state)


def test_offsets_are_64_bit(function):
    """Fault: a slot at 2^31 elements and beyond wrapped a 32-bit offset into another slot. Only the
    pages in use become memory.
    """
    stride = 2**31 + 64
    case = make_case(Problem(SPOILT, 2, 1, 2), permute=False)
    try:
        room = torch.empty(2 * stride)
    except RuntimeError as error:
        pytest.skip(f"no 16 GiB of addresses: {error}")
    far = dataclasses.replace(
        case, state=room.as_strided(case.state.shape, (stride, *case.state.stride()[1:]))
    )
    far.state.copy_(case.state)
    far.output = torch.empty_like(case.output)
    run = function(DECODE, SPOILT, SPOILT_KNOBS)
    run(*case.arguments())
    run(*far.arguments())
    assert torch.equal(far.state, case.state)
    assert torch.equal(far.output, case.output)


def gate_error(function, contract: Contract, x: torch.Tensor, A_log: float, **options) -> float:
    """The decay's worst error, relative to the truth and to its exponent: with beta 0 and S = 1, a
    one-hot q reads it off.
    """
    n, K = x.numel(), contract.K
    case = make_case(Problem(contract, n // K, 1, 1), use_qk_l2norm=False, scale=1.0, **options)
    case.state.fill_(1.0)
    case.a.copy_(x.view(case.a.shape))
    case.A_log.fill_(A_log)
    case.dt_bias.zero_()
    case.b.zero_()
    case.v.zero_()
    run = function(DECODE, contract, cpu_recurrent_config.Knobs(32, 4, 16))
    found = torch.empty(n // K, K, dtype=torch.float64)
    for key in range(K):
        case.q.zero_()
        case.q[..., key] = 1
        run(*case.clone().arguments()[:14], case.output, *case.arguments()[15:])
        found[:, key] = case.output[:, 0, 0, 0]
    wide = case.a.double().view(n // K, K)
    if contract.gate == "lower_bound":
        exponent = case.lower_bound * torch.sigmoid(wide * torch.tensor(A_log).double().exp())
    else:
        exponent = -torch.tensor(A_log).double().exp() * torch.nn.functional.softplus(wide)
    truth = exponent.exp()
    # a denormal is as exact as its spacing
    return float(
        (
            ((found - truth).abs() - 1.5e-45).clamp(min=0) / (truth * (1 + exponent.abs()) + 1e-45)
        ).max()
    )


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
@pytest.mark.parametrize("A_log", [-3.0, 0.0, 2.7])
def test_gates_are_accurate(gate, A_log, function):
    """Over all gates that softplus and sigmoid tell apart, the overflowing ones included; fp32 can
    have 1.2e-7.
    """
    contract = PLAIN.replace(op="kda_decode", gate=gate, K=64, V=32, beta="given")
    x = torch.cat(
        (
            torch.linspace(-110, 110, 400),
            torch.linspace(-12, 12, 600),
            torch.linspace(-0.1, 0.1, 24),
        )
    )
    assert gate_error(function, contract, x, A_log) < 4e-7


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("vec", [4, 8, 16])
def test_every_16_bit_number_converts(dtype, vec, function):
    """All bit patterns there and back, and rounded after a product: as PyTorch does, denormals,
    infinities and NaN included.
    """
    contract = Contract(state_dtype=dtype)
    run = function(FLOOR, contract, cpu_stream_config.Knobs(4, 4, vec))
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(DTYPES[dtype]).view(2, -1)
    for factor in (1.0, -0.7310585975646973, 3.0e-5, 1.0e4):
        state = every.clone()
        run(state, torch.arange(2, dtype=torch.int32), None, factor, torch.zeros(1))
        want = (every.float() * torch.tensor(factor)).to(DTYPES[dtype])
        assert torch.equal(state.isnan(), want.isnan())
        same = (state.view(torch.int16) == want.view(torch.int16)) | want.isnan()
        assert same.all(), every[~same][:4]


@pytest.mark.parametrize("name", ["k", "v", "a", "b"])
def test_a_nan_stays_one(name, function):
    """A NaN of all bits set, as poisoned memory has them, is NaN in a bf16 state: rounding it by
    integers would give zero.
    """
    contract = SPOILT.replace(state_dtype="bf16")
    case = make_case(Problem(contract, 2, 1, 2))
    getattr(case, name)[0].view(torch.int32).fill_(-1)
    function(DECODE, contract, SPOILT_KNOBS)(*case.arguments())
    first, second = case.state[case.write_index.long()]
    assert first.isnan().all()
    assert case.output[0].isnan().all()
    assert not second.isnan().any()


@pytest.mark.parametrize("intermediate", ["none", "dense"])
@pytest.mark.parametrize("mode", ["update", "frozen"])
def test_the_floor_moves_what_it_should(mode, intermediate, function):
    """read; read and write; read and T writes, with and without the last."""
    contract = Contract(
        mode=mode, intermediate=intermediate, tokens=3, V=96, K=96, state_dtype="fp32"
    )
    problem = Problem(contract, 3, 1, 1)
    state, slots, buffer, _, sink = floor_case(problem, floor_form(contract))
    slots = slots[slots != 1]
    buffer = buffer[:2] if buffer is not None else None
    before = state.clone()
    run = function(
        FLOOR, contract, cpu_stream_config.Knobs(16, 4, 16, around=intermediate != "none")
    )
    run(state, slots, buffer, 0.5, sink)
    moved = before[slots.long()]
    if mode == "update":
        assert torch.equal(state[slots.long()], moved * 0.5) and torch.equal(state[1], before[1])
    else:
        assert torch.equal(state, before)
    if buffer is not None:
        assert torch.equal(buffer, (moved * 0.5)[:, None].expand_as(buffer))
    elif mode == "frozen":
        torch.testing.assert_close(float(sink), float(moved.double().sum()), rtol=1e-4, atol=1e-2)
    with pytest.raises(ValueError, match="slots: 3 was given, expected 0 to 2"):
        run(state, slots + 1 + (slots == 0), buffer, 0.5, sink)


def test_sixteen_tokens(function):
    """The longest call: T=16, every state kept, the final one too."""
    contract = SPOILT.replace(tokens=16, state_dtype="bf16")
    check_variant(function(DECODE, contract, SPOILT_KNOBS), contract, seeds=(0,)).require()


def test_threads_change_nothing(function):
    """A row is computed by one thread, in one order."""
    contract = PLAIN.replace(tokens=3)
    run = function(DECODE, contract, cpu_recurrent_config.default(contract, 64, DEVICE))
    case = make_case(Problem(contract, 8, 4, 8))
    one, two = case.clone(), case.clone()
    threads = torch.get_num_threads()
    try:
        for n, each in ((1, one), (2, two)):
            torch.set_num_threads(n)
            run(*each.arguments())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(one.output, two.output)
    assert torch.equal(one.state, two.state)


def test_loading_leaves_denormals_alone(function):
    """Fault: a library linked with -ffast-math set flush-to-zero for the whole process."""
    function(DECODE, SPOILT, SPOILT_KNOBS)
    assert float(torch.tensor(1e-40) * 0.5) > 0
    assert not any("fast-math" in flag for flag in cpu_object.FLAGS)


def test_objects_export_their_function_alone(store):
    """Two objects of one template link into one library: nothing but the function is visible."""
    for contract, variant in list(CONTRACTS.values())[:2]:
        spec = object_spec(DECODE, contract, variant, DEVICE)
        listed = subprocess.run(
            ["nm", "-g", "--defined-only", store.object_file(spec.key)],
            capture_output=True,
            text=True,
        )
        names = {line.split()[-1] for line in listed.stdout.splitlines()}
        assert {n for n in names if "gdntune" in n} == {f"__tvm_ffi_{spec.name}"}
        assert [n for n in names if "Decode" in n or "Arguments" in n] == []


def test_a_missing_compiler_is_named(monkeypatch, tmp_path):
    """Without a compiler the message says which and how to get it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    facts, knobs = DECODE.facts(PLAIN), dataclasses.asdict(cpu_recurrent_config.Knobs(32, 4, 16))
    with pytest.raises(ToolMissing, match=r"g\+\+ was not found.*apt-get install g\+\+"):
        cpu_recurrent.compile(facts, knobs, "f", tmp_path)


def test_a_compiler_error_is_a_build_error(tmp_path):
    """What does not compile says so with the compiler's own words; so does a setting that `refuse`
    should have caught.
    """
    with pytest.raises(BuildError, match=r"broken.cpp does not compile:(.|\n)*error: .*not_there"):
        cpu_object.object_of("int f() { return not_there; }", "broken", tmp_path)
    knobs = dataclasses.asdict(cpu_recurrent_config.Knobs(32, 3, 16))
    with pytest.raises(BuildError, match="static assertion failed"):
        cpu_recurrent.compile(DECODE.facts(PLAIN), knobs, "odd", tmp_path)


def test_spaces_are_large_and_legal():
    """At least 24 variants for K=128, each legal, each with an id of its own; the default is legal
    everywhere.
    """
    for device in (
        DEVICE,
        *(msgspec.structs.replace(DEVICE, arch=name) for name in ("x86_64-avx2-0", "aarch64-0")),
    ):
        for contract in (c for seed in range(200) for c, _ in [draw(seed)]):
            found = DECODE.variants(contract, device)
            assert found
            assert len({v.id for v in found}) == len(found)
            assert [v.id for v in found if DECODE.refuse(contract, DECODE.setting(v.knobs))] == []
            for exponent in range(0, 16, 3):
                assert (
                    DECODE.refuse(contract, DECODE.default(contract, 1 << exponent, device)) is None
                )
            assert FLOOR.refuse(contract, FLOOR.default(contract, 64, device)) is None
            assert len(FLOOR.variants(contract, device)) >= 12
        for layout, dtype, tokens in itertools.product(("k_last", "v_last"), DTYPES, (1, 4)):
            contract = Contract(layout=layout, state_dtype=dtype, tokens=tokens)
            assert len(DECODE.variants(contract, device)) >= 24, (layout, dtype, device.arch)


@pytest.mark.parametrize(
    ("change", "knobs", "reason"),
    [
        ({}, {"ilp": 3}, "ilp=3: expected one of 1, 2, 4, 8"),
        ({}, {"vec": 32}, "vec=32: expected one of 4, 8, 16"),
        ({"V": 96}, {"tile_v": 64}, "V=96 is not a multiple of tile_v=64"),
        (
            {"layout": "v_last"},
            {"tile_v": 32, "ilp": 4},
            "not a multiple of the 128 rows in flight",
        ),
        ({}, {"around": True}, "without intermediate states"),
    ],
)
def test_illegal_knobs_are_refused_with_a_reason(change, knobs, reason):
    """The one legality function says why."""
    setting = cpu_recurrent_config.Knobs(**{"tile_v": 32, "ilp": 4, "vec": 16, **knobs})
    assert reason in (DECODE.refuse(Contract().replace(**change), setting) or "")
