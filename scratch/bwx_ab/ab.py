"""ab.py FOLDER CUBINS: backward passes by the kernels of several commits, in turn; bits against the first; traces' sums by kind."""
import pathlib, statistics, sys, time
from collections import defaultdict
import numpy as np, torch, flashmoe
from flashmoe import _ffi, jit
from flashmoe.engines import cuda
from flashmoe.tensors import as_view
from flashmoe.trace import PHASES

FOLDER = pathlib.Path(sys.argv[1]); T0 = time.time()
CUBINS = sorted(pathlib.Path(sys.argv[2]).iterdir())
TREES = [line.split()[0] for line in (FOLDER / "trees.txt").read_text().splitlines() if line.strip()]
tree = TREES[0]

def kernel(v):
    assert v.dtype == "bfloat16" and not v.transposed, v
    start = f"{tree}-" if v.backward else "keeps-"
    end = f"{v.activation}-{int(v.trace)}.cubin" if v.backward else f"{v.activation}.cubin"
    found = [c for c in CUBINS if c.name.startswith(start) and c.name.endswith(end)]
    assert len(found) == 1, (v, found)
    return found[0]
jit.kernel = kernel

def floor(rows, H, I, E, n, w1, w2):
    offs = torch.bincount(torch.randint(E, (rows,), device="cuda"), minlength=E).cumsum(0).int()
    r = lambda c: torch.randn(rows, c, device="cuda", dtype=torch.bfloat16)
    x, dy, a, dz = r(H), r(H), r(I), r(n)
    return lambda: [torch._grouped_mm(dy, w2, offs=offs), torch._grouped_mm(dz, w1, offs=offs),
                    torch._grouped_mm(dy.t(), a, offs=offs), torch._grouped_mm(dz.t(), x, offs=offs)]

def span(f):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(4_000_000); a.record(); f(); b.record(); b.synchronize(); return a.elapsed_time(b)

def trace_of(ctx, run):
    eng, old = ctx._engine, cuda.CudaEngine._layer
    cuda.CudaEngine._layer = lambda self, tensors, options, trace, pass_: old(self, tensors, options, pass_ == 2 or trace, pass_)
    try:
        for _ in range(2): run(); torch.cuda.synchronize()
    finally: cuda.CudaEngine._layer = old
    raw = np.empty(_ffi.library().cuda_trace_bytes(eng.checked_handle()), np.uint8)
    _ffi.library().cuda_read_trace(eng.checked_handle(), as_view(raw))
    per, total, n, begin, end = len(raw) // eng.processors, defaultdict(int), defaultdict(int), [], []
    for b in range(eng.processors):
        block = raw[b * per:(b + 1) * per]; count = int(block[:8].view(np.uint64)[0])
        ev = block[32:32 + 32 * min(count, per // 32 - 1)].view(np.uint64).reshape(-1, 4)
        s, e = ev[:, 0].astype(np.int64), ev[:, 1].astype(np.int64)
        kind = [PHASES[k] for k in (ev[:, 2] & 0xffffffff).astype(int)]
        idx, col = (ev[:, 2] >> 32).astype(np.int64), (ev[:, 3] & 0xffffffff).astype(np.int64)
        begin.append(s.min()); end.append(e.max())
        epilogues = defaultdict(list)
        for i, p in enumerate(kind):
            if p == "epilogue": epilogues[idx[i], col[i]].append((s[i], e[i]))
        for i, p in enumerate(kind):
            if p == "epilogue": continue
            if idx[i] == 0xffffffff: p = "rehearsal"
            elif p in ("gemm0", "gemm1"):
                inner = [x for x in epilogues[idx[i], col[i]] if x[0] >= s[i] and x[1] <= e[i]]
                p = "dA" if p == "gemm0" else "dX" if inner else "over rows"
                for a, z in inner: total[p + " epilogue"] += z - a; n[p + " epilogue"] += 1
            total[p] += e[i] - s[i]; n[p] += 1
    wall = (max(end) - min(begin)) / 1e3
    return f"wall {wall:.0f} us; " + "; ".join(f"{k} {total[k] / eng.processors / 1e3:.0f} a block, {total[k] / n[k] / 1e3:.2f} each"
                                               for k in ("dA", "dA epilogue", "dX", "dX epilogue", "over rows") if n[k])

def shape(name, T, H, I, E, K, act, traced):
    global tree
    g = torch.Generator("cuda").manual_seed(1)
    n = lambda *s, size=1.0: (torch.randn(s, generator=g, device="cuda", dtype=torch.bfloat16) * size)
    columns = 2 * I if act == "swiglu" else I
    x, up, down, dy = n(T, H), n(E, columns, H, size=H**-.5), n(E, H, I, size=I**-.5), n(T, H)
    w = torch.rand(T, K, device="cuda", generator=g); ids = torch.rand(T, E, device="cuda", generator=g).topk(K).indices.int()
    for v in (x, up, down, w): v.requires_grad_()
    calls, first, bits = {}, None, {}
    torch.cuda.empty_cache()
    for tree in TREES:
        ctx = flashmoe.Context(engine="cuda", max_tokens=T, hidden=H, intermediate=I, experts=E, top_k=K, dtype="bfloat16", timeout=10, profile={})
        y = flashmoe.moe(ctx, x, up, down, topk_ids=ids, topk_weights=w, activation=act)
        def back(y=y): return torch.autograd.grad(y, (x, up, down, w), dy, retain_graph=True)
        try: got = back(); torch.cuda.synchronize()
        except Exception as error: print(name, tree, "FAILED", str(error)[:300], flush=True); continue
        again = back()
        assert all(torch.equal(a, b) for a, b in zip(got, again)), (name, tree, "not the same bits twice")
        del again
        if first is None: first = [v.clone() for v in got]
        bits[tree] = "".join("=" if torch.equal(a, b) else "!" for a, b in zip(got, first))
        if "!" in bits[tree]:
            bits[tree] += str([f"{((a.float() - b.float()).norm() / b.float().norm()).item():.1e}" for a, b in zip(got, first)])
        del got; calls[tree] = (ctx, back)
    bare = floor(T * K, H, I, E, columns, up.detach(), down.detach())
    times, order = defaultdict(list), list(calls)
    for i in range(11):
        for t in order[i % len(order):] + order[:i % len(order)]: times[t].append(span(calls[t][1]))
        times["floor"].append(span(bare))
    m = {t: statistics.median(v[1:]) for t, v in times.items()}
    print(f"== {name}: floor {m['floor']:.3f} ms; bits of dx, d gate_up, d down, d weights against {TREES[0]}", flush=True)
    for t in order: print(f"{t:>10} {m[t]:7.3f} ms  of floor {m[t] / m['floor']:.3f}  of first {m[t] / m[order[0]]:.3f}  {bits[t]}", flush=True)
    for t in order if traced else []:
        tree = t; print(f"{t:>10} {trace_of(*calls[t])}", flush=True)
    for ctx, _ in calls.values(): ctx.synchronize(); ctx.close()
    del calls, first; torch.cuda.empty_cache(); print(f"   ({time.time() - T0:.0f} s)", flush=True)

print(torch.cuda.get_device_name(), flush=True)
shape("qwen3-30b 8192", 8192, 2048, 768, 128, 8, "swiglu", True)
shape("mixtral 8192", 8192, 4096, 14336, 8, 2, "swiglu", True)
shape("paper-E64 16384", 16384, 2048, 2048, 64, 2, "gelu", False)
