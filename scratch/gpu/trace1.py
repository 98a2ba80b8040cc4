"""trace1.py SHAPE:T...: where a block's time goes."""
import sys; sys.path.insert(0, "benchmarks")
import statistics as st, torch, flashmoe
from collections import defaultdict
from harness import LoneLayer
for a in sys.argv[1:]:
    name, t = a.split(":"); layer = LoneLayer(name, int(t))
    for i in range(30): layer(i)
    layer.moe(layer.xs[0], layer.w1, layer.w2, trace=True); layer.context.synchronize()
    for i in range(30): layer(i)
    layer.moe(layer.xs[1], layer.w1, layer.w2, trace=True); layer.context.synchronize()
    ev = layer.context.last_call.events
    b = min(e.start_ns for e in ev); end = max(e.end_ns for e in ev)
    by = defaultdict(list)
    for e in ev: by[(e.kind, e.column if e.kind == "gemm0" else 0)].append(e)
    blocks = len({e.actor for e in ev}); total = (end - b) / 1000
    print(f"== {a} total {total:.0f} us, {blocks} actors")
    for k in sorted(by):
        d = sorted((e.end_ns - e.start_ns) / 1000 for e in by[k]); n = len(d)
        q = lambda f: d[min(n - 1, int(f * n))]
        print(f"{k[0]:>9} {k[1]:2d} n {n:6d} from {(min(e.start_ns for e in by[k])-b)/1000:6.0f} to {(max(e.end_ns for e in by[k])-b)/1000:6.0f}  p10 {q(.1):6.2f} p50 {q(.5):6.2f} p90 {q(.9):6.2f}  per actor {sum(d)/blocks:7.1f}")
    g0 = [e for e in ev if e.kind == "gemm0"]; first = defaultdict(lambda: 10**30)
    for e in g0: first[e.actor] = min(first[e.actor], e.start_ns)
    print("   first gemm0 by block", [round((v - b) / 1000) for v in sorted(first.values())][::16])
    # epilogues within tasks, by kind
    per = defaultdict(list)
    for e in sorted(ev, key=lambda e: e.end_ns): per[e.actor].append(e)
    ep = defaultdict(list)
    for v in per.values():
        x = None
        for e in v:
            if e.kind == "epilogue": x = e
            elif e.kind in ("gemm0", "gemm1") and x is not None:
                ep[(e.kind, e.column if e.kind == "gemm0" else 0)].append(((x.end_ns - x.start_ns) / 1000, (e.end_ns - e.start_ns) / 1000)); x = None
    for k in sorted(ep): print(f"   epilogue of {k}: median {st.median(x for x, _ in ep[k]):.2f} of {st.median(y for _, y in ep[k]):.2f}")
    layer.close(); del layer; torch.cuda.empty_cache()
