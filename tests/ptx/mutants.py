"""Kernels that are broken on purpose: edits of a good kernel's PTX, each a fault that people write.

Every edit must find its place in the text, so that none is a kernel unchanged.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from gdntune.problem import Contract

Edit = Callable[[str], str]


class Base(NamedTuple):
    """A kernel that is edited: its default setting for a contract, but for these knobs."""

    kernel: str
    contract: Contract
    knobs: tuple[tuple[str, Any], ...] = ()

    @property
    def id(self) -> str:
        """Its name among the tests."""
        return "-".join(
            [self.kernel, self.contract.key(), *(f"{name}={value}" for name, value in self.knobs)]
        )


# T = 1, a loop over tokens, warps that share a row, tensor cores, dependent launch.
ONE = Base("recurrent", Contract())
LOOP = Base("recurrent", Contract(tokens=4, intermediate="dense"))
SPLIT = Base("recurrent", Contract("kda_decode", 3, gate="softplus", layout="v_last", K=64, V=64))
WY = Base("wy", Contract(tokens=8))
BLOCK = Base("wy_block", Contract(tokens=8))
BLOCK_KDA = Base("wy_block", Contract("kda_decode", 4, gate="softplus", K=64))
COPIED = Base(
    "wy_block",
    Contract("kda_decode", 4, gate="softplus", K=64, mode="frozen"),
    (("copied", 1), ("fence", True)),
)
WHOLE = Base(
    "wy_block",
    Contract("kda_decode", 4, gate="softplus", K=64),
    (("rows", 16), ("copied", 2), ("lines", True), ("terms", 3), ("fence", True)),
)
PAIRS = Base("wy_block", Contract("kda_decode", 8, gate="softplus", K=64), (("columns", 2),))
TF32 = Base(
    "wy_block",
    Contract("kda_decode", 8, gate="softplus", K=64, state_dtype="fp32"),
    (("rows", 16), ("terms", 2), ("tf32", True)),
)
FIRST = Base("wy", Contract(tokens=4), (("pdl", "first"),))
RING_NORM = Base(
    "ring_norm", Contract(tokens=2, K=64, V=32, ring=16, norm="silu"), (("warps", 2), ("rows", 16))
)
V_LAST = Base("wy_block", Contract(tokens=4, layout="v_last"), (("matrices", True),))
QUADS = Base("wy_quads", Contract(tokens=4, mode="frozen", intermediate="slots", accepted=True))
STATE = Base("wy_block", Contract(tokens=4), (("pdl", "state"),))


@dataclass(frozen=True)
class Mutant:
    """A kernel, and how it is broken."""

    name: str
    base: Base
    edit: Edit

    @property
    def id(self) -> str:
        return f"{self.base.kernel}: {self.name}"


def _replaced(pattern: str, new: str, which: int | None = None) -> Edit:
    """Replaces the which-th match, counted from the end where negative; all of them by default."""

    def edit(text: str) -> str:
        found = list(re.finditer(pattern, text))
        if not found:
            raise ValueError(f"nothing to edit: {pattern}")
        for m in reversed(found if which is None else [found[which]]):
            text = text[: m.start()] + m.expand(new) + text[m.end() :]
        return text

    return edit


def _dropped(pattern: str, which: int) -> Edit:
    """Leaves an instruction out."""
    return _replaced(rf"(?m)^\s*(?:@!?%p\d+\s+)?{pattern}[^;]*;", "", which)


_to_other_lanes = _replaced(r"(shfl\.sync\.bfly\.b32\s[^;]*), 16,", r"\1, 8,", 0)


def _scalar(n: int, kind: str = "b32") -> Callable[[str], str]:
    """The register of the n-th parameter behind the five fp32 ones: 0 is null_index, 1 whether q and
    k are normalised, 4 the pool's slots.
    """

    def register(text: str) -> str:
        names = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) (\w+)", text)
        first = next(i for i, (kind, _) in enumerate(names) if kind == "f32")
        name = names[first + 5 + n][1]
        found = re.search(rf"ld\.param\.{kind}\s+(%\w+), \[{name}\];", text)
        if found is None:
            raise ValueError(f"parameter {name} is not read")
        return found.group(1)

    return register


def _compared_as(register: Callable[[str], str], other: str) -> Edit:
    """Wherever a register is compared, a constant stands for it."""

    def edit(text: str) -> str:
        return _replaced(rf"(setp\.\w+\.\w+\s[^;]*){register(text)}\b", rf"\g<1>{other}")(text)

    return edit


def _parameter(one: int, other: int) -> Edit:
    """Reads another parameter in place of one."""
    return _replaced(rf"(ld\.param\.\S+\s+[^;]*_param_){one}([\]+])", rf"\g<1>{other}\2")


def _further(pattern: str, by: int, which: int = 0) -> Edit:
    """Shifts an access's address."""
    return _replaced(rf"({pattern}[^;]*\[%\w+)(?:\+(-?\d+))?\]", rf"\g<1>+{by}]", which)


def _cut_to_32_bits(text: str) -> str:
    """The product of a slot and its stride keeps 32 bits."""
    return _replaced(
        r"(?m)^\s*(?:mul|mad)\.lo\.s64\s+(%rd\d+),[^;]*;", r"\g<0>\n\tand.b64 \1, \1, 4294967295;"
    )(text)


def _in_bf16(text: str) -> str:
    """What ex2 gives is rounded to bf16."""
    found = re.search(r"\.reg \.b16\s+%rs<(\d+)>", text)
    assert found is not None
    spare = int(found.group(1))
    text = text.replace(found.group(), f".reg .b16 %rs<{spare + 1}>")
    half = f"%rs{spare}"
    rounding = rf"\g<0>\n\tcvt.rn.bf16.f32 {half}, \1;\n\tcvt.f32.bf16 \1, {half};"
    return _replaced(r"ex2\.approx\.ftz\.f32\s+(%r\d+), [^;]*;", rounding)(text)


_MMA = (
    r"mma\.sync\.aligned\.\S+\s+\{([^}]*)\},\s*\{(%r\d+), (%r\d+), ([^}]*)\},\s*\{([^}]*)\},"
    r"\s*\{([^}]*)\};"
)


def _without_a_product(text: str) -> str:
    """An mma gives the sum that it was given."""
    m = re.search(_MMA, text)
    assert m is not None
    pairs = zip(m.group(1).split(","), m.group(6).split(","), strict=True)
    moves = "\n".join(f"\tmov.b32 {to.strip()}, {source.strip()};" for to, source in pairs)
    return text[: m.start()] + moves + text[m.end() :]


def _exchanged_tf32(text: str) -> str:
    """The rows of one operand, which are k's and q's, change places."""
    kind = "m16n8k8.row.col.f32.tf32.tf32.f32"
    new = rf"mma.sync.aligned.{kind} {{\1}}, {{\3, \2, \4}}, {{\5}}, {{\6}};"
    return _replaced(_MMA, new, 0)(text)


def _unguarded_state(text: str) -> str:
    """The final state is written whether its slot is padding or not."""
    last = text.rindex("st.global.v4.b32")
    for m in reversed(list(re.finditer(r"@!?%p\d+ bra\s+\$\w+;", text[:last]))):
        between = text[m.end() : last]
        if "st.shared" not in between and "$L" not in between:
            return text[: m.start()] + text[m.end() :]
    raise ValueError("no branch around the state's stores")


_WAIT = r"(?m)^\s*griddepcontrol\.wait;"


def _waits_late(text: str) -> str:
    """The first wait for the kernel ahead stands behind what it is for: before the first barrier."""
    text = _replaced(_WAIT, "", 0)(text)
    return _replaced(r"(?m)^\s*bar\.sync", r"\n\tgriddepcontrol.wait;\g<0>", 0)(text)


MUTANTS = [
    Mutant("null_index is a slot like others", ONE, _compared_as(_scalar(0), "-77777")),
    Mutant("slots beyond the pool are read", ONE, _compared_as(_scalar(4), "2147483647")),
    Mutant("the state goes back to where it came from", ONE, _parameter(9, 8)),
    Mutant("the state is written for padding", ONE, _unguarded_state),
    Mutant("an output is not written", ONE, _dropped(r"st\.global\.b16", 0)),
    Mutant("padding's output is not zeroed", ONE, _dropped(r"st\.global\.b16", -1)),
    Mutant("the state is rounded down", ONE, _replaced(r"cvt\.rn\.(bf16x2)", r"cvt.rz.\1")),
    Mutant(
        "a butterfly misses a thread",
        ONE,
        _replaced(r"(shfl\.sync\.bfly.*), 1, 31", r"\1, 2, 31", 0),
    ),
    Mutant("u is v + S k", ONE, _replaced(r"sub\.f32", "add.f32", -1)),
    Mutant("a load of the state is 16 bytes off", ONE, _further(r"ld\.global\.v4\.b32", 16, -1)),
    Mutant("slots are addressed in 32 bits", ONE, _cut_to_32_bits),
    Mutant("q and k are normalised unasked", ONE, _compared_as(_scalar(1), "2")),
    Mutant("no barrier before the tokens are read", LOOP, _dropped(r"bar\.sync", 0)),
    Mutant(
        "a token too many", LOOP, _replaced(r"(setp\.ne\.b32\s+%p\d+, %r\d+, )0;", r"\g<1>1;", -1)
    ),
    Mutant(
        "a token too few", LOOP, _replaced(r"(setp\.ne\.b32\s+%p\d+, %r\d+, )0;", r"\g<1>-1;", -1)
    ),
    Mutant("decays in bf16", LOOP, _in_bf16),
    Mutant("an intermediate state has a hole", LOOP, _dropped(r"st\.global\.v4", 0)),
    Mutant("k is not staged", LOOP, _dropped(r"st\.shared", 1)),
    Mutant("no barrier between the warps of a row", SPLIT, _dropped(r"bar\.sync", -1)),
    Mutant("another key's decay", SPLIT, _further(r"ld\.shared\.v4\.b32", 48)),
    Mutant("no order before P is read", WY, _dropped(r"bar\.warp\.sync", 3)),
    Mutant("no order before u is read", WY, _dropped(r"bar\.warp\.sync", 4)),
    Mutant("a product is left out", WY, _without_a_product),
    Mutant(
        "an operand's rows are exchanged",
        WY,
        _replaced(
            _MMA,
            r"mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {\1}, {\3, \2, \4}, {\5}, {\6};",
            0,
        ),
    ),
    Mutant("keys are not turned", WY, _replaced(r"movmatrix\S*", "mov.b32", 0)),
    Mutant("slots are addressed in 32 bits", WY, _cut_to_32_bits),
    Mutant("the state is written for padding", WY, _unguarded_state),
    Mutant("a misaligned line", WY, _further(r"ld\.shared\.v4\.b32", 4)),
    Mutant("no barrier after the operands", BLOCK, _dropped(r"bar\.sync", 0)),
    Mutant("no barrier after the Gram matrices", BLOCK, _dropped(r"bar\.sync", 1)),
    Mutant("a product is left out", BLOCK, _without_a_product),
    Mutant("no barrier after the staging", BLOCK_KDA, _dropped(r"bar\.sync", 0)),
    Mutant("projections over operands that others read", BLOCK_KDA, _dropped(r"bar\.sync", 1)),
    Mutant("decays in bf16", BLOCK_KDA, _in_bf16),
    Mutant("sums of pairs of tokens are given to other lanes", BLOCK_KDA, _to_other_lanes),
    Mutant("the same, of pairs in a loop", PAIRS, _to_other_lanes),
    Mutant(
        "what TF32 lacks is left out",
        TF32,
        _replaced(r"sub\.f32(\s+%r\d+), %r\d+, (%r\d+);", r"sub.f32\1, \2, \2;"),
    ),
    Mutant("rows of a TF32 operand are exchanged", TF32, _exchanged_tf32),
    Mutant("a product of TF32 is left out", TF32, _without_a_product),
    Mutant("no barrier before TF32 operands are read", TF32, _dropped(r"bar\.sync", 1)),
    Mutant("a state is not turned", V_LAST, _replaced(r"movmatrix\S*", "mov.b32", 0)),
    Mutant("states are written before all warps have read", QUADS, _dropped(r"bar\.sync", 0)),
    Mutant("a product is left out", QUADS, _without_a_product),
    Mutant("the other key of a word", QUADS, _replaced(r"\b12850\b", "4112")),
    Mutant(
        "a state goes to the slot of the token before",
        QUADS,
        _replaced(r"(shfl\.sync\.idx\S*\s+%r\d+, %r\d+, )2,", r"\g<1>1,", -1),
    ),
    Mutant("no barrier before the norm", RING_NORM, _dropped(r"bar\.sync", -1)),
    Mutant("a warp's squares lack lanes", RING_NORM, _dropped(r"shfl\.sync\.bfly", -1)),
    Mutant("no wait for the kernel ahead", FIRST, _replaced(_WAIT, "")),
    Mutant("inputs are read before the wait", STATE, _waits_late),
    Mutant("padding is written before the wait", STATE, _replaced(_WAIT, "", -1)),
    Mutant(
        "dependents start before the wait",
        STATE,
        _replaced(
            r"(?s)griddepcontrol\.wait;(.*?)(griddepcontrol\.launch_dependents;)",
            r"\2\1griddepcontrol.wait;",
        ),
    ),
    Mutant("rows are not waited for", COPIED, _dropped(r"cp\.async\.wait_group", 0)),
    Mutant(
        "other lanes' copies are not waited for",
        WHOLE,
        _replaced(r"(cp\.async\.wait_group[^;]*;\s*)bar\.warp\.sync[^;]*;", r"\1"),
    ),
    Mutant("rows leave before all lanes' are there", WHOLE, _dropped(r"bar\.warp\.sync", -1)),
    Mutant(
        "a copied row is another's",
        COPIED,
        _replaced(
            r"(cp\.async\.cg\.shared\.global \[[^\]]*\], \[%\w+)(?:\+(\d+))?\]", r"\g<1>+16]", 0
        ),
    ),
]
