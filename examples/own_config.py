"""Sweep a config of your own, read the report with pandas and let the runtime use the table.

A minute on two cores:  python examples/own_config.py [FOLDER]
"""

import subprocess
import sys
from pathlib import Path

import pandas as pd

import gdntune

CONFIG = Path(__file__).with_suffix(".yaml")


def main(folder: Path) -> None:
    sweep = [sys.executable, "-m", "gdntune", "sweep", str(CONFIG), "--out", str(folder)]
    subprocess.run(sweep, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    # One row per cell and implementation. `chosen` marks what the table names.
    report = pd.read_csv(folder / "report.csv")
    chosen = report[report.chosen].sort_values("work_units")
    print(chosen[["B", "work_units", "kernel"]].to_string(index=False))

    gdntune.load_table(folder / "table.json")  # from now on the runtime chooses by it
    print("table loaded")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results/own_config"))
