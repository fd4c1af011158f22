"""The gates of the gated delta rule as compile-time kinds, in fp32 on the device.

raw, softplus   log decay = -exp(A_log) softplus(x + dt_bias)
lower_bound     log decay = lower_bound sigmoid(exp(A_log) (x + dt_bias))
log             log decay = x
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr


@cute.jit
def sigmoid(x: Float32):
    """1 / (1 + exp(-x)); exp overflows to inf at x < -88, which gives 0."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-x, fastmath=True))


@cute.jit
def softplus(x: Float32, beta: Float32, threshold: Float32):
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold, so that exp cannot overflow."""
    scaled = x * beta
    result = x
    if scaled <= threshold:
        # The accurate log: the approximate one is off by 2.4e-7 absolute, which exp(A_log) <= 16 would multiply.
        result = cute.math.log(Float32(1.0) + cute.math.exp(scaled, fastmath=True), fastmath=False)
        result = result * cute.arch.rcp_approx(beta)
    return result


@cute.jit
def decay(kind, x: Float32, A_log, dt_bias, softplus_beta: Float32, threshold: Float32, lower_bound: Float32):
    """The factor exp(log decay) for one head, or one key dimension of it; A_log and dt_bias are None where kind is `log`."""
    g = x
    if const_expr(kind in ("raw", "softplus")):
        g = -cute.math.exp(A_log, fastmath=True) * softplus(x + dt_bias, softplus_beta, threshold)
    elif const_expr(kind == "lower_bound"):
        g = lower_bound * sigmoid(cute.math.exp(A_log, fastmath=True) * (x + dt_bias))
    return cute.math.exp(g, fastmath=True)
