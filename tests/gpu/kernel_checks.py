"""What the scripts of one kernel share (`layer_gpu.py`, `ring_gpu.py`): a bundle of what they call,
the session on the GPU, the gate of a sweep, random problems, and the command line.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gdntune import kernels
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.device import arch
from gdntune.kernels.spec import Kernel, Variant
from gdntune.objects.build import compile_objects
from gdntune.objects.store import Store, default_root, object_spec, write_bundle
from gdntune.problem import Contract, Problem
from gdntune.runtime import environment
from gdntune.timing import Policy
from gdntune.tuning.session import Session

Wanted = tuple[Kernel, Contract, Variant, str | None]
Found = list[tuple[Contract, list[Variant]]]
# The tolerance of a check's relative error
TOLERANCE = 64 * 2.0**-24


def arguments(doc: str, sizes: str) -> argparse.ArgumentParser:
    """The command line of a script that compiles, checks and times; doc: its docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("what", choices=("compile", "check", "time"))
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--random", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--l2", default="cold-clean")
    parser.add_argument("--sizes", default=sizes)
    return parser


def of_the_timers() -> Iterable[Wanted]:
    """What empties L2, and what writes a call's inputs in a chain."""
    for label in (None, "flush"):
        contract, v = kernels.flush()
        yield kernels.get(v.kernel), contract, v, label
    contract, v = kernels.producer()
    yield kernels.get(v.kernel), contract, v, "producer"


def bundle(wanted: Iterable[Wanted], device: arch.Device, folder: Path) -> None:
    """Compiles all of it into a bundle; exits where one does not compile. Needs no GPU."""
    specs = {}
    for kernel, contract, variant, label in wanted:
        spec = object_spec(kernel, contract, variant, device, label=label)
        specs[spec.key] = (spec, kernel.compiler)
    store = Store()
    print(f"{len(specs)} objects", flush=True)
    for built in compile_objects(list(specs.values()), store):
        if not built.ok:
            sys.exit(f"{built.spec.name}: {built.reason}")
    write_bundle(store, [spec for spec, _ in specs.values()], folder)
    print(f"in {folder}")


def session_of(l2: str) -> Session:
    """The GPU at hand with the objects of the bundle."""
    device = arch.detect("cuda")
    return Session(device, 0, Store(default_root(), environment.bundles()), Policy(l2=l2))


def gate(session: Session, found: Found) -> bool:
    """Whether each variant passes a sweep's checks of its contract."""
    right = True
    for c, variants in found:
        session.load(c, variants)
        said = [(v.id, *session.check(c, v)) for v in variants]
        wrong = [(name, worst) for name, ok, worst, _ in said if not ok]
        most = max(error or 0.0 for _, _, _, error in said) / TOLERANCE
        print(
            f"{c.key()}: {len(said) - len(wrong)} of {len(said)} right, worst {most:.2f} of the"
            " tolerance",
            flush=True,
        )
        for name, worst in wrong:
            print(f"  {name}: {worst}")
        right &= not wrong
    return right


def randomly(
    session: Session,
    found: Found,
    count: int,
    seed: int,
    own: Callable[[random.Random, Problem], dict[str, Any]],
) -> bool:
    """Whether all of `count` random problems are right, each with a random variant. own: options of
    a case that the kernel has beside the usual ones.
    """
    pick, wrong, most = random.Random(seed), 0, 0.0
    for n in range(count):
        c, variants = pick.choice(found)
        H = pick.choice((1, 2, 4))
        problem = Problem(c, pick.randint(1, 17), H, H * pick.choice((1, 2, 3, 4)))
        options: dict[str, Any] = {
            "padding": pick.choice((0.0, 0.3)),
            "split": pick.random() < 0.5,
            "null_index": pick.choice((-1, 0)),
            "slot_stride_pad": pick.choice((0, 64)),
            "extra_rows": pick.choice((0, 2)),
            "packed_qkv": pick.random() < 0.5,
            "extreme_gates": pick.random() < 0.3,
            "use_qk_l2norm": pick.random() < 0.8,
            **own(pick, problem),
        }
        variant = pick.choice(variants)
        truth = Truth(make_case(problem, session.place, n, **options))
        case = truth.before.clone()
        session.function(c, variant)(*case.arguments())
        verdict = truth.judge(case)
        most = max(most, verdict.error / verdict.tolerance)
        if not verdict.ok:
            wrong += 1
            print(f"wrong: {problem.key()} {variant.id} {options}: {verdict.worst}", flush=True)
    print(f"{count - wrong} of {count} random problems right, worst {most:.2f} of the tolerance")
    return not wrong
