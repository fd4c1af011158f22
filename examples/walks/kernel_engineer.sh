#!/usr/bin/env bash
# A kernel engineer: a kernel from outside the package, one of its knobs at two values, beside the package's own.
#
#   examples/walks/kernel_engineer.sh [FOLDER]
set -euo pipefail
folder=${1:-results/own_kernel} here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} GDNTUNE_KERNELS=own_kernel

mkdir -p "$(dirname "$folder")"
# The sweep refuses a value that is not legal before it compiles anything.
sed 's/own_kernel: {} .*/own_kernel: {rows: [4, 8]}/' "$here/own_kernel/own_kernel.yaml" > "$folder.yaml"
gdntune sweep "$folder.yaml" --batch 1 --l2 warm --out "$folder"
gdntune report "$folder" --out "$folder/rows.csv"
python -c "import pandas, sys; rows = pandas.read_csv(sys.argv[1])
print(rows[['kernel', 'variant', 'role', 'verified', 'median_us', 'over_floor']].to_csv(index=False))" "$folder/rows.csv"
gdntune replay "$folder" --without-variants 'cpu_recurrent*' --out "$folder/own.json"
gdntune explain --B 1 --HV 4 --state-dtype fp32 --device cpu --table "$folder/own.json"
