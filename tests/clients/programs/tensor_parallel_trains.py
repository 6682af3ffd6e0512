"""transformers' `tp_plan="auto"`: a small Llama whose layers are split over the ranks, trained for three steps."""

import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from common import tell
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

dist.init_process_group(sys.argv[1], timeout=timedelta(seconds=60))
rank = dist.get_rank()
with tempfile.TemporaryDirectory() as folder:
    folders = [folder]
    dist.broadcast_object_list(folders)
    if rank == 0:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False)
        LlamaForCausalLM(config).save_pretrained(folder)
    dist.barrier()
    model = AutoModelForCausalLM.from_pretrained(folders[0], tp_plan="auto", dtype=torch.float32)
    dist.barrier()
split = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
tokens = torch.arange(40).view(2, 20) % 96
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.detach())
assert losses[-1] < losses[0] and split
whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
tell(torch.nn.ParameterList(p.detach() for p in whole), losses)
dist.destroy_process_group()
