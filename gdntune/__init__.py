"""gdntune: compiles, checks and times variants of Gated DeltaNet and KDA decode kernels on the GPU
or CPU at hand, and calls the one that a table names.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Loaded on first use: `import gdntune` takes a few milliseconds, and torch some hundreds.
_PUBLIC = {
    "gated_delta_rule_decode": "gdntune.runtime.ops",
    "gated_delta_rule_packed_decode": "gdntune.runtime.ops",
    "kda_decode": "gdntune.runtime.ops",
    "gated_delta_rule_layer_decode": "gdntune.runtime.layers",
    "kda_layer_decode": "gdntune.runtime.layers",
    "plan": "gdntune.runtime.loading",
    "prepare": "gdntune.runtime.loading",
    "load_table": "gdntune.runtime.loading",
    "table_hash": "gdntune.runtime.loading",
    "check_ranks": "gdntune.runtime.loading",
    "explain": "gdntune.runtime.loading",
    "served": "gdntune.engines.substitute",
    "tune": "gdntune.tuning.tune",
    "check_table": "gdntune.tuning.table_check",
    "RawWindow": "gdntune.runtime.drafts",
    "RingState": "gdntune.runtime.rings",
    "gated_delta_rule_verify": "gdntune.runtime.rings",
    "kda_verify": "gdntune.runtime.rings",
    "gated_delta_rule_commit": "gdntune.runtime.rings",
    "Plan": "gdntune.runtime.planned",
    "Contract": "gdntune.problem",
    "Problem": "gdntune.problem",
    "GdntuneError": "gdntune.errors",
    "UnsupportedProblem": "gdntune.errors",
    "TableError": "gdntune.errors",
    "BuildError": "gdntune.errors",
    "ToolMissing": "gdntune.errors",
    "CaptureError": "gdntune.errors",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(
            f"module 'gdntune' has no attribute {name!r}: it has {', '.join(sorted(_PUBLIC))}"
        )
    try:
        module = import_module(_PUBLIC[name])
    except ModuleNotFoundError as e:
        # An engine's install of the core lacks what tuning alone needs.
        if not _PUBLIC[name].startswith("gdntune.tuning") or (e.name or "gdntune").startswith(
            "gdntune"
        ):
            raise
        from gdntune.errors import ToolMissing

        raise ToolMissing(f"gdntune.{name} needs {e.name}: pip install 'gdntune[sweep]'") from None
    # kept here, so that the next look costs nothing
    found = globals()[name] = getattr(module, name)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
