"""The order of tasks on a GPU: the numbers that may be set (`knobs`), what measurements have found (`profiles`), and
the search by which `flashmoe tune` measures (`search`)."""
