"""What needs a plugin from the start of its process; test_plugins.py starts such processes."""

import sys

NEEDS = {"test_kernels.py": "tests.emulation.plugin", "test_cuda_kernels.py": "tests.emulation.cuda"}
collect_ignore = [name for name, plugin in NEEDS.items() if plugin not in sys.modules]
