"""Six models' config.json, as transformers' classes write them, each to a config and a sweep on the CPU.

    python tests/tuning/hf_sweeps.py FOLDER [--dry-run] [--whole]

A short sweep of decode: T=1 at B=1 and 4, with the heads of the config's largest tensor-parallel size,
states in the cache: about two minutes of CPU a model, most of it to compile and check. --whole: every T
and size of the config, states in memory, 10 to 16 minutes a model. A script and not a test;
test_models.py has what is read. Prints for each the minutes that were expected and that came, the CPU's
minutes, and how many cells have a variant.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import transformers
import yaml

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
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stdout}")
    return done.stdout.strip()


def short(config):
    """The options that leave decode of one shard, in the cache: on a CPU with a large one, to empty it
    before each sample is most of what a sweep takes.
    """
    made = yaml.safe_load(config.read_text())
    heads = (made["model"][name] // max(made["shards"]) for name in ("H", "HV"))
    return "--tokens", "1", "--heads", ",".join(map(str, heads)), "--l2", "warm"


def sweep(model, options):
    """A model's sweep, with what it takes."""
    config = model / "sweep.yaml"
    gdntune("config", "from-hf", model, "--out", config)
    asked = ["sweep", config, "--device", "cpu", "--batch", "1,4", "--out", model / "run"]
    if "--whole" not in options:
        asked += short(config)
    print("gdntune", *asked, flush=True)
    print("  expected:", gdntune(*asked, "--dry-run"), flush=True)
    if "--dry-run" in options:
        return
    began, before = time.monotonic(), os.times()
    found = json.loads(gdntune(*asked, "--json"))
    after = os.times()
    cpu = sum(getattr(after, f) - getattr(before, f) for f in ("children_user", "children_system"))
    print(
        f"  came: {(time.monotonic() - began) / 60:.1f} minutes, {cpu / 60:.1f} of CPU;"
        f" {found['chosen']} of {found['cells']} cells have a variant",
        flush=True,
    )


def main(folder, *options):
    """Each model, one after the other."""
    for name, fields in MODELS.items():
        made = getattr(transformers, name, None)
        if made is None:
            print(f"{name}: transformers {transformers.__version__} has none")
            continue
        model = Path(folder) / name.lower()
        made(**fields).save_pretrained(model)
        sweep(model, options)


if __name__ == "__main__":
    main(*sys.argv[1:])
