def write(out, page): return []
