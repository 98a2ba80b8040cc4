#!/bin/bash
# From the repository root of the GPU machine, with .whl/ beside it; 16 cores, 80 to 100 s, of which some 35 compile.
D=$(cd "$(dirname "$0")" && pwd); S=$(date +%s); C=/tmp/bwx_cubins; mkdir -p $C
NVCC=$(command -v nvcc || ls /usr/local/cuda*/bin/nvcc | tail -1)
compile() {  # out, root, flags
  "$NVCC" -cubin -gencode arch=compute_90a,code=sm_90a -std=c++20 -O3 -DFLASHMOE_DTYPE=1 -DFLASHMOE_EXACT=0 "${@:3}" \
    -I "$2/include" "$2/csrc/cuda/entry/moe.cu" -o "$C/$1.tmp" && mv "$C/$1.tmp" "$C/$1"
}
last=
while read -r name commit; do
  [ -n "$name" ] || continue
  last=$name
  for k in "swiglu 3 0" "swiglu 3 1" "gelu 1 0"; do
    set -- $k; compile "$name-$1-$3.cubin" "$D/trees/$name" -DFLASHMOE_ACTIVATION=$2 -DFLASHMOE_TRACE=$3 -DFLASHMOE_BACKWARD=1 &
  done
done < "$D/trees.txt"
for k in "swiglu 3" "gelu 1"; do
  set -- $k; compile "keeps-$1.cubin" "$D/trees/$last" -DFLASHMOE_ACTIVATION=$2 -DFLASHMOE_TRACE=0 -DFLASHMOE_KEEP=1 &
done
python3 -m pip install -q --no-deps .whl/*.whl "$D"/dep/*.whl 2>&1 | grep -v WARN
python3 -m pip install -q --no-deps --target /tmp/bwx_ab "$D"/*.whl 2>&1 | grep -v WARN
wait; echo "compiled $(ls $C/*.cubin | wc -l) in $(( $(date +%s) - S )) s"
PYTHONPATH=/tmp/bwx_ab FLASHMOE_CACHE=/tmp/bwx_cache timeout 150 python3 "$D/ab.py" "$D" $C 2>&1 | tail -80
echo "all $(( $(date +%s) - S )) s"
