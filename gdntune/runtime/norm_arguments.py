"""What a call says of a gated norm behind the delta rule."""

from typing import Any

from torch import Tensor

from gdntune.errors import UnsupportedProblem, listed, shown

NORM_GATES = ("silu", "sigmoid")


def together(called: dict[str, Any], *names: str) -> bool:
    """Whether all of a pair are given; UnsupportedProblem for one of them."""
    given = [called[name] is not None for name in names]
    if any(given) and not all(given):
        raise UnsupportedProblem(f"{' and '.join(names)}: expected both or neither")
    return all(given)


def check_kind(name: str, given: Any, kinds: tuple[str, ...]) -> None:
    """Refuses what is none of some words."""
    if not isinstance(given, str) or given not in kinds:
        raise UnsupportedProblem(f"{shown(name, given)}: expected one of {listed(kinds)}")


def check_epsilon(epsilon: Any) -> None:
    """Refuses an epsilon that is no finite number from 0."""
    if isinstance(epsilon, Tensor) or not 0 <= float(epsilon) < 1e30:
        raise UnsupportedProblem(f"{shown('norm_eps', epsilon)}: expected a finite number from 0")
