"""The gates of the gated delta rule as compile-time kinds, in fp32 on the device.

raw, softplus   log decay = -exp(A_log) softplus(x + dt_bias)
lower_bound     log decay = lower_bound sigmoid(exp(A_log) (x + dt_bias))
log             log decay = x
"""

import cutlass.cute as cute
from cutlass import Float32, const_expr

# of what exp may give: fp32's largest number, roughly
LARGEST = 3.4e38


@cute.jit
def sigmoid(x: Float32):
    """1 / (1 + exp(-x)); exp overflows to inf at x < -88, which gives 0."""
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(-x, fastmath=True))


@cute.jit
def softplus(x: Float32, beta: Float32, threshold: Float32):
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold, so that exp cannot overflow; off by 6e-8 absolute."""
    scaled = x * beta
    result = x
    if scaled <= threshold:
        # The accurate log: the approximate one is off by 2.4e-7 absolute, which exp(A_log) <= 16 would multiply.
        result = cute.math.log(Float32(1.0) + cute.math.exp(scaled, fastmath=True), fastmath=False)
        result = result * cute.arch.rcp_approx(beta)
    return result


@cute.jit
def softplus_of_many(x: Float32, beta: Float32, threshold: Float32):
    """softplus in fewer instructions, for where a thread computes several: relative error 3e-7 at any x.

    With e = exp(-|beta x|) it is max(beta x, 0) + log1p(e), and log1p(e) = 2 atanh(z) at z = e / (2 + e) <= 1/3, by a polynomial
    in z^2. For one gate a head it loses: the compiler then puts it, and q and k with it, before the state's loads.
    """
    scaled = x * beta
    e = cute.math.exp(-cute.arch.fmax(scaled, -scaled), fastmath=True)
    z = e * cute.arch.rcp_approx(Float32(2.0) + e)
    w = z * z
    # atanh(z) / z on z^2 <= 1/9, least largest relative error: 4e-9
    series = Float32(0.14095773)
    for c in (0.13978833, 0.20012557, 0.33333155, 1.0):
        series = series * w + Float32(c)
    result = (
        cute.arch.fmax(scaled, Float32(0.0)) + z * series * Float32(2.0)
    ) * cute.arch.rcp_approx(beta)
    if scaled > threshold:
        result = x
    return result


@cute.jit
def rate(A_log):
    """exp(A_log), finite: at inf a vanishing softplus or sigmoid would give NaN."""
    return cute.arch.fmin(cute.math.exp(A_log, fastmath=True), Float32(LARGEST), nan=True)


@cute.jit
def decay(
    kind,
    x: Float32,
    A_log,
    dt_bias,
    softplus_beta: Float32,
    threshold: Float32,
    lower_bound: Float32,
):
    """The factor exp(log decay) for one head, or one key dimension of it; A_log and dt_bias are None where kind is `log`."""
    g = x
    if const_expr(kind == "raw"):
        g = -cute.math.exp(A_log, fastmath=True) * softplus(x + dt_bias, softplus_beta, threshold)
    elif const_expr(kind == "softplus"):
        g = -rate(A_log) * softplus_of_many(x + dt_bias, softplus_beta, threshold)
    elif const_expr(kind == "lower_bound"):
        g = lower_bound * sigmoid(rate(A_log) * (x + dt_bias))
    return cute.math.exp(g, fastmath=True)
