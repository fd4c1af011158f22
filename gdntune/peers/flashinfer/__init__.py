"""FlashInfer's CuTe DSL kernels: GDN decode and verify in both state dtypes, its tensor-core
verifies of GDN and KDA, its ring of corrections, recurrent KDA.

The functions take their own thresholds from B*HV; `backend` names these kernels, so that no other
is tried first.
"""

from gdntune.peers.flashinfer import gdn, kda, rings
from gdntune.peers.spec import Peer

PEER = Peer(
    name="flashinfer",
    packages=("flashinfer", "cutlass"),
    distributions=("flashinfer-python",),
    written_for="0.7.4",
    remedy="pip install 'gdntune[peers]'",
    cache="FLASHINFER_WORKSPACE_BASE",
    entries=(*gdn.ENTRIES, *rings.ENTRIES, *kda.ENTRIES),
)
