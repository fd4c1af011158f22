#!/usr/bin/env bash
# Runs a part of the tests with the versions that vLLM 0.33.0 and SGLang 0.5.23 pin:
#   tests/engine_pins.sh [FOLDER]
# They are installed in FOLDER (build/engine-pins), which goes before the environment's own.
# test_first_call.py loads a bundle and decodes in processes that import no CuTe DSL at all.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-build/engine-pins}")
dsl=4.8.0
python -m pip install --quiet --no-deps --upgrade --target "$folder" apache-tvm-ffi==0.1.11 \
  nvidia-cutlass-dsl==$dsl nvidia-cutlass-dsl-libs-{base,core,cu13}==$dsl
export PYTHONPATH="$folder:$PWD${PYTHONPATH:+:$PYTHONPATH}"
# objects of other versions are no test of these
export GDNTUNE_TEST_CACHE="${folder}-cache"
python - <<PY
import importlib.metadata as m, cutlass, tvm_ffi
assert m.version("apache-tvm-ffi") == "0.1.11" and tvm_ffi.__file__.startswith("$folder"), tvm_ffi
assert m.version("nvidia-cutlass-dsl") == cutlass.__version__ == "$dsl", cutlass.__version__
PY
python -m pytest -q -x tests/objects/test_store.py tests/runtime/test_first_call.py \
  tests/runtime/test_headers.py "tests/kernels/test_kernels_cute.py::test_representative_objects_compile"
