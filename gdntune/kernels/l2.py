"""What a kernel asks the L2 cache to fetch for blocks that come after it: hints, which change no result."""

from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


def _ask(text: str, constraints: str, values, loc, ip) -> None:
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
    _ask("prefetch.global.L2 [$0];", "l", [Int64(address)], loc, ip)


@dsl_user_op
def prefetch_run(address: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """`size` bytes of global memory; address and size are multiples of 16, size is not 0."""
    _ask(
        "cp.async.bulk.prefetch.L2.global [$0], $1;",
        "l,r",
        [Int64(address), Int32(size)],
        loc,
        ip,
    )
