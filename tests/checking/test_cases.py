"""Cases: what kernels are called with, and that each awkward option does what it says."""

import time

import pytest
import torch

from gdntune.checking.cases import floor_case, make_case, whole
from gdntune.checking.draw import BLOCK
from gdntune.checking.places import Given, places
from gdntune.checking.reference import DTYPES, decode
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import DECODE_ARGUMENTS
from gdntune.problem import Contract, Problem
from gdntune.sol import floor_form

SMALL = {"K": 64, "V": 32}


def names_of(case, *names):
    """Every slot or row that the index tensors of these names hold."""
    return [
        int(i) for n in names if getattr(case, n) is not None for i in getattr(case, n).flatten()
    ]


@pytest.mark.parametrize("layout", ["k_last", "v_last"])
@pytest.mark.parametrize(
    "op,gate",
    [
        ("gdn_decode", "raw"),
        ("gdn_decode", "log"),
        ("kda_decode", "softplus"),
        ("kda_decode", "lower_bound"),
    ],
)
def test_shapes_and_dtypes(op, gate, layout):
    """Those of the calling convention, in its order; None for what the contract lacks."""
    contract = Contract(
        **SMALL,
        op=op,
        gate=gate,
        layout=layout,
        tokens=3,
        intermediate="dense",
        input_dtype="fp16",
        state_dtype="fp32",
        gate_dtype="fp32",
        A_log_dtype="bf16",
        dt_bias_dtype="fp16",
    )
    case = make_case(Problem(contract, 2, 2, 4))
    state, q, k, v, a, b, A_log, dt_bias, read, write, slots, accepted, bounds, buffer, output = (
        case.arguments()[:15]
    )
    width = (64,) if op == "kda_decode" else ()
    head = (32, 64) if layout == "k_last" else (64, 32)
    assert [x.shape for x in (state, q, k, v)] == [
        (2, 4, *head),
        (2, 3, 2, 64),
        (2, 3, 2, 64),
        (2, 3, 4, 32),
    ]
    assert [x.shape for x in (a, b, read, write)] == [(2, 3, 4, *width), (2, 3, 4), (2,), (2,)]
    assert [x.shape for x in (buffer, output)] == [(2, 3, 4, *head), (2, 3, 4, 32)]
    assert {x.dtype for x in (q, k, v, output)} == {torch.float16}
    assert {x.dtype for x in (state, buffer, a)} == {torch.float32}
    assert b.dtype == torch.bfloat16
    assert slots is accepted is bounds is None
    if gate == "log":
        assert A_log is dt_bias is None
    else:
        assert (A_log.shape, dt_bias.shape) == ((4,), (4, *width))
        assert (A_log.dtype, dt_bias.dtype) == (torch.bfloat16, torch.float16)
    assert len(case.arguments()) == len(DECODE_ARGUMENTS) == len(case.tensors())


def test_values_are_like_a_models():
    """States and inputs of order 1, decays between 0 and 1 that differ, beta in (0, 1); what is to
    be written is NaN.
    """
    contract = Contract(tokens=2, gate_dtype="fp32", intermediate="dense")
    case = make_case(Problem(contract, 16, 4, 8))
    assert abs(case.state.float().std() - 0.5) < 0.01 and abs(case.q.float().std() - 1) < 0.05
    decay = torch.exp(-case.A_log.exp() * torch.nn.functional.softplus(case.a + case.dt_bias))
    assert 0 < decay.min() < 0.7 and 0.97 < decay.max() < 1
    assert 0.03 < decay.std() < 0.3
    assert case.output.isnan().all() and case.intermediate.isnan().all()
    given = make_case(Problem(contract.replace(gate="log", beta="given"), 16, 4, 8))
    assert (given.a < 0).all() and given.b.min() > 0 and given.b.max() < 1


def test_a_seed_gives_the_same_case_again():
    """Same seed, same bits; another seed, others; the global generator is not touched."""
    problem = Problem(Contract(**SMALL, tokens=2), 3, 1, 2)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first, again, other = (
        make_case(problem, seed=7),
        make_case(problem, seed=7),
        make_case(problem, seed=8),
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.state, again.state) and torch.equal(first.read_index, again.read_index)
    assert not torch.equal(first.q, other.q)


def test_a_seed_gives_the_slots_of_before():
    """A failed check names its seed and options: the slots they gave are had again, whatever moved
    in the code since.
    """
    odd = {"padding": 0.3, "skipped": 0.3, "out_of_range": True, "null_index": 1}
    contract = Contract(
        **SMALL, tokens=2, intermediate="slots", accepted=True, mode="frozen", state_dtype="fp32"
    )
    case = make_case(Problem(contract, 4, 1, 1), seed=7, **odd)
    assert case.slot_index.tolist() == [[10, 1], [8, 0], [1, 3], [2, 9]]
    assert case.accepted.tolist() == [2, 1, 3, 0]
    indexed = contract.replace(intermediate="indexed", accepted=False, state_dtype="bf16")
    case = make_case(Problem(indexed, 4, 1, 1), seed=7, **odd)
    assert case.read_index.tolist() == [0, 3, -1, 2]
    assert case.slot_index.tolist() == [4, -1, 3, 2]


@pytest.mark.parametrize("intermediate", ["none", "indexed", "slots"])
@pytest.mark.parametrize("split", [False, True], ids=["in place", "split"])
def test_slots_are_distinct(intermediate, split):
    """No slot or row is written by two requests, none read by one and written by another."""
    contract = Contract(
        **SMALL, tokens=3, intermediate=intermediate, accepted=intermediate == "slots"
    )
    case = make_case(Problem(contract, 6, 1, 1), split=split, slots=40, extra_rows=3, extra_steps=1)
    read, written = names_of(case, "read_index"), names_of(case, "write_index")
    if intermediate == "slots":
        named = written + names_of(case, "slot_index")
        assert case.slot_index.shape == (6, 4)
    else:
        named = sorted({*read, *written})
        assert (read == written) == (not split)
        assert len(named) == (12 if split else 6)
    assert len(set(named)) == len(named) and all(0 <= s < 40 for s in named)
    assert read != sorted(read) or written != sorted(written)
    if intermediate == "indexed":
        assert len(set(names_of(case, "slot_index"))) == 6 and case.intermediate.shape[:2] == (9, 4)


def test_the_pool_is_as_small_as_it_can_be():
    """Timing touches the slots that the call needs and no more."""
    assert make_case(Problem(Contract(**SMALL), 4, 1, 1)).state.shape[0] == 4
    assert make_case(Problem(Contract(**SMALL), 4, 1, 1), split=True).state.shape[0] == 8
    slots = Contract(**SMALL, tokens=3, intermediate="slots", mode="frozen")
    assert make_case(Problem(slots, 4, 1, 1)).state.shape[0] == 12
    assert make_case(Problem(Contract(**SMALL, pool=False), 4, 1, 1)).state.shape[0] == 4


@pytest.mark.parametrize("intermediate", ["none", "slots"])
def test_padding(intermediate):
    """The share asked for, by every kind of index that means padding; their inputs are NaN, a slot
    they name is no one's.
    """
    contract = Contract(
        **SMALL, tokens=2, intermediate=intermediate, accepted=intermediate == "slots"
    )
    case = make_case(Problem(contract, 20, 1, 1), padding=0.5, null_index=3, out_of_range=True)
    tensors = case.tensors()
    where = places(contract, Given(**tensors))
    padded = where.start < 0
    assert padded.sum() == 10
    assert (
        case.q[padded].isnan().all()
        and case.b[padded].isnan().all()
        and not case.q[~padded].isnan().any()
    )
    if intermediate == "none":
        kinds = set(case.read_index[padded].tolist())
        assert {3, -1, -7} <= kinds and max(kinds) >= case.state.shape[0]
        guards = {int(s) for s in case.write_index[padded] if 0 <= s < case.state.shape[0]} - {3}
        assert len(guards) == 1
        assert not guards & set(case.write_index[~padded].tolist())
    assert 3 not in where.final.tolist() + where.cells.flatten().tolist()
    assert decode(contract, **tensors).output.isfinite().all()


def test_skipped():
    """Some whole requests lack a place to write, and are no padding."""
    case = make_case(Problem(Contract(**SMALL), 10, 1, 1), padding=0.2, skipped=0.3)
    assert ((case.read_index >= 0) & (case.write_index < 0)).sum() == 3
    indexed = Contract(**SMALL, intermediate="indexed")
    assert (make_case(Problem(indexed, 10, 1, 1), skipped=0.3).slot_index < 0).sum() == 3
    slots = make_case(
        Problem(Contract(**SMALL, tokens=4, intermediate="slots"), 10, 1, 1), skipped=0.3
    )
    assert (slots.slot_index < 0).sum() == 3 and (slots.slot_index[:, 0] >= 0).all()


def test_int64_indices_go_as_low_words():
    """The int32 view of int64 indices, of any stride, without a copy; -1 stays -1."""
    contract = Contract(**SMALL, tokens=2, intermediate="slots", accepted=True, ragged=True)
    for strided in (False, True):
        case = make_case(
            Problem(contract, 5, 1, 1),
            index_dtype=torch.int64,
            strided_indices=strided,
            padding=0.4,
            lengths=[2, 0, 1, 2, 1],
        )
        named = dict(zip(DECODE_ARGUMENTS, case.arguments(), strict=True))
        for name in ("write_index", "slot_index", "accepted", "cu_seqlens"):
            x, view = getattr(case, name), named[name]
            assert x.dtype == torch.int64 and view.dtype == torch.int32
            assert view.tolist() == x.tolist() and view.data_ptr() == x.data_ptr()
            assert x.is_contiguous() != strided
        assert (case.slot_index < 0).any()


def test_strides():
    """Packed q, k, v; gates in wider tensors; padded slots, rows and steps; the innermost dimension
    stays contiguous.
    """
    contract = Contract(**SMALL, tokens=2, intermediate="dense", op="kda_decode", gate="softplus")
    case = make_case(
        Problem(contract, 3, 2, 4),
        packed_qkv=True,
        strided_gates=True,
        slot_stride_pad=48,
        extra_steps=2,
        extra_rows=1,
    )
    assert (
        case.q.untyped_storage().data_ptr()
        == case.k.untyped_storage().data_ptr()
        == case.v.untyped_storage().data_ptr()
    )
    assert case.q.stride() == (2 * (4 * 64 + 4 * 32), 4 * 64 + 4 * 32, 64, 1)
    assert case.a.stride() == (2 * (4 * 64 + 16), 4 * 64 + 16, 64, 1) and case.b.stride(-1) == 2
    head = 4 * 64 * 32 + 48
    assert case.state.stride() == (head, 64 * 32, 64, 1)
    assert case.intermediate.stride() == (
        4 * head,
        head,
        64 * 32,
        64,
        1,
    ) and case.intermediate.shape[:2] == (4, 4)
    plain = make_case(Problem(contract, 3, 2, 4))
    assert all(
        x.is_contiguous() for x in (plain.q, plain.a, plain.b, plain.state, plain.intermediate)
    )


def test_ragged():
    """Lengths as given, full by default; rows beyond the last request are NaN."""
    contract = Contract(**SMALL, tokens=3, ragged=True)
    case = make_case(Problem(contract, 3, 1, 2), lengths=[1, 0, 3], tail_rows=2)
    assert case.cu_seqlens.tolist() == [0, 1, 1, 4] and case.q.shape[:2] == (1, 6)
    assert case.q[0, 4:].isnan().all() and not case.q[0, :4].isnan().any()
    assert make_case(Problem(contract, 3, 1, 2)).cu_seqlens.tolist() == [0, 3, 6, 9]
    with pytest.raises(UnsupportedProblem, match=r"lengths=\[4\].*B=1.*tokens=3"):
        make_case(Problem(contract, 1, 1, 2), lengths=[4])


def test_parameters_and_scalars():
    """Parameters of each q/k head; beta_scale, scale and the norm as asked; extreme gates reach
    both ends.
    """
    problem = Problem(Contract(**SMALL, op="kda_decode", gate="softplus"), 2, 2, 4)
    case = make_case(
        problem,
        parameters_by_head="H",
        neg_eigval=True,
        scale=0.5,
        use_qk_l2norm=False,
        extreme_gates=True,
    )
    assert (case.A_log.shape, case.dt_bias.shape) == ((2,), (2, 64))
    assert (case.beta_scale, case.scale, case.use_qk_l2norm) == (2.0, 0.5, 0)
    assert (case.a.min(), case.a.max()) == (-100, 100)
    norms = case.k.float().norm(dim=-1)
    assert norms.min() > 0.5 and norms.max() < 1.1
    result = decode(problem.contract, **case.tensors(), dtype=torch.float32)
    assert result.output.isfinite().all() and result.state.isfinite().all()


def test_clone_and_restore():
    """A clone keeps strides, gaps and shared storages, and shares nothing with its original;
    restore undoes a call.
    """
    contract = Contract(**SMALL, tokens=2, intermediate="dense")
    case = make_case(Problem(contract, 2, 1, 2), packed_qkv=True, slot_stride_pad=8, extra_steps=1)
    copy = case.clone()
    assert copy.q.stride() == case.q.stride() and copy.state.stride() == case.state.stride()
    assert (
        copy.q.untyped_storage().data_ptr()
        == copy.v.untyped_storage().data_ptr()
        != case.q.untyped_storage().data_ptr()
    )
    assert torch.equal(whole(copy.state), whole(case.state))
    address = copy.state.data_ptr()
    whole(copy.state).zero_()
    copy.output.zero_()
    copy.intermediate.zero_()
    assert not (case.state == 0).all() and case.output.isnan().all()
    copy.restore(case)
    assert torch.equal(whole(copy.state), whole(case.state)) and copy.state.data_ptr() == address
    assert copy.output.isnan().all() and copy.intermediate.isnan().all()


@pytest.mark.parametrize(
    "change,options,message",
    [
        ({"K": 65}, {}, "K=65"),
        ({"pool": False}, {"padding": 0.5}, "padding=0.5 without a pool"),
        ({}, {"slots": 1}, "slots=1.*need 2"),
        ({}, {"slots": 2, "null_index": 0}, "without null_index=0"),
    ],
    ids=["illegal contract", "padding without pool", "too few slots", "null slot"],
)
def test_refusals(change, options, message):
    """What cannot be made says what was given and what is needed."""
    with pytest.raises(UnsupportedProblem, match=message):
        make_case(Problem(Contract(**{**SMALL, **change}), 2, 1, 1), **options)


def test_large_states_are_filled_quickly():
    """A state beyond BLOCK repeats a block whose odd length keeps neighbouring slots apart: 16
    times it in about a second.
    """
    problem = Problem(Contract(), 8, 16, 128)
    started = time.perf_counter()
    case = make_case(problem)
    assert time.perf_counter() - started < 5
    assert case.state.numel() > 15 * BLOCK["cpu"]
    assert abs(case.state.float().std() - 0.5) < 0.01
    assert not torch.equal(case.state[0], case.state[1])


@pytest.mark.parametrize(
    "intermediate,mode,steps",
    [("none", "frozen", 0), ("none", "update", 0), ("dense", "frozen", 3), ("slots", "update", 3)],
)
def test_floor_case(intermediate, mode, steps):
    """The state, written in place for an update, and a buffer for the writes of the tokens."""
    contract = Contract(**SMALL, tokens=3, intermediate=intermediate, mode=mode)
    problem = Problem(contract, 2, 1, 2)
    state, slots, buffer, factor, sink = floor_case(problem, floor_form(contract))
    assert slots.dtype == torch.int32 and sorted(slots.tolist()) == [0, 1]
    assert (
        state.shape == (2, 2 * 64 * 32)
        and state.dtype == DTYPES["bf16"]
        and (state != 0).float().mean() > 0.99
    )
    assert (buffer.shape == (2, steps, 2 * 64 * 32)) if steps else buffer is None
    assert factor == 1.0 and sink.tolist() == [0.0] and sink.dtype == torch.float32
