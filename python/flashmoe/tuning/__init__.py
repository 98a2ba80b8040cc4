"""Which order of tasks a GPU runs: the numbers that may be set (`knobs`), what measuring them has found (`profiles`),
and the search that `flashmoe tune` measures by (`search`)."""
