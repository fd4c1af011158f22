"""Whether a call's tensors are like those of a call that was looked at whole.

By the guards of torch.compile, whose C++ compares a tensor's type, dispatch keys, dtype, device,
requires_grad and sizes in 0.1 us. Dispatch keys tell tensors that are no plain memory: fakes, views
that are lazily negated, wrappers of transforms.
"""

import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

Guard = Callable[[tuple[Any, ...]], bool]
# What is known of an argument: None where it is not given, else the sizes and strides that it must
# have (None is any).
Pattern = tuple[Sequence[int | None], Sequence[int | None]] | None

_nested = torch.Tensor.is_nested.__get__  # type: ignore[attr-defined]


def pattern(x: Any, *, sizes: bool, strides: bool = False) -> Pattern:
    """What tensors like `x` have; sizes, strides: whether those must be the same."""
    if x is None:
        return None
    free = [None] * x.dim()
    return list(x.shape) if sizes else free, list(x.stride()) if strides else free


def guard(given: tuple[Any, ...], patterns: Mapping[int, Pattern]) -> Guard | None:
    """A function of a tuple like `given` that says whether what stands at the places of `patterns`
    is like what stands there now; None where this torch has no such guards.

    It keeps no tensor alive. For a nested tensor it may raise RuntimeError.
    """
    # One call of 1 us for a whole tuple; but its C++ imports torch._dynamo, which takes seconds.
    if "torch._dynamo.guards" in sys.modules:
        made = _manager(given, patterns)
        if made is not None:
            return made
    return _tensor_guards(given, patterns)


def _manager(given: tuple[Any, ...], patterns: Mapping[int, Pattern]) -> Guard | None:
    """By a guard manager: all places in one call."""
    try:
        from torch._C._dynamo.guards import RootGuardManager
        from torch._dynamo.guards import GuardManagerType
    except ImportError:
        return None
    # Of newer versions each guard also takes the stack of the user's code.
    for stack in ((None,), ()):
        try:
            root: Any = RootGuardManager()
            for i, wanted in patterns.items():
                x = given[i]
                place = root.tuple_getitem_manager(i, "x", x, GuardManagerType.GUARD_MANAGER)
                if wanted is None:
                    place.add_none_match_guard([""], *stack)
                else:
                    keys = torch._C._dispatch_keys(x)
                    place.add_tensor_match_guard(x, *wanted, "x", [""], *stack, type(x), keys)
            return root.check if root.check(given) else None
        except (AttributeError, TypeError):
            continue
    return None


def _tensor_guards(given: tuple[Any, ...], patterns: Mapping[int, Pattern]) -> Guard | None:
    """By TensorGuards, which knows neither None nor the same tensor twice, and ends the process at
    a nested tensor.
    """
    present = [i for i, wanted in patterns.items() if wanted is not None]
    missing = [i for i, wanted in patterns.items() if wanted is None]
    pick = operator.itemgetter(*present)
    absent = operator.itemgetter(*missing) if missing else lambda _: None
    nothing = (None,) * len(missing) if len(missing) > 1 else None
    wanted = [cast(Any, patterns[i]) for i in present]
    try:
        from torch._C._dynamo.guards import TensorGuards

        fits = TensorGuards(
            *pick(given),
            dynamic_dims_sizes=[w[0] for w in wanted],
            dynamic_dims_strides=[w[1] for w in wanted],
        ).check
    except (ImportError, AttributeError, TypeError):
        return None

    def check(tensors: tuple[Any, ...]) -> bool:
        found = pick(tensors)
        try:
            return absent(tensors) == nothing and not any(map(_nested, found)) and fits(*found)
        except TypeError:  # what is no tensor
            return False

    return check if check(given) else None
