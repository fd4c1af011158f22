"""The drop-ins for flash-linear-attention and FlashInfer against the formula in fp64, and the tool
that runs a peer's own tests on them.
"""

import subprocess
import sys
from pathlib import Path

import calls
import pytest
import theirs
import torch

from gdntune.engines import fla, flashinfer
from gdntune.errors import UnsupportedProblem

S = calls.Sizes(B=3)
TOOL = Path(__file__).parents[1] / "on_drop_ins.py"


def rows(N, T, kda=False):
    """q, k, v, a raw gate and a logit of N sequences of T tokens, and the gate's parameters."""
    H = S.HV if kda else S.H
    q, k, v = S.normal(N, T, H, S.K), S.normal(N, T, H, S.K, seed=1), S.normal(N, T, S.HV, S.V)
    a = S.normal(N, T, S.HV, S.K) if kda else S.normal(N, T, S.HV)
    b = S.normal(N, T, S.HV, seed=2)
    A_log, dt_bias = S.normal(S.HV, seed=3), S.normal(S.HV * S.K if kda else S.HV, seed=4)
    return q, k, v, a, b, A_log, dt_bias


def exact(q, k, v, g, beta, states, lengths=None, **settings):
    """The output and the final states [N, HV, V, K], by the formula on packed rows."""
    final = states.double().clone()

    def keep(n, t, state):
        final[n] = state

    lengths = [q.shape[1]] * q.shape[0] if lengths is None else lengths
    flat = [x.flatten(0, 1) for x in (q, k, v, g, beta)]
    out = theirs.recurrence(*flat, states, list(range(len(lengths))), lengths, keep, **settings)
    return out.unflatten(0, q.shape[:2]), final


def close(got, expected):
    """Equal but for fp32's rounding."""
    torch.testing.assert_close(got.double(), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kda", [False, True])
def test_fla(kda, gated, v_first):
    """40 tokens, so three calls of ours: gates and betas given or formed here, both layouts; the
    initial state stays.
    """
    q, k, v, a, b, A_log, dt_bias = rows(2, 40, kda)
    states = S.pool()[:2].contiguous()
    function = fla.fused_recurrent_kda if kda else fla.fused_recurrent_gated_delta_rule
    given = states if v_first else states.transpose(2, 3).contiguous()
    before = given.clone()
    if gated:
        g, beta = theirs.gate(a.flatten(0, 1), A_log, dt_bias), torch.sigmoid(b)
        gates = {"g": a, "beta": b, "use_gate_in_kernel": True, "A_log": A_log}
        gates |= {"dt_bias": dt_bias, "use_beta_sigmoid_in_kernel": True}
    else:
        g, beta = -torch.rand_like(a).flatten(0, 1), torch.rand_like(b)
        gates = {"g": g.unflatten(0, a.shape[:2]), "beta": beta}
    output, final = function(
        q, k, v, **gates, initial_state=given, output_final_state=True, scale=0.3,
        use_qk_l2norm_in_kernel=True, state_v_first=v_first,
    )  # fmt: skip
    expected = exact(q, k, v, g.unflatten(0, a.shape[:2]), beta, states, scale=0.3)
    close(output, expected[0])
    close(final if v_first else final.transpose(2, 3), expected[1])
    assert torch.equal(given, before)


def test_fla_without_options():
    """No state, no gate, no beta, another dtype of v, gradients on: as fla fills them in."""
    q, k, v, *_ = rows(2, 3)
    output, final = fla.fused_recurrent_gdn(q.requires_grad_(), k, v.half())
    assert (output.dtype, final) == (torch.float16, None)
    zeros, ones = torch.zeros(2, 3, S.HV), torch.ones(2, 3, S.HV)
    expected, _ = exact(
        q.detach(), k, v.half(), zeros, ones, torch.zeros(2, S.HV, S.V, S.K), l2norm=False
    )
    torch.testing.assert_close(output.double(), expected, atol=1e-1, rtol=1e-2)
    q, k, v, a, b, _, dt_bias = rows(1, 2, kda=True)
    g = -2.0 * torch.sigmoid(a + dt_bias.view(S.HV, S.K))
    first, _ = fla.fused_recurrent_kda(
        q, k, v, a, b, dt_bias=dt_bias, use_gate_in_kernel=True, lower_bound=-2.0
    )
    close(first, fla.fused_recurrent_kda(q, k, v, g, b)[0].double())


def test_fla_packed_rows():
    """cu_seqlens: sequences of any length, a state each, and none for an empty one."""
    q, k, v, a, b, *_ = rows(1, 40)
    states, lengths = S.pool()[:4].transpose(2, 3).contiguous(), [5, 0, 33, 2]
    output, final = fla.fused_recurrent_gated_delta_rule(
        q, k, v, g=-a.abs(), beta=torch.sigmoid(b), initial_state=states, output_final_state=True,
        cu_seqlens=torch.tensor([0, 5, 5, 38, 40]), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    expected = exact(q, k, v, -a.abs(), torch.sigmoid(b), states.transpose(2, 3), lengths)
    close(output, expected[0])
    close(final.transpose(2, 3), expected[1])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gv": torch.zeros(1)}, "gv: expected none"),
        ({"no_such": 1}, "no_such: expected none"),
        ({"use_gate_in_kernel": True}, "without A_log"),
        ({"allow_neg_eigval": True}, "without use_beta_sigmoid_in_kernel"),
        ({"beta": torch.zeros(2, 3, S.HV, S.V)}, "expected one a head"),
        ({"initial_state": torch.zeros(1, S.HV, S.K, S.V)}, "1 states for 2 sequences"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "expected packed rows"),
    ],
)
def test_fla_refuses(change, said):
    """What has no kernel is refused by name."""
    q, k, v, a, *_ = rows(2, 3)
    with pytest.raises(UnsupportedProblem, match=said):
        fla.fused_recurrent_gated_delta_rule(q, k, v, **{"g": a, **change})


@pytest.mark.filterwarnings("ignore:transpose_state_layout is now called state_v_first")
def test_fla_layouts_older_name():
    """transpose_state_layout is state_v_first, with a warning."""
    q, k, v, a, b, *_ = rows(2, 3)
    call = {"output_final_state": True}
    expected = fla.fused_recurrent_gated_delta_rule(q, k, v, a, beta=b, state_v_first=True, **call)
    with pytest.warns(DeprecationWarning, match="now called state_v_first"):
        got = fla.fused_recurrent_gated_delta_rule(
            q, k, v, a, beta=b, transpose_state_layout=True, **call
        )
    assert torch.equal(got[1], expected[1])


def gates(q_to_dt_bias):
    """The raw gate and parameters by FlashInfer's names, and as the formula takes them."""
    a, b, A_log, dt_bias = q_to_dt_bias[3:]
    named = {"A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b}
    g = theirs.gate(a.flatten(0, 1), A_log, dt_bias).unflatten(0, a.shape[:2])
    return named, (g, torch.sigmoid(b.double()))


@pytest.mark.parametrize("output", [None, torch.float32, torch.bfloat16])
def test_flashinfer_states_of_the_batch(output):
    """One token from states in both layouts, updated in place, to an output of any dtype."""
    case = rows(3, 1)
    named, formula = gates(case)
    states = S.pool()[:3].contiguous()
    expected = exact(*case[:3], *formula, states)
    out = None if output is None else torch.empty(3, 1, S.HV, S.V, dtype=output)
    k_last, v_last = states.clone(), states.transpose(2, 3).contiguous()
    for function, given in (
        (flashinfer.gated_delta_rule_decode_pretranspose, k_last),
        (flashinfer.gated_delta_rule_decode, v_last),
    ):
        result, same = function(*case[:3], given, **named, output=out)
        assert same is given
        assert result is out or out is None
        if output is torch.bfloat16:
            torch.testing.assert_close(result.double(), expected[0], atol=2e-2, rtol=2e-2)
        else:
            close(result, expected[0])
    close(k_last, expected[1])
    close(v_last.transpose(2, 3), expected[1])


def test_flashinfer_pool():
    """From and to slots of a pool; a negative one is padding."""
    case = rows(3, 1)
    named, formula = gates(case)
    pool = S.pool()
    before = pool.clone()
    read, write = S.indices(4, -1, 2), S.indices(5, -1, -1)
    output, same = flashinfer.gated_delta_rule_decode_pretranspose(
        *case[:3], None, **named, initial_state=pool, initial_state_indices=read,
        output_state_indices=write,
    )  # fmt: skip
    assert same is pool
    expected = exact(*case[:3], *formula, before[[4, 0, 2]])
    close(output[[0, 2]], expected[0][[0, 2]])
    assert output[1].abs().max() == 0
    close(pool[5], expected[1][0])
    rest = [i for i in range(S.slots) if i != 5]
    assert torch.equal(pool[rest], before[rest])


@pytest.mark.parametrize("form", ["frozen", "buffer", "updated", "slots"])
def test_flashinfer_drafts(form):
    """Three drafts a request: states nowhere, to a buffer, the last one, or to a slot a token."""
    case = rows(3, 3)
    named, formula = gates(case)
    pool = S.pool()
    before, read = pool.clone(), S.indices(4, -1, 2)
    more = {"disable_state_update": form not in ("updated", "slots")}
    if form == "buffer":
        more["intermediate_states_buffer"] = torch.zeros(3, 4, S.HV, S.V, S.K)
    if form == "slots":
        more["ssm_state_indices"] = S.indices((5, 6, 7), (8, 9, 10), (11, 12, 13))
    if form == "frozen":
        del more["disable_state_update"]  # what 0.7 takes it for
    output, same = flashinfer.gated_delta_rule_mtp(*case[:3], pool, read, **named, **more)
    assert same is pool
    expected = exact(*case[:3], *formula, before[[4, 0, 2]])
    close(output[[0, 2]], expected[0][[0, 2]])
    if form == "buffer":
        close(more["intermediate_states_buffer"][[0, 2], 2], expected[1][[0, 2]])
    written = {"updated": [4, 2], "slots": [7, 13]}.get(form, [])
    for slot, n in zip(written, (0, 2), strict=False):
        close(pool[slot], expected[1][n])
    kept = [0, 1, 3, 8, 9, 10] + ([] if form == "updated" else [4, 2])
    assert torch.equal(pool[kept], before[kept])


@pytest.mark.parametrize(
    ("function", "change", "said"),
    [
        ("gated_delta_rule_decode", {"backend": "cake_gdn"}, "backend='cake_gdn'"),
        ("gated_delta_rule_decode_pretranspose", {"disable_state_update": True}, "expected T > 1"),
        ("gated_delta_rule_decode_pretranspose", {"initial_state": torch.zeros(1)}, "expected both"),
        ("gated_delta_rule_decode_pretranspose", {"state": None}, "states: expected state"),
        ("gated_delta_rule_mtp", {"cache_replayssm": True}, "a ring of drafts"),
        ("gated_delta_rule_mtp", {"replayssm_g": torch.zeros(1)}, "a ring of drafts"),
        ("gated_delta_rule_mtp", {"ssm_state_indices": S.indices((1,))}, "leave them out"),
    ],
)  # fmt: skip
def test_flashinfer_refuses(function, change, said):
    """What is not served, or is no call of theirs, is refused by name."""
    case = rows(3, 1)
    named, _ = gates(case)
    states = {"state": S.pool()[:3].contiguous()}
    if function == "gated_delta_rule_mtp":
        states = {"initial_state": S.pool(), "initial_state_indices": S.indices(0, 1, 2)}
    q, k, v = case[:3]
    with pytest.raises(UnsupportedProblem, match=said):
        getattr(flashinfer, function)(**{"q": q, "k": k, "v": v, **states, **named, **change})


THEIR_TESTS = """
import torch
from fla.ops.kda import fused_recurrent_kda
from fla.utils import device


def call(K=64):
    x = torch.ones(1, 1, 1, K, device=device)
    return fused_recurrent_kda(x, x, x, -x, x[..., 0])[0]


def test_right():
    assert call().shape == (1, 1, 1, 64)


def test_wrong():
    assert call().shape == (2, 2)


def test_not_served():
    call(K=60)


def test_of_another_function():
    from fla.ops.kda import chunk_kda


def test_of_another_function_without_a_gpu():
    raise RuntimeError("no driver")
"""


def test_tool_runs_a_peers_tests(tmp_path):
    """A package fla with its own function, of which the tests would get nothing: ours is in each
    place, and each test ends where it belongs.
    """
    for place in ("", "ops", "ops/gated_delta_rule", "ops/kda"):
        (tmp_path / "fla" / place).mkdir(parents=True)
    own = "def fused_recurrent_kda(*args):\n    pass\n\nchunk_kda = fused_recurrent_kda\n"
    for file, text in {
        "__init__.py": "", "ops/__init__.py": "", "ops/kda/__init__.py": own,
        "utils.py": "device = 'cuda'\n", "ops/kda/fused_recurrent.py": own,
        "ops/gated_delta_rule/__init__.py": "", "ops/gated_delta_rule/fused_recurrent.py": "",
    }.items():  # fmt: skip
        (tmp_path / "fla" / file).write_text(text)
    (tmp_path / "test_theirs.py").write_text(THEIR_TESTS)
    code = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}, {str(TOOL.parent)!r}];"
        f" sys.argv = ['tool', 'fla', {str(tmp_path / 'test_theirs.py')!r}];"
        f" runpy.run_path({str(TOOL)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    said = done.stdout[done.stdout.index("fla's tests on gdntune") :].splitlines()
    assert said[0] == "fla's tests on gdntune: 1 passed, 1 failed, 3 skipped (3 calls)"
    assert "test_wrong" in said[1]
    skipped = "\n".join(said[2:])
    assert "K=60: expected one of 64, 96, 128, 256" in skipped
    assert "1  calls no function that has a drop-in" in skipped
    assert "and raises RuntimeError: no driver" in skipped
