"""`python -m gdntune`: the command line."""

from gdntune.cli.app import entry

if __name__ == "__main__":
    entry()
