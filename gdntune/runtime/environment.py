"""The environment variables that the runtime reads, each in one place."""

import os
from pathlib import Path

from gdntune.errors import UnsupportedProblem

# docs/reference.md says what each means, and a test that all stand there.
VARIABLES = frozenset(
    {
        "GDNTUNE_TABLE",
        "GDNTUNE_BUNDLE",
        "GDNTUNE_CHECK",
        "GDNTUNE_LOG",
        "GDNTUNE_VLLM",
        "GDNTUNE_SGLANG",
    }
)


def _get(name: str) -> str:
    if name not in VARIABLES:
        raise KeyError(name)
    return os.environ.get(name, "")


def given_table() -> str:
    """The table that GDNTUNE_TABLE names; empty where it is not set."""
    return _get("GDNTUNE_TABLE")


def bundles() -> list[Path]:
    """The folders that GDNTUNE_BUNDLE names."""
    return [Path(b) for b in _get("GDNTUNE_BUNDLE").split(os.pathsep) if b]


def checking() -> bool:
    """Whether GDNTUNE_CHECK asks for the checks that read what lies on the device."""
    return _switch("GDNTUNE_CHECK")


def log_level() -> str:
    """The level that GDNTUNE_LOG names; empty where it is not set."""
    return _get("GDNTUNE_LOG").lower()


def plugin_is_on(name: str) -> bool:
    """Whether an engine's plug-in is asked for, by GDNTUNE_VLLM or GDNTUNE_SGLANG."""
    return _switch(name)


def _switch(name: str) -> bool:
    """Whether a variable is 1; UnsupportedProblem for what is neither that nor 0: `false` and `off`
    once meant on.
    """
    value = _get(name)
    if value not in ("", "0", "1"):
        raise UnsupportedProblem(f"{name}={value!r}: expected 1, or 0 or nothing")
    return value == "1"
