"""A researcher: the CSV of a report to a plot.

gdntune report docs/results/nvidia-h100-80gb-hbm3/kimi-linear-48b-a3b.jsonl.xz --out kimi.csv
python examples/walks/researcher.py kimi.csv kimi.svg
"""

import sys

import matplotlib.pyplot as plt
import pandas as pd

rows = pd.read_csv(sys.argv[1])
chosen = rows[rows["chosen"]].sort_values("work_units")
for (state, tokens), cells in chosen.groupby(["state_dtype", "tokens"]):
    plt.loglog(cells["work_units"], cells["median_us"], ".-", label=f"{state} state, T={tokens}")
plt.xlabel("work units, B x HV")
plt.ylabel("us")
plt.legend()
plt.savefig(sys.argv[2])
print(f"{len(chosen)} cells of {len(rows)} rows: {sys.argv[2]}")
