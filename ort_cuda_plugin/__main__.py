"""``python -m ort_cuda_plugin``."""

import sys

from ort_cuda_plugin.cli import main

sys.exit(main())
