"""The command: see `programs.campaign`."""

from __future__ import annotations

import sys

from programs.campaign import main

sys.exit(main())
