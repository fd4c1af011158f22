"""A tiny bench, for the tests of benches."""

from gdntune.device import arch
from gdntune.kernels.spec import Variant
from gdntune.problem import Problem
from gdntune.results import table
from gdntune.results.records import Trial
from gdntune.results.table import Interval, Rule, TableVariant
from gdntune.tuning import bench, config

TINY = """
name: tiny
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 3]
tokens: [1, 2]
contracts: [{state_dtype: fp32}]
policy: {timer: auto, l2: warm}
search: {final_rounds: 6, max_cell_seconds: 5}
"""
ONE = TINY.replace("[1, 3]", "[2]").replace("[1, 2]", "[1]")


def run(folder, store, *names, text=TINY, **options):
    """A bench of a config's text on this CPU."""
    return bench.bench(
        config.parse(text),
        folder,
        peer_names=names,
        device=arch.detect("cpu"),
        store=store,
        **options,
    )


def rows(records, problem):
    """The trials of a problem by the last part of their variants' ids."""
    return {
        r.variant.id.rpartition(".")[2]: r
        for r in records
        if isinstance(r, Trial) and r.problem == problem
    }


def write_table(path, problem: Problem, variant: Variant, folder, store):
    """A table that names one variant for a problem's contract."""
    made = run(folder, store, text=ONE).table
    rule = Rule(problem.contract, (Interval(1, None, variant.id),))
    changes = {
        "rules": (rule,),
        "variants": {variant.id: TableVariant(variant.kernel, variant.knobs)},
    }
    table.save(table.msgspec.structs.replace(made, **changes), path)
