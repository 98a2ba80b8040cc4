"""Write a text with a model of Transformers whose experts are spread over processes of this machine.

    torchrun --standalone --nproc-per-node 2 examples/generate.py [--gpu] CHECKPOINT "It was a truth"

Needs Transformers. With --gpu each rank uses a GPU. PyTorch's process group is only used to bring the ranks together.
"""

import os
import sys

import torch
import torch.distributed as dist
from flashmoe.integrations.transformers import load_parallel
from transformers import AutoTokenizer

*gpu, path, prompt = sys.argv[1:]
dist.init_process_group("gloo")
device = f"cuda:{os.environ['LOCAL_RANK']}" if gpu else "cpu"
if gpu:
    torch.cuda.set_device(device)
model = load_parallel(path, max_tokens=4096, device=device)
tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
text = tokenizer.decode(model.generate(ids, max_new_tokens=50, do_sample=False, synced_gpus=True)[0])
print(f"rank {dist.get_rank()}: {text}\n", end="", flush=True)  # one write, so that lines of several ranks do not mix
dist.destroy_process_group()
