"""Train a model of Transformers whose experts are spread over processes of this machine.

    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py CHECKPOINT TEXT [STEPS]

Needs Transformers. Each rank reads a window of the text, and a step's loss is the mean of all ranks'. An expert's
gradient is made where it is, of all ranks' tokens; DistributedDataParallel averages those of what every rank has.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from flashmoe.integrations.transformers import load_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerFast

WINDOW = 64

path, text, *steps = sys.argv[1:]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = load_parallel(path, max_tokens=WINDOW, dtype=torch.float32).train()
experts = {name: each for name, each in model.named_parameters() if ".experts." in name}
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(experts))
wrapped = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))

tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(path) / "tokenizer.json"))
ids = torch.tensor(tokenizer(Path(text).read_text(encoding="utf-8")).input_ids)
generator = torch.Generator().manual_seed(1)
for step in range(int(steps[0]) if steps else 200):
    first = torch.randint(len(ids) - WINDOW, (ranks,), generator=generator)[rank]
    window = ids[None, first : first + WINDOW]
    loss = wrapped(input_ids=window, labels=window, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    for each in experts.values():
        each.grad /= ranks  # of the sum of all ranks' losses
    optimizer.step()
    mean = loss.detach() / ranks
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: {mean.item():.6f}", flush=True)
dist.destroy_process_group()
