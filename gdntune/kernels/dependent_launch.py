"""The knob `pdl` of kernels that may start before the kernel ahead of them ends."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gdntune.errors import listed
from gdntune.kernels.spec import knob

PDL = ("none", "first", "state")
# What a kernel that starts before the one ahead ends is worth shows under this L2 policy alone.
SHOWN_UNDER = "chain"


def pdl_knob() -> Any:
    """The field of a knobs dataclass. `state` owes more than `first`: between two calls on one pool
    lies a full dependency, and the kernel just ahead does not write the indices.
    """
    return knob(
        "pdl",
        "programmatic dependent launch: `none`; `first` waits for the kernel ahead before its first"
        " load, `state` after indices and state are asked for, which that kernel must not write",
        default="none",
    )


def pdl_fault(setting: Any) -> str | None:
    """Why a setting's `pdl` is no such form, or None."""
    return None if setting.pdl in PDL else f"pdl={setting.pdl!r}: expected one of {listed(PDL)}"


def uses(knobs: Mapping[str, Any]) -> bool:
    """Whether a variant of these knobs starts before the kernel ahead ends; of a kernel without the
    knob, or from before there was one, none does.
    """
    return knobs.get("pdl", PDL[0]) != PDL[0]


def without(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The same knobs, but for dependent launch."""
    return {**knobs, "pdl": PDL[0]} if uses(knobs) else dict(knobs)


def tried(knobs: Mapping[str, Any], policy: Mapping[str, str]) -> bool:
    """Whether a choice of these knobs, timed under a policy, was made among the forms too (a config
    may leave them out): in a chain, by a version whose kernel had the knob, which its knobs name.
    """
    return "pdl" in knobs and policy.get("l2") == SHOWN_UNDER


def form(setting: Any, dependent: bool) -> Any:
    """A setting as a caller allows it to start: without dependent launch, or with the form that it
    has, and `first`, which owes least, where it has none. One without the knob stays as it is.
    """
    if not hasattr(setting, "pdl") or (setting.pdl != PDL[0]) is dependent:
        return setting
    return dataclasses.replace(setting, pdl=PDL[1] if dependent else PDL[0])


def in_every_form(found: Sequence[Any]) -> tuple[Any, ...]:
    """Settings without dependent launch, then with each form of it."""
    return (*found, *(dataclasses.replace(s, pdl=p) for p in PDL[1:] for s in found))


def under(setting: Any, l2: str) -> bool:
    """Whether a setting's times mean something under an L2 policy.

    A kernel that starts before the one ahead ends waits within its own time; what that is worth to
    a model shows in a chain alone.
    """
    return setting.pdl == PDL[0] or l2 == SHOWN_UNDER
