"""The command: see `mutation.campaign`."""

from __future__ import annotations

import sys

from mutation.campaign import main

sys.exit(main())
