#!/usr/bin/env bash
# A new user without a GPU: from a checkout to a table that the runtime uses. Three minutes on two cores.
#
#   examples/walks/new_user.sh [CONFIG] [FOLDER]
set -euo pipefail
config=${1:-quickstart} folder=${2:-results/quickstart}

gdntune doctor
gdntune sweep "$config" --device cpu --dry-run
gdntune sweep "$config" --device cpu --out "$folder"
gdntune table validate "$folder/table.json"
gdntune table install "$folder"
gdntune explain --B 1 --HV 8 --state-dtype fp32 --device cpu
python "$(dirname "$0")/../decode.py"
