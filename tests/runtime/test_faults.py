"""What went wrong in other decode kernels and was reported by their users, one test a kind, through
the public functions.

Left out is what does not touch a decode call: graphs timed with more clones than iterations, a ring
    timed without advancing it, bytes
counted that are not written and tunings that disagree are faults of benchmarks and tuners, and have
their tests there.

Large ones: on the CPU only the pages in use become memory; what must be written whole runs on a GPU
    alone.
"""

import dataclasses

import pytest
import torch
from public import DEVICES, call

import gdntune
from gdntune.checking import reference
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.problem import Contract, Problem
from gdntune.runtime import call as calls

PLAIN = Contract(state_dtype="fp32")
BF16 = Contract()
DENSE = Contract(tokens=3, intermediate="dense", state_dtype="fp32")
DENSE_BF16 = Contract(tokens=2, intermediate="dense")
LARGE = Contract(tokens=8, intermediate="dense")
INDEXED = Contract(tokens=2, intermediate="indexed", state_dtype="fp32")
SLOTS = Contract(tokens=3, intermediate="slots", accepted=True, mode="frozen", state_dtype="fp32")
RAGGED = Contract(tokens=4, ragged=True, state_dtype="fp32")
ROWS = Contract(pool=False, state_dtype="fp32", beta_dtype="fp32")
DRAFTS = [Contract(tokens=T, state_dtype="fp32") for T in (2, 3, 5, 8)]
HALF = Contract(input_dtype="fp16", state_dtype="fp16", gate_dtype="fp16", beta_dtype="fp16")
DTYPES = [
    BF16,
    PLAIN,
    BF16.replace(state_dtype="fp16"),
    BF16.replace(input_dtype="fp16"),
    BF16.replace(gate_dtype="fp32", beta_dtype="fp16"),
    BF16.replace(A_log_dtype="bf16", dt_bias_dtype="fp16"),
]
# what a machine without a compiler needs
CONTRACTS = [
    PLAIN, BF16, DENSE, DENSE.replace(mode="frozen"), DENSE_BF16, LARGE, INDEXED, SLOTS, RAGGED, ROWS, ROWS.replace(state_dtype="bf16"),
    HALF, PLAIN.replace(layout="v_last"), *DRAFTS, *DTYPES,
]  # fmt: skip


@pytest.fixture
def one_thread():
    """Tensors are small: where cores are shared, a second thread makes an operation wait for it, a
    hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


by_device = pytest.mark.parametrize("device", DEVICES)


def judged(before, **changes):
    """A clone of a case after its public call, which must agree with the fp64 reference and touch
    nothing else.
    """
    truth = Truth(before)
    case = before.clone()
    call(case, **changes)
    truth.judge(case).require()
    return case


def index(values, device, dtype=torch.int32):
    """An index tensor."""
    return torch.tensor(values, dtype=dtype, device=device)


def same_bits(x, y):
    """Whether two tensors hold the same, NaNs included."""
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


@by_device
def test_intermediate_states_beyond_2_31_elements(device):
    """Fault: intermediate states beyond 2^31 elements were an illegal access, by 32-bit offsets.
    Here rows lie 2^30 elements apart.
    """
    compact = make_case(Problem(DENSE_BF16, 3, 1, 2), device, seed=1)
    apart, far = 2**30, compact.clone()
    memory = torch.empty(
        2 * apart + compact.intermediate[0].numel(), dtype=torch.bfloat16, device=device
    )
    far.intermediate = memory.as_strided(
        compact.intermediate.shape, (apart, *compact.intermediate.stride()[1:])
    )
    after = judged(compact)
    call(far)
    for name in ("output", "state", "intermediate"):
        assert same_bits(getattr(far, name), getattr(after, name))


@pytest.mark.gpu
def test_intermediate_states_of_a_large_batch():
    """Fault: bf16, intermediate states, B*T*HV >= 131072 (B=512, T>=5, HV=64) was an illegal
    access. 9 GB, of which some rows are judged.
    """
    before = make_case(Problem(LARGE, 512, 16, 64), "cuda", seed=1)
    truth = Truth(before, requests=[0, 1, 255, 256, 510, 511])
    case = before.clone()
    call(case)
    truth.judge(case).require()


@by_device
@pytest.mark.parametrize(
    "HV, slot, stride",
    [(64, 2047, None), (64, 2048, None), (64, 2100, None), (32, 4096, 540672), (32, 4100, 540672)],
)
def test_high_slots(HV, slot, stride, device):
    """Fault: slot index >= 2048 at HV=64, or slot stride 540672 at HV=32: the wrong slot was used,
    or an illegal access.
    """
    compact = make_case(Problem(BF16, 2, 16, HV), device, seed=2, permute=False)
    each = compact.state[0].numel()
    stride = stride or each
    memory = torch.empty(slot * stride + each, dtype=torch.bfloat16, device=device)
    pool = memory.as_strided(
        (slot + 1, *compact.state.shape[1:]), (stride, *compact.state.stride()[1:])
    )
    high = dataclasses.replace(compact.clone(), state=pool)
    high.read_index, high.write_index = index([slot, 1], device), index([slot, 1], device)
    pool[slot], pool[1] = compact.state[0], compact.state[1]
    # where a wrapped offset would land
    others = {0, slot % 2048, slot - 1} - {1, slot}
    for other in others:
        pool[other] = 7.0
    after = judged(compact)
    call(high)
    assert same_bits(high.output, after.output)
    assert same_bits(pool[slot], after.state[0]) and same_bits(pool[1], after.state[1])
    assert all((pool[other] == 7.0).all() for other in others)


@by_device
def test_buffer_by_batch_row_beside_high_slots(device):
    """Fault: a buffer of B rows was indexed by pool slot, slot >= B: an out-of-bounds write. Rows
    beyond B stay as they are.
    """
    before = make_case(Problem(DENSE, 3, 1, 2), device, seed=3, slots=40, extra_rows=38)
    before.intermediate = before.intermediate[:3]
    assert int(before.read_index.max()) >= 3
    judged(before)


@by_device
def test_buffer_by_pool_slot(device):
    """Fault: as above. A buffer that is meant to go by slot has a row a slot, and says so by
    intermediate_state_indices.
    """
    before = make_case(Problem(INDEXED, 3, 1, 2), device, seed=4, slots=9, extra_rows=6)
    before.slot_index.copy_(before.read_index)
    judged(before)


@by_device
@pytest.mark.parametrize("contract", [DENSE, INDEXED], ids=["dense", "indexed"])
def test_buffer_of_more_steps_than_tokens(contract, device):
    """Fault: T was taken for the buffer's stride from row to row, so rows overlapped where it had
    more steps.
    """
    judged(make_case(Problem(contract, 3, 1, 2), device, seed=5, extra_steps=4))


@by_device
@pytest.mark.parametrize("how", ["padded", "steps first"])
def test_buffer_that_is_not_contiguous(how, device):
    """Fault: a copy of a buffer that was not contiguous was written, and the caller's stayed stale."""
    before = make_case(
        Problem(DENSE, 3, 1, 2), device, seed=6, slot_stride_pad=64 if how == "padded" else 0
    )
    if how == "steps first":
        before.intermediate = before.intermediate.transpose(0, 1).contiguous().transpose(0, 1)
    assert not before.intermediate.is_contiguous()
    judged(before)


@by_device
@pytest.mark.parametrize("B", [1, 6, 40])
@pytest.mark.parametrize("mode", ["update", "frozen"])
def test_final_state_hangs_on_one_argument_alone(mode, B, device):
    """Fault: with intermediate states, whether the final state was written hung on B*HV; it hangs
    on disable_state_update alone.
    """
    before = make_case(Problem(DENSE.replace(mode=mode), B, 2, 4), device, seed=7)
    assert same_bits(judged(before).state, before.state) == (mode == "frozen")


@by_device
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("shift", [88.0, 89.0, 1e4, -89.0, -1e4, -3e38])
def test_gates_beyond_exp(shift, T, device):
    """Fault: a + dt_bias > 88.7, where exp overflows, made 0 * inf = NaN."""
    contract = PLAIN.replace(tokens=T)
    before = make_case(Problem(contract, 2, 1, 2), device, seed=8)
    before.dt_bias[0] = shift
    before.a[:, 0, 1] = shift
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


@by_device
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(
    "A_log, a",
    [
        (88.0, 0.0),
        (88.0, -250.0),
        (88.8, 0.0),
        (88.8, -250.0),
        (200.0, -30.0),
        (200.0, -300.0),
        (3e38, 1.0),
    ],
)
def test_rates_beyond_exp(A_log, a, T, device):
    """Fault: as above, of exp(A_log): it overflows above 88.7, and beside a softplus that vanishes
    it made inf * 0 = NaN.

    GDN's CUDA kernels serve A_log up to 88: to clamp it costs a tenth of T=1, B=1
    (docs/measured.md).
    """
    if device != "cpu" and A_log > 88:
        pytest.skip("GDN's CUDA kernels serve A_log up to 88, as the public docstring says")
    before = make_case(Problem(PLAIN.replace(tokens=T), 2, 1, 2), device, seed=8)
    before.A_log[0], before.dt_bias[0] = A_log, 0.0
    before.a[:, :, 0] = a
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


@by_device
@pytest.mark.parametrize(
    "contract", [PLAIN, DENSE, SLOTS, INDEXED], ids=["T=1", "dense", "slots", "indexed"]
)
@pytest.mark.parametrize("padding", [[0], [1, 3], [0, 1, 2, 3]], ids=["one", "mixed", "all"])
def test_padding(padding, contract, device):
    """Fault: index -1, alone, mixed with others or all of a CUDA-graph padded batch: slot 0 or the
    last was overwritten, or a crash.
    """
    before = make_case(Problem(contract, 4, 1, 2), device, seed=9, extra_rows=1)
    names = ("slot_index",) if contract.intermediate == "slots" else ("read_index", "write_index")
    for name in names:
        getattr(before, name)[padding] = -1
    for x in (before.q, before.k, before.v, before.a, before.b):
        x[padding] = float("nan")
    after = judged(before)
    assert (after.output[padding] == 0).all()


@by_device
def test_a_padded_request_alone(device):
    """Fault: index -1 with B=1 crashed, or overwrote a slot."""
    before = make_case(Problem(PLAIN, 1, 1, 2), device, seed=10, slots=2)
    before.read_index[0] = -1
    after = judged(before, output_state_indices=None)
    assert (after.output == 0).all() and same_bits(after.state, before.state)


@by_device
@pytest.mark.parametrize("null_index", [-1, 0])
def test_null_block_and_a_request_that_owns_slot_0(null_index, device):
    """Fault: vLLM's null block 0 beside a request that owns slot 0: live state overwritten, or the
    request skipped. null_index says.
    """
    before = make_case(Problem(PLAIN, 3, 1, 2), device, seed=11, slots=4, null_index=null_index)
    before.read_index.copy_(index([0, -1, 2], device))
    before.write_index.copy_(before.read_index)
    after = judged(before)
    assert same_bits(after.state[0], before.state[0]) == (null_index == 0)
    assert (after.output[0] == 0).all() == (null_index == 0)


@by_device
@pytest.mark.parametrize("null_index", [None, -1])
def test_null_block_of_the_packed_call(null_index, device):
    """Fault: as above, in the call that vLLM and SGLang make: slot 0 is padding there unless
    null_index says otherwise.
    """
    case = make_case(Problem(PLAIN, 3, 1, 2), device, seed=11, slots=4)
    state = case.state.clone()
    packed = torch.cat([x[:, 0].flatten(1) for x in (case.q, case.k, case.v)], -1)
    options = {} if null_index is None else {"null_index": null_index}
    output = gdntune.gated_delta_rule_packed_decode(
        packed,
        case.a[:, 0],
        case.b[:, 0],
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        initial_state=case.state,
        initial_state_indices=index([0, -1, 2], device),
        **options,
    )
    assert same_bits(case.state[0], state[0]) == (null_index is None)
    assert (output[0] == 0).all() == (null_index is None)
    assert (output[1] == 0).all() and same_bits(case.state[[1, 3]], state[[1, 3]])
    assert not same_bits(case.state[2], state[2])


INDICES = {
    "read_index": PLAIN,
    "write_index": PLAIN,
    "slot_index": SLOTS,
    "accepted": SLOTS,
    "cu_seqlens": RAGGED,
}


@by_device
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "column"])
@pytest.mark.parametrize("name", [*INDICES, "buffer rows"])
def test_int64_indices(name, strided, device):
    """Fault: int64 indices, of either index argument, were a type error or the wrong slots. A
    column of a wider table will do too.
    """
    contract, field = INDICES.get(name, INDEXED), "slot_index" if name == "buffer rows" else name
    options = {"lengths": [2, 0, 4]} if contract.ragged else {"split": contract is PLAIN}
    before = make_case(Problem(contract, 3, 1, 2), device, seed=12, extra_rows=2, **options)
    x = getattr(before, field).to(torch.int64)
    if strided:
        x = torch.stack((torch.full_like(x, 2**20), x, torch.zeros_like(x)), -1)[..., 1]
    setattr(before, field, x)
    judged(before)


@by_device
def test_parameters_that_require_grad(device):
    """Fault: int64 indices with A_log and dt_bias as a module holds them, requiring grad: refused
    or detached by hand.
    """
    before = make_case(Problem(PLAIN, 3, 2, 4), device, seed=1, index_dtype=torch.int64, split=True)
    judged(
        before, A_log=torch.nn.Parameter(before.A_log), dt_bias=torch.nn.Parameter(before.dt_bias)
    )


@by_device
@pytest.mark.parametrize("layers", [1, 3])
def test_padded_and_strided_pools(layers, device):
    """Fault: a padded or strided pool was cloned in silence and its updates lost. Here also one
    layer's slots among three's.
    """
    before = make_case(Problem(PLAIN, 3, 1, 2), device, seed=13, slots=5, slot_stride_pad=128)
    if layers > 1:
        wide = torch.randn(5, layers, *before.state.shape[1:], device=device)
        wide[:, 1] = before.state
        before.state = wide[:, 1]
    assert not before.state.is_contiguous()
    after = judged(before)
    assert not same_bits(after.state, before.state)


@by_device
def test_no_compile_for_another_pool(device, monkeypatch):
    """Fault: each pool size, stride, scale or number of heads compiled anew. B*HV alone can ask for
    another object.
    """
    judged(make_case(Problem(PLAIN, 4, 2, 2), device, seed=14))

    def compiled(*_):
        raise AssertionError("compiled anew")

    monkeypatch.setattr("gdntune.objects.build.compile_objects", compiled)
    judged(
        make_case(Problem(PLAIN, 4, 1, 2), device, seed=14, slots=33, slot_stride_pad=64, scale=0.5)
    )
    judged(
        make_case(
            Problem(PLAIN, 2, 2, 4), device, seed=14, slots=7, packed_qkv=True, strided_gates=True
        )
    )
    judged(make_case(Problem(PLAIN, 1, 1, 8), device, seed=14, null_index=0, neg_eigval=True))


@by_device
@pytest.mark.parametrize("contract", [PLAIN, DRAFTS[1]], ids=["T=1", "T=3"])
def test_slices_of_one_packed_tensor(contract, device):
    """Fault: q, k and v as slices of one tensor were refused or misread."""
    before = make_case(Problem(contract, 3, 2, 4), device, seed=15, packed_qkv=True)
    assert before.q.untyped_storage().data_ptr() == before.v.untyped_storage().data_ptr()
    judged(before)


@by_device
def test_rows_of_a_wider_projection(device):
    """Fault: as above: the packed call's rows may lie in a wider tensor, as one projection leaves
    q, k, v and the output gate.
    """
    before = make_case(Problem(PLAIN, 3, 2, 4), device, seed=15)
    qkv = torch.cat([x[:, 0].flatten(1) for x in (before.q, before.k, before.v)], -1)
    wide = torch.cat((qkv, torch.full((3, 512), float("nan"), dtype=qkv.dtype, device=device)), -1)
    after, state = judged(before), before.state.clone()
    output = gdntune.gated_delta_rule_packed_decode(
        wide[:, : qkv.shape[1]],
        before.a[:, 0],
        before.b[:, 0],
        A_log=before.A_log,
        dt_bias=before.dt_bias,
        initial_state=state,
        initial_state_indices=before.read_index,
        null_index=-1,
    )
    assert same_bits(output, after.output) and same_bits(state, after.state)


@by_device
def test_output_none_is_fresh_each_time(device):
    """Fault: output=None twice with the same shape, and the second call overwrote the first result."""
    case = make_case(Problem(PLAIN, 3, 2, 4), device)
    first = call(case, output=None)
    kept = first.clone()
    second = call(case, output=None)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


@by_device
def test_same_shape_another_dtype(device):
    """Fault: the kernel that was compiled for the first dtype ran for a call of the same shape and
    another dtype.
    """
    for _ in range(2):
        for contract in DTYPES:
            judged(make_case(Problem(contract, 2, 1, 2), device, seed=16))


@by_device
@pytest.mark.parametrize("contract", [PLAIN, DRAFTS[1]], ids=["T=1", "T=3"])
def test_l2norm_off(contract, device):
    """Fault: use_qk_l2norm=False was ignored."""
    before = make_case(Problem(contract, 2, 1, 2), device, seed=17, use_qk_l2norm=False)
    without = judged(before)
    before.use_qk_l2norm = 1
    assert not torch.equal(without.output, judged(before).output)


@by_device
def test_float16_inputs(device):
    """Fault: float16 inputs were read as bf16. Gates and states in fp16 too."""
    judged(make_case(Problem(HALF, 3, 1, 2), device, seed=18))


def long_decode(contract, device, steps):
    """The states after many calls of one token: the kernel's, fp64's, the model's of rounding where
    stored, and fp64's with gates in bf16.
    """
    case = make_case(Problem(contract, 2, 1, 2), device, seed=19, gate_shift=-1.0)
    exact = rough = case.state.double()
    model = case.state.clone()

    def bf16(x):
        return x.to(torch.bfloat16).to(x.dtype)

    for seed in range(steps):
        flow = make_case(Problem(contract, 2, 1, 2), device, seed=1000 + seed, gate_shift=-1.0)
        case.q, case.k, case.v, case.a, case.b = flow.q, flow.k, flow.v, flow.a, flow.b
        call(case)
        tensors = case.tensors()
        exact = reference.decode(contract, **{**tensors, "state": exact}).state
        model = reference.decode(contract, **{**tensors, "state": model}).stored(contract).state
        rounded = {name: bf16(tensors[name]) for name in ("A_log", "dt_bias")}
        beta = {"b": bf16(tensors["b"].sigmoid())}
        given = contract.replace(beta="given")
        rough = reference.decode(given, **{**tensors, **rounded, **beta, "state": rough}).state
    norm = exact.norm()
    return [float((x.double() - exact).norm() / norm) for x in (case.state, model, rough)]


@pytest.mark.usefixtures("one_thread")
@by_device
def test_gates_are_not_rounded(device):
    """Fault: sigmoid(b), or A_log and dt_bias, rounded to bf16 drifted over a long decode: a
    thousand times what fp32 loses.
    """
    error, _, rough = long_decode(ROWS, device, 150)
    assert error < 2e-6
    assert rough > 1000 * error


@pytest.mark.usefixtures("one_thread")
@by_device
def test_bf16_state_loses_its_rounding_alone(device):
    """Fault: bf16 states over 16k steps cost 10% of acceptance. What they lose against fp64 is
    rounding where stored, and no more.
    """
    error, model, _ = long_decode(ROWS.replace(state_dtype="bf16"), device, 150)
    assert error < 1.1 * model < 0.02


@by_device
def test_layouts_are_told_apart(device):
    """Fault: a K-last state handed to a V-last kernel passes every shape check where K=V. An
    asymmetric state tells.
    """
    case = make_case(Problem(PLAIN, 2, 1, 2), device, seed=20)
    v, k = torch.meshgrid(*[torch.linspace(-1, 1, 128, device=device)] * 2, indexing="ij")
    case.state.copy_(v + 3 * k)
    wrong, right = case.clone(), case.clone()
    right.state = case.state.transpose(-1, -2).contiguous()
    k_last = call(case, output=None)
    v_last = call(right, output=None, state_layout="v_last")
    mistaken = call(wrong, output=None, state_layout="v_last")
    torch.testing.assert_close(k_last.float(), v_last.float(), rtol=2**-7, atol=1e-3)
    torch.testing.assert_close(case.state, right.state.transpose(-1, -2), rtol=1e-5, atol=5e-5)
    assert (k_last.float() - mistaken.float()).abs().max() > 0.1


@by_device
def test_draft_length_changes(device):
    """Fault: the draft's length changed, and the T of another call ran."""
    for contract in (*DRAFTS, *reversed(DRAFTS)):
        judged(make_case(Problem(contract, 2, 1, 2), device, seed=21))
    for lengths in ([4, 4], [1, 3], [0, 2], [4, 4]):
        judged(
            make_case(
                Problem(RAGGED, 2, 1, 2),
                device,
                seed=21,
                lengths=lengths,
                tail_rows=8 - sum(lengths),
            )
        )


def captured(case, stream):
    """A graph of a case's public call, captured on a stream of its own."""
    gdntune.prepare(case.contract, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call(case)
    return graph


@pytest.mark.gpu
def test_draft_length_changes_under_a_graph():
    """Fault: a captured graph replayed the T of its capture. Lengths lie on the device, so a replay
    follows them.
    """
    before = make_case(Problem(RAGGED, 3, 1, 2), "cuda", seed=22)
    case = before.clone()
    graph = captured(case, torch.cuda.Stream())
    for ends in ([0, 1, 4, 4], [0, 4, 8, 12], [0, 0, 2, 5]):
        before.cu_seqlens.copy_(index(ends, "cuda"))
        case.cu_seqlens.copy_(before.cu_seqlens)
        case.restore(before)
        graph.replay()
        Truth(before).judge(case).require()


@pytest.mark.gpu
@pytest.mark.parametrize("contract", [PLAIN, DENSE], ids=["T=1", "dense"])
def test_capture_on_another_stream(contract):
    """Fault: a launch on another stream than the capture's was not in the graph: its replay did
    nothing, and stale output passed.
    """
    before = make_case(Problem(contract, 3, 1, 2), "cuda", seed=23)
    case = before.clone()
    graph = captured(case, torch.cuda.Stream())
    torch.cuda.synchronize()
    assert case.output.isnan().all(), "a capture runs nothing"
    for seed in (24, 25):
        flow = make_case(Problem(contract, 3, 1, 2), "cuda", seed=seed)
        for name in ("q", "k", "v", "a", "b"):
            getattr(before, name).copy_(getattr(flow, name))
            getattr(case, name).copy_(getattr(flow, name))
        case.restore(before)
        graph.replay()
        Truth(before).judge(case).require()


@by_device
def test_first_call_in_serving(device, monkeypatch):
    """Fault: a first call in serving compiled for seconds. After `prepare` no batch size compiles,
    after `plan` its own does not.
    """
    contract = BF16
    bound = gdntune.prepare(contract, device)
    assert all(function is not None for function in bound._functions)
    gdntune.plan(Problem(PLAIN, 3, 1, 2), device)

    def compiled(*_):
        raise AssertionError("compiled in serving")

    monkeypatch.setattr("gdntune.objects.build.compile_objects", compiled)
    calls.forget()
    for B in (1, 7, 64, 300):
        call(make_case(Problem(contract, B, 1, 2), device))
    call(make_case(Problem(PLAIN, 3, 1, 2), device))
