"""Six models' config.json, as transformers' classes write them, each to a config and a sweep on the CPU.

    python tests/tuning/hf_sweeps.py FOLDER [--dry-run]

Minutes a model on a quiet machine, so a script and not a test; test_models.py has what is read. Prints
for each the minutes that were expected and that came.
"""

import subprocess
import sys
import time
from pathlib import Path

import transformers

HEADS = {"num_hidden_layers": 4, "linear_num_key_heads": 16}
MODELS = {
    "Qwen3NextConfig": {**HEADS, "linear_num_value_heads": 32},
    "Qwen3_5TextConfig": {**HEADS, "linear_num_value_heads": 48},
    "Qwen3_5Config": {"text_config": {**HEADS, "linear_num_value_heads": 64}},
    "OlmoHybridConfig": {"num_hidden_layers": 4, "num_attention_heads": 30, "hidden_size": 3840},
    "KimiLinearConfig": {"num_hidden_layers": 4},
    "Glm5NextConfig": {"num_hidden_layers": 4},
    "BailingHybridConfig": {"num_hidden_layers": 6},
}


def gdntune(*arguments):
    """A command's run, with what it printed; raises where it failed."""
    command = [sys.executable, "-m", "gdntune", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True)


def main(folder, *options):
    """Each model: a config, what a sweep would take, and the sweep."""
    for name, fields in MODELS.items():
        made = getattr(transformers, name, None)
        if made is None:
            print(f"{name}: transformers {transformers.__version__} has none")
            continue
        model = Path(folder) / name.lower()
        made(**fields).save_pretrained(model)
        config = model / "sweep.yaml"
        gdntune("config", "from-hf", model, "--out", config)
        asked = ("sweep", config, "--device", "cpu", "--batch", "1,4", "--out", model / "run")
        print(gdntune(*asked, "--dry-run").stdout.strip())
        if "--dry-run" not in options:
            began = time.monotonic()
            gdntune(*asked)
            print(f"  came: {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main(*sys.argv[1:])
