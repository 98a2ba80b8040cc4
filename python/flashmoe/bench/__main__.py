"""``python -m flashmoe.bench``: the same as `flashmoe bench`, for where the `flashmoe` command is not on the path."""

import sys

from flashmoe_layer.command import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
