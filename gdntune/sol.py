"""Speed of light: the bytes that a problem must move, its floor, and what share of the DRAM's peak
a time is.

The convention is that of FlashInfer's pull request 3127, whose 76 printed percentages `bytes_moved`
reproduces within 0.1 points (data/flashinfer_pr_3127.csv): each state is read once; it is written
once where the final state is kept (mode=update), and T times where the states between tokens are;
q, k, v, a, b and the output move once, and A_log and dt_bias. Left out are index tensors (4 bytes a
request against 16 KiB and more a head) and second reads, since they hit a cache (q and k of GVA).
"""

from typing import Literal

import msgspec

from gdntune.device.arch import Device
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.problem import ITEMSIZE, Contract, Problem

Bound = Literal["latency-bound", "L2-assisted", "DRAM-bound"]

# Below this transfer time fixed costs decide. H100: an empty kernel takes 0.86 to 1.4 us; B=1,
# HV=64, 1.3 us at the peak, took 3.1 us. CPU: a call after 10 ms of idleness took 60 us where 15 us
# were work.
LATENCY_US = {"cuda": 5.0, "cpu": 50.0}
# L2 assists where it can keep more than this share of the bytes off the DRAM.
L2_SHARE = 0.1


class FloorForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """How often the floor of a contract reads and writes the state; it moves (reads + writes) *
    state_bytes.
    """

    reads: int
    writes: int


def floor_form(contract: Contract) -> FloorForm:
    """One read; a write for the final state, and one a token where the states between tokens are
    kept.
    """
    final = 1 if contract.always_writes else 0
    # Under `update` the last token's state counts twice: it goes to its slot and to the buffer.
    between = 0 if contract.intermediate == "none" else contract.tokens
    return FloorForm(reads=1, writes=final + between)


def state_bytes(problem: Problem) -> int:
    """The bytes of one state of each request and value head: B*HV*K*V elements."""
    c = problem.contract
    return problem.B * problem.HV * c.K * c.V * ITEMSIZE[c.state_dtype]


def floor_bytes(problem: Problem) -> int:
    """The bytes that the floor moves: the states' alone."""
    form = floor_form(problem.contract)
    return (form.reads + form.writes) * state_bytes(problem)


def bytes_moved(problem: Problem) -> int:
    """Every byte that must move, as this module's head says.

    q, k [B,T,H,K]; v, output [B,T,HV,V]; a [B,T,HV] (KDA: g [B,T,HV,K]); b [B,T,HV]; A_log [HV] and
    dt_bias [HV] (KDA: [HV,K]) where the gate has them; with a norm the output's gate [B,T,HV,V] and
    the weight [V]; with a convolution its windows and weights; with a ring its entries and the
    share of its folds. A ragged batch counts as full: B*T
    tokens.
    """
    c = problem.contract
    rows, HV = problem.B * c.tokens, problem.HV
    # KDA's gate is as wide as a key, GDN's is a number a head.
    gates = HV * c.K if c.op == "kda_decode" else HV
    total = floor_bytes(problem)
    # q and k are of H heads, v and the output of HV: second reads of q and k by GVA's heads hit a
    # cache.
    total += rows * 2 * (problem.H * c.K + HV * c.V) * ITEMSIZE[c.input_dtype]
    total += rows * (gates * ITEMSIZE[c.gate_dtype] + HV * ITEMSIZE[c.beta_dtype])
    if c.has_parameters:
        total += HV * ITEMSIZE[c.A_log_dtype] + gates * ITEMSIZE[c.dt_bias_dtype]
    if c.norm != "none":
        total += rows * HV * c.V * ITEMSIZE[c.input_dtype] + c.V * ITEMSIZE[c.norm_weight_dtype]
    if c.conv != "none":
        total += _convolution_bytes(problem)
    if c.ring:
        total += _ring_bytes(problem)
    return total


def _ring_bytes(problem: Problem) -> int:
    """In the mean over a cycle in which all drafts are accepted: T, 2T, ... to `ring` live entries
    read, T written, and the state written by one call in ring / T.
    """
    c = problem.contract
    entry = problem.H * c.K * ITEMSIZE[c.input_dtype]
    decays = c.K if c.op == "kda_decode" else 1
    entry += problem.HV * (c.V * ITEMSIZE[c.ring_dtype] + 4 * decays)
    rows = problem.B * ((c.ring + c.tokens) / 2 + c.tokens)
    return round(entry * rows + state_bytes(problem) * c.tokens / c.ring)


def _convolution_bytes(problem: Problem) -> int:
    """Of D channels: a window's width - 1 rows read; written the new rows, or where it is shifted
    all that it holds; weights and bias. The row that is convolved is q, k and v.
    """
    c = problem.contract
    D = 2 * problem.H * c.K + problem.HV * c.V
    drafts = c.intermediate == "slots"
    moved = c.conv_width - 2 + c.tokens if drafts else c.conv_width - 1
    written = (c.tokens if c.conv_window == "ring" else moved) * (c.mode == "update" or drafts)
    rows = problem.B * (c.conv_width - 1 + written) + c.conv_width + c.conv_bias
    return D * rows * ITEMSIZE[c.input_dtype]


def sol(bytes_moved: int, time_us: float, peak_gb_s: float) -> float:
    """Bytes over time as a share of the peak (1e9 bytes a second); above 1 where a cache helped or
    a time is wrong.

    Raises MeasurementError for a time that is not above 0, UnsupportedProblem for such a peak.
    """
    if not time_us > 0:
        raise MeasurementError(
            f"time_us={time_us}: a share of the peak needs a time above 0; time it again"
        )
    if not peak_gb_s > 0:
        raise UnsupportedProblem(
            f"peak_gb_s={peak_gb_s}: expected a number above 0; see timing.measured_peaks"
        )
    return bytes_moved / (time_us * peak_gb_s * 1e3)


def kept_bytes(problem: Problem, device: Device, l2_policy: str) -> int:
    """The bytes that L2 can keep off the DRAM within the timed call.

    `cold-clean`: writes may stay, up to L2's size. `warm`: everything may. `cold-dirty` and
    `rotate`: none, since each line kept pushes out a modified one. `chain`: all but the states,
    since what was just written is read and what is written is used at once; states are written back
    while the next kernels run, who wait for it, so that is in the time.
    """
    if l2_policy == "cold-clean":
        return min(device.l2_bytes, floor_form(problem.contract).writes * state_bytes(problem))
    if l2_policy == "warm":
        return min(device.l2_bytes, bytes_moved(problem))
    if l2_policy in ("cold-dirty", "rotate"):
        return 0
    if l2_policy == "chain":
        return min(device.l2_bytes, bytes_moved(problem) - floor_bytes(problem))
    raise UnsupportedProblem(
        f"l2={l2_policy!r}: expected one of cold-clean, cold-dirty, rotate, warm, chain"
    )


def classify(problem: Problem, time_us: float, device: Device, l2_policy: str) -> Bound:
    """What a time is bound by, so that a share of the peak is read rightly.

    `latency-bound`: the transfer alone would take less than half the time, and less than
    LATENCY_US. `L2-assisted`: L2 can keep more than L2_SHARE of the bytes, so the share may
    honestly exceed 1. `DRAM-bound`: the rest; the share is what it says. Where the peak is unknown
    (a CPU), time and sizes decide. Raises MeasurementError where the cache was full of other
    modified data (`cold-dirty`) and the time is yet below bytes over peak.
    """
    return Limits(problem, device, l2_policy).bound(time_us)


class Limits:
    """What `classify` asks of a problem, a device and a policy, counted once for many times."""

    def __init__(self, problem: Problem, device: Device, l2_policy: str) -> None:
        self.problem, self.device, self.l2_policy = problem, device, l2_policy
        self.moved, self.kept = bytes_moved(problem), kept_bytes(problem, device, l2_policy)

    def bound(self, time_us: float) -> Bound:
        """See `classify`."""
        return _bound(self, time_us)


def _bound(limits: Limits, time_us: float) -> Bound:
    problem, device, l2_policy = limits.problem, limits.device, limits.l2_policy
    moved, kept, peak = limits.moved, limits.kept, device.peak_gb_s
    latency_us = LATENCY_US[device.kind]
    # A CPU without a measured peak: all that is left to tell fixed costs by is the time itself.
    if peak is None:
        latency_bound = time_us < latency_us
    else:
        share = sol(moved, time_us, peak)
        if l2_policy == "cold-dirty" and share > 1:
            raise MeasurementError(
                f"{problem.key()}: {moved} bytes in {time_us:.2f} us are {share:.1%} of the peak of"
                f" {device.name}, {peak:.0f} GB/s, and under cold-dirty no more than 100% can be"
                " true: see that the kernel passes its check, that the flush runs, and what"
                " arch.peak_disagreement says of the peak"
            )
        # Both: a large transfer at a poor share is slow for another reason than its fixed costs.
        latency_bound = share < 0.5 and share * time_us < latency_us
    if latency_bound:
        return "latency-bound"
    return "L2-assisted" if kept > L2_SHARE * moved else "DRAM-bound"
