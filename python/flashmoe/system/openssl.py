"""Where libssl is, the library of OpenSSL 3. Groups on several machines need its TLS."""

from __future__ import annotations

import os

INSTALL = "a system's package of OpenSSL 3, such as Debian's libssl3"
_LIBRARY = "libssl.so.3"


def library() -> str:
    """The library's path that ``FLASHMOE_OPENSSL`` gives, else the name under which the loader finds libssl."""
    return os.environ.get("FLASHMOE_OPENSSL") or _LIBRARY
