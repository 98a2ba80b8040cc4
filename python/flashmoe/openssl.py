"""Where OpenSSL 3 is, whose TLS groups on several machines need: its library libssl."""

from __future__ import annotations

import os

INSTALL = "a system's package of OpenSSL 3, such as Debian's libssl3"
_LIBRARY = "libssl.so.3"


def library() -> str:
    """The library: what ``FLASHMOE_OPENSSL`` names, else the name that the loader looks for."""
    return os.environ.get("FLASHMOE_OPENSSL") or _LIBRARY
