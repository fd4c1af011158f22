"""Random tensors of a case: inputs, gates and states as a model's, or at the edges of fp32."""

import math
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.options import Options
from gdntune.checking.reference import DTYPES
from gdntune.problem import Contract, Problem

# Beyond this many elements a tensor is a repeated block: normal_ makes 50 to 100 million elements a
# second on a CPU core, and a table's largest states have billions. An odd length, so that
# neighbouring slots differ.
BLOCK = {"cpu": (1 << 20) + 1237, "cuda": (1 << 26) + 1237}


class Draw:
    """Random tensors of one device and one seed. What a seed gives hangs on the order of calls."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def fill(self, x: Tensor, spread: float = 1.0) -> Tensor:
        """x, contiguous, filled in place with N(0, spread^2)."""
        flat, block = x.view(-1), BLOCK[self.device.type]
        done = min(flat.numel(), block)
        flat[:done].normal_(0, spread, generator=self.generator)
        while done < flat.numel():
            more = min(done, flat.numel() - done)
            flat[done : done + more].copy_(flat[:more])
            done += more
        return x

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """N(0, 1), made in the dtype it is for."""
        return self.fill(torch.empty(shape, dtype=dtype, device=self.device))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """U(low, high) in fp32."""
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self.generator)


def draw_qkv(
    draw: Draw, problem: Problem, rows: tuple[int, int], options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [*rows, H, K] and v [*rows, HV, V] in the inputs' dtype."""
    c, H, HV = problem.contract, problem.H, problem.HV
    dtype, shapes = DTYPES[c.input_dtype], ((H, c.K), (H, c.K), (HV, c.V))
    if options.packed_qkv or c.conv != "none":
        sizes = [n * size for n, size in shapes]
        parts = draw.normal(*rows, sum(sizes), dtype=dtype).split(sizes, -1)
        q, k, v = (x.unflatten(-1, shape) for x, shape in zip(parts, shapes, strict=True))
    else:
        q, k, v = (draw.normal(*rows, *shape, dtype=dtype) for shape in shapes)
    if not options.use_qk_l2norm and c.conv == "none":
        # Keys near unit length, as a model would hand over, yet far enough from it that normalising
        # again shows. Behind a convolution its weights see to it (`draw_conv`).
        norm = k.float().norm(dim=-1, keepdim=True).clamp(min=1e-3)
        k.copy_(k.float() / norm * draw.uniform(*rows, H, 1, low=0.6, high=1.0))
    return q, k, v


def draw_beta(draw: Draw, problem: Problem, rows: tuple[int, int], options: Options) -> Tensor:
    """b [*rows, HV]: logits, or beta itself where the contract says that it is given."""
    c = problem.contract
    b = draw.normal(*rows, problem.HV)
    if c.beta == "given":
        b = b.sigmoid()
    b = b.to(DTYPES[c.beta_dtype])
    return _every_other(b) if options.strided_gates else b


def draw_gate(
    draw: Draw, problem: Problem, rows: tuple[int, int], options: Options
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """a or g [*rows, HV], of KDA [*rows, HV, K]; A_log and dt_bias. As models initialise them:
    exp(A_log) in 1..16, softplus(dt_bias) in 0.001..0.1, a in N(0, 1).
    """
    c = problem.contract
    heads = problem.H if options.parameters_by_head == "H" else problem.HV
    width = (c.K,) if c.op == "kda_decode" else ()
    A_log = draw.uniform(heads, low=1.0, high=16.0).log()
    dt = draw.uniform(heads, *width, low=math.log(1e-3), high=math.log(0.1)).exp()
    dt_bias = dt.expm1().log()
    dtype = DTYPES[c.gate_dtype]
    a = draw.normal(*rows, problem.HV, *width, dtype=torch.float32 if c.gate == "log" else dtype)
    if options.gate_shift:
        a += options.gate_shift
    if c.gate == "lower_bound":
        # The sigmoid's slope is what tells gates apart: keep exp(A_log) * (a + dt_bias) within a
        # few units of it.
        A_log, dt_bias = A_log / 4, draw.normal(heads, *width) / 4
    group = problem.HV // heads
    bias = dt_bias.repeat_interleave(group, 0)
    if options.extreme_gates:
        a = _extreme(draw, a, bias)
    if c.gate == "log":
        A = A_log.exp().repeat_interleave(group, 0).view(-1, *[1] * len(width))
        a = (-A * torch.nn.functional.softplus(a + bias)).to(dtype)
    if options.strided_gates:
        a = _every_other(a) if not width else _gapped(a)
    if not c.has_parameters:
        return a, None, None
    return a, A_log.to(DTYPES[c.A_log_dtype]), dt_bias.to(DTYPES[c.dt_bias_dtype])


def draw_norm(
    draw: Draw, problem: Problem, rows: tuple[int, int], options: Options
) -> tuple[Tensor | None, Tensor | None]:
    """The output's gate [*rows, HV, V] and the norm's weight [V], near one as trained ones are;
    None where the contract has no norm.
    """
    c = problem.contract
    if c.norm == "none":
        return None, None
    gate = draw.normal(*rows, problem.HV, c.V, dtype=DTYPES[c.input_dtype])
    if options.extreme_gates:
        # beyond exp's range in fp32, on either side
        fifth = torch.arange(gate.numel(), device=draw.device).view(gate.shape) % 5
        gate = torch.where(fifth == 1, 100.0, torch.where(fifth == 3, -100.0, gate)).to(gate.dtype)
    weight = (1 + draw.normal(c.V) / 4).to(DTYPES[c.norm_weight_dtype])
    return _gapped(gate) if options.packed_qkv else gate, weight


def window_rows(contract: Contract, options: Options) -> int:
    """Rows of a slot's window."""
    before = contract.conv_width - 1
    if contract.conv_window != "ring":
        drafts = contract.intermediate == "slots"
        return before + (contract.tokens - 1 + options.extra_rows if drafts else 0)
    return before + contract.tokens + options.extra_rows


def _windows(stored: Tensor, c: Contract, rows: int) -> Tensor:
    """Slots' memory [slots, rows * D] as windows [slots, rows, D]."""
    if c.conv_window == "dims_first":
        return stored.unflatten(-1, (-1, rows)).transpose(1, 2)
    return stored.unflatten(-1, (rows, -1))


def draw_conv(
    draw: Draw, problem: Problem, options: Options, slots: int, q: Tensor
) -> dict[str, Any]:
    """The packed inputs, whose view q is, windows [slots, rows, D], weights [D, width] of a trained
    size and bias [D]; nothing where the contract has no convolution.

    Where keys are not normalised, their channels' weights and biases make them shorter than one.
    Keys of length 5, as trained weights would give, multiply fp32's roundings by
    beta |k|^2 a token: PyTorch's own fp32 then came to 0.9 of the check's tolerance.
    """
    c = problem.contract
    if c.conv == "none":
        return {}
    mixed, dtype = q._base, DTYPES[c.input_dtype]
    assert mixed is not None
    D, rows = mixed.shape[-1], window_rows(c, options)
    stored = draw.normal(slots, rows * D + options.slot_stride_pad, dtype=dtype)
    weight = draw.normal(D, c.conv_width) / 2
    # The newest token's tap is felt: a result that lies between two numbers of the dtype gets off
    # it by another input.
    weight[:, -1] = torch.copysign(weight[:, -1].abs().clamp(min=0.125), weight[:, -1])
    weight = weight.to(dtype)
    bias = draw.normal(D, dtype=dtype) / 4 if c.conv_bias else None
    if not options.use_qk_l2norm:
        keys = problem.H * c.K
        for x in (weight, bias):
            if x is not None:
                x[keys : 2 * keys] *= _key_scale(c)
    return {
        "mixed_qkv": mixed,
        "conv_state": _windows(stored[:, : rows * D], c, rows),
        "conv_weight": weight,
        "conv_bias": bias,
    }


def _key_scale(c: Contract) -> float:
    """A power of two, so that weights stay exact; a key of K convolved channels is 0.7 long."""
    scale: float = 2.0 ** -round(math.log2(c.K) / 2 + 0.5)
    # near zero silu halves
    return 2 * scale if c.conv == "silu" else scale


def draw_ring(draw: Draw, problem: Problem, options: Options, slots: int) -> dict[str, Any]:
    """Rings of all slots, every row of them filled, and when they are folded; nothing where the
    contract has none.
    """
    c = problem.contract
    if not c.ring:
        return {}
    rows = c.ring + c.tokens + options.extra_rows

    def kept(dtype: torch.dtype, *shape: int) -> Tensor:
        size, gap = math.prod(shape), options.slot_stride_pad
        return draw.normal(slots, size + gap, dtype=dtype)[:, :size].unflatten(-1, shape)

    k = kept(DTYPES[c.input_dtype], problem.H, rows, c.K)
    u = kept(DTYPES[c.ring_dtype], problem.HV, rows, c.V)
    if options.use_qk_l2norm:
        # u is kept over the norm of a key, which is about this
        u *= c.K**-0.5
    else:
        k *= c.K**-0.5
    per_key = (c.K,) if c.op == "kda_decode" else ()
    decay = kept(torch.float32, problem.HV, rows, *per_key)
    decay.uniform_(0.5, 1.0, generator=draw.generator)
    least = c.ring + 1 if options.flush_min is None else options.flush_min
    seed = None
    if c.ring_rounding == "stochastic":
        seed = torch.tensor([1, 2], dtype=torch.int32, device=k.device)
    return {
        "ring_seed": seed, "ring_k": k, "ring_u": u, "ring_decay": decay, "flush_min": least,
        "append": int(options.append),
    }  # fmt: skip


def _extreme(draw: Draw, a: Tensor, bias: Tensor) -> Tensor:
    """Of every six gates in memory order two stay, two lie just above softplus' turn, one each at
    +-100, beyond exp's range in fp32.
    """
    sixth = torch.arange(a.numel(), device=draw.device).view(a.shape) % 6
    turn = (draw.uniform(*a.shape, low=0.4, high=0.6) - bias).to(a.dtype)
    far = torch.where(sixth == 2, 100.0, torch.where(sixth == 5, -100.0, a))
    return torch.where(sixth % 3 == 1, turn, far)


def _every_other(x: Tensor) -> Tensor:
    """The values of x [..., HV], two elements apart in a tensor whose other half is NaN."""
    return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0]


def _gapped(x: Tensor) -> Tensor:
    """The values of x [*rows, HV, K] in a tensor with 16 NaN after each row: each head's K stay
    contiguous, which kernels load as vectors.
    """
    flat = x.flatten(-2)
    gap = torch.full((*x.shape[:2], 16), math.nan, dtype=x.dtype, device=x.device)
    return torch.cat((flat, gap), -1)[..., : flat.shape[-1]].unflatten(-1, x.shape[-2:])
