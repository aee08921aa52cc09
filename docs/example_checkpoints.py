"""Makes the small checkpoints that the examples in docstrings read, in the current folder.

docs/site.py shows this program on the page of the Python names, and tests/docs runs the examples.
"""

import shutil
from pathlib import Path

import fastshard
from fastshard import examples

# run: a GPT-NeoX run on two tensor-parallel ranks; lossy: the same without one rank file
examples.make("gpt_neox", "run", to="gpt_neox", tp=2)
shutil.copytree("run", "lossy")
Path("lossy/global_step0/layer_03-model_01-model_states.pt").unlink()

# model: the same model for Hugging Face, with a manifest; edited: the same with another output embedding
fastshard.convert("run", "model", to="hf", vocab_size=500)
with fastshard.Writer("edited", expected=fastshard.open("model")) as writer:
    for name, tensor in fastshard.open("model").items():
        writer[name] = tensor.numpy() * (2 if name == "embed_out.weight" else 1)

# steps: a Megatron-LM run with two steps; the newest lacks a rank
examples.make("llama", "steps", to="megatron:legacy", tp=2)
shutil.copytree("steps/release", "steps/iter_0000500")
Path("steps/release").rename("steps/iter_0001000")
shutil.rmtree("steps/iter_0001000/mp_rank_01")
Path("steps/latest_checkpointed_iteration.txt").write_text("1000")

# mylab.toml: a layout table without rules
Path("mylab.toml").write_text('layout = "mylab.llama"\nfamily = "llama"\n')
