"""Kernels whose variants are broken, each in its way, for sweeps on a CPU and on a GPU.

`Planted` is a timing policy that a sweep hands to its timing process, which imports this module to
read it, and has the kernels then. Their functions are the honest kernel's, called from Python, and
a fault.
"""

import ctypes
import dataclasses
import os
import sys
import time

import msgspec

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels.spec import Kernel, knob
from gdntune.objects.store import Manifest, Store
from gdntune.problem import Contract
from gdntune.timing import Policy

HONEST = {"faulty": "cpu_recurrent", "faulty_cuda": "recurrent"}
# The batch size at which variants break that pass their check, whose problems have others.
LATE_BATCH = 7
HONEST_WORK_UNITS = 4
FAR = 1 << 38
KEPT = []


class Planted(Policy, frozen=True):
    """A policy like any other."""


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Which fault, and when: at once, or at LATE_BATCH alone."""

    fault: str = knob("", "what breaks")
    late: bool = knob("late", "not before the cell is timed", default=False)


FAULTS = ("none", "wild", "hang", "abort", "leak", "wrong", "nan", "touches")


def space(contract, device):
    """Every fault at once, and those that kill late."""
    return tuple(Knobs(f) for f in FAULTS) + tuple(Knobs(f, True) for f in ("wild", "hang"))


def kernel(name):
    """A registry entry beside the honest one of its device."""
    honest = kernels.get(HONEST[name])
    return Kernel(
        name=name,
        device=honest.device,
        role="decode",
        knobs=Knobs,
        space=space,
        refuse=lambda contract, setting: None,
        default=lambda contract, work_units, device: Knobs("none"),
        facts=msgspec.to_builtins,
        compiler="fakes.faulty:never",
        sources=honest.sources,
    )


class Elsewhere:
    """Memory far behind a tensor's, as a kernel sees it whose offsets are wrong."""

    def __init__(self, x):
        self.__cuda_array_interface__ = {
            "shape": (FAR,),
            "strides": None,
            "typestr": "<f4",
            "data": (x.data_ptr(), False),
            "version": 2,
        }


def wild(state):
    """Writes where nothing is."""
    if state.is_cuda:
        import torch

        torch.as_tensor(Elsewhere(state), device=state.device)[-1:].fill_(1.0)
    else:
        ctypes.memset(state.data_ptr() + FAR, 1, 1)


def hang(state):
    """Does not come back for hours; on a GPU the launch returns, the kernel does not."""
    if state.is_cuda:
        import torch

        torch.cuda._sleep(10**14)
    else:
        time.sleep(10**4)


def leak(state):
    """Keeps a quarter of the machine's memory, or of the GPU's, at each call. On a CPU none of it
    is touched.
    """
    import torch

    if state.is_cuda:
        size = torch.cuda.mem_get_info()[1] // 4
    else:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    KEPT.append(torch.empty(size, dtype=torch.uint8, device=state.device))


def broken(fault, arguments):
    """What goes wrong after the honest call."""
    state, output = arguments[0], arguments[14]
    if fault == "wild":
        wild(state)
    elif fault == "hang":
        hang(state)
    elif fault == "abort":
        os.abort()
    elif fault == "leak":
        leak(state)
    elif fault == "wrong":
        output[..., 3] += 0.01
    elif fault == "nan":
        output[..., 3] = float("nan")
    elif fault == "touches":
        state[-1, 0, 0, 0] += 1


def function(spec, honest):
    """The Python function of a spec."""
    fault, late = spec.knobs["fault"], spec.knobs["late"]

    def call(*arguments):
        honest(*arguments)
        if not late or arguments[1].shape[0] == LATE_BATCH:
            broken(fault, arguments)

    return call


def find(self, spec):
    """`Store.find`: what is no object needs none."""
    return Manifest(spec, spec.name, "", 0.0) if spec.kernel in HONEST else honest_find(self, spec)


def load(self, specs):
    """`Store.load`: the honest kernel's default where a faulty one is asked for, with its fault."""
    from gdntune.objects.store import object_spec

    specs = list(specs)
    found = honest_load(self, [s for s in specs if s.kernel not in HONEST])
    for s in specs:
        if s.kernel in HONEST:
            contract = msgspec.convert(s.facts, Contract)
            device = msgspec.structs.replace(arch.detect(s.device), arch=s.arch)
            variant = kernels.default(contract, HONEST_WORK_UNITS, device)
            honest = object_spec(kernels.get(variant.kernel), contract, variant, device)
            found[s.key] = function(s, honest_load(self, [honest])[honest.key])
    return found


honest_find, honest_load = Store.find, Store.load


def plant(setitem, setattr):
    """Adds the kernels to the registry and the store, by a monkeypatch's two functions or the
    builtins' like.
    """
    for name in HONEST:
        setitem(kernels.KERNELS, name, kernel(name))
    setattr(Store, "find", find)
    setattr(Store, "load", load)


# A timing process, which has no test in it.
if "pytest" not in sys.modules:
    plant(dict.__setitem__, setattr)
