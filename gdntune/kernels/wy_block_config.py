"""Knobs of `wy_block`: which settings are legal and which are worth trying."""

import dataclasses
from typing import Any

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.dependent_launch import in_every_form, pdl_fault, pdl_knob, under
from gdntune.kernels.facts import compiled_tokens, facts
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract

# bf16 terms of an operand of the projection, and of a key where it meets u in the final state
TERMS = {"bf16": 1, "fp16": 2}


@dataclasses.dataclass(frozen=True)
class BlockKnobs:
    """What a tensor-core kernel has whose block works together: how rows of V lie on its warps."""

    rows: int = knob("rw", "rows of V a warp has in registers")
    warps: int = knob("wp", "warps of a block that have rows of V")
    threads: int = knob(
        "th",
        "threads a block, all of which work on what depends on q, k and the gates alone",
        default=128,
    )
    passes: int = knob("ps", "times that a warp takes new rows", default=1)
    registers: int = knob(
        "rg", "at most so many registers a thread, for more warps at once; 0: no cap", default=0
    )


@dataclasses.dataclass(frozen=True)
class Knobs(BlockKnobs):
    """One setting of `wy_block`."""

    pdl: str = pdl_knob()
    matrices: bool = knob(
        "mx",
        "v_last, states of 16 bits: read 16 bytes of neighbouring rows at a time, as matrices that a"
        " warp turns; else each thread turns its own",
        default=False,
    )
    lines: bool = knob(
        "fl",
        "k_last: read and write whole lines of 128 bytes, of which lanes exchange halves, or, of rows that"
        " are copied, whole rows; else half a line of twice as many rows at a time",
        default=False,
    )
    terms: int = knob(
        "ut",
        "bf16 terms of u, and of a decayed key, where they meet in the final state; 3: of states"
        " that are not rounded to bf16, and of KDA",
        default=2,
    )
    tf32: bool = knob(
        "tf",
        "fp32 states of KDA, eight tokens: products are of two TF32 terms, else of three bf16 terms",
        default=False,
    )
    fence: bool = knob(
        "fence",
        "what waits for q, k and the gates stands behind a branch, across which ptxas moves nothing"
        " ahead of the state's loads",
        default=False,
    )
    columns: int = knob(
        "cl",
        "KDA: of the products of pairs of tokens, columns that a warp has; the more, the fewer reads of"
        " shared memory and the fewer warps at work. 2, of more than four tokens: in a loop of few"
        " instructions",
        default=4,
    )
    copied: int = knob(
        "cp",
        "k_last: so many times eight of a warp's rows come by cp.async into shared memory, the others into"
        " registers",
        default=0,
    )
    ahead: int = knob(
        "ah",
        "a block asks into the L2 cache for what the block so many places behind it in the grid"
        " reads, a power of two; 0: it does not",
        default=0,
    )


def three_terms(c: Contract) -> bool:
    """Whether a final state is written that shows what two terms lose: up to 2^-17 of u k for each
    of u and a decayed key, where one token may lose 2^-18 of a row. fp32 and fp16 states show it
    where a decay leaves nothing of the rest. A bf16 state shows it next to the middle between two
    of its numbers: seen with KDA, one of 2,100 random problems.
    """
    return c.mode == "update" and (c.state_dtype != "bf16" or c.op == "kda_decode")


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.intermediate != "none":
        return (
            f"intermediate={c.intermediate}: states between tokens are never formed, expected none"
        )
    if compiled_tokens(c) == 1:
        return "tokens=1: there is nothing to gather into a product, expected 2 to 16, or ragged"
    if c.K not in (64, 128, 256):
        return f"K={c.K}: a token's keys are shared out among the threads of a warp, expected 64, 128 or 256"
    for name, given, expected in (
        ("rows", s.rows, (16, 32)),
        ("warps", s.warps, (1, 2, 4, 8)),
        ("threads", s.threads, (128, 256)),
        ("passes", s.passes, (1, 2, 4)),
        ("terms", s.terms, (2, 3) if three_terms(c) else (2,)),
        ("registers", s.registers, (0, 64, 80, 96, 128, 168)),
    ):
        if given not in expected:
            return f"{name}={given}: expected one of {', '.join(map(str, expected))}"
    if fault := pdl_fault(s):
        return fault
    if s.matrices and (c.layout != "v_last" or ITEMSIZE[c.state_dtype] != 2):
        return (
            f"matrices=True with layout={c.layout}, state_dtype={c.state_dtype}: expected v_last and"
            " 16 bits, which movmatrix turns"
        )
    if s.lines and c.layout != "k_last":
        return f"lines=True with layout={c.layout}: expected k_last, whose rows hold whole lines"
    if s.tf32 and (
        c.op != "kda_decode" or c.state_dtype != "fp32" or block_facts(c)["tokens"] != 8
    ):
        return (
            f"tf32=True with op={c.op}, state_dtype={c.state_dtype}, tokens={c.tokens}: expected"
            " kda_decode, fp32 and 5 to 8 tokens"
        )
    if s.tf32 and s.terms != 2:
        return f"tf32=True with terms={s.terms}, which are of bf16: expected 2"
    if s.tf32 and c.layout != "k_last":
        return f"tf32=True with layout={c.layout}: expected k_last, whose rows are an operand"
    if s.tf32 and s.lines and not s.copied:
        return "tf32=True with lines=True, copied=0: expected lines of rows that are copied"
    if s.tf32 and s.threads * 2 > 4 * c.K:
        return (
            f"tf32=True with threads={s.threads}, K={c.K}: a thread fills in an even number of"
            f" tokens, expected at most {2 * c.K} threads"
        )
    if s.columns != 4 and c.op != "kda_decode":
        return f"columns={s.columns} with op={c.op}: expected 4, they are KDA's"
    tokens, warps = block_facts(c)["tokens"], s.threads // 32
    if c.op == "kda_decode" and (
        s.columns not in (2, 4, 8)
        or s.columns > tokens
        or (s.columns > 2 and tokens > s.columns * warps)
    ):
        return (
            f"columns={s.columns} of {tokens} tokens by {warps} warps: expected 2, or one of 4, 8, no"
            " more than tokens and at least tokens / warps"
        )
    if s.copied and c.layout != "k_last":
        return (
            f"copied={s.copied} with layout={c.layout}: expected k_last, whose rows are an operand"
        )
    if s.copied not in range(s.rows // 8 + 1):
        return f"copied={s.copied} with rows={s.rows}: expected 0 to {s.rows // 8}"
    if s.copied and s.passes > 1:
        return f"copied={s.copied} with passes={s.passes}: expected passes=1"
    if s.copied and s.lines and c.mode == "update" and 8 * s.copied != s.rows:
        return f"copied={s.copied} with lines=True, mode=update: expected {s.rows // 8}, all rows"
    if s.ahead < 0 or s.ahead & (s.ahead - 1):
        return f"ahead={s.ahead}: expected 0 or a power of two"
    if s.ahead and (c.layout != "k_last" or c.ragged):
        return (
            f"ahead={s.ahead} with layout={c.layout}, ragged={c.ragged}: expected k_last and not"
            " ragged, whose rows are one run of memory and known without another wait"
        )
    if 32 * s.warps > s.threads:
        return f"warps={s.warps} with threads={s.threads}: expected at most {s.threads // 32}"
    # Warps without rows of their own redo the last warp's, and in a second pass would overwrite what
    # it still reads: tests/ptx found the race.
    if s.passes > 1 and s.threads != 32 * s.warps:
        return (
            f"passes={s.passes} with {s.threads // 32} warps, {s.warps} with rows: expected as many"
        )
    if c.V % (s.rows * s.warps * s.passes):
        return f"V={c.V} is not a multiple of rows*warps*passes={s.rows * s.warps * s.passes}"
    registers = (s.rows - 8 * s.copied) * c.K * ITEMSIZE[c.state_dtype] // 128
    if registers > 64:
        return f"the state takes {registers} registers a thread: expected at most 64"
    return None


def block_facts(c: Contract) -> Facts:
    """`facts`, but up to four tokens are compiled apart: k and q are then half of a product's rows."""
    return {**facts(c), "tokens": 4} if c.tokens <= 4 else facts(c)


def block(c: Contract, s: Knobs, values: bool = True) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to; values: with v and outputs."""
    tokens = block_facts(c)["tokens"]
    kda, update = c.op == "kda_decode", c.mode == "update"
    if s.terms == 3 and not kda:
        tokens = max(tokens, 8)
    N = 4 if tokens <= 4 else 8 * (-(-tokens // 8))
    terms = 2 if kda else TERMS[c.input_dtype]
    rows = 2 * N * terms
    rows += rows % 16 > 0
    # operands, of KDA the first two tokens' in one term more; the keys of the final state; Gram matrices
    # and factors
    operands = 8 * c.K * N if s.tf32 else 2 * (c.K + 8) * rows + (8 * c.K if kda else 0)
    keys = 4 * c.K * N if s.tf32 else 2 * (c.K + 8) * s.terms * N
    shared = operands + (keys if kda and update else 0) + 4 * (2 * N * N + 4 * N)
    spare = 0
    if kda:
        # k and q as they came, and decays
        came = 2 * tokens * c.K * ITEMSIZE[c.input_dtype] + 4 * tokens * c.K
        shared += 4 * c.K + came
        spare = operands + came
    else:
        shared += 4 * (N + 4) + 8 * N
    # rows that every thread copies, those beyond the last warp with rows too
    shared += s.copied * 8 * c.K * ITEMSIZE[c.state_dtype] * s.threads // 32
    # v and outputs, and a line or two of each row of V, which take what is spare
    lines = s.warps * s.rows
    shared += tokens * lines * s.passes * ITEMSIZE[c.input_dtype] if values else 0
    for width in (4 * (2 * N + 4), *([_width_of_u(s, N, tokens)] if update else [])):
        if s.passes == 1 and lines * width <= spare:
            spare -= lines * width
        else:
            shared += lines * width
    return Block(s.threads, shared)


def _width_of_u(s: Knobs, N: int, tokens: int) -> int:
    """Bytes of a row of u in shared memory."""
    if s.tf32:
        return 4 * 12
    if s.terms == 3:
        # the first terms twice, or an odd number of 16 bytes
        return 2 * (24 if tokens <= 4 else 3 * N + 8 + (8 if (3 * N + 8) // 8 % 2 == 0 else 0))
    return 2 * (2 * N if tokens <= 4 else 2 * N + 8)


def _in_tf32(c: Contract) -> list[Knobs]:
    """Settings of TF32 products. On sm_90a 2,490 instructions a warp of 16 rows, where three bf16 terms
    take 3,000, and 2,890 of 32, of which a block is all of a head: it has what hangs on q, k and
    gates once. Of 94 cells with T=5 and 8 on an H200 those with rows in shared memory are the choice at
    39, and eight warps of 16 rows, which are left out, at none (2026-11-30, docs/measured.md).
    """
    # without the final state 128 registers hold two passes, so that four blocks fit
    frozen = c.mode == "frozen"
    plain = [
        Knobs(16, 4, registers=128, tf32=True),
        Knobs(16, 4, passes=2, registers=128 if frozen else 168, tf32=True),
    ]
    plain += [
        Knobs(rows, 4, registers=r, copied=n, tf32=True)
        for rows, r, n in ((16, 80, 2), (32, 96 if frozen else 168, 4), (32, 168, 2))
    ]
    whole = ((16, 80, 2), (32, 96, 4), (32, 168, 2)) if frozen else ((16, 128, 2),)
    whole_rows = [_whole_rows(rows, r, n, tf32=True) for rows, r, n in whole]
    if frozen or c.ragged:
        return plain + whole_rows
    # Four requests of 32 heads behind, by blocks of 64 rows or of 128. Not of two passes: behind the
    # best by 6.7% or more at each of 30 cells (docs/results/nvidia-h200/kda-fp32.jsonl.xz), where
    # without a prefetch they won at 392 and, T=8, 720 work units.
    behind = ((plain[0], 256), (plain[-1], 128), (_whole_rows(32, 168, 4, tf32=True), 128))
    return plain + whole_rows + [dataclasses.replace(s, ahead=n) for s, n in behind]


def _copied(c: Contract, device: Device) -> list[Knobs]:
    """Settings whose rows come to shared memory, which won cells on an H200 (2026-11-30, docs/measured.md).
    By what the best of the others takes more: a final state up to 16% with up to about 1,400 work units,
    KDA's of eight tokens in bf16 1 to 4% beyond; outputs alone up to 11% with few requests, KDA's of eight
    tokens 1 to 4% with many.
    """
    if c.layout != "k_last":
        return []
    if c.state_dtype == "fp32":
        few = ((2, 64), (2, 80), (1, 96)) if c.mode == "frozen" else ((2, 96),)
        return [Knobs(16, 4, registers=r, copied=n) for n, r in few]
    if c.mode == "frozen":
        return [Knobs(32, 4, registers=r, copied=n) for n, r in ((4, 64), (4, 80), (2, 96))]
    if c.op == "gdn_decode":
        return [Knobs(32, 4, registers=r, copied=4) for r in (0, 96)]
    ahead = 0 if c.ragged or device.arch.startswith("sm_8") else 256
    return [
        Knobs(32, 4, registers=168, copied=4),
        Knobs(32, 4, registers=168, copied=2, ahead=ahead),
    ]


def _whole_rows(rows: int, registers: int, copied: int, **more: Any) -> Knobs:
    """Rows that come and go whole, by four warps unless `more` says otherwise."""
    return Knobs(**{"warps": 4, **more}, rows=rows, registers=registers, copied=copied, lines=True)


def _whole(c: Contract, device: Device) -> list[Knobs]:
    """Such settings: on an H200 the choice at 300 of 754 cells (2026-12-01, docs/measured.md). By what the best of the
    others takes more there: outputs alone up to 9%, a final state of 16 bits up to 8% (KDA, T=2 to 4) and 6% (GDN, T=8),
    of fp32 up to 5%.
    """
    if c.layout != "k_last" or (c.op == "kda_decode" and c.state_dtype == "fp32" and c.tokens > 4):
        # the second have TF32's
        return []
    if c.mode == "frozen":
        few = (
            ((16, 80, 2), (32, 96, 4))
            if c.state_dtype == "fp32"
            else ((32, r, 4) for r in (64, 80, 96))
        )
        return [_whole_rows(*x) for x in few]
    alone = c.ragged or device.arch.startswith("sm_8")
    if c.state_dtype == "fp32":
        found = [_whole_rows(16, 128, 2)]
        if not alone:
            found += [
                _whole_rows(16, 128, 2, ahead=256),
                _whole_rows(16, 128, 2, warps=8, threads=256, ahead=128),
                _whole_rows(32, 168, 4, ahead=128),
            ]
        return found
    return [_whole_rows(32, 128, 4, ahead=x) for x in ((0,) if alone else (0, 256))]


def _in_order(c: Contract, s: Knobs) -> bool:
    """Whether a setting's loads stand ahead of what waits for gates. Copies hold up nobody, so that ptxas puts
    them behind all of it, where no fence does; loads of other rows into registers keep their place.
    """
    if s.copied and s.lines:
        return s.fence
    return s.fence or not s.copied or (c.mode == "frozen" and 8 * s.copied < s.rows)


def _whole_lines(c: Contract) -> list[Knobs]:
    """Settings that read and write whole lines, and won a cell on an H200 (docs/measured.md)."""
    if c.state_dtype == "fp32" and c.mode == "update":
        return []
    if c.mode == "frozen":
        # 0.5 to 1% of time, T=8, then T=4
        return [Knobs(32, 4, registers=r, lines=True) for r in (0, 96, 128)] + [
            Knobs(16, 4, passes=2, registers=96, lines=True)
        ]
    if c.op == "gdn_decode":
        # 4% at 1024 work units, nothing beyond
        return [Knobs(16, 4, passes=2, lines=True)]
    return [Knobs(32, 4, lines=True)]


def _ahead(c: Contract, device: Device) -> list[Knobs]:
    """Settings that prefetch for later blocks, in bulk, which is there from Hopper on: 4% of a final
    state's time from 4096 work units on (H200); a state that is only read loses by it.
    """
    if c.layout != "k_last" or c.ragged or c.mode == "frozen" or device.arch.startswith("sm_8"):
        return []
    if c.state_dtype == "fp32":
        few = [Knobs(16, 4, registers=128, ahead=256)] if c.op == "kda_decode" else []
        return [Knobs(16, 4, ahead=256), *few]
    # of tiles of 64 rows the block that is as many requests behind is twice as many blocks behind
    found = [Knobs(32, 4, ahead=256), Knobs(16, 4, ahead=512)]
    if c.state_dtype == "bf16":
        found += [dataclasses.replace(s, ahead=256) for s in _whole_lines(c)]
    if c.state_dtype == "bf16" and c.op == "gdn_decode":
        # four requests ahead by twice the warps, and by whole lines
        found += [Knobs(16, 8, 256, ahead=256), Knobs(32, 4, lines=True, ahead=256)]
    if c.op == "kda_decode":
        # three terms take 13 registers more, and with them the fourth block
        found += [Knobs(32, 4, registers=128, lines=x, ahead=256) for x in (False, True)]
    return found


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    # what won a cell with 4 or 8 tokens on an H200; two warps are for a V of 64
    tried = [Knobs(rows, 4, registers=r) for rows, r in ((32, 0), (32, 128), (16, 0), (16, 96))]
    if c.state_dtype == "fp32" and c.mode == "update":
        # with 96 registers it spills more than a sweep times
        tried[-1] = Knobs(16, 4, registers=128)
    tried += [Knobs(16, 8, 256), Knobs(16, 2)]
    if c.mode == "frozen":
        tried += [Knobs(16, 4, passes=2, registers=96), Knobs(32, 4, registers=96)]
        tried += [Knobs(16, 8, 256, registers=80)]
    elif three_terms(c) and c.state_dtype == "bf16":
        # 170 registers without a cap, of KDA: two blocks a multiprocessor, where 168 are three
        tried += [Knobs(32, 4, registers=168)]
    tried += [dataclasses.replace(s, matrices=True) for s in tried] + _whole_lines(c)
    tried += _ahead(c, device) + _copied(c, device) + _whole(c, device)
    if three_terms(c):
        tried = [dataclasses.replace(s, terms=3) for s in tried]
    if c.layout == "k_last":
        tried += _in_tf32(c)
    # Without a fence sm_90a's machine code waits for k and q ahead of the state's loads: of GDN to
    # widen a key or two, of KDA to compute all gates (tests/early_loads.py). It wins where blocks
    # are many, up to 2%, and loses up to 10% at a request or two (docs/measured.md).
    if c.op == "kda_decode":
        tried = [dataclasses.replace(s, columns=x) for x in _columns(c) for s in tried]
    tried += [dataclasses.replace(s, fence=True) for s in tried]
    tried = [s for s in tried if _in_order(c, s)]
    return in_every_form([s for s in dict.fromkeys(tried) if not refuse(c, s)])


def _columns(c: Contract) -> tuple[int, ...]:
    """Up to four tokens two columns a warp are the fastest, by 0 to 8%. Of eight tokens four are from 16
    requests on (32 heads), by up to 6%, two with fewer, by up to 8%; eight columns are nowhere (H200,
    2026-11-30, docs/measured.md).
    """
    return (2,) if c.tokens <= 4 else (4, 2)


def elsewhere(c: Contract, s: Knobs, device: Device) -> Knobs:
    """On sm_100a no cap on registers where ptxas would keep more than 64 bytes a thread in local memory.

    Of 32 rows with the final state and more than four tokens: 72 bytes of KDA, 104 of fp16 inputs;
    158 registers and none without a cap (DSL 4.8.1).
    """
    many = c.mode == "update" and compiled_tokens(c) > 4
    wide = c.op == "kda_decode" or c.input_dtype == "fp16"
    if device.arch.startswith("sm_100") and many and wide and (s.rows, s.registers) == (32, 128):
        return dataclasses.replace(s, registers=0)
    return s


def _few_rows(c: Contract) -> list[Knobs]:
    """What the default rule chooses among."""
    terms = 3 if three_terms(c) else 2
    columns = 2 if c.op == "kda_decode" and c.tokens <= 4 else 4
    return [
        Knobs(rows, warps, terms=terms, columns=columns) for rows in (32, 16) for warps in (4, 2, 1)
    ]


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: few rows a block while the heads are few."""
    few = work_units < 2 * device.sm_count
    legal = [s for s in _few_rows(c) if not refuse(c, s)]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of wy_block serves {c.key()}: {refuse(c, Knobs(16, 1))}"
        )
    wanted = 64 if few else 128
    return min(legal, key=lambda s: (abs(s.rows * s.warps - wanted), -s.rows))


def leads(c: Contract) -> bool:
    """Where its default rule takes less time than the other kernels' in the mean of an H200's sweeps
    (2026-11-30): outputs alone at any T, by 0.4% to 2.5 times; a final state of 16 bits from three
    tokens on, by 0.4 to 30%, and of fp32 beyond five, by 11 and 12% at T=8, the next that was swept.
    """
    least = 2 if c.mode == "frozen" else 6 if c.state_dtype == "fp32" else 3
    return c.tokens >= least and any(not refuse(c, s) for s in _few_rows(c))


KERNEL = Kernel(
    name="wy_block",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=block_facts,
    compiler="gdntune.kernels.wy_block:compile",
    sources=("gdntune.kernels.wy_block",),
    leads=leads,
    block=block,
    elsewhere=elsewhere,
    under=under,
)
