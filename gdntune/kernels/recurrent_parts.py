"""What the modules of `recurrent` hand one another: where a thread and a block stand, what they have
read, where states go.
"""

from typing import Any, NamedTuple


class Thread(NamedTuple):
    """Where a thread stands: in its block, among those of a row, and its row's among the block's.

    part: which `own` of its RV rows it will have the sums of. home: where in its warp the row's threads begin.
    """

    tid: Any
    lane: Any
    group: Any
    part: Any
    home: Any


class Block(NamedTuple):
    """What a block works on: tile vt of V, from row v0, of head hv of request n, which reads q/k head hq.

    ni, t0, length: where the request's tokens lie, row of q and first token there, and how many there are.
    """

    vt: Any
    v0: Any
    hv: Any
    hq: Any
    n: Any
    ni: Any
    t0: Any
    length: Any


class Gate(NamedTuple):
    """A head's A and bias; of KDA, whose bias is one a key, its row `dh` of dt_bias, and, at T = 1, a lane's share of it."""

    A: Any
    bias: Any
    dh: Any
    rbias: Any


class Read(NamedTuple):
    """Registers for what was asked for of q, k, v and the gates: one token's, or those that a warp stages."""

    q: Any
    k: Any
    g: Any
    v: Any
    a: Any
    b: Any


class Token(NamedTuple):
    """One token as `advance` takes it: a thread's shares of q, k and KDA's decays in fp32, decay, beta and k.q."""

    fq: Any
    fk: Any
    fg: Any
    decay: Any
    beta: Any
    kq: Any


class Stage(NamedTuple):
    """Several tokens in shared memory: q and k normalised, KDA's decays, v, and (decay, beta, k.q)."""

    q: Any
    k: Any
    g: Any
    v: Any
    scalars: Any


class Kept(NamedTuple):
    """Where states between tokens go: slots of the pool, or a row of `intermediate`, if it `keeps` any.

    row_slots: a request's slots, one a lane, where they were read at once.
    """

    slots: Any
    columns: Any
    steps: Any
    row: Any
    keeps: Any
    row_slots: Any
