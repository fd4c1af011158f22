"""Reads PTX: finds 32-bit arithmetic on values that must be 64-bit before they are multiplied by a
stride.
"""

import re
from collections.abc import Callable

_LINE = re.compile(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+(.*?);")
_REGISTER = re.compile(r"%\w+(?:\.\w)?")
# Operations that hand an index on unchanged in size; what they read tainted, they write tainted.
_CARRIES = ("mov.", "selp.", "min.", "max.", "cvt.u32", "cvt.s32")
# Products in 32 bits: with a stride of 2^20 elements they wrap at index 2048.
_NARROW = ("mul.lo.s32", "mul.lo.u32", "mad.lo.s32", "mad.lo.u32", "shl.b32")


def narrow_products(ptx: str, sources: tuple[str, ...] = ("%ctaid.z",)) -> list[str]:
    """32-bit products on the way from an index to the address of a vector access; empty where all
    offsets are 64-bit.

    An index is what is loaded from memory as 32 bits, or one of `sources`. Vector accesses are
    those of states and of q, k and v; gates and indices, which are read one by one, are small and
    addressed in 32 bits on purpose.
    """
    lines = [
        (m.group(1), m.group(2), line.strip())
        for line in ptx.splitlines()
        if (m := _LINE.match(line))
    ]
    forward = _closure(lines, set(sources), lambda op: op.startswith(_CARRIES), backwards=False)
    addresses: set[str] = set()
    for op, operands, _ in lines:
        if op.startswith(("ld.global", "st.global")) and ".v" in op:
            addresses |= set(_REGISTER.findall(operands[operands.index("[") :].split("]")[0]))
    reached = _closure(
        lines, addresses, lambda op: not op.startswith(("ld.", "st.")), backwards=True
    )
    found = []
    for op, operands, line in lines:
        target, rest = operands.split(",", 1) if "," in operands else (operands, "")
        if (
            op in _NARROW
            and set(_REGISTER.findall(rest)) & forward
            and set(_REGISTER.findall(target)) & reached
        ):
            found.append(line)
    return found


def _closure(
    lines: list[tuple[str, str, str]],
    seed: set[str],
    follows: Callable[[str], bool],
    backwards: bool,
) -> set[str]:
    """Registers that the seed's values reach, or that reach the seed: to a fixed point, since a
    loop hands values back to lines above.
    """
    found, grown = set(seed), True
    while grown:
        grown = False
        for op, operands, _ in lines:
            target, rest = operands.split(",", 1) if "," in operands else (operands, "")
            writes, reads = set(_REGISTER.findall(target)), set(_REGISTER.findall(rest))
            loaded = (
                not backwards
                and op.startswith("ld.global")
                and op.endswith((".b32", ".u32", ".s32"))
                and ".v" not in op
            )
            new: set[str] = set()
            if loaded or (not backwards and follows(op) and reads & found):
                new = writes - found
            elif backwards and follows(op) and writes & found:
                new = reads - found
            found |= new
            grown |= bool(new)
    return found


def wide_products(ptx: str) -> int:
    """How many 64-bit products there are."""
    return len(re.findall(r"\b(?:mul|mad)\.lo\.[su]64\b", ptx))


def compile_ptx(kernel: str, facts: dict, knobs: dict, arch: str) -> str:
    """The PTX of a kernel's setting; to be run in a process of its own, since the architecture is
    read at import.
    """
    import importlib
    import tempfile

    from gdntune.objects.worker import cute_options

    target = cute_options(arch)
    compile = importlib.import_module(f"gdntune.kernels.{kernel}").compile

    with tempfile.TemporaryDirectory() as folder:
        # what ptxas makes of it is not looked at
        options = f"{target} --keep-ptx --ptxas-options '-O0' --dump-dir {folder}"
        ptx = compile(facts, knobs, options=options, prefix="kernel").__ptx__
    return ptx if isinstance(ptx, str) else ptx.decode()
