#!/usr/bin/env bash
# An operator with a GPU that no table is of: what it would get, what a sweep would take, and how to sweep.
# Needs no GPU; the commands for the GPU's own machine are printed.
#
#   examples/walks/operator.sh [GPU] [CONFIG]
set -euo pipefail
gpu=${1:-h20} config=${2:-qwen3.5-397b-a17b}

gdntune table which --gpu "$gpu"
gdntune sweep "$config" --dry-run --arch "$gpu"
cat <<END
There:
  gdntune doctor
  gdntune sweep $config --out results/mine
  gdntune judge results/mine --hold-out every-second
  gdntune table install results/mine
END
