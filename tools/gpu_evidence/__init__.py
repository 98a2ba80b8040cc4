"""Makes docs/evidence.md: which tests show what the pages promise, where they ran last, and on which sources."""
