"""The layer's kernel in forms that a sample of its settings may miss: clusters, heads that share a
block, chunks ahead; and what a cluster gets wrong is caught.
"""

import dataclasses
import re

import pytest

from gdntune import kernels
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.device import arch
from gdntune.errors import CheckFailed
from gdntune.problem import Contract, Problem

from . import call
from .build import ARCH
from .cover import Row
from .faults import Fault

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

LAYER = kernels.get("layer")
STEP = {"norm": "silu", "conv": "silu"}
SLOTS = {"tokens": 4, "mode": "frozen", "intermediate": "slots", "accepted": True}
KDA = {"op": "kda_decode", "gate": "softplus", "norm": "sigmoid", "conv": "silu"}
RAGGED = Contract(**STEP, tokens=4, ragged=True, state_dtype="fp32")
PADDED = {"padding": 0.3, "slot_stride_pad": 64, "extra_rows": 2}
LENGTHS = {"lengths": (4, 0, 1), **PADDED}


def row(contract, ratio, options=PADDED, **knobs):
    """A setting beside a whole head's other knobs; ratio: value heads of a q/k head."""
    space = LAYER.space(contract, arch.target(ARCH))
    whole = next(s for s in space if s.tile_v == contract.V)
    if contract.layout == "k_last":
        whole = dataclasses.replace(whole, threads=128, ilp=8)
    setting = dataclasses.replace(whole, **knobs)
    assert LAYER.refuse(contract, setting) is None
    return Row("layer", contract, LAYER.variant(setting), tuple(options.items()), ratio)


ONE = row(Contract(**STEP), 2, tile_v=64, threads=128, ilp=8)
WINDOW = row(Contract(**STEP, conv_window="shifted"), 3, threads=256, ilp=4, share=1, group=8)
# of KDA with fp32 states, decays once a block
WIDE = {"vec": 4, "once": True, "pdl": "first"}
KDA_FP32 = Contract(**KDA, state_dtype="fp32")
# a warp has one part of what stands ahead of the delta rule, or none
PARTS = {"apart": True, "roles": True}
SENT = row(KDA_FP32, 1, **WIDE, ilp=4, threads=256, ahead=2, sent=True)
APART = row(KDA_FP32, 1, **WIDE, ilp=4, threads=512, apart=True, stores="first")
ROLES = row(
    KDA_FP32,
    1,
    **WIDE,
    ilp=8,
    threads=512,
    lanes=32,
    apart=True,
    roles=True,
    fence=True,
    window_first=True,
)
ROWS = [
    ONE,
    row(Contract(**STEP), 2, tile_v=32, ilp=2, threads=256, pdl="first"),
    row(Contract(**STEP, **SLOTS), 1, tile_v=32, ilp=4, row=True, pdl="state"),
    row(RAGGED, 3, LENGTHS, tile_v=32, ilp=2),
    row(Contract(**KDA), 1, tile_v=64, ilp=8),
    row(Contract(norm="silu", layout="v_last"), 2, tile_v=64, vec=8, threads=64),
    # three heads in twos and in a four: the last block has fewer than it could
    row(Contract(**STEP), 3, share=2, ilp=2, ahead=4, registers=96, pdl="first"),
    row(RAGGED, 3, LENGTHS, share=4, ilp=2, ahead=2, pdl="state"),
    row(Contract(**STEP, **SLOTS), 3, share=2, ilp=4, row=True),
    row(Contract(norm="silu", **SLOTS), 1, ilp=4, ahead=2),
    # rows on their way in shared memory: a whole head at once, two chunks of four, over several heads
    row(Contract(**STEP), 2, ilp=4, threads=128, copied=True, ahead=4, registers=80),
    row(
        Contract(**STEP, state_dtype="fp32"),
        3,
        ilp=4,
        threads=128,
        vec=4,
        copied=True,
        share=2,
        pdl="state",
    ),
    row(RAGGED, 3, LENGTHS, ilp=8, threads=128, copied=True, ahead=2),
    row(Contract(**STEP), 1, ilp=2, copied=True, ahead=4, registers=64, pdl="state"),
    row(Contract(**STEP, **SLOTS), 2, tile_v=64, threads=256, ilp=4, row=True, registers=64),
    row(Contract(**STEP, **SLOTS), 1, ilp=4, threads=256, copied=True, ahead=2, row=True),
    row(Contract(**KDA), 1, ilp=4, threads=128, copied=True, ahead=2, pdl="first"),
    # what L2 is told and asked for: a later request's state, that of two heads, of a tile of V
    row(Contract(**STEP), 2, ilp=4, threads=128, copied=True, ahead=2, stores="first", beyond=1),
    row(
        Contract(**STEP, **SLOTS),
        2,
        tile_v=64,
        row=True,
        stores="first",
        beyond=1,
        pdl="first",
    ),
    row(Contract(**STEP, conv_window="shifted"), 3, ilp=4, share=8, group=1, beyond=1),
    # states that leave by bulk stores: of each token, of several chunks of rows, of both
    row(Contract(norm="silu", **SLOTS), 2, tile_v=64, row=True, stores="bulkfirst", pdl="first"),
    row(
        Contract(norm="silu", **SLOTS),
        3,
        tile_v=64,
        fence=True,
        row=True,
        stores="bulkfirst",
        pdl="state",
        beyond=1,
    ),
    row(Contract(**STEP, state_dtype="fp32"), 3, ilp=4, vec=4, share=2, stores="bulkfirst"),
    row(RAGGED, 3, LENGTHS, ilp=4, copied=True, ahead=2, stores="bulk"),
    row(
        Contract(**KDA, state_dtype="fp32"), 1, tile_v=64, ilp=4, threads=256, vec=4, stores="bulk"
    ),
    row(Contract(norm="silu", **SLOTS), 1, ilp=8, threads=256, row=True, stores="bulk"),
    row(
        Contract(**STEP, **SLOTS, conv_window="shifted"),
        3,
        ilp=4,
        threads=128,
        registers=96,
        share=2,
        group=4,
        row=True,
        stores="bulk",
    ),
    row(Contract(**KDA, state_dtype="fp32"), 1, ilp=4, threads=256, vec=4, ahead=2, copied=True),
    row(
        Contract(norm="silu", tokens=3, intermediate="dense"), 1, ilp=2, threads=256, stores="bulk"
    ),
    # rows that are sent, a head's as two chunks or one of a cluster's; decays once a block
    SENT,
    row(
        Contract(**KDA, state_dtype="fp32"),
        1,
        tile_v=32,
        ilp=4,
        threads=128,
        vec=4,
        sent=True,
        once=True,
        pdl="state",
    ),
    row(Contract(**STEP, **SLOTS), 2, tile_v=64, row=True, sent=True, stores="bulkfirst"),
    row(
        Contract(**KDA, conv_window="shifted", conv_bias=True, gate_dtype="fp32"),
        1,
        ilp=4,
        threads=256,
        once=True,
        stores="first",
    ),
    row(
        Contract(**KDA, state_dtype="fp32"),
        1,
        ilp=4,
        threads=256,
        vec=4,
        ahead=2,
        copied=True,
        once=True,
        window_first=True,
        pdl="first",
    ),
    # warps that convolve before they ask for their rows: a head's at once, one chunk of a cluster's, and of GDN
    APART,
    row(Contract(**KDA), 1, tile_v=32, ilp=4, threads=128, apart=True, once=True),
    row(Contract(**STEP, conv_bias=True), 3, ilp=4, threads=512, apart=True, pdl="first"),
    # of these, warps that ask for what their part needs alone
    ROLES,
    # and whose rows are sent, as one chunk or two
    row(KDA_FP32, 1, **WIDE, **PARTS, ilp=4, threads=512, fence=True, sent=True, stores="first"),
    row(KDA_FP32, 1, **WIDE, **PARTS, ilp=4, threads=256, ahead=2, sent=True, window_first=True),
    row(
        Contract(**KDA),
        1,
        tile_v=32,
        ilp=4,
        threads=128,
        apart=True,
        once=True,
        roles=True,
        window_first=True,
    ),
    row(
        Contract(**STEP, conv_bias=True),
        3,
        ilp=4,
        threads=512,
        apart=True,
        roles=True,
        pdl="first",
    ),
    row(
        Contract(**STEP, conv_input="interleaved", state_dtype="fp32"),
        2,
        tile_v=64,
        ilp=4,
        vec=4,
        threads=256,
        apart=True,
        roles=True,
        fence=True,
    ),
    row(
        Contract(conv="silu"),
        2,
        ilp=4,
        threads=256,
        ahead=2,
        apart=True,
        roles=True,
        window_first=True,
    ),
    # several tokens: in slots, ragged, of KDA, and of a call that leaves windows as they are
    row(
        Contract(**STEP, **SLOTS),
        2,
        tile_v=64,
        ilp=4,
        threads=256,
        row=True,
        apart=True,
        pdl="first",
    ),
    row(RAGGED, 3, LENGTHS, ilp=4, threads=256, vec=4, apart=True),
    row(Contract(**KDA, tokens=3), 1, tile_v=64, ilp=8, apart=True),
    row(Contract(**STEP, tokens=4, mode="frozen"), 2, ilp=4, threads=256, apart=True),
    # windows that are shifted in place, by a cluster of their readers: with idle blocks, of one head each, of two
    WINDOW,
    row(
        Contract(**STEP, conv_window="shifted"),
        8,
        ilp=4,
        threads=128,
        share=2,
        group=4,
        pdl="state",
    ),
    row(
        Contract(**STEP, **SLOTS, conv_window="dims_first"),
        5,
        share=2,
        group=4,
        row=True,
        ahead=2,
        copied=True,
        registers=128,
    ),
    row(RAGGED.replace(conv_window="shifted"), 3, LENGTHS, threads=256, ilp=4, share=4, group=2),
    row(Contract(**KDA, conv_window="shifted"), 1, tile_v=64),
    row(Contract(**STEP, conv_window="shifted", layout="v_last"), 3, vec=8, threads=64),
    # windows that are shifted in place, by a block that has all their readers
    row(
        Contract(**STEP, conv_window="shifted"),
        3,
        threads=256,
        ilp=4,
        pdl="state",
        share=8,
        group=1,
    ),
    row(
        Contract(conv="silu", conv_bias=True, conv_width=3, conv_window="shifted"),
        8,
        share=8,
        group=1,
    ),
    row(Contract(**KDA, conv_window="shifted"), 1),
    row(
        Contract(**STEP, **SLOTS, conv_window="shifted"),
        3,
        ilp=4,
        threads=256,
        row=True,
        share=8,
        group=1,
    ),
    row(
        Contract(**KDA, **SLOTS, conv_window="shifted"),
        1,
        {"extra_steps": 2, **PADDED},
        pdl="state",
    ),
    row(RAGGED.replace(conv_window="shifted"), 2, LENGTHS, threads=256),
    row(Contract(**STEP, **SLOTS, conv_window="dims_first"), 2, threads=256, row=True),
    row(Contract(**STEP, conv_window="dims_first", conv_width=2), 3),
    # rows with q/k heads side by side
    row(Contract(**STEP, conv_input="interleaved"), 3, ilp=4, threads=128, share=2),
    row(Contract(**STEP, conv_input="interleaved"), 2, tile_v=64),
    row(
        Contract(**STEP, **SLOTS, conv_input="interleaved", conv_window="shifted"),
        2,
        share=2,
        group=4,
        row=True,
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_forms(row, builder):
    """Right by the gate that every variant passes, with no access out of bounds and no race."""
    truth = Truth(make_case(row.problem, "cpu", 0, **dict(row.options)))
    case = truth.before.clone()
    call.decode(builder.get(row.contract, row.variant), row.contract)(*case.arguments())
    truth.judge(case).require()


def test_a_window_that_is_moved_on_too_early(builder):
    """Its readers are waited for, and with what they have read."""
    made = builder.get(WINDOW.contract, WINDOW.variant)
    for pattern, instead in (
        (r"barrier\.cluster\.wait[^;]*;", ""),
        (r"barrier\.cluster\.arrive", "barrier.cluster.arrive.relaxed"),
    ):
        text = re.sub(pattern, instead, made.ptx)
        assert text != made.ptx
        case = make_case(WINDOW.problem, "cpu", 0)
        with pytest.raises(Fault, match="races with the load"):
            call.decode(made, WINDOW.contract, text)(*case.arguments())


def require_caught(one, broken, HV, builder):
    """A kernel whose text was changed by `broken` is a fault, or its results are not right."""
    made = builder.get(one.contract, one.variant)
    text = re.sub(*broken, made.ptx)
    assert text != made.ptx
    truth = Truth(make_case(Problem(one.contract, 1, 1, HV), "cpu", 0))
    case = truth.before.clone()

    def judge():
        call.decode(made, one.contract, text)(*case.arguments())
        truth.judge(case).require()

    with pytest.raises((Fault, CheckFailed)):
        judge()


BULK = row(Contract(norm="silu", **SLOTS), 2, {}, tile_v=64, row=True, stores="bulkfirst")


@pytest.mark.parametrize(
    "broken",
    [
        (r"cp\.async\.bulk\.wait_group\.read\s+1;", ""),
        (r"cp\.async\.bulk\.wait_group\.read\s+0;", ""),
        (r"(cp\.async\.bulk\.global[^;]*), %r\d+, (%rd\d+);", r"\1, 2048, \2;"),
    ],
    ids=["a place is written too early", "an end too early", "half of the rows"],
)
def test_broken_bulk_stores_are_caught(broken, builder):
    """A fault, or a verdict that is not ok."""
    require_caught(BULK, broken, 2, builder)


BROKEN = {
    "a block sends before the others run": (r"barrier\.cluster\.wait[^;]*;", ""),
    "nothing is sent": (r"st\.async[^;]*;", ""),
    "sums go to the block itself": (r"(mapa\S+\s+%r\d+, %r\d+), %r\d+;", r"\1, 0;"),
    "sums are read before they are there": (
        r"mbarrier\.try_wait\S* P1,[^;]*;",
        "setp.eq.b32 P1, 0, 0;",
    ),
    "a sum is not counted on": (r"(mbarrier\.arrive\.expect_tx\S+ [^;]*), %r\d+;", r"\1, 4;"),
}


@pytest.mark.parametrize(
    "broken",
    [
        (r"mbarrier\.try_wait\S* P1,[^;]*;", "setp.eq.b32 P1, 0, 0;"),
        (r"(cp\.async\.bulk\.shared[^;]*), %r\d+, (\[[^;]*);", r"\1, 2048, \2;"),
        (r"(st\.shared\.b32\s+\[%r\d+)\+1280\]", r"\1+1284]"),
    ],
    ids=["rows are read before they are there", "half of the rows", "another key's decay"],
)
def test_broken_sent_rows_are_caught(broken, builder):
    """A fault, or a verdict that is not ok."""
    require_caught(SENT, broken, 1, builder)


def test_warps_that_do_not_wait_for_the_convolution_are_caught(builder):
    """Its only barrier ahead of the rows; a race, whatever the results are."""
    require_caught(APART, (r"(?s)\A(.*?)bar(rier)?\.sync\s+0;", r"\1"), 1, builder)


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_clusters_are_caught(broken, builder):
    """A fault, or a verdict that is not ok."""
    made = builder.get(ONE.contract, ONE.variant)
    text = re.sub(*BROKEN[broken], made.ptx)
    assert text != made.ptx
    truth = Truth(make_case(Problem(ONE.contract, 2, 1, 2), "cpu", 0))
    case = truth.before.clone()
    broken_kernel = call.decode(made, ONE.contract, text)

    def judge():
        broken_kernel(*case.arguments())
        truth.judge(case).require()

    with pytest.raises((Fault, CheckFailed)):
        judge()
