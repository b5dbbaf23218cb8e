"""test_kernels.py needs the plugin from the start of its process, and test_plugin.py starts one."""

import sys

collect_ignore = ["test_plugin.py" if "tests.emulation.plugin" in sys.modules else "test_kernels.py"]
