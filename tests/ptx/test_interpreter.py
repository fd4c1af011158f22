"""The interpreter itself: what it computes by itself, and what it refuses."""

import numpy as np
import pytest
import torch

from . import grid
from .faults import Fault, Unmodelled
from .grid import Launch
from .memory import Global
from .program import operands, parse

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
{
.reg .pred %p<9>; .reg .b16 %rs<9>; .reg .b32 %r<99>; .reg .b64 %rd<19>;
.shared .align 16 .b8 buffer[4096];
ld.param.b64 %rd1, [k_param_0];
ld.param.b64 %rd2, [k_param_1];
mov.u32 %r1, %tid.x;
mov.u32 %r2, %ctaid.x;
mad.lo.s32 %r3, %r2, 64, %r1;
mul.wide.u32 %rd3, %r3, 4;
add.s64 %rd4, %rd1, %rd3;
add.s64 %rd5, %rd2, %rd3;
ld.global.b32 %r4, [%rd4];
mov.b32 %r5, buffer;
shl.b32 %r6, %r1, 2;
add.s32 %r7, %r5, %r6;
"""


def run(body, source=None, blocks=2, threads=64):
    """What `body` leaves in %r9 of each thread; %r4 is the thread's element of the source."""
    x = torch.arange(blocks * threads, dtype=torch.int32) if source is None else source
    out = torch.zeros_like(x)
    program = parse(f"{HEAD}{body}\nst.global.b32 [%rd5], %r9;\nret;\n}}")
    memory = Global({"x": x, "out": out}, ["out"], [])
    pointers = [memory.shown(n, t)[0].to_bytes(8, "little") for n, t in (("x", x), ("out", out))]
    grid.run(program, Launch((blocks, 1, 1), (threads, 1, 1), 0, tuple(pointers)), memory)
    memory.write_back()
    return out


def test_operands_are_split_at_the_top_level():
    """Braces and brackets hold their commas."""
    assert operands("{%r1, %r2}, [%rd1+8], 4") == ("{%r1, %r2}", "[%rd1+8]", "4")


def test_threads_part_and_meet_again():
    """A branch, a loop of a length of each thread's own, and a shuffle behind them."""
    body = """
    and.b32 %r10, %r1, 3;
    mov.b32 %r9, 0;
    setp.eq.s32 %p1, %r10, 0;
    @%p1 bra $L_out;
    $L_loop:
    add.s32 %r9, %r9, %r10;
    sub.s32 %r10, %r10, 1;
    setp.ne.s32 %p2, %r10, 0;
    @%p2 bra $L_loop;
    $L_out:
    shfl.sync.bfly.b32 %r9, %r9, 1, 31, -1;
    """
    sums = torch.tensor([0, 1, 3, 6])
    assert torch.equal(run(body).long(), sums[torch.arange(128) % 4 ^ 1])


NEIGHBOUR = "xor.b32 %r20, %r6, {far}; add.s32 %r21, %r5, %r20; ld.shared.b32 %r9, [%r21];"


def test_a_barrier_orders_shared_memory():
    """Behind a barrier each thread of a block reads what another one wrote."""
    got = run("st.shared.b32 [%r7], %r4;\nbar.sync 0;\n" + NEIGHBOUR.format(far=128))
    assert torch.equal(got, torch.arange(128, dtype=torch.int32) ^ 32)


@pytest.mark.parametrize(
    ("between", "far", "raced"),
    [
        ("", 4, True),
        ("bar.warp.sync -1;", 4, False),
        ("bar.warp.sync -1;", 128, True),
        ("bar.sync 0;", 128, False),
        ("shfl.sync.idx.b32 %r30, %r4, 0, 31, -1;", 4, True),
    ],
)
def test_races_in_shared_memory(between, far, raced):
    """A read of another thread's store, and a store where another thread read, without an order."""
    store, other = "st.shared.b32 [%r7], %r4;\n", "st.shared.b32 [%r7], %r9;\n"
    read = NEIGHBOUR.format(far=far)
    for body in (f"{store}{between}{read}", f"{store}bar.sync 0;\n{read}{between}{other}"):
        if raced:
            with pytest.raises(Fault, match="races with"):
                run(body)
        else:
            run(body)


def test_blocks_race_in_global_memory():
    """Two blocks that write different values to one place; the same value may be written."""
    with pytest.raises(Fault, match="races with|at once"):
        run("mov.b32 %r9, %r2; st.global.b32 [%rd2], %r2;")
    with pytest.raises(Fault, match="races with"):
        run("ld.global.b32 %r9, [%rd5]; sub.s64 %rd6, %rd5, %rd3; st.global.b32 [%rd6], 7;")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("ld.global.b32 %r9, [%rd4+512];", "beyond the end of x"),
        ("ld.global.b32 %r9, [%rd4+-4];", "before x"),
        ("ld.global.v2.b32 {%r9, %r10}, [%rd4];", "misaligned"),
        ("st.global.b32 [%rd4], %r1;", "to be read alone"),
        ("ld.shared.b32 %r9, [%r7+4096];", "shared memory"),
        ("ld.global.b32 %r9, [%rd17];", "load of 4 bytes"),
    ],
)
def test_accesses_out_of_bounds(body, message):
    """Each is a fault that names the place and the instruction."""
    with pytest.raises(Fault, match=message):
        run(body)


@pytest.mark.parametrize("rows", [0, 3])
def test_an_index_beyond_a_spread_dimension(rows):
    """It is nobody's place, however many bytes a row has: not the next tensor's either."""
    x, behind = torch.zeros(1, rows, 4096), torch.zeros(1, 3, 4096)
    memory = Global({"x": x, "y": behind}, [], ["x"])
    first, strides = memory.shown("x", x)
    for row in range(-1, rows + 2):
        address = np.array([first + 4 * strides[1] * row + 4096])
        if 0 <= row < rows:
            memory.require(address, 4, str)
        else:
            with pytest.raises(Fault, match=f"of x, which has 16384 an index, of {rows}"):
                memory.require(address, 4, str)


def test_gaps_are_no_part_of_a_tensor():
    """Every other element of a storage is a tensor's: what is between is nobody's."""
    x = torch.arange(256, dtype=torch.int32)[::2]
    with pytest.raises(Fault, match="a gap"):
        run("ld.global.b32 %r9, [%rd4+4];", source=x)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("setp.lt.u32 %p1, %r1, 5; @%p1 shfl.sync.bfly.b32 %r9, %r4, 1, 31, -1;", "part of a warp"),
        ("setp.lt.u32 %p1, %r1, 5; @%p1 bar.warp.sync -1;", "part of a warp"),
        ("$L_x: bra $L_x;", "no end"),
        (
            "cp.async.ca.shared.global [%r7], [%rd4], 4; cp.async.commit_group; mov.b32 %r9, 0;",
            "an end before copies",
        ),
    ],
)
def test_waits_without_an_end(body, message):
    """What would hang, or be undefined, on a GPU."""
    with pytest.raises(Fault, match=message):
        run(body)


def test_copies_land_when_they_are_waited_for():
    """cp.async: before the wait there is what was there, NaN's bits; the last group may be left."""
    copy = "cp.async.ca.shared.global [%r7{at}], [%rd4], 4; cp.async.commit_group;"
    both = copy.format(at="") + copy.format(at="+1024")
    read = "ld.shared.b32 %r9, [%r7{at}]; cp.async.wait_all;"
    assert (run(both + read.format(at="")) == -1).all()
    first = both + "cp.async.wait_group 1;"
    assert torch.equal(run(first + read.format(at="")), torch.arange(128, dtype=torch.int32))
    assert (run(first + read.format(at="+1024")) == -1).all()


def test_a_barrier_of_some_threads():
    """Warps that only arrive go on; the others wait for as many as it says."""
    upper = "setp.ge.u32 %p1, %r1, 32;"
    both = "@%p1 bar.sync 1, 64; @!%p1 bar.arrive 1, 64; mov.b32 %r9, 7;"
    assert (run(upper + both) == 7).all()
    with pytest.raises(Fault, match="threads wait at barrier 1, and no others come"):
        run(upper + "@%p1 bar.sync 1, 64; mov.b32 %r9, 7;")
    with pytest.raises(Fault, match="more than 32 threads of a block come to barrier 1"):
        run("bar.arrive 1, 32; mov.b32 %r9, 7;")


def test_what_is_not_modelled_is_refused_by_name():
    """No instruction is passed over in silence."""
    for text in (
        "atom.global.add.u32 %r9, [%rd5], 1;",
        "bar.red.popc.u32 %r9, 1, %p1;",
        "frobnicate.f32 %r9, %r4;",
        "add.sat.s32 %r9, %r4, 1;",
    ):
        with pytest.raises(Unmodelled, match=text.split()[0].split(".")[0]):
            run(text)


@pytest.mark.parametrize(
    ("instruction", "want"),
    [
        ("mul.hi.u32 %r9, %r4, 0x80000000;", lambda x: x // 2),
        ("shl.b32 %r9, %r4, 32;", lambda x: 0 * x),
        ("prmt.b32 %r9, %r4, %r4, 0x4440;", lambda x: x % 256 * 0x01010101),
        ("bfe.u32 %r9, %r4, 2, 3;", lambda x: x // 4 % 8),
        ("lop3.b32 %r9, %r4, %r1, 7, 0x96;", lambda x: x ^ x % 64 ^ 7),
        ("rem.u32 %r9, %r4, 7;", lambda x: x % 7),
        (
            "sub.s32 %r9, %r4, 64; min.relu.s32 %r9, %r9, 9;",
            lambda x: (x - 64).clamp(max=9).clamp(min=0),
        ),
        ("cvt.rn.f32.s32 %r9, %r4; cvt.rzi.s32.f32 %r9, %r9;", lambda x: x),
        ("clz.b32 %r9, %r4;", lambda x: 32 - torch.tensor([int(n).bit_length() for n in x])),
    ],
)
def test_integers(instruction, want):
    """Integer instructions, against the same in torch."""
    assert torch.equal(run(instruction).long() & 0xFFFFFFFF, want(torch.arange(128)) & 0xFFFFFFFF)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_sixteen_bits_round_as_torch_does(kind):
    """cvt.rn of fp32, and back, for all kinds of numbers: ties, overflow, subnormals, NaN."""
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}[kind]
    bits = torch.randint(-(2**31), 2**31, (128,), generator=torch.Generator().manual_seed(0))
    x = bits.to(torch.int32).view(torch.float32)
    x[:6] = torch.tensor([1 + 2**-9, 1 + 3 * 2**-9, 65520.0, 1e-7, 3e38, float("nan")])
    got = run(f"cvt.rn.{name}.f32 %rs1, %r4; cvt.f32.{name} %r9, %rs1;", source=x.view(torch.int32))
    want = x.to(kind).float()
    assert torch.equal(got.view(torch.float32).nan_to_num(nan=1.5), want.nan_to_num(nan=1.5))


def test_a_product_of_tf32_cuts_off_what_tf32_lacks():
    """A's columns c and c + 4 are a lane's first and third register, B's rows its two; of each word the
    13 low bits are not read.
    """
    body = """
    mov.b32 %r20, 0f00000000;
    add.f32 %r21, %r4, %r4;
    mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%r22, %r9, %r23, %r24},
    {%r4, %r20, %r21, %r20}, {%r4, %r21}, {%r20, %r20, %r20, %r20};
    """
    x = torch.randn(32, generator=torch.manual_seed(0))
    got = run(body, x.view(torch.int32), 1, 32).view(torch.float32)
    cut = (x.view(torch.int32) & -8192).view(torch.float32).double().view(8, 4)
    # of lane (g, c) row g, column 2 c + 1
    want = 5 * (cut @ cut.T)[:, 1::2]
    assert torch.equal(got.view(8, 4), want.float())
    assert not torch.equal(got.view(8, 4), (5 * x.view(8, 4) @ x.view(8, 4).T)[:, 1::2])


def test_matrices_go_through_ldmatrix_and_mma():
    """ldmatrix, plain and turned, and movmatrix give mma's operands: A A^T and A A of an 8 x 8 block."""
    pairs = np.arange(64, dtype=np.float32).reshape(8, 8) / 8
    words = torch.from_numpy(pairs).to(torch.bfloat16).view(torch.int32).reshape(-1)
    x = torch.zeros(64, dtype=torch.int32)
    x[:32] = words
    load = """
    st.shared.b32 [%r7], %r4;
    bar.sync 0;
    and.b32 %r10, %r1, 7; shl.b32 %r10, %r10, 4; add.s32 %r10, %r5, %r10;
    ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r11}, [%r10];
    ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r12}, [%r10];
    movmatrix.sync.aligned.m8n8.trans.b16 %r13, %r11;
    mov.b32 %r14, 0;
    """
    product = (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%r20, %r21, %r22, %r23}, "
        "{%r11, %r14}, {B}, {%r14, %r14, %r14, %r14};\nmov.b32 %r9, %r20;"
    )
    for b, want in (("%r11", pairs @ pairs.T), ("%r12", pairs @ pairs), ("%r13", pairs @ pairs)):
        got = run(load + product.replace("B", b), source=x, blocks=1)
        first = torch.from_numpy(want.reshape(8, 4, 2)[..., 0].copy()).reshape(-1)
        assert torch.equal(got[:32].view(torch.float32), first)
