"""gdntune/expect.py, resources.py and render/expect.py: what is said of a GPU that is not here, and
what is not.
"""

import re
from pathlib import Path

import msgspec
import pytest
import synthetic
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from gdntune import kernels, sol
from gdntune.device import arch
from gdntune.errors import BuildError, JournalError, UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects.build import Built
from gdntune.objects.store import Manifest
from gdntune.problem import Contract, Problem
from gdntune.report.expect import MARK, expectations
from gdntune.report.markdown import markdown
from gdntune.results.expect import Model
from gdntune.results.records import Check, Trial
from gdntune.results.published import published
from gdntune.tuning import config
from gdntune.tuning.plan import plan_objects
from gdntune.tuning.resources import Range, range_of, resources

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "blackwell.md"
H100, B200 = arch.target("sm_90a"), arch.target("sm_100a")
PR = "published:flashinfer-pr-3127"
THEIRS = Variant("peer:flashinfer", "peer:flashinfer.decode", {})
TEXT = b"""
name: tiny
device: cuda
model: {H: 16, HV: 64, K: 128, V: 128}
batch: [1, 64]
tokens: [1, 4, 8]
contracts: [{op: gdn_decode, mode: update, state_dtype: bf16}]
"""


def journal_of(*contracts, batches=(1, 8, 64, 512), slow=1.0, l2="cold-clean", device=H100, theirs=0.0, status="ok"):
    """A made-up sweep; with `theirs`, FlashInfer's kernel beside ours, so many times as slow, and
    its check's outcome.
    """
    header = synthetic.run(device, policy={"timer": "cupti", "l2": l2})
    found = [Check(contract=c, variant=v.id, status="ok") for c in contracts for v in synthetic.VARIANTS]
    for c in contracts:
        if theirs:
            found.append(Check(contract=c, variant=THEIRS.id, status=status))
        for B in batches:
            *trials, closed = synthetic.cell(Problem(c, B, 16, 64), header, slow=slow)
            best = min(min(t.samples_us) for t in trials if t.role == "decode")
            if theirs:
                peer = Trial(
                    problem=closed.problem,
                    variant=THEIRS,
                    role="peer",
                    stage="final",
                    status="ok",
                    samples_us=[best * theirs] * 9,
                )
                trials.append(peer)
            found += [*trials, closed]
    return header, found


def median_of(records, problem, role="decode"):
    """The best median of the final samples of a problem."""
    samples = [
        sorted(t.samples_us)
        for t in records
        if isinstance(t, Trial) and (t.problem, t.role, t.stage) == (problem, role, "final")
    ]
    return min((s[len(s) // 2 - 1] + s[len(s) // 2]) / 2 for s in samples)


# -- the model


def test_of_the_same_gpu_it_says_what_was_measured():
    """Carried over to the GPU that was timed, a time stays as it is."""
    header, records = journal_of(Contract())
    model = Model([(header, records)], H100)
    assert model.share == 1
    for B in (1, 8, 64, 512):
        found = model.expected(model.line(Contract(), "cold-clean"), B * 64)
        assert found == pytest.approx((median_of(records, Problem(Contract(), B, 16, 64)),) * 2)


def test_the_formula():
    """Of a GPU with twice the bandwidth and as many SMs, the floor's transfer takes half; all else
    stays.
    """
    double = msgspec.structs.replace(H100, name="twice", peak_gb_s=2 * H100.peak_gb_s)
    header, records = journal_of(Contract())
    model = Model([(header, records)], double)
    problem = Problem(Contract(), 64, 16, 64)
    time, floor = median_of(records, problem), median_of(records, problem, "floor")
    least = Problem(Contract(), 1, 16, 64)
    fixed = median_of(records, least, "floor") - sol.floor_bytes(least) / (H100.peak_gb_s * 1e3)
    found = model.expected(model.line(Contract(), "cold-clean"), 4096)
    assert found.time_us == pytest.approx(time - (floor - fixed) / 2)
    assert found.most_us == pytest.approx(time)


def test_the_load_of_an_sm_is_the_same():
    """With twice the SMs at twice the bandwidth, twice the work takes as long: a wave is a wave."""
    twice = msgspec.structs.replace(H100, name="twice", sm_count=2 * H100.sm_count, peak_gb_s=2 * H100.peak_gb_s)
    header, records = journal_of(Contract())
    model = Model([(header, records)], twice)
    found = model.expected(model.line(Contract(), "cold-clean"), 2 * 512)
    assert found == pytest.approx((median_of(records, Problem(Contract(), 8, 16, 64)),) * 2)


@given(st.integers(1, 40000), st.floats(500, 16000), st.integers(20, 300))
def test_expected_lies_between(units, peak, sms):
    """A time is positive, not above `most` where the SMs' share of the DRAM grows, and grows with
    the work.
    """
    target = msgspec.structs.replace(B200, peak_gb_s=peak, sm_count=sms)
    model = MODELS.setdefault((peak, sms), Model([MADE], target))
    line = model.line(Contract(), "cold-clean")
    found, more = model.expected(line, units), model.expected(line, 2 * units)
    at = units * H100.sm_count / sms
    if found is None:
        assert at > 512 * 64 or at < 64
        return
    assert found.time_us > 0
    assert (found.time_us <= found.most_us + 1e-9) or model.share > 1
    assert more is None or more.most_us >= found.most_us - 1e-9


MADE = journal_of(Contract())
MODELS: dict = {}


def test_beyond_the_cells_nothing_is_said():
    """Neither above the largest cell nor where an SM's load is far below the smallest: no guess."""
    model = Model([MADE], B200)
    line = model.line(Contract(), "cold-clean")
    assert model.expected(line, 64) is not None  # 57 of an H100's, where 64 is the least: within the ratio of the SMs
    assert model.expected(line, 32) is None
    assert model.expected(line, 512 * 64) is not None
    assert model.expected(line, 640 * 64) is None
    coarse = Model([journal_of(Contract(), batches=(16, 512))], B200)
    # 913 of an H100's: its least cell, 1024, has eight heads an SM, and there every head counts
    assert coarse.expected(coarse.line(Contract(), "cold-clean"), 1024) is None


def test_no_floor_no_word():
    """A contract whose floor was not timed is not carried over."""
    header, records = journal_of(Contract())
    model = Model([(header, [r for r in records if not (isinstance(r, Trial) and r.role == "floor")])], B200)
    assert model.expected(model.line(Contract(), "cold-clean"), 4096) is None


def test_which_line():
    """The policy asked for comes first, then the most cells; the dtypes of parameters do not count,
    those of the state do.
    """
    bf16 = Contract(dt_bias_dtype="bf16")
    few = journal_of(Contract(), batches=(8, 64), slow=2.0, l2="cold-dirty")
    model = Model([few, journal_of(bf16)], B200)
    assert model.line(Contract(), "cold-dirty").l2 == "cold-dirty"
    assert model.line(bf16, "rotate").l2 == "cold-clean"
    assert len(model.line(Contract(), "cold-clean").times) == 4
    assert model.line(Contract(state_dtype="fp32"), "cold-clean") is None
    assert model.line(Contract(), "cold-clean", "flashinfer") is None


def test_peers_that_failed_are_left_out():
    """A peer's times count where it passed its check, and only of those that are asked for."""
    right = Model([journal_of(Contract(), theirs=1.5)], B200)
    assert len(right.line(Contract(), "cold-clean", "flashinfer").times) == 4
    assert (
        Model([journal_of(Contract(), theirs=1.5, status="failed")], B200).line(Contract(), "cold-clean", "flashinfer")
        is None
    )
    assert (
        Model([journal_of(Contract(), theirs=1.5)], B200, peers=("sglang",)).line(
            Contract(), "cold-clean", "flashinfer"
        )
        is None
    )


def test_what_it_refuses():
    """No journal, journals of two devices or of a CPU, and a device without a known peak."""
    with pytest.raises(JournalError, match="expected those of one device"):
        Model([], B200)
    with pytest.raises(JournalError, match="NVIDIA A100.*expected those of one device"):
        Model([MADE, journal_of(Contract(), device=arch.target("sm_80"))], B200)
    with pytest.raises(
        UnsupportedProblem, match=r"a journal of .*EPYC.*, a CPU: expected one of a GPU \(--journal\)"
    ):
        Model([journal_of(Contract(), device=synthetic.cpu())], B200)
    with pytest.raises(UnsupportedProblem, match="EPYC.*peak is not known"):
        Model([MADE], synthetic.cpu())


# -- what compiled variants take


def outcomes(wanted, spills=(), failed=()):
    """The outcome of each object, made up: registers by the place in the list."""
    found = []
    for i, (spec, _) in enumerate(plan_objects(wanted, B200)):
        spilled = 16 if i in spills else 0
        manifest = None if i in failed else Manifest(spec, spec.name, "", 0.1, 32 + i % 90, spilled, 1024)
        found.append(Built(spec, manifest, reason="made up" if i in failed else ""))
    return found


@pytest.fixture(scope="module")
def tiny():
    """A config of three T and one state dtype."""
    return config.parse(TEXT)


def test_resources(tiny):
    """Each object once, with every T that it serves; registers are the manifest's, a block's
    threads and memory the config's.
    """
    built = outcomes(tiny)
    found = resources([tiny, tiny], B200, built)
    assert len(found) == len({b.spec.key for b in built}) - 1  # without what empties L2
    by_tokens = {r.tokens for r in found if r.role == "decode"}
    assert {(1,), (4, 8)} <= by_tokens  # some kernels compile an object a T
    assert {r.tokens for r in found if r.role == "floor"} == {(1, 4, 8)}
    for r in found:
        kernel = kernels.get(r.variant.kernel)
        assert r.block == kernel.block(r.contract, kernel.setting(r.variant.knobs))
        assert r.occupancy.blocks * r.block.threads <= 2048


def test_resources_of_failures(tiny):
    """What failed is left out; what was never compiled, and a CPU, is refused."""
    whole = resources([tiny], B200, outcomes(tiny))
    assert len(resources([tiny], B200, outcomes(tiny, failed=(3, 4)))) == len(whole) - 2
    with pytest.raises(BuildError, match="registers are not known; compile it first"):
        resources([tiny], B200, outcomes(tiny)[:-1])
    with pytest.raises(UnsupportedProblem, match="expected a CUDA arch"):
        resources([tiny], arch.detect("cpu"), [])


@given(st.lists(st.integers(0, 300), min_size=1))
def test_range(numbers):
    """Least, a number in the middle, greatest."""
    found = range_of(numbers)
    assert found.least <= found.median <= found.most and found.median in numbers
    assert range_of([7]) == Range(7, 7, 7)


# -- the page


def page_of(tiny, model, spills=(), failed=()):
    """The page on some made-up journals and objects."""
    built = outcomes(tiny, spills, failed)
    names = [b.spec.name for b in built if not b.ok]
    found = resources([tiny], B200, built)
    return markdown(expectations(model, found, names, [published(PR)], tiny.problems(), "gdntune expect ..."))


def test_the_page(tiny):
    """Every column of the model's is marked, nothing is cut, and figures stand beside the published
    ones.
    """
    dense = Contract(tokens=4, mode="frozen", intermediate="dense")
    model = Model([journal_of(Contract(), Contract(tokens=8), dense, theirs=1.25)], B200)
    text = page_of(tiny, model)
    assert text.startswith(f"# NVIDIA B200: {MARK}\n")
    assert "No variant spills." in text and "none failed" in text
    for wanted in ("T=1, gdn bf16 update; theirs cold-dirty, ours from cold-clean", "T=4, gdn bf16 frozen dense"):
        assert wanted in text
    table = text[text.index("T=1, gdn bf16 update; ") :]
    header, _, first = (line.split("|")[1:-1] for line in table.splitlines()[2:5])
    assert [h.strip() for h in header] == ["B", "theirs, us, published", f"ours, us, {MARK}", f"at most, {MARK}"]
    said = model.expected(model.line(Contract(), "cold-dirty"), 64)
    assert [c.strip() for c in first] == ["1", "3.49", f"{said.time_us:.2f}", f"{said.most_us:.2f}"]
    assert "T=2, gdn" not in text  # no journal has it
    assert "the geometric mean of 20 cells" in " ".join(text.split())
    grids = [line for line in text.splitlines() if line.startswith("|")]
    assert max(map(len, grids)) <= 100
    assert not [line for line in grids if "..." in line]


def test_what_spills_and_what_failed_is_named(tiny):
    """A spill and a failure are on the page by name."""
    text = " ".join(page_of(tiny, Model([MADE], B200), spills=(5,), failed=(7,)).split())
    spec = plan_objects(tiny, B200)[5][0]
    assert f"Spills: 1 of them, `{spec.label}`" in text and "16 bytes a thread" in text
    assert f"1 failed: {plan_objects(tiny, B200)[7][0].name}." in text


def test_of_another_gpu_nothing_stands_beside(tiny):
    """Published figures are of a B200: beside another GPU's expected times they would say nothing.
    """
    b300 = arch.target("sm_103a")
    built = outcomes(tiny)
    text = markdown(
        expectations(Model([MADE], b300), resources([tiny], B200, built), [], [published(PR)], tiny.problems(), "x")
    )
    assert "pull request" not in text and MARK in text


# -- the command


def test_the_command(tmp_path, monkeypatch):
    """It compiles what configs name, writes the page with the command that makes it, and its exit
    code tells of spills.
    """
    from gdntune.cli.app import app
    from gdntune.objects import build

    path = tmp_path / "tiny.yaml"
    path.write_bytes(TEXT)
    folder = synthetic.write(tmp_path / "run", *journal_of(Contract()), with_table=False)
    out = tmp_path / "page.md"
    for spills, code in (((), 0), ((2,), 1)):
        made = outcomes(config.parse(TEXT), spills)
        monkeypatch.setattr(build, "compile_objects", lambda objects, store, made=made, **_: made)
        args = ["expect", str(path), "--arch", "sm_100a", "--journal", str(folder), "--against", PR, "--out", str(out)]
        result = CliRunner().invoke(app, args)
        assert result.exit_code == code, result.output
        assert ("spills 16 bytes" in result.stderr) == bool(spills)
    command = re.search(r"```sh\n(.*?)\n```", out.read_text(), re.DOTALL)[1].replace("\\\n", "")
    assert command.split() == ["gdntune", *args]


def test_the_shipped_page_names_a_command_that_exists():
    """docs/blackwell.md shows one `gdntune expect`; its configs and journals are in the repository,
    and its options are those of today.
    """
    from gdntune.cli.app import app

    command = re.search(r"```sh\n(.*?)\n```", PAGE.read_text(), re.DOTALL)[1].replace("\\\n", "")
    program, *args = command.split()
    assert program == "gdntune" and args[:1] == ["expect"]
    given = [a for a in args if a.endswith((".yaml", ".xz"))]
    assert len(given) == 8 and all((ROOT / path).is_file() for path in given)
    expect = typer.main.get_command(app).commands["expect"]
    parsed = expect.make_context("expect", args[1:]).params
    assert (parsed["arch"], parsed["against"]) == ("sm_100a", [PR])
