"""Compiling at a call, which an engine does not want: it is said once, with what avoids it."""

import logging

from gdntune.errors import BuildError, ToolMissing
from gdntune.objects.store import ObjectSpec, Store, kernel_package
from gdntune.problem import Contract

log = logging.getLogger("gdntune")
_SAID: set[str] = set()


def compile_missing(
    missing: list[tuple[ObjectSpec, str]], store: Store, contract: Contract
) -> None:
    """Compiles what a contract needs and the store lacks. ToolMissing where there is no compiler
    and BuildError where one fails, each with what would do without.
    """
    from gdntune.objects.build import compile_objects

    spec = missing[0][0]
    package = kernel_package(spec.arch).replace("_", "-")
    avoids = (
        f"GDNTUNE_BUNDLE=DIR, made by `gdntune compile CONFIG --arch {spec.arch} --table TABLE"
        f" --bundle DIR` where there is a compiler, or the package {package}"
    )
    # Once in full; a server's log should not hold it for each contract.
    level = logging.DEBUG if spec.arch in _SAID else logging.INFO
    _SAID.add(spec.arch)
    log.log(
        level, "compiling %d objects for %s, seconds each; what avoids it: %s, or gdntune.prepare"
        " before the first call", len(missing), contract.key(), avoids,
    )  # fmt: skip
    try:
        failed = [b for b in compile_objects(missing, store) if not b.ok]
    except ToolMissing as e:
        raise ToolMissing(
            f"{contract.key()} has no compiled object here, and none can be made: {e}. Without a"
            f" compiler: {avoids}"
        ) from None
    if failed:
        raise BuildError(f"{failed[0].spec.name} does not compile: {failed[0].reason}")
