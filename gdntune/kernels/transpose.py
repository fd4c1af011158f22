"""8 x 8 matrices of 16-bit values, turned within a warp's registers."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op


@dsl_user_op
def _movmatrix(x: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type,
            [Int32(x).ir_value(loc=loc, ip=ip)],
            "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
            "=r,r",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@cute.jit
def pair(x, offset):
    """Two values that the warp holds as a matrix, turned: lane 4g + c gives M[g][2c], M[g][2c+1] and gets M[2c][g], M[2c+1][g]."""
    words = cute.recast_tensor(cute.make_tensor(x.iterator + offset, cute.make_layout((2,))), Int32)
    turned = cute.make_rmem_tensor((2,), x.element_type)
    cute.recast_tensor(turned, Int32)[0] = _movmatrix(words[0])
    return turned
