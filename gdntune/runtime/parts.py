"""A call of more requests than a launch has blocks for, as several launches."""

from collections.abc import Callable
from typing import Any

from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import arguments_of
from gdntune.problem import Contract
from gdntune.runtime.contracts import Tensors

# CUDA's limit of a grid's third dimension, which requests lie along; the same on the CPU, so that
# it can be tested there.
MAX_REQUESTS = 65535
TENSORS = len(Tensors._fields)


def check_ring(contract: Contract, B: int) -> None:
    """UnsupportedProblem for a call behind a ring of more requests than a launch has."""
    if contract.ring:
        raise UnsupportedProblem(
            f"{B} requests with ring={contract.ring}: expected at most {MAX_REQUESTS} a call; give"
            " them in several"
        )


def in_parts(function: Callable[..., Any], contract: Contract) -> Callable[..., None]:
    """A compiled function, called by as many requests at once as it can launch, one part after the
    other on the current stream. It allocates nothing and copies nothing: parts are views.
    """
    own = _own(contract)
    names = arguments_of(contract)[TENSORS:]
    # of a layer's own arguments, those that have a row for each request
    rows = {names.index(name) for name in _layer_rows(contract)}

    def run(*arguments: Any) -> None:
        t, rest = Tensors._make(arguments[:TENSORS]), arguments[TENSORS:]
        B = t.cu_seqlens.shape[0] - 1 if contract.ragged else t.q.shape[0]
        for first in range(0, B, MAX_REQUESTS):
            last = min(first + MAX_REQUESTS, B)
            part = {f: x[first:last] for f in own if (x := getattr(t, f)) is not None}
            if contract.ragged:
                # Offsets into the same tokens, the end of the last request among them.
                part["cu_seqlens"] = t.cu_seqlens[first : last + 1]
            behind = (x[first:last] if i in rows else x for i, x in enumerate(rest))
            function(*t._replace(**part), *behind)

    return run


def _layer_rows(contract: Contract) -> list[str]:
    """A layer's arguments that have a row for each request."""
    found = ["conv_position"] if contract.conv != "none" and contract.conv_window == "ring" else []
    if not contract.ragged:
        found += ["output_gate"] if contract.norm != "none" else []
        found += ["mixed_qkv"] if contract.conv != "none" else []
    return found


def _own(contract: Contract) -> tuple[str, ...]:
    """The tensors that have a row for each request."""
    fields = ["read_index", "write_index", "slot_index", "accepted"]
    if not contract.ragged:
        fields += ["q", "k", "v", "a", "b", "output"]
    if not contract.pool:
        fields.append("state")
    if contract.intermediate == "dense":
        fields.append("intermediate")
    return tuple(fields)
