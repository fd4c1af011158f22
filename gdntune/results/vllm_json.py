"""A table as the JSON files in which vLLM keeps what it tuned: a file a contract and device, in it a
configuration by batch size.
"""

import json
import re

from gdntune.results.table import Table


def vllm_json(table: Table, HV: int) -> dict[str, str]:
    """The files by name, for calls of HV value heads: what to use from each batch size on. Those
    that no batch size reaches are left out.
    """
    device = re.sub(r"[^A-Za-z0-9]+", "_", table.device.name)
    found = {}
    for rule in table.rules:
        by_batch: dict[str, dict[str, object]] = {}
        for interval in rule.serving(dependent_launch=False):
            # from the first whole batch on; a later interval of the same batch counts
            batch = -(-interval.first // HV)
            if interval.last is None or batch * HV <= interval.last:
                chosen = table.variants[interval.variant]
                by_batch[str(batch)] = {"kernel": chosen.kernel, **chosen.knobs}
        name = f"{rule.when.key().replace('.', ',')},HV={HV},device_name={device}.json"
        found[name] = json.dumps(by_batch, indent=4) + "\n"
    return found
