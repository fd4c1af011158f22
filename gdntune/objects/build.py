"""Compiles the objects that a store lacks, in processes of our own.

Processes, never threads: four threads compiling with CuTe DSL crashed.
"""

from collections.abc import Callable, Iterable

import msgspec

from gdntune.device.arch import cpu_threads
from gdntune.errors import ToolMissing
from gdntune.objects.farm import Farm
from gdntune.objects.store import Manifest, ObjectSpec, Store

COMPILE_TIMEOUT_S = 300.0
# Spills beyond this are dropped before timing; a stack of 8 bytes was one store and two loads, and
# cost nothing.
SPILL_LIMIT_BYTES = 64


class Built(msgspec.Struct, frozen=True):
    """The outcome of one object: its manifest, or the reason why there is none."""

    spec: ObjectSpec
    manifest: Manifest | None
    reason: str = ""
    cached: bool = False

    @property
    def ok(self) -> bool:
        return self.manifest is not None


def compile_objects(
    specs: Iterable[tuple[ObjectSpec, str]],
    store: Store,
    *,
    jobs: int | None = None,
    on_done: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Compiles what the store lacks, in the order given; one failed object is a value, not an
    exception.

    specs: pairs of an object and its kernel's compiler (`module:function`).
    """
    # Variants of several contracts may share an object; it is compiled once.
    unique = {spec.key: (spec, compiler) for spec, compiler in specs}
    done: dict[str, Built] = {}
    todo = []

    def finish(built: Built) -> None:
        done[built.spec.key] = built
        if on_done:
            on_done(built)

    for spec, compiler in unique.values():
        found = store.find(spec)
        if found is not None:
            finish(Built(spec, found, cached=True))
        else:
            todo.append((spec, compiler))
    if todo:
        # Before the first compiler starts: each would only find the same fault minutes later.
        store.require_writable()
        with Farm(store.root, min(jobs or cpu_threads(), len(todo)), COMPILE_TIMEOUT_S) as farm:
            for number, answer in farm.compile(todo):
                # A missing tool: the other thousand objects would fail the same way, one by one.
                if answer.fatal:
                    raise ToolMissing(answer.reason)
                finish(Built(todo[number][0], answer.manifest, answer.reason))
    return [done[key] for key in unique]
