"""A tiny sweep on the CPU, for tests of sweeps."""

import os
from pathlib import Path

from gdntune import search
from gdntune.device import arch
from gdntune.tuning import config

TINY = """
name: tiny
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 8]
tokens: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [8, 16], tile_v: [16, 32], ilp: [2]}}
search: {screen_rounds: 4, keep: 2, final_rounds: 8, max_cell_seconds: 5}
"""


def run(folder, store, text=TINY, **options):
    """A sweep of a config's text on this CPU."""
    return search.sweep(
        config.parse(text), folder, device=arch.detect("cpu"), store=store, **options
    )


def busy():
    """Whether more processes than this one want to run: as the system counts them now, of which
    sweeps' children are none between two sweeps.
    """
    running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
    return int(running) > 2 or os.getloadavg()[0] > 1.5 * arch.cpu_threads()
