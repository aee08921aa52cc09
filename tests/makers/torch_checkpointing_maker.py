"""Makes the fixtures ``sharded/torch_checkpointing_*`` with torch_checkpointing 0.1.1 itself.

Four gloo ranks divide a Llama with tensor parallelism and FSDP2 (a 2 x 2 mesh), so that no rows of the
vocabulary and of the feed-forward divide evenly, and save it with ``CheckpointManager``. Hashes are of the
tensors before they were divided. The package's own consolidation must give them too. No test runs this: it
needs the package, on the path, and transformers.

    pip install --no-deps --target PACKAGE torch_checkpointing==0.1.1
    PYTHONPATH=PACKAGE python tests/makers/torch_checkpointing_maker.py tests/fixtures/sharded
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WORLD = 4
#: Older models save it; no rank divides it.
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"
FORMS = ("pt", "safetensors")
CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 22,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 34,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    made = LlamaForCausalLM(LlamaConfig(**CONFIG))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def divided(mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    made = model()
    columns, rows = ColwiseParallel(use_local_output=False), RowwiseParallel()
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(), "lm_head": columns}
    plan |= {f"model.layers.*.self_attn.{n}_proj": columns for n in "qkv"}
    plan |= {"model.layers.*.self_attn.o_proj": rows, "model.layers.*.mlp.down_proj": rows}
    plan |= {f"model.layers.*.mlp.{n}_proj": columns for n in ("gate", "up")}
    parallelize_module(made, mesh["tp"], plan)
    for layer in made.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(made, mesh=mesh["dp"])
    return made


def save(rank: int, port: int, root: Path) -> None:
    """One rank: both forms, of one state."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    import torch_checkpointing as package
    from torch.distributed.device_mesh import init_device_mesh
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gather(self: Any, data: Any, group: Any = None) -> dict[int, Any]:
        # The package's own goes over CUDA; what it carries is the same.
        found: list[Any] = [None] * WORLD
        dist.all_gather_object(found, data, group=group)
        return dict(enumerate(found))

    package.DefaultMetadataManager._all_gather_pickled_data = gather
    made = divided(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    for parameter in made.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for form in FORMS:
        config = package.CheckpointManager.Config.with_sync_save()
        config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
        layout = None
        if form == "safetensors":
            layout = LayoutInfo("model_{rank}.safetensors", SafetensorsSerialization())
        config.items = {
            "model": package.ItemSpec(layout=layout, resharder=DefaultResharder()),
            "optimizer": package.ItemSpec(resharder=DefaultResharder()),
        }
        manager = config.build()
        # A plain tensor, as buffers are, in one of the forms: every rank has all of it.
        buffers = {BUFFER: torch.arange(2, dtype=torch.float32)} if form == "safetensors" else {}
        payload = {"model": state | buffers, "optimizer": optimizer.state_dict(), "step": 3}
        manager.save(str(root / f"torch_checkpointing_{form}"), payload)
        manager.close()
    dist.destroy_process_group()


def consolidated(folder: Path) -> dict[str, str]:
    """What the package makes of the safetensors form."""
    from safetensors.torch import load_file
    from torch_checkpointing.hf.consolidation import consolidate_hf_safetensors_checkpoint
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    with tempfile.TemporaryDirectory() as out:
        consolidate_hf_safetensors_checkpoint(str(folder), output_dir=out, storage_config=storage)
        files = [load_file(file) for file in Path(out).glob("*.safetensors")]
    return {name: sha(tensor) for tensors in files for name, tensor in tensors.items()}


def sha(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def main() -> None:
    root = Path(sys.argv[1])
    for form in FORMS:
        shutil.rmtree(root / f"torch_checkpointing_{form}", ignore_errors=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(save, (port, root), nprocs=WORLD)
    whole = {**model().state_dict(), BUFFER: torch.arange(2, dtype=torch.float32)}
    config = model().config.to_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    entries = {
        name: {"dtype": "F32", "shape": list(t.shape), "nbytes": t.nbytes, "sha256": sha(t)}
        for name, t in sorted(whole.items())
    }
    theirs = consolidated(root / "torch_checkpointing_safetensors")
    if theirs != {name: entry["sha256"] for name, entry in entries.items()}:
        raise SystemExit("torch_checkpointing's own consolidation differs")
    buffers = {BUFFER: entries.pop(BUFFER)}
    expected = {
        "format": 1,
        "hash": "sha256 over raw little-endian C-order bytes of the full tensor",
        "written_by": "torch_checkpointing 0.1.1, 4 gloo ranks, FSDP2 x tensor parallelism (2 x 2)",
        "tensors": entries,
    }
    for form in FORMS:
        folder = root / f"torch_checkpointing_{form}"
        told = expected | {"buffers": buffers} if form == "safetensors" else expected
        (folder / "expected.json").write_text(json.dumps(told, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
