"""The command: see `fuzzing.campaign`."""

from __future__ import annotations

import sys

from fuzzing.campaign import main

sys.exit(main())
