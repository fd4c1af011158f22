"""How many thread blocks of a kernel a multiprocessor can hold at once, from what the compiler says
of it.
"""

from typing import NamedTuple

from gdntune.errors import UnknownName, UnsupportedProblem, listed

WARP = 32
# The system keeps so much shared memory of each block.
RESERVED_BYTES = 1024
# A warp's registers come in units of 256, 8 a thread; shared memory in units of 128 bytes.
REGISTER_UNIT, SHARED_UNIT = 8, 128


class Multiprocessor(NamedTuple):
    """What an SM has: 32-bit registers, shared memory in bytes and of that the most a block can ask
    for, threads and blocks at once.
    """

    registers: int
    shared_bytes: int
    shared_bytes_a_block: int
    threads: int
    blocks: int


# NVIDIA, CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": 8.0, 8.9,
# 9.0, 10.0, 10.3 and 12.0.
MULTIPROCESSORS: dict[str, Multiprocessor] = {
    "sm_80": Multiprocessor(65536, 164 << 10, 163 << 10, 2048, 32),
    "sm_89": Multiprocessor(65536, 100 << 10, 99 << 10, 1536, 24),
    "sm_90a": Multiprocessor(65536, 228 << 10, 227 << 10, 2048, 32),
    "sm_100a": Multiprocessor(65536, 228 << 10, 227 << 10, 2048, 32),
    "sm_103a": Multiprocessor(65536, 228 << 10, 227 << 10, 2048, 32),
    "sm_120a": Multiprocessor(65536, 100 << 10, 99 << 10, 1536, 24),
}


class Occupancy(NamedTuple):
    """blocks: at once on an SM. share: of the warps that it has room for. bound: what admits no
    more blocks, the first where several.
    """

    blocks: int
    share: float
    bound: str


def occupancy(arch: str, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """The theoretical occupancy of an SM by blocks of `threads` threads with `registers` each and
    `shared_bytes` that the launch asks for.

    bound: `warps`, `registers`, `shared memory` or `blocks`.
    Raises UnknownName for an arch that MULTIPROCESSORS lacks, UnsupportedProblem for a block that
    no SM can hold.
    """
    if arch not in MULTIPROCESSORS:
        raise UnknownName(
            f"arch {arch!r}: the limits of its SMs are not here; expected one of"
            f" {listed(MULTIPROCESSORS)}"
        )
    sm = MULTIPROCESSORS[arch]
    if (
        not 1 <= threads <= 1024
        or not 1 <= registers <= 255
        or not 0 <= shared_bytes <= sm.shared_bytes_a_block
    ):
        raise UnsupportedProblem(
            f"a block of {threads} threads, {registers} registers a thread and {shared_bytes} bytes"
            f" of shared memory: expected on {arch} 1 to 1024, 1 to 255, 0 to"
            f" {sm.shared_bytes_a_block}"
        )
    # A block takes whole warps, and registers in their unit, whatever of both it uses.
    warps = -(-threads // WARP)
    held = -(-registers // REGISTER_UNIT) * REGISTER_UNIT * WARP
    shared = -(-(shared_bytes + RESERVED_BYTES) // SHARED_UNIT) * SHARED_UNIT
    room = {
        "warps": sm.threads // WARP // warps,
        # An SM is four parts, each with a quarter of the registers, and a warp is in one
        "registers": sm.registers // 4 // held * 4 // warps,
        "shared memory": sm.shared_bytes // shared,
        "blocks": sm.blocks,
    }
    # The first of equals, so that the same kernel always has the same name for its bound.
    bound = min(room, key=lambda name: room[name])
    if not room[bound]:
        raise UnsupportedProblem(
            f"no SM of {arch} holds a block of {threads} threads with {registers} registers each:"
            " fewer threads, or fewer registers"
        )
    return Occupancy(room[bound], room[bound] * warps * WARP / sm.threads, bound)
