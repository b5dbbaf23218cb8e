"""`maelm-fast presets [NAME]`: the presets by name, or one as the YAML that --config takes. Those of one table or
figure share the part of the name before the slash."""

from __future__ import annotations

import yaml

from maelm_fast import presets
from maelm_fast.cli.common import OneLineParser
from maelm_fast.config import to_dict


def main(argv: list[str]) -> int:
    parser = OneLineParser(prog="maelm-fast presets", description="List the presets, or print one in full as YAML.")
    parser.add_argument("name", nargs="?", help="a preset, such as base or table2/misaligned")
    arguments = parser.parse_args(argv)
    if arguments.name:
        print(yaml.safe_dump(to_dict(presets.get(arguments.name)), sort_keys=False), end="")
    else:
        width = max(map(len, presets.names()))
        for name in presets.names():
            print(f"{name:{width}}  {presets.describe(name)}")
    return 0
