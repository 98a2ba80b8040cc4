"""What the tests draw from."""

import os
import secrets

SEED = int(os.environ.get("FLASHMOE_SEED") or secrets.randbelow(2**31))
"""Of what is new in each run; conftest.py prints it."""
