"""Tensor parallelism: two processes give what one does."""

import os
import subprocess
import sys

import pytest
import torch
from laws.cases import assert_close, random_ids, tiny_model

# Loads a model split over the processes and saves what rank 0 sees. Arguments: model folder, output file.
RUN = """
import sys
import torch
import modeling_avgpath
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

folder, file = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan="auto"))
ids = torch.load(file)
local = model.model.layers[0].mixer.q_proj.weight
outputs = model(ids, labels=ids)
outputs.loss.backward()
gradient = model.model.embed_tokens.weight.grad
generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False)
full = lambda tensor: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
results = {
    "logits": full(outputs.logits.detach()), "gradient": full(gradient), "generated": generated,
    "local": getattr(local, "to_local", lambda: local)().shape,
}
if torch.distributed.get_rank() == 0:
    torch.save(results, file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("case, tied", [("softmax_first", False), ("three_cache_kinds", True)])
def test_two_processes_equal_one(case, tied, tmp_path):
    # Sizes that two processes can share.
    model = tiny_model(case, hidden_size=32, vocab_size=96, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "model")
    ids = random_ids(2, 11).clamp(max=95)
    outputs = model(ids, labels=ids)
    outputs.loss.backward()
    torch.save(ids, tmp_path / "exchange.pt")
    (tmp_path / "run.py").write_text(RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
    finished = subprocess.run(
        [*command, tmp_path / "run.py", tmp_path / "model", tmp_path / "exchange.pt"],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr[-3000:]
    results = torch.load(tmp_path / "exchange.pt", weights_only=False)
    whole = model.model.layers[0].mixer.q_proj.weight.shape
    assert results["local"] == (whole[0] // 2, whole[1])
    assert_close(results["logits"], outputs.logits.detach())
    assert_close(results["gradient"], model.model.embed_tokens.weight.grad)
    arguments = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(results["generated"], model.generate(ids, **arguments))
