"""What a kernel entry has, what a variant is, and the one calling convention of every compiled
kernel.

Calling convention. A decode kernel, CPU or CUDA, takes these positional arguments; a tensor that
the contract does not have is None.

    state         [slots, HV, V, K] (k_last) or [slots, HV, K, V] (v_last); each head contiguous,
    any slot stride
    q, k          [B, T, H, K];  v  [B, T, HV, V];  last dimension contiguous. ragged: [1, total,
    ...]
    a             [B, T, HV] (GDN: a, or the log decay) or [B, T, HV, K] (KDA: g)
    b             [B, T, HV]: beta or its logit
    A_log, dt_bias   GDN: [HV] each;  KDA: A_log [HV] or [H], dt_bias [HV, K] or [H, K]
    read_index    [B] int32;  write_index  [B] int32
    slot_index    int32: [B] (`indexed`: row of `intermediate`) or [B, 1+S] (`slots`: slot that
        token t's state goes to)
    accepted      [B] int32: the start column is clamp(accepted, 1, 1+S) - 1
    cu_seqlens    [B+1] int32
    intermediate  [rows, steps, HV, V, K] (v_last: [..., K, V]), any stride of rows and steps
    output        [B, T, HV, V]
    scale, softplus_beta, softplus_threshold, lower_bound, beta_scale   float32 (beta_scale is 2 for
    negative eigenvalues)
    null_index, use_qk_l2norm   int32 (an index that is negative or equals null_index is padding)

A kernel of layers (`Kernel.layer`) serves the contracts that do more of a layer than gates and
delta rule, and takes behind these

    output_gate   [B, T, HV, V] of the inputs' dtype;  norm_weight [V];  norm_eps float32
    mixed_qkv     [B, T, D] with a convolution, D = 2 H K + HV V: q, k and v side by side, whose
        views are the q, k and v above, before the convolution; last dimension contiguous
    conv_state    [slots, rows, D], last dimension contiguous. A request's window is in the slot of
        its state to start from, and its new rows go to that of its final one, if there is one; of
        `slots` both are that of column 0, and where this is no slot the window is zeros and no row
        is kept. `ring`: rows >= width - 1 + T; `shifted`: rows = width - 1, of
        `slots` rows >= width - 2 + T: the window begins behind accepted - 1 rows, clamped to what
        leaves it whole, and moves on by one row, with all tokens behind it. `dims_first` is
        `shifted` with stride 1 along the rows, any along D
    conv_weight   [D, width], the newest token's tap last;  conv_bias [D]; both contiguous
    conv_position [B] int32, `ring`: the row from 0 that the first token goes to; those before it,
        cyclically, have the tokens before

Where conv_input is `interleaved`, r = HV / H and G = 2 K + 2 r V, mixed_qkv is [B, T, H G]: of q/k
head h at h G its q, its k, v of its r value heads and their output gates. q, k and v then say the
sizes alone. Of value head hv = h r + i the output gate is r V elements behind v, at
h G + 2 K + (r + i) V, and a and b are at 2 h r + i from the tensors' first element of a row on:
output_gate [B, T, HV, V], a and b [B, T, HV] begin at the first head's, and their rows' strides are
those of the projections; their stride of HV says nothing.

A kernel of rings (`Kernel.ring`) serves the contracts with a ring, and takes behind the numbers

    ring_k        [slots, H, rows, K] of the inputs' dtype: keys as they came, before the norm
    ring_u        [slots, HV, rows, V]: u over the norm of its key, so that u k^T is of both as kept
    ring_decay    [slots, HV, rows] float32: each token's own decay, never a product of several;
        of all three a slot's memory is contiguous, any slot stride
    ring_base, ring_count   [B] int32: a request's live entries are ring_count[n] rows from
        ring_base[n] on, cyclically; clamped to 0..rows-1 and 0..min(ring, rows)
    flush_min, append   int32
    ring_seed     [2] int32, with ring_rounding=stochastic alone, else None: the key of Philox-4x32, whose
        counter is of a kernel's own: the slot that is written, the head and the place in it, so
        that a request's numbers do not hang on its batch

rows is ring + T or more. The call starts from the slot's state with its live entries folded in.
Where these are flush_min or more, or T more would not fit into `ring`, that state is written to the
write slot. Where append is not 0 the call's tokens become the rows behind the live ones.

A kernel of both (`Kernel.layer` and `Kernel.ring`) serves the contracts with a ring and a norm, and
takes output_gate, norm_weight and norm_eps behind the ring's arguments.

A floor kernel takes (state [slots, n], slots [B] int32: those that it moves, one after another,
intermediate [B, steps, n] or None, factor float32, sink [1] float32). Nothing is allocated or kept
by a kernel; CUDA kernels run on the current stream.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from gdntune.device.arch import Device
from gdntune.errors import UnknownName, listed
from gdntune.problem import Contract, Problem

DECODE_ARGUMENTS = (
    "state q k v a b A_log dt_bias read_index write_index slot_index accepted cu_seqlens"
    " intermediate output scale softplus_beta softplus_threshold lower_bound beta_scale null_index"
    " use_qk_l2norm"
).split()
LAYER_ARGUMENTS = (
    "output_gate norm_weight norm_eps mixed_qkv conv_state conv_weight conv_bias conv_position"
).split()
RING_ARGUMENTS = "ring_k ring_u ring_decay ring_base ring_count flush_min append ring_seed".split()
NORM_ARGUMENTS = LAYER_ARGUMENTS[:3]
FLOOR_ARGUMENTS = ("state", "slots", "intermediate", "factor", "sink")

Role = Literal["decode", "floor"]
Facts = Mapping[str, Any]


def arguments_of(contract: Contract) -> list[str]:
    """The names of what a contract's decode kernels are called with, in order."""
    if contract.ring:
        return [*DECODE_ARGUMENTS, *RING_ARGUMENTS, *(NORM_ARGUMENTS if contract.layer else ())]
    return [*DECODE_ARGUMENTS, *(LAYER_ARGUMENTS if contract.layer else ())]


def knob(tag: str, doc: str, **kw: Any) -> Any:
    """A field of a knobs dataclass; `tag` is its short name in a variant's id."""
    return dataclasses.field(metadata={"tag": tag, "doc": doc}, **kw)


class Variant(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One kernel and its knobs, `id` is stable: `recurrent.tv32.ilp4.vec8`."""

    kernel: str
    id: str
    knobs: dict[str, int | str | bool]

    def __hash__(self) -> int:
        return hash(self.id)


class Block(NamedTuple):
    """What a thread block is launched with: its threads, and bytes of shared memory."""

    threads: int
    shared_bytes: int


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An entry of the registry. The search knows kernels by these fields alone.

    knobs: a frozen dataclass of `knob` fields.
    space: every setting worth trying for a contract on a device, in order of simplicity; each is
        legal.
    refuse: the kernel's one legality function: why a setting cannot serve a contract, or None.
    default: the setting used where no table speaks, by contract, work units and device.
    facts: what an object is compiled for, as plain values; contracts with equal facts share
        objects.
    compiler: `module:function`, imported in a worker process, called with (facts, knobs as a dict,
        function name).
    leads: whether this kernel's default rule goes before those of kernels that the registry names
        earlier, by contract.
    at: whether a setting is timed at a problem's cell on a device; all are, unless it says
        otherwise.
    under: whether a setting's times mean something under an L2 policy; they do under all, unless it
        says otherwise.
    elsewhere: what a setting that another architecture's table chose becomes on a device, by
        contract; itself, unless it says otherwise.
    few: of a floor, settings whose best is near the best of all: what a sweep of a few variants
        needs. None: all.
    layer: whether it serves contracts that do more of a layer than gates and delta rule, and those
        alone; its calling convention has more arguments then.
    ring: whether it serves contracts with a ring, and those alone; its calling convention has more
        arguments then.
    block: what a setting's thread blocks are launched with, by contract; None where there are none
        (the CPU).
    sources: modules or files below gdntune/ whose text decides the object; the fingerprint covers
        what they import from kernels/.
    """

    name: str
    device: Literal["cuda", "cpu"]
    role: Role
    knobs: type
    space: Callable[[Contract, Device], tuple[Any, ...]]
    refuse: Callable[[Contract, Any], str | None]
    default: Callable[[Contract, int, Device], Any]
    facts: Callable[[Contract], Facts]
    compiler: str
    sources: tuple[str, ...]
    leads: Callable[[Contract], bool] = lambda _: False
    at: Callable[[Problem, Device, Any], bool] = lambda problem, device, setting: True
    under: Callable[[Any, str], bool] = lambda setting, l2: True
    elsewhere: Callable[[Contract, Any, Device], Any] = lambda contract, setting, device: setting
    block: Callable[[Contract, Any], Block] | None = None
    few: Callable[[Contract, Device], tuple[Any, ...]] | None = None
    layer: bool = False
    ring: bool = False

    def takes(self, contract: Contract) -> bool:
        """Whether the calling convention is the contract's."""
        return self.role != "decode" or (
            contract.layer == self.layer and (contract.ring > 0) == self.ring
        )

    def fault(self, contract: Contract, setting: Any) -> str | None:
        """Why a setting cannot serve a contract, or None: what `refuse` says, and whether the
        calling convention is the contract's.
        """
        if self.role == "decode" and contract.layer != self.layer:
            expected = "one of them other than" if self.layer else "both"
            return (
                f"norm={contract.norm!r}, conv={contract.conv!r}: {self.name} serves contracts with"
                f" {expected} 'none'"
            )
        if not self.takes(contract):
            expected = "16 or 32" if self.ring else "0"
            return f"ring={contract.ring}: {self.name} serves contracts with {expected}"
        return self.refuse(contract, setting)

    def variant(self, knobs: Any) -> Variant:
        """The variant of a setting; knobs at their default stay out of its id."""
        parts = [self.name]
        for field in dataclasses.fields(knobs):
            value = getattr(knobs, field.name)
            if value != field.default:
                parts.append(
                    field.metadata["tag"] if value is True else f"{field.metadata['tag']}{value}"
                )
        return Variant(self.name, ".".join(parts), dataclasses.asdict(knobs))

    def setting(self, knobs: Mapping[str, Any]) -> Any:
        """The knobs dataclass of plain values, as a table holds them; unknown or missing names are
        refused.
        """
        names = {f.name for f in dataclasses.fields(self.knobs)}
        required = {
            f.name for f in dataclasses.fields(self.knobs) if f.default is dataclasses.MISSING
        }
        if unknown := set(knobs) - names:
            raise UnknownName(
                f"{self.name} has no knob {listed(sorted(unknown))}: it has {listed(sorted(names))}"
            )
        if missing := required - set(knobs):
            raise UnknownName(f"{self.name} lacks the knob {listed(sorted(missing))}")
        return self.knobs(**knobs)

    def named(self, variant: Variant) -> str | None:
        """The id that a variant's knobs have, where its own says otherwise; None where it does not,
        or has knobs of another version.

        A knob that the id leaves out is at its default, which another version may have had
            elsewhere: that is not looked at.
        """
        fields = {f.name: f for f in dataclasses.fields(self.knobs)}
        if not variant.knobs.keys() <= fields.keys():
            return None
        parts = {
            name: (
                field.metadata["tag"]
                if variant.knobs[name] is True
                else f"{field.metadata['tag']}{variant.knobs[name]}"
            )
            for name, field in fields.items()
            if name in variant.knobs
        }
        always = [
            part for name, part in parts.items() if fields[name].default is dataclasses.MISSING
        ]
        first, *said = variant.id.split(".")
        if first == self.name and set(always) <= set(said) <= set(parts.values()):
            return None
        return ".".join(
            [self.name, *(p for n, p in parts.items() if variant.knobs[n] != fields[n].default)]
        )

    def variants(
        self, contract: Contract, device: Device, l2: str = "cold-clean"
    ) -> tuple[Variant, ...]:
        """The variants worth trying under an L2 policy."""
        if not self.takes(contract):
            return ()
        return tuple(self.variant(s) for s in self.space(contract, device) if self.under(s, l2))

    def few_variants(self, contract: Contract, device: Device) -> tuple[Variant, ...]:
        """Those of `few`; all, where it names none for the contract."""
        found = self.few(contract, device) if self.few else ()
        return tuple(map(self.variant, found or self.space(contract, device)))


# The floors that are timed, the headlines' first.
IN_ORDER, BY_INDEX = "states in order", "by the pool's index"
FLOORS = (IN_ORDER, BY_INDEX)


def floor_name(variant: Variant) -> str:
    """Which of FLOORS a floor's variant is."""
    return BY_INDEX if variant.knobs.get("indexed") else IN_ORDER
