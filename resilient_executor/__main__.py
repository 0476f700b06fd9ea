"""``python -m resilient_executor``: the same as the command ``resilient-executor``."""

from __future__ import annotations

import sys

from resilient_executor.cli import main

if __name__ == "__main__":
    sys.exit(main())
