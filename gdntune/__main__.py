"""`python -m gdntune`: the command line."""

from gdntune.cli.app import app

if __name__ == "__main__":
    app(prog_name="gdntune")
