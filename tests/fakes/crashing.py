"""A peer on the CPU that takes its process down: one entry at its first call, one at its second,
which is when it is timed.
"""

import os

from fakes import library
from gdntune.peers import Bound, Entry, Peer

CALLS = [0]


def at_once(case):
    """Dies at the first call."""
    return Bound(os.abort, lambda returned: returned)


def later(case):
    """Dies at the second call."""
    bound = library.right(case)

    def call():
        CALLS[0] += 1
        if CALLS[0] > 1:
            os.abort()
        return bound.call()

    return Bound(call, bound.output, bound.state, bound.rows)


PEER = Peer(
    name="crashing",
    packages=("torch",),
    distributions=("torch",),
    remedy="none is known",
    entries=(
        Entry("at_once", library.serves, at_once, "as it comes"),
        Entry("later", library.serves, later, "as it comes"),
    ),
    device="cpu",
)
