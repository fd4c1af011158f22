"""gdntune/occupancy.py, and what the kernels' configs say of a block: threads and shared memory, as
the compiled launch has them.
"""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdntune import kernels
from gdntune.device import arch
from gdntune.device.occupancy import MULTIPROCESSORS, occupancy
from gdntune.errors import UnknownName, UnsupportedProblem
from gdntune.kernels import recurrent_config, wy_block_config, wy_config
from gdntune.kernels.spec import Block
from gdntune.objects.build import SPILL_LIMIT_BYTES
from gdntune.problem import Contract

KDA = Contract(op="kda_decode", gate="softplus")
BLACKWELL = arch.target("sm_100a")
WY_FP32 = Contract(tokens=8, state_dtype="fp32", mode="frozen")
WY_K96 = Contract(tokens=8, state_dtype="fp16", mode="frozen", K=96, V=192, gate="log", pool=False)
WY_K256 = Contract(tokens=8, K=256, V=32)
# kernel, contract, knobs: every allocation of the kernels, alone and together, and every kind of
# contract
SETTINGS = {
    "T=1: none": ("recurrent", Contract(), recurrent_config.Knobs(32, 2, 8, 16, 128)),
    "KDA, T=1: decays of a warp": (
        "recurrent",
        KDA,
        recurrent_config.Knobs(32, 2, 8, 16, 128, early=True),
    ),
    "KDA, T=8, staged, fp32": (
        "recurrent",
        KDA.replace(
            tokens=5, state_dtype="fp32", mode="frozen", intermediate="slots", accepted=True
        ),
        recurrent_config.Knobs(32, 2, 4, 16, 256),
    ),
    "T=8, staged": (
        "recurrent",
        Contract(tokens=3, intermediate="indexed", pool=False),
        recurrent_config.Knobs(64, 4, 8, 16, 128, spread=True),
    ),
    "T=16, staged, K=96": (
        "recurrent",
        Contract(
            tokens=9,
            K=96,
            V=192,
            input_dtype="fp16",
            state_dtype="fp16",
            ragged=True,
            intermediate="dense",
            gate="log",
            beta="given",
        ),
        recurrent_config.Knobs(64, 4, 4, 8, 128),
    ),
    "split rows": (
        "recurrent",
        Contract(layout="v_last"),
        recurrent_config.Knobs(64, 1, 8, 4, 128, split=4, early=True),
    ),
    "KDA, split rows": (
        "recurrent",
        KDA.replace(layout="v_last"),
        recurrent_config.Knobs(64, 1, 8, 4, 128, split=4, early=True, spread=True),
    ),
    "wy, T=8": ("wy", Contract(tokens=8), wy_config.Knobs(32, 2)),
    "wy, T=4, frozen": ("wy", Contract(tokens=4, mode="frozen"), wy_config.Knobs(32, 1, 4)),
    "wy, T=16, one warp": ("wy", Contract(tokens=16, ragged=True), wy_config.Knobs(16, 1)),
    "wy, fp32, frozen": ("wy", WY_FP32, wy_config.default(WY_FP32, 64, BLACKWELL)),
    "wy, fp16, K=96": ("wy", WY_K96, wy_config.default(WY_K96, 64, BLACKWELL)),
    "wy, K=256": ("wy", WY_K256, wy_config.default(WY_K256, 64, BLACKWELL)),
    "wy_block, KDA, T=8": (
        "wy_block",
        KDA.replace(tokens=8),
        wy_block_config.Knobs(32, 4),
    ),
    "wy_block, T=8": (
        "wy_block",
        Contract(tokens=8),
        wy_block_config.Knobs(32, 4, registers=128),
    ),
    "wy_block, fp16, T=3, frozen": (
        "wy_block",
        Contract(tokens=3, mode="frozen", input_dtype="fp16"),
        wy_block_config.Knobs(16, 8, threads=256),
    ),
    "wy_block, T=16": (
        "wy_block",
        Contract(tokens=16, ragged=True),
        wy_block_config.Knobs(16, 4),
    ),
    "wy_block, KDA, fp32": (
        "wy_block",
        KDA.replace(tokens=8, state_dtype="fp32"),
        wy_block_config.Knobs(16, 8, threads=256, terms=3),
    ),
    "wy_block, KDA, fp16, v_last, K=64": (
        "wy_block",
        KDA.replace(tokens=4, layout="v_last", input_dtype="fp16", state_dtype="fp16", K=64, V=64),
        wy_block_config.Knobs(16, 4, threads=256, terms=3),
    ),
    "wy_block, K=256, no pool": (
        "wy_block",
        Contract(tokens=8, K=256, V=32, pool=False),
        wy_block_config.Knobs(16, 2),
    ),
    "floor": (
        "stream",
        Contract(),
        kernels.get("stream").default(Contract(), 64, arch.target("sm_100a")),
    ),
}


def launch_of(name, facts, knobs, target):
    """Threads and dynamic shared memory of a compiled kernel's launch, from its host code, and what
    ptxas says of it; to be run in a process of its own.
    """
    import importlib
    import tempfile

    from gdntune.objects.worker import cute_options, resources

    arch = cute_options(target)
    compile = importlib.import_module(f"gdntune.kernels.{name}").compile
    with tempfile.TemporaryDirectory() as folder:
        made = compile(
            facts, knobs, options=f"{arch} --keep-cubin --dump-dir {folder}", prefix="kernel"
        )
        code, used = str(made.ir_module), resources(made.__cubin__)
    # the launch's struct: grid, block, dynamic shared memory, stream, ...
    launch = r"!llvm.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
    for body in re.split(r"\n  llvm\.func ", code):
        constants = {
            m[1]: int(m[2])
            for m in re.finditer(r"(%\S+) = llvm\.mlir\.constant\((-?\d+) : i\d+\)", body)
        }
        found = {}
        for field in ("1, 0", "2"):
            at = re.search(rf"(%\S+) = llvm\.getelementptr %\w+\[0, {field}\] .*{launch}", body)
            stored = at and re.search(rf"llvm\.store (%\S+), {at[1]} :", body)
            if stored:
                found[field] = constants[stored[1]]
        if found:
            return (found["1, 0"], found["2"]), used
    raise AssertionError("no launch in the host code")


@pytest.fixture(scope="module")
def launches():
    """What each of SETTINGS is launched with, and uses, compiled for sm_100a by two processes."""
    if find_spec("cutlass") is None:
        pytest.skip("nvidia-cutlass-dsl has wheels for Linux alone")
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for label, (name, contract, knobs) in SETTINGS.items():
            kernel = kernels.get(name)
            facts = dict(kernel.facts(contract))
            jobs[label] = pool.submit(
                launch_of, name, facts, kernel.variant(knobs).knobs, "sm_100a"
            )
        yield {label: job.result() for label, job in jobs.items()}


@pytest.mark.parametrize("label", SETTINGS)
def test_a_block_is_what_the_launch_asks_for(label, launches):
    """A config's threads and shared memory are those of the compiled launch: the cubin does not
    hold what is asked for at launch.
    """
    name, contract, knobs = SETTINGS[label]
    assert kernels.refuse(contract, kernels.get(name).variant(knobs)) is None
    assert kernels.get(name).block(contract, knobs) == Block(*launches[label][0])


@pytest.mark.parametrize("label", SETTINGS)
def test_it_compiles_for_blackwell_without_spills(label, launches):
    """What ptxas keeps in local memory is below the limit beyond which a sweep drops a variant."""
    _, used = launches[label]
    assert 0 < used["registers"] <= 255 and used["spill_bytes"] <= SPILL_LIMIT_BYTES


def test_every_setting_fits_a_multiprocessor():
    """No setting that a kernel accepts asks for more than an SM has, whatever the registers: 255 of
    512 threads would not fit.
    """
    device = arch.target("sm_100a")
    for contract in (
        Contract(),
        Contract(tokens=8),
        KDA.replace(tokens=8),
        Contract(tokens=16, K=256),
        Contract(layout="v_last"),
    ):
        for kernel in (*kernels.serving(device, "decode"), *kernels.serving(device, "floor")):
            for knobs in kernel.space(contract, device):
                assert occupancy(
                    device.arch,
                    kernel.block(contract, knobs).threads,
                    64,
                    kernel.block(contract, knobs)[1],
                ).blocks


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "share", "bound"),
    [
        # CUDA's occupancy calculator at 9.0 gives these
        (128, 32, 0, 16, 1.0, "warps"),
        (128, 40, 0, 12, 0.75, "registers"),
        (128, 64, 0, 8, 0.5, "registers"),
        (128, 65, 0, 7, 0.4375, "registers"),
        (32, 32, 0, 32, 0.5, "blocks"),
        (1024, 64, 0, 1, 0.5, "registers"),
        (128, 32, 227 << 10, 1, 0.0625, "shared memory"),
        (128, 32, 18 << 10, 12, 0.75, "shared memory"),
        # 19 of 12 KiB by 228 KiB; each block's reserved KiB makes it 17
        (32, 8, 12 << 10, 17, 17 / 64, "shared memory"),
        (33, 32, 0, 32, 1.0, "warps"),
    ],
)
def test_occupancy(threads, registers, shared, blocks, share, bound):
    """Warps, registers, shared memory or the number of blocks decide; a warp's registers come from
    a quarter of the SM's.
    """
    assert occupancy("sm_100a", threads, registers, shared) == (blocks, share, bound)


@given(
    st.sampled_from(sorted(MULTIPROCESSORS)),
    st.integers(1, 32),
    st.integers(1, 64),
    st.integers(0, 99 << 10),
)
def test_occupancy_never_exceeds_an_sm(target, warps, registers, shared):
    """What is counted fits, and a thread, register or byte less never admits fewer blocks."""
    sm, found = MULTIPROCESSORS[target], occupancy(target, 32 * warps, registers, shared)
    assert (
        found.blocks * 32 * warps <= sm.threads
        and found.blocks <= sm.blocks
        and 0 < found.share <= 1
    )
    assert found.blocks * 32 * warps * registers <= sm.registers
    assert found.blocks * (shared + 1024) <= sm.shared_bytes
    assert (
        occupancy(target, 32 * warps, max(1, registers - 1), max(0, shared - 1)).blocks
        >= found.blocks
    )


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (("sm_70", 128, 32, 0), UnknownName, "expected one of sm_80"),
        (("sm_100a", 2048, 32, 0), UnsupportedProblem, "1 to 1024"),
        (("sm_100a", 128, 256, 0), UnsupportedProblem, "1 to 255"),
        (("sm_100a", 128, 0, 0), UnsupportedProblem, "1 to 255"),
        (("sm_100a", 128, 32, (227 << 10) + 1), UnsupportedProblem, "0 to 232448"),
        (("sm_89", 128, 32, 100 << 10), UnsupportedProblem, "0 to 101376"),
        (("sm_100a", 1024, 128, 0), UnsupportedProblem, "fewer threads, or fewer registers"),
    ],
)
def test_what_no_sm_holds(args, error, words):
    """An unknown arch and an impossible block are refused with what is expected."""
    with pytest.raises(error, match=words):
        occupancy(*args)
