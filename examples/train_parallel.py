"""Train a model of Transformers whose experts are spread over processes of this machine, or a model in one process.

    torchrun --standalone --nproc-per-node 4 examples/train_parallel.py CHECKPOINT TEXT [--steps 200]
    python examples/train_parallel.py CHECKPOINT TEXT [--experts eager]

Needs Transformers. A step's loss is the mean over --batch windows of the text, which are divided evenly among the
ranks: so the loss does not depend on the number of ranks, or on what computes the experts, except for rounding. An
expert's gradient is computed on the rank that has the expert, from all ranks' tokens. DistributedDataParallel averages
the gradients of the weights that every rank has.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from flashmoe.integrations.transformers import load_parallel
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", type=Path, help="a folder, with tokenizer.json")
parser.add_argument("text", type=Path, help="a UTF-8 text file")
parser.add_argument("--experts", choices=("flashmoe", "eager"), default="flashmoe", help="eager: in one process")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch", type=int, default=4, help="windows per step, a multiple of the ranks")
parser.add_argument("--window", type=int, default=64, help="tokens of each")
args = parser.parse_args()

rank, ranks = 0, int(os.environ.get("WORLD_SIZE", "1"))  # torchrun sets it
if args.batch % ranks:
    parser.error(f"--batch: expected a multiple of {ranks} ranks, got {args.batch}")
if ranks == 1:
    load = {"dtype": torch.float32, "experts_implementation": args.experts}
    model = trained = AutoModelForCausalLM.from_pretrained(args.checkpoint, local_files_only=True, **load).train()
    spread = {}
elif args.experts == "flashmoe":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = load_parallel(args.checkpoint, max_tokens=args.batch // ranks * args.window, dtype=torch.float32).train()
    spread = {name: each for name, each in model.named_parameters() if ".experts." in name}
    leave_out = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
    leave_out(model, list(spread))  # type: ignore[no-untyped-call]
    trained = DistributedDataParallel(model)
else:
    parser.error(f"--experts eager: expected one process, got {ranks}")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95))

tokenizer = PreTrainedTokenizerFast.from_pretrained(args.checkpoint, local_files_only=True)
ids = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8")).input_ids)
generator = torch.Generator().manual_seed(1)
for step in range(args.steps):
    first = torch.randint(len(ids) - args.window, (args.batch, 1), generator=generator).chunk(ranks)[rank]
    windows = ids[first + torch.arange(args.window)]
    loss = trained(input_ids=windows, labels=windows, use_cache=False).loss
    optimizer.zero_grad()
    loss.backward()
    for each in spread.values():
        if each.grad is not None:
            each.grad /= ranks  # it was the gradient of the sum of all ranks' losses; the loss is their mean
    optimizer.step()
    mean = loss.detach() / ranks
    if ranks > 1:
        dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step}: {mean.item():.8f}", flush=True)
if ranks > 1:
    dist.destroy_process_group()
