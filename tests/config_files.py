"""Small configs, for tests of what they say."""

import yaml

from gdntune.tuning import config

SMALL = {
    "name": "small",
    "model": {"H": 4, "HV": 8},
    "batch": [1, 2],
    "contracts": [{"op": "gdn_decode"}],
}


def read(**changes):
    """The small config with some keys changed; None takes a key out."""
    return config.parse(
        yaml.safe_dump({k: v for k, v in {**SMALL, **changes}.items() if v is not None}),
        "small.yaml",
    )
