"""A bundle of what a GPU's runtime can choose for contracts, made without that GPU: for the scripts
beside this, which run where there is no compiler.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from gdntune import kernels
from gdntune.device import arch, gpus
from gdntune.objects.build import compile_objects
from gdntune.objects.store import Store, object_spec, write_bundle
from gdntune.problem import Contract
from gdntune.runtime.dispatch import Runtime


def bundle(
    contracts: Iterable[Contract],
    folder: str | Path,
    gpu: str = "h200",
    most: Mapping[Contract, int] | None = None,
) -> None:
    """Compiles, bundles and says how many; exits with 1 where one does not compile.

    gpu: its name, as its own table may choose otherwise than another card's; an arch takes the
    nearest table. most: of contracts that are called with up to so many work units, what is chosen
    there alone.
    """
    device = arch.target(gpu) if gpu.startswith("sm_") else gpus.named(gpu)
    runtime = Runtime(device)
    chosen = [
        (c, x.variant, None)
        for c in contracts
        for x in runtime.choices(c)
        if most is None or x.first <= most.get(c, x.first)
    ]
    # what empties the cache between samples, as the sweep calls it and as check_table does, and
    # what writes a chain's inputs
    chosen += [(*kernels.flush(), label) for label in (None, "flush")]
    chosen.append((*kernels.producer(), "producer"))
    wanted = {}
    for contract, variant, label in chosen:
        kernel = kernels.get(variant.kernel)
        spec = object_spec(kernel, contract, variant, device, label=label)
        wanted[spec.key] = (spec, kernel.compiler)
    store = Store()
    for built in compile_objects(list(wanted.values()), store):
        if not built.ok:
            sys.exit(f"{built.spec.name}: {built.reason}")
    made = write_bundle(store, [spec for spec, _ in wanted.values()], Path(folder))
    print(f"{len(made.objects)} objects in {folder}")
