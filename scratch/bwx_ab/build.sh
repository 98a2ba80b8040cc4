#!/bin/bash
# Makes trees/ of the commits in trees.txt ("name commit"); run.sh compiles them.
set -e
cd "$(dirname "$0")"; R=$(git rev-parse --show-toplevel)
rm -rf trees
while read -r name commit; do
  [ -n "$name" ] || continue
  mkdir -p "trees/$name"; git -C $R archive "$commit" include csrc/cuda/entry | tar x -C "trees/$name"
done < trees.txt
