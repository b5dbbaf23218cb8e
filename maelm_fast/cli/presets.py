"""`maelm-fast presets [NAME]`: the presets by name, or one as the YAML that --config takes. Those of one table or
figure share the part of the name before the slash."""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from maelm_fast import presets
from maelm_fast.cli.common import option, parse
from maelm_fast.config import to_dict

EXAMPLES = """
    maelm-fast presets
    maelm-fast presets table2/misaligned
    maelm-fast presets base > mine.yaml
"""


@dataclass(frozen=True, kw_only=True)
class Options:
    """List the presets, or print one in full as YAML, to change and give to 'pretrain --config'."""

    name: str | None = option(None, positional=True)
    """A preset, such as base or table2/misaligned."""


def main(argv: list[str]) -> int:
    options: Options = parse("presets", argv, Options, examples=EXAMPLES)
    if options.name:
        print(yaml.safe_dump(to_dict(presets.get(options.name)), sort_keys=False), end="")
    else:
        width = max(map(len, presets.names()))
        for name in presets.names():
            print(f"{name:{width}}  {presets.describe(name)}")
    return 0
