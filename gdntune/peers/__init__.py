"""The registry of peers: other libraries' kernels that ours are timed beside. Each is imported when
it is asked for.
"""

import importlib

from gdntune.errors import UnknownName, listed
from gdntune.peers.spec import Bound, Entry, Peer

__all__ = ["PEERS", "Bound", "Entry", "Peer", "get"]

PEERS: dict[str, str] = {
    "flashinfer": "gdntune.peers.flashinfer",
    "fla": "gdntune.peers.fla",
    "sglang": "gdntune.peers.sglang",
    "vllm": "gdntune.peers.vllm",
    "apart": "gdntune.peers.apart",
}


def get(name: str) -> Peer:
    """The peer of a name, or of an importable module `package.module` that has a `PEER`;
    UnknownName lists what there is.
    """
    module = PEERS.get(name) or (name if "." in name else None)
    if module is None:
        raise UnknownName(
            f"no peer is called {name!r}: there are {listed(PEERS)}, and any module package.module"
            " with a PEER"
        )
    try:
        found = getattr(importlib.import_module(module), "PEER", None)
    except ImportError as e:
        raise UnknownName(
            f"peer {name}: {module} cannot be imported: {e}; there are {listed(PEERS)}"
        ) from e
    if not isinstance(found, Peer):
        raise UnknownName(
            f"peer {name}: {module} has no PEER, an instance of gdntune.peers.Peer; there are"
            f" {listed(PEERS)}"
        )
    return found
