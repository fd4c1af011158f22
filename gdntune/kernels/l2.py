"""What a kernel tells the L2 cache: to fetch what blocks that come after it will read, and to evict first what no block
reads again. Hints, which change no result.
"""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

# createpolicy.fractional.L2::evict_first of all lines
EVICT_FIRST = 0x12F0000000000000


def _tell(text: str, constraints: str, values, loc, ip) -> None:
    llvm.inline_asm(
        None,
        [x.ir_value(loc=loc, ip=ip) for x in values],
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def prefetch_line(address: Int64, *, loc=None, ip=None) -> None:
    """Of one global address its 128 bytes."""
    _tell("prefetch.global.L2 [$0];", "l", [Int64(address)], loc, ip)


@dsl_user_op
def prefetch_run(address: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """`size` bytes of global memory; address and size are multiples of 16, size is not 0."""
    _tell(
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        [Int64(address), Int32(size)],
        loc,
        ip,
    )


@dsl_user_op
def store_evict_first(address: Int64, words, *, loc=None, ip=None) -> None:
    """Stores 16 bytes, four words of 32 bits, in lines that L2 evicts before others."""
    _tell(
        "st.global.L2::cache_hint.v4.b32 [$0], {$1, $2, $3, $4}, $5;",
        "l,r,r,r,r,l",
        [Int64(address), *words, Int64(EVICT_FIRST)],
        loc,
        ip,
    )
