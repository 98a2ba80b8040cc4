"""The order of tasks on a GPU: the numbers that a profile may set (`knobs`), profiles that were measured (`profiles`),
and the search of `flashmoe tune` for the fastest one (`search`)."""
