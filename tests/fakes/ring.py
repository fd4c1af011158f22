"""A peer on the CPU that works in cycles: every second call of its one entry takes two milliseconds
more.
"""

import dataclasses
import itertools
import time

from fakes import library
from gdntune.peers import Entry, Peer


def in_turns(case):
    """The right answer, at once or late in turns."""
    bound, pauses = library.right(case), itertools.cycle((0.0, 0.002))

    def call():
        time.sleep(next(pauses))
        return bound.call()

    return dataclasses.replace(bound, call=call, cycle=2)


PEER = Peer(
    name="ring",
    packages=("torch",),
    distributions=("torch",),
    remedy="none is needed",
    entries=(Entry("in_turns", library.serves, in_turns, "as it comes"),),
    device="cpu",
)
