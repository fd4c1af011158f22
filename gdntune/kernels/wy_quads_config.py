"""Knobs of `wy_quads`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.dependent_launch import in_every_form, pdl_fault, pdl_knob, under
from gdntune.kernels.spec import Block, Kernel, knob
from gdntune.kernels.wy_lanes_config import exact
from gdntune.problem import Contract

# keys that a quad of lanes loads at once, and rows of V that a warp has
RUN, ROWS = 32, 8


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the kernel of few tokens by warps that wait for nobody."""

    threads: int = knob("th", "threads a block")
    parts: int = knob("pt", "warps that have the same rows, each with a part of the keys to store")
    pdl: str = pdl_knob()


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "gdn_decode":
        return f"op={c.op}: its sums want one decay a head, expected gdn_decode"
    if c.layout != "k_last":
        return f"layout={c.layout}: a row's lanes read along K, expected k_last"
    if not 2 <= c.tokens <= 4:
        return f"tokens={c.tokens}: a quad of lanes has one token each, expected 2, 3 or 4"
    for name, given in (("state_dtype", c.state_dtype), ("input_dtype", c.input_dtype)):
        if given != "bf16":
            return f"{name}={given}: states and keys are operands of one product, expected bf16"
    if s.threads not in (32, 64, 128, 256):
        return f"threads={s.threads}: expected one of 32, 64, 128, 256"
    if c.K % RUN or c.K > 256:
        return f"K={c.K}: expected a multiple of {RUN} up to 256, which a quad has in registers"
    if s.parts not in (1, 2, 4) or c.K // RUN % s.parts:
        return f"parts={s.parts}: expected 1, 2 or 4, a divisor of K/{RUN}={c.K // RUN}"
    if s.threads // 32 % s.parts:
        return f"parts={s.parts}: {s.threads // 32} warps are no multiple of it"
    if c.V % (tile := s.threads // 32 // s.parts * ROWS):
        return f"V={c.V} is not a multiple of a block's {tile} rows (threads/32/parts*{ROWS})"
    return pdl_fault(s)


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and no shared memory."""
    return Block(s.threads, 0)


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    settings = [Knobs(threads, parts) for parts in (1, 2, 4) for threads in (32, 64, 128, 256)]
    return in_every_form([s for s in settings if not refuse(c, s)])


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A middling setting."""
    legal = [s for s in space(c, device) if s.pdl == "none"]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of wy_quads serves {c.key()}: {refuse(c, Knobs(32, 1))}"
        )
    return min(legal, key=lambda s: (abs(s.parts - 2), abs(s.threads - 64)))


KERNEL = Kernel(
    name="wy_quads",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=exact,
    compiler="gdntune.kernels.wy_quads:compile",
    sources=("gdntune.kernels.wy_quads",),
    block=block,
    under=under,
)
