"""The CuTe kernels without a GPU: they compile, use what registers they should, and address 64 bits
wide.
"""

import multiprocessing
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
from ptx.cover import EVERY
from ptx.offsets import compile_ptx, narrow_products

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels import recurrent_config, wy_config
from gdntune.kernels.spec import Variant
from gdntune.objects.build import SPILL_LIMIT_BYTES, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

CONTRACTS = {
    "T=1": Contract(),
    "T=8, fp32 state": Contract(tokens=8, state_dtype="fp32"),
    "v_last": Contract(layout="v_last"),
    "kda, slots": Contract(
        op="kda_decode",
        gate="softplus",
        tokens=4,
        intermediate="slots",
        accepted=True,
        mode="frozen",
    ),
    "ragged, dense, fp16, K=96": Contract(
        tokens=4,
        ragged=True,
        intermediate="dense",
        state_dtype="fp16",
        input_dtype="fp16",
        gate="log",
        beta="given",
        K=96,
        V=192,
    ),
    "indexed, no pool": Contract(
        tokens=2, intermediate="indexed", pool=False, layout="v_last", K=64, V=64
    ),
}
WY_CONTRACTS = {
    "T=8": Contract(tokens=8),
    "T=4, frozen": Contract(tokens=4, mode="frozen"),
    "T=16, ragged": Contract(tokens=16, ragged=True),
    "T=8, fp32 state, frozen": Contract(tokens=8, state_dtype="fp32", mode="frozen"),
    "T=8, fp16 state, K=96": Contract(
        tokens=8, state_dtype="fp16", mode="frozen", K=96, V=192, gate="log", pool=False
    ),
    "T=8, K=256": Contract(tokens=8, K=256, V=32),
}
# Those that hold most in registers.
FEW = (
    "T=1",
    "kda, slots",
    "ragged, dense, fp16, K=96",
    "T=16, ragged",
    "T=8, fp32 state, frozen",
)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store of this module's own."""
    return Store(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def ptx_of():
    """PTX of a contract's default variant, compiled in another process."""
    device = arch.target("sm_90a")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

        def compiled(contract, name="recurrent", **changes):
            kernel = kernels.get(name)
            knobs = {
                **kernel.variant(
                    kernel.default(contract, 8192 if contract == Contract() else 64, device)
                ).knobs,
                **changes,
            }
            return pool.submit(
                compile_ptx, name, dict(kernel.facts(contract)), knobs, device.arch
            ).result()

        yield compiled


def test_representative_objects_compile(store):
    """Contracts of each kernel compile for Hopper with their default variant, without spills; all of
    these with GDNTUNE_TEST_ALL=1. For Blackwell every kind does, see
    tests/device/test_occupancy.py, and what a row of tests/ptx has is compiled for Hopper.
    """
    device = arch.target("sm_90a")
    objects = []
    for contract in (c for name, c in CONTRACTS.items() if EVERY or name in FEW):
        kernel = kernels.get("recurrent")
        variant = kernels.default(contract, 64, device)
        objects.append((object_spec(kernel, contract, variant, device), kernel.compiler))
    kernel = kernels.get("wy")
    for contract in (c for name, c in WY_CONTRACTS.items() if EVERY or name in FEW):
        variant = kernel.variant(wy_config.default(contract, 64, device))
        objects.append((object_spec(kernel, contract, variant, device), kernel.compiler))
    kernel = kernels.get("stream")
    objects.append((object_spec(kernel, *kernels.flush(), device, label="flush"), kernel.compiler))
    for built in compile_objects(objects, store):
        assert built.ok, built.reason
        assert 0 < built.manifest.registers <= 255
        assert built.manifest.spill_bytes <= SPILL_LIMIT_BYTES


FLUSH = """
import hashlib, os, sys
from gdntune import kernels
from gdntune.objects.worker import cute_options

ours = sys.argv[2:] == ["ours"]
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
options = cute_options("sm_90a") if ours else ""
from gdntune.kernels import stream

(contract, variant), folder = kernels.flush(), sys.argv[1]
facts = dict(kernels.get("stream").facts(contract))
made = stream.compile(facts, variant.knobs, f"{options} --keep-cubin --dump-dir {folder}", "f")
made.export_to_c(f"{folder}/f.o", function_name="f")
both = made.__cubin__ + open(f"{folder}/f.o", "rb").read()
print(made.engine is None, hashlib.sha256(both).hexdigest())
"""


def test_no_function_is_made_of_an_object(tmp_path):
    """Fault: the DSL compiled each object's host code thrice, twice of it for a function that nobody
    called. The bytes are those of the DSL's own way.
    """
    said = {
        how: subprocess.run(
            [sys.executable, "-c", FLUSH, str(tmp_path), how],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split()
        for how in ("theirs", "ours")
    }
    assert (said["theirs"][0], said["ours"][0]) == ("False", "True")
    assert said["theirs"][1] == said["ours"][1]


def test_spaces_are_large_and_legal():
    """At least 30 variants a contract, each legal, each with an id of its own, and the default is
    legal everywhere.
    """
    device = arch.target("sm_90a")
    for contract in CONTRACTS.values():
        found = kernels.variants(contract, device)
        assert len({v.id for v in found}) == len(found)
        assert all(kernels.refuse(contract, v) is None for v in found)
        for exponent in range(0, 16, 3):
            assert (
                kernels.refuse(contract, kernels.default(contract, 1 << exponent, device)) is None
            )
    assert len(kernels.variants(Contract(), device)) >= 30
    assert len(kernels.variants(Contract(tokens=8), device)) >= 30


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"lanes": 12, "vec": 8}, "power"),
        ({"vec": 32}, "bytes a load"),
        ({"tile_v": 24}, "tile_v"),
        ({"threads": 100}, "threads"),
        ({"run": 2}, "run=2 with k_last"),
        ({"registers": 100}, "registers"),
        ({"ilp": 16, "lanes": 4, "tile_v": 512}, "V=128"),
        ({"spread": True, "ilp": 1}, "spread=True"),
        ({"heads": True, "tile_v": 128}, "heads=True"),
        ({"fence": True}, "fence=True"),
        ({"row": True}, "row=True with intermediate=none"),
        ({"pdl": "last"}, "pdl='last': expected one of none, first, state"),
        ({"pdl": "state", "early": False}, "pdl='state' without early=True"),
    ],
)
def test_illegal_knobs_are_refused_with_a_reason(knobs, reason):
    """An illegal setting is refused by the one legality function, not by the compiler: K=96 on 12
    lanes compiled in silence.
    """
    setting = {"tile_v": 32, "ilp": 2, "vec": 8, "lanes": 16, "threads": 128, **knobs}
    assert reason in (recurrent_config.refuse(Contract(), recurrent_config.Knobs(**setting)) or "")


@pytest.mark.parametrize(
    ("fields", "knobs", "reason"),
    [
        ({"op": "kda_decode", "gate": "softplus"}, {}, "op=kda_decode"),
        ({"layout": "v_last"}, {}, "layout=v_last"),
        ({"intermediate": "dense"}, {}, "intermediate=dense"),
        ({"tokens": 1}, {}, "tokens=1"),
        ({"input_dtype": "fp16"}, {}, "input_dtype=fp16"),
        ({}, {"rows": 8}, "rows=8"),
        ({}, {"warps": 3}, "warps=3"),
        ({}, {"passes": 3}, "passes=3"),
        ({}, {"warps": 8}, "V=128"),
        ({}, {"registers": 64}, "registers=64"),
        ({"state_dtype": "fp32"}, {}, "registers a thread"),
    ],
)
def test_wy_refuses_with_a_reason(fields, knobs, reason):
    """What the tensor-core kernel does not serve, it says; everything that it tries is legal, and a
    contract out of its reach has none.
    """
    contract = Contract(**{"tokens": 8, **fields})
    assert reason in (
        wy_config.refuse(contract, wy_config.Knobs(**{"rows": 32, "warps": 1, **knobs})) or ""
    )
    assert not knobs or wy_config.refuse(contract, wy_config.Knobs(32, 1)) is None
    assert all(
        wy_config.refuse(contract, s) is None
        for s in wy_config.space(contract, arch.target("sm_90a"))
    )


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_wy_refuses_a_wide_state_that_it_would_write(dtype):
    """Faults: a legal setting that no space had; u's two bf16 terms left 7e-6 of an fp32 row, of 4e-6.
    Of fp16 states one random problem of 5,000 failed on a GPU.
    """
    contract = Contract(tokens=1, ragged=True, state_dtype=dtype)
    setting = wy_config.Knobs(16, 1)
    assert "mode=update" in wy_config.refuse(contract, setting)
    assert wy_config.refuse(contract.replace(mode="frozen"), setting) is None


def test_the_default_serves_what_a_space_leaves_out():
    """The default rule names a variant of the space where there is one, and has a legal one for
    sizes whose space is empty or small.
    """
    device = arch.target("sm_90a")
    for contract in (
        Contract(),
        Contract(layout="v_last", state_dtype="fp32"),
        Contract(tokens=8),
        Contract(K=64, V=32),
    ):
        space = recurrent_config.space(contract, device)
        for exponent in range(16):
            knobs = recurrent_config.default(contract, 1 << exponent, device)
            assert recurrent_config.refuse(contract, knobs) is None
            assert knobs in space
    # many heads: a thread with several rows, whose sums it shares; few: one wait less
    many, few = (recurrent_config.default(Contract(), n, device) for n in (8192, 16))
    assert (many.spread, few.spread) == (True, False)


NEW_KNOBS = {
    "recurrent": ("row", "pdl"),
    "wy": ("pdl",),
    "wy_block": ("pdl", "matrices"),
    "wy_lanes": ("pdl",),
    "wy_quads": ("pdl",),
}
SLOTS = Contract(tokens=3, intermediate="slots", mode="frozen", accepted=True)
SEVERAL = Contract(tokens=8)
# a contract that each of these serves
SERVED = {
    "recurrent": SLOTS,
    "wy": SEVERAL,
    "wy_block": SEVERAL,
    "wy_lanes": SLOTS,
    "wy_quads": SLOTS,
}


@pytest.mark.parametrize("name", NEW_KNOBS)
def test_a_table_of_fewer_knobs_names_the_same_objects(name):
    """A knob that a later version adds is at its default in an earlier version's table: the ids and
    the objects stay, else each such table would be void.
    """
    device, kernel, contract = arch.target("sm_90a"), kernels.get(name), SERVED[name]
    for now in kernel.variants(contract, device):
        if any(now.knobs[k] not in (False, "none") for k in NEW_KNOBS[name]):
            continue
        fewer = {k: v for k, v in now.knobs.items() if k not in NEW_KNOBS[name]}
        then = Variant(name, now.id, fewer)
        assert kernel.variant(kernel.setting(fewer)).id == now.id
        assert kernel.named(then) is None
        specs = [object_spec(kernel, contract, v, device) for v in (then, now)]
        assert specs[0].key == specs[1].key


@pytest.mark.parametrize("name", NEW_KNOBS)
def test_dependent_launch_is_tried_under_chain_alone(name):
    """Its own time of a kernel that waits within it says nothing of what it is worth; and no rule
    chooses it unasked.
    """
    device, kernel, contract = arch.target("sm_90a"), kernels.get(name), SERVED[name]

    def forms(l2):
        return {v.knobs["pdl"] for v in kernel.variants(contract, device, l2)}

    assert forms("cold-clean") == forms("warm") == {"none"}
    assert forms("chain") == {"none", "first", "state"}
    for exponent in range(14):
        assert kernel.default(contract, 1 << exponent, device).pdl == "none"


def test_rows_of_slots_are_tried_where_there_are_slots():
    """And the default rule does not choose them before a sweep has."""
    device = arch.target("sm_90a")
    rows = [s for s in recurrent_config.space(SLOTS, device) if s.row]
    assert rows
    assert not any(s.row for s in recurrent_config.space(Contract(tokens=3), device))
    for exponent in range(14):
        assert not recurrent_config.default(SLOTS, 1 << exponent, device).row


def _until_it_waits(ptx):
    """The loads before a kernel's first wait for the kernel ahead, and all others."""
    assert ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")
    before, after = ptx.split("griddepcontrol.wait", 1)
    return [re.findall(r"ld\.global[.\w]*", part) for part in (before, after)]


@pytest.mark.parametrize(
    ("name", "contract", "vectors"),
    [
        ("recurrent", Contract(), 8),
        ("wy_lanes", SLOTS, 1),
        ("wy_quads", SLOTS, 4),
        ("wy", SEVERAL, 16),
        ("wy_block", SEVERAL, 16),
    ],
)
def test_where_a_dependent_launch_waits(name, contract, vectors, ptx_of):
    """`first`: nothing is loaded before the wait. `state`: indices and the state are, q, k, v and
    the gates are not. `none`: no wait.
    """
    assert "griddepcontrol" not in ptx_of(contract, name)
    before, after = _until_it_waits(ptx_of(contract, name, pdl="first"))
    assert (before, bool(after)) == ([], True)
    in_all = len(after)
    before, after = _until_it_waits(ptx_of(contract, name, pdl="state"))
    # vectors of the state that a thread holds
    assert sum(".v" in load for load in before) == vectors
    # q, k and v, 16 bytes or a token at a time, and gates, by whoever reads them
    assert len(after) >= 5
    assert len(before) + len(after) == in_all


def test_a_row_of_slots_is_read_once(ptx_of):
    """Fault: of `slots` every column to write was a load of its own in the loop over tokens, a wait
    before each state's store.
    """
    in_loop = [ptx_of(SLOTS, row=row).rpartition("bar.sync")[2] for row in (False, True)]
    assert [part.count("ld.global") for part in in_loop] == [1, 0]


def test_what_writes_a_chains_inputs_lets_its_dependents_start(ptx_of):
    """Else a kernel of dependent launch has nothing to start ahead of."""
    (contract, variant), flush = kernels.producer(), kernels.flush()
    assert "griddepcontrol.launch_dependents" in ptx_of(contract, "stream", **variant.knobs)
    assert "griddepcontrol" not in ptx_of(flush[0], "stream", **flush[1].knobs)


def test_the_ptx_reader_sees_narrow_products():
    """The reader above finds a 32-bit product of a loaded index, also through a move and a loop; so
    it can fail.
    """
    load = "ld.global.v4.b32 {%r90, %r91, %r92, %r93}, [%rd9];\n"
    direct = (
        "ld.global.b32 %r1, [%rd1];\nmad.lo.s32 %r2, %r1, 1048576, %r3;\nmul.wide.s32 %rd9, %r2, 2;\n"
        + load
    )
    moved = (
        "mov.b32 %r9, %ctaid.z;\nselp.b32 %r8, %r9, 0, %p1;\nshl.b32 %r7, %r8, 20;\ncvt.s64.s32 %rd9, %r7;\n"
        + load
    )
    wide = (
        "ld.global.b32 %r1, [%rd1];\ncvt.s64.s32 %rd2, %r1;\nmad.lo.s64 %rd9, %rd2, %rd4, %rd5;\n"
        + load
    )
    assert len(narrow_products(direct)) == 1
    assert len(narrow_products(moved)) == 1
    assert narrow_products(wide) == []
