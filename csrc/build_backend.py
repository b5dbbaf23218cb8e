"""setuptools.build_meta, but an isolated build sees the torch of the environment that it installs into.

The compiled ops need torch's headers. Were torch a build requirement, each installation would download a second one;
without it, pip's isolation hides the one that is there. So it is asked for only where there is none. The ops use its
stable ABI: which torch they are compiled against does not matter.
"""

import importlib.util
import os
import shutil
import site
import sys
from importlib.machinery import PathFinder

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  the hooks that pip calls


def _see_torch():  # whether torch can be imported, here or behind the isolation
    if importlib.util.find_spec("torch"):
        return True
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        if PathFinder.find_spec("torch", [folder]):
            sys.path.append(folder)  # last: setuptools and pybind11 stay those of the build
            return True
    return False


_SEEN = _see_torch()


def get_requires_for_build_wheel(config_settings=None):
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    lacks = not _SEEN and compiler and os.environ.get("MAELM_BUILD_EXT") != "0"
    return [*build_meta.get_requires_for_build_wheel(config_settings), *(["torch>=2.11"] if lacks else [])]


get_requires_for_build_editable = get_requires_for_build_wheel
