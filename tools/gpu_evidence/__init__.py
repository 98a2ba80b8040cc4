"""Records of GPU tests: which ran, on which device and sources; which are stale; running these; the page about it."""
