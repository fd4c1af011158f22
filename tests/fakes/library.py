"""A peer on the CPU: one entry is right, the others are wrong each in its way."""

import torch

from gdntune.checking.reference import decode
from gdntune.peers import Bound, Entry, Peer
from gdntune.peers.spec import slots_of, unless


def right(case):
    """The reference in fp32, rounded where a kernel would."""

    def call():
        found = decode(case.contract, dtype=torch.float32, **case.tensors()).stored(case.contract)
        case.state.copy_(found.state)
        return found.output

    writes = case.contract.mode == "update"
    return Bound(
        call, lambda returned: returned, (lambda _: case.state) if writes else None, slots_of(case)
    )


def wrong(case):
    """A decay that is off by 5%: the state and the output are."""
    bound = right(case)

    def call():
        output = bound.call()
        case.state.mul_(1.05)
        return output

    return Bound(call, bound.output, bound.state, bound.rows)


def raises(case):
    """What a library raises for arguments that it does not like."""
    raise AssertionError("K must be 4096,\n  got K=64")


def serves(problem):
    """Whether the contract is decode of one token."""
    return unless(problem.contract, op=("gdn_decode",), tokens=(1,))


PEER = Peer(
    name="library",
    packages=("torch",),
    distributions=("gdntune-no-such-distribution", "torch"),
    remedy="none is needed",
    entries=(
        Entry("right", serves, right, "as it comes", extra_bytes=lambda p: 1000 * p.B),
        Entry("wrong", serves, wrong, "as it comes"),
        Entry("raises", serves, raises, "as it comes"),
        Entry("picky", lambda problem: "V=64, expected 63", right, "not at all"),
    ),
    device="cpu",
)
