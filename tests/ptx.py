"""Reads PTX: finds 32-bit arithmetic on values that must be 64-bit before they are multiplied by a stride."""

import re

_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*?);")
_REGISTER = re.compile(r"%\w+(?:\.\w)?")
# Operations that hand an index on unchanged in size; what they read tainted, they write tainted.
_CARRIES = ("mov.", "selp.", "min.", "max.", "cvt.u32", "cvt.s32")
# Products in 32 bits: with a stride of 2^20 elements they wrap at index 2048.
_NARROW = ("mul.lo.s32", "mul.lo.u32", "mad.lo.s32", "mad.lo.u32", "shl.b32")


def narrow_products(ptx: str, sources: tuple[str, ...] = ("%ctaid.z",)) -> list[str]:
    """Lines that multiply or shift, in 32 bits, an index loaded from memory or one of `sources`; empty where all offsets are 64-bit."""
    lines = [(m.group(1), m.group(2), line.strip()) for line in ptx.splitlines() if (m := _LINE.match(line))]
    tainted = set(sources)
    grown = True
    # to a fixed point: a loop hands values back to lines above
    while grown:
        grown = False
        for op, operands, _ in lines:
            target, *rest = operands.split(",", 1)
            registers = set(_REGISTER.findall(rest[0])) if rest else set()
            loads_index = op.startswith("ld.global") and op.endswith((".b32", ".u32", ".s32")) and ".v" not in op
            if loads_index or (op.startswith(_CARRIES) and registers & tainted):
                new = set(_REGISTER.findall(target)) - tainted
                tainted |= new
                grown |= bool(new)
    return [
        line
        for op, operands, line in lines
        if op in _NARROW and set(_REGISTER.findall(operands.split(",", 1)[1])) & tainted
    ]


def wide_products(ptx: str) -> int:
    """How many 64-bit products there are."""
    return len(re.findall(r"\b(?:mul|mad)\.lo\.[su]64\b", ptx))


def compile_ptx(facts: dict, knobs: dict, arch: str) -> str:
    """The PTX of a setting of `recurrent`; to be run in a process of its own, since the architecture is read at import."""
    import os
    import tempfile

    os.environ["CUTE_DSL_ARCH"] = arch
    from gdntune.kernels.recurrent import compile

    with tempfile.TemporaryDirectory() as folder:
        ptx = compile(facts, knobs, options=f"--keep-ptx --dump-dir {folder}", prefix="kernel").__ptx__
    return ptx if isinstance(ptx, str) else ptx.decode()
