"""Bytes, floors and speed of light."""

import csv
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdntune import sol
from gdntune.device import arch
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.problem import Contract, Problem

PUBLISHED = Path(sol.__file__).parent / "data" / "flashinfer_pr_3127.csv"
H100 = arch.target("sm_90a")


def problem(B=1, H=16, HV=64, **contract):
    """A problem of Qwen3.5's heads."""
    return Problem(Contract(**contract), B, H, HV)


def published():
    """(tokens, batch, time_us, percent) of each cell that was printed."""
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    cells = {}
    for row in csv.DictReader(lines):
        assert (row["num_q_heads"], row["num_v_heads"], row["head_size"], row["state_dtype"]) == (
            "16",
            "64",
            "128",
            "bf16",
        )
        assert row["mode"] == ("update" if row["tokens"] == "1" else "cache")
        cells.setdefault((int(row["tokens"]), int(row["batch"])), {})[row["metric"]] = row["value"]
    return [
        (tokens, batch, float(cell["time_us"]), float(cell["dram_sol_percent"]))
        for (tokens, batch), cell in cells.items()
        if cell["time_us"] and cell["dram_sol_percent"]
    ]


def test_published_percentages():
    """From the times printed in FlashInfer's PR 3127 follow all 76 printed shares of 8 TB/s within
    0.1 points.
    """
    cells = published()
    assert len(cells) == 76
    for tokens, batch, time_us, percent in cells:
        form = {} if tokens == 1 else {"tokens": tokens, "mode": "frozen", "intermediate": "dense"}
        moved = sol.bytes_moved(problem(B=batch, **form))
        assert 100 * sol.sol(moved, time_us, arch.target("sm_100a").peak_gb_s) == pytest.approx(
            percent, abs=0.1
        )


@pytest.mark.parametrize(
    ("contract", "writes"),
    [
        ({}, 1),
        ({"mode": "frozen"}, 0),
        ({"tokens": 4}, 1),
        ({"tokens": 4, "mode": "frozen", "intermediate": "dense"}, 4),
        ({"tokens": 4, "intermediate": "indexed"}, 5),
        ({"tokens": 3, "mode": "frozen", "intermediate": "slots"}, 3),
    ],
)
def test_floor(contract, writes):
    """The floor reads once, and writes the final state and each state between tokens where they are
    kept.
    """
    p = problem(B=2, HV=32, state_dtype="fp32", **contract)
    assert sol.floor_form(p.contract) == sol.FloorForm(reads=1, writes=writes)
    assert sol.state_bytes(p) == 2 * 32 * 128 * 128 * 4
    assert sol.floor_bytes(p) == (1 + writes) * sol.state_bytes(p)


def test_bytes_by_hand():
    """One token of one head, counted by hand: GDN and KDA, whose g and dt_bias are K wide."""
    state, rows = 128 * 128 * 2, (128 + 128 + 128 + 128) * 2
    assert sol.bytes_moved(problem(H=1, HV=1)) == 2 * state + rows + 2 + 2 + 4 + 4
    kda = problem(H=1, HV=1, op="kda_decode", gate="softplus", beta="given", gate_dtype="fp32")
    assert sol.bytes_moved(kda) == 2 * state + rows + 128 * 4 + 2 + 4 + 128 * 4
    log = problem(H=1, HV=1, op="kda_decode", gate="log", gate_dtype="fp32", beta_dtype="fp32")
    assert sol.bytes_moved(log) == 2 * state + rows + 128 * 4 + 4


@given(
    B=st.integers(1, 64), group=st.integers(1, 4), tokens=st.integers(1, 8), frozen=st.booleans()
)
def test_bytes_are_ordered(B, group, tokens, frozen):
    """More bytes move than the floor's; and twice the batch moves at most twice, more than before."""
    p = problem(B=B, H=2, HV=2 * group, tokens=tokens, mode="frozen" if frozen else "update")
    twice = msgspec.structs.replace(p, B=2 * B)
    assert (
        sol.floor_bytes(p) < sol.bytes_moved(p) < sol.bytes_moved(twice) <= 2 * sol.bytes_moved(p)
    )


def test_sol():
    """Bytes over time over peak; a time or a peak that is not above 0 is refused."""
    assert sol.sol(3_352_000_000, 2000.0, 3352.0) == pytest.approx(0.5)
    for time_us in (0.0, -1.0, float("nan")):
        with pytest.raises(MeasurementError, match="time_us"):
            sol.sol(1, time_us, 3352.0)
    with pytest.raises(UnsupportedProblem, match="peak_gb_s"):
        sol.sol(1, 1.0, 0.0)


@pytest.mark.parametrize(
    ("B", "time_us", "policy", "bound"),
    [
        (1, 3.07, "cold-clean", "latency-bound"),
        (16, 19.9, "cold-clean", "L2-assisted"),
        (256, 362.15, "cold-clean", "DRAM-bound"),
        (16, 25.79, "cold-dirty", "DRAM-bound"),
        (16, 25.79, "rotate", "DRAM-bound"),
        (4, 4.0, "warm", "L2-assisted"),
    ],
)
def test_classify(B, time_us, policy, bound):
    """Times measured on an H100 at HV=64, bf16: B=1 is latency, B=16 fits L2 (its share is above
    1), B=256 is DRAM.
    """
    assert sol.classify(problem(B=B), time_us, H100, policy) == bound


def test_slow_kernels_are_not_latency_bound():
    """A kernel bound by arithmetic at a large size has a low share, which is not the launch's
    doing.
    """
    assert sol.classify(problem(B=512, tokens=8), 2000.0, H100, "cold-clean") == "DRAM-bound"


def test_cold_dirty_above_peak_is_refused():
    """More than the peak cannot be true where L2 was full of modified lines; where it was clean, it
    can.
    """
    p = problem(B=256)
    with pytest.raises(MeasurementError, match=r"B=256.*peak of NVIDIA H100"):
        sol.classify(p, 300.0, H100, "cold-dirty")
    assert sol.classify(p, 300.0, H100, "cold-clean") == "DRAM-bound"


def test_classify_without_a_peak():
    """A CPU has no stated peak: time and sizes decide."""
    cpu = arch.Device("cpu", "CPU", "x86_64", 2, 32 << 20, 1 << 34)
    assert sol.classify(problem(HV=1, H=1), 9.0, cpu, "cold-clean") == "latency-bound"
    assert sol.classify(problem(B=4), 900.0, cpu, "cold-clean") == "L2-assisted"
    assert sol.classify(problem(B=256), 9e4, cpu, "cold-clean") == "DRAM-bound"


def test_classify_refuses_a_wrong_policy():
    """A wrong policy lists the right ones."""
    with pytest.raises(UnsupportedProblem, match="cold-clean, cold-dirty, rotate, warm"):
        sol.classify(problem(), 3.0, H100, "hot")


def test_a_layer_moves_its_windows_gates_and_weights():
    """By hand: B=2, H=1, HV=2, K=64, V=32, D=192, bf16."""
    plain = Contract(K=64, V=32)
    without = sol.bytes_moved(Problem(plain, 2, 1, 2))
    norm = sol.bytes_moved(Problem(plain.replace(norm="silu"), 2, 1, 2)) - without
    assert norm == 2 * (2 * 2 * 32) + 4 * 32
    conv = plain.replace(conv="silu", conv_bias=True)
    # three rows read and one written a request, four taps and a bias
    assert sol.bytes_moved(Problem(conv, 2, 1, 2)) - without == 2 * 192 * (2 * 4 + 5)
    shifted = conv.replace(conv_window="shifted", conv_bias=False)
    assert sol.bytes_moved(Problem(shifted, 2, 1, 2)) - without == 2 * 192 * (2 * 6 + 4)
