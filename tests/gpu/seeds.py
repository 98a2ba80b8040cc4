"""The seed of tests that draw new examples in each run."""

import os
import secrets

SEED = int(os.environ.get("FLASHMOE_SEED") or secrets.randbelow(2**31))
"""Another number in each run, unless FLASHMOE_SEED gives it; conftest.py prints it."""
