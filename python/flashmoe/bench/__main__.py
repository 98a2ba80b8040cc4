"""``python -m flashmoe.bench``: `flashmoe bench` where the command is not on the path."""

import sys

from flashmoe_layer.command import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
