"""Kernels broken on purpose are caught: by the reference, by bounds, or as a race."""

import dataclasses
import functools

import pytest

from gdntune import kernels
from gdntune.checking.check import Checker
from gdntune.device import arch
from gdntune.errors import CheckFailed

from . import call
from .build import ARCH, spec_of
from .faults import Fault
from .mutants import MUTANTS

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

BASES = list(dict.fromkeys(m.base for m in MUTANTS))


def variant_of(base):
    """The variant whose text is edited."""
    kernel = kernels.get(base.kernel)
    default = kernel.default(base.contract, 64, arch.target(ARCH))
    return kernel.variant(dataclasses.replace(default, **dict(base.knobs)))


@functools.cache
def checker(contract):
    """A contract's cases, made once."""
    return Checker(contract, seeds=(0,))


@pytest.fixture(scope="module")
def compiled(builder):
    """The good kernels, by base."""
    started = {b: builder.start(spec_of(b.contract, variant_of(b))) for b in BASES}
    return {b: future.result() for b, future in started.items()}


@pytest.mark.parametrize("base", BASES, ids=lambda b: b.id)
def test_good_kernels_pass(base, compiled):
    """What the mutants are made of is right."""
    checker(base.contract).check(call.decode(compiled[base], base.contract)).require()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.id)
def test_mutants_are_caught(mutant, compiled, record_property):
    """A fault, or a verdict that is not ok, on one of the cases that every variant is checked on."""
    good, contract = compiled[mutant.base], mutant.base.contract
    text = mutant.edit(good.ptx)
    assert text != good.ptx
    broken = call.decode(good, contract, text)
    with pytest.raises((Fault, CheckFailed)) as caught:
        checker(contract).check(broken).require()
    record_property("caught", str(caught.value))
