"""What GPU tests have run, on what, of which sources: what is stale, how it is run again, and the page about it."""
