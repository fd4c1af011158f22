"""`python -m gdntune` and the command `gdntune`."""

import sys


def main() -> None:
    """The command line, which an engine's install of the core need not have."""
    try:
        from gdntune.cli.app import entry
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("gdntune"):
            raise
        sys.exit(f"gdntune: the command line needs {e.name}: pip install 'gdntune[sweep]'")
    entry()


if __name__ == "__main__":
    main()
