"""Output folders of trainers, as each leaves them: ``LAYOUTS[name](RUN)`` writes one, and returns tensors.

A run has two steps. Where the trainer's own code can run in one process, it writes the files; else torch's
own writers do, under the names that the trainer's sources give.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForTokenClassification

Weights = dict[str, torch.Tensor]

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {f"w{n}": n for n in range(40)}, "unk_token": "w0"},
    },
    "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"},
}
RANKS = 2
#: The steps of each run.
OLD, NEW = 10, 20


def config() -> LlamaConfig:
    return LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config())


def weights(seed: int) -> Weights:
    """The tensors of the model of a step."""
    return {name: tensor.detach().clone() for name, tensor in make_model(seed).state_dict().items()}


def value_weights(seed: int) -> Weights:
    """The tensors of a critic: another head."""
    torch.manual_seed(seed + 1000)
    model = LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=1))
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_text(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def write_torch(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def write_tokenizer(folder: Path) -> None:
    for name, content in TOKENIZER.items():
        write_json(folder / name, content)


def write_companions(folder: Path, critic: bool = False) -> None:
    """Config and tokenizer, as ``save_pretrained`` leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    own = LlamaConfig(**SIZES, num_labels=1, architectures=["LlamaForTokenClassification"])
    (own if critic else config()).save_pretrained(folder)
    write_tokenizer(folder)


def write_model(folder: Path, tensors: Weights) -> None:
    """A complete model of transformers."""
    write_companions(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(folder: Path, seed: int) -> Weights:
    """An adapter of PEFT; the tensors that it holds."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    prefix = "base_model.model.model.layers"
    tensors = {}
    for layer in range(2):
        tensors[f"{prefix}.{layer}.self_attn.q_proj.lora_A.weight"] = torch.randn(4, 16)
        tensors[f"{prefix}.{layer}.self_attn.q_proj.lora_B.weight"] = torch.randn(16, 4)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    write_json(folder / "adapter_config.json", settings | {"task_type": "CAUSAL_LM"})
    return tensors


def write_dcp(folder: Path, state: dict[str, Any]) -> None:
    """As torch's own writer does, of one process."""
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def moments(tensors: Weights) -> dict[str, Any]:
    """An optimizer's state by parameters' names, as ``get_optimizer_state_dict`` gives it."""
    state = {
        name: {"step": torch.tensor(3.0), "exp_avg": tensor * 0.5, "exp_avg_sq": tensor * tensor}
        for name, tensor in tensors.items()
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(tensors)}]}


def write_ranks(folder: Path, tensors: Weights) -> None:
    """Rank files of FSDP2 as verl names them: each rank's parts, by torch's own DTensor."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",))

            def part(whole: torch.Tensor, mesh: Any = mesh) -> torch.Tensor:
                return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)

            parts = {name: part(tensor) for name, tensor in tensors.items()}
            end = f"world_size_{RANKS}_rank_{rank}.pt"
            torch.save(parts, folder / f"model_{end}")
            state = {
                n: {"step": torch.tensor(3.0), "exp_avg": part(t * 0.5), "exp_avg_sq": part(t * t)}
                for n, t in enumerate(tensors.values())
            }
            groups = [{"lr": 0.1, "params": list(range(len(parts)))}]
            torch.save({"state": state, "param_groups": groups}, folder / f"optim_{end}")
            scheduler = {"last_epoch": 3, "_step_count": 4}
            rng = {"cpu": torch.get_rng_state()}
            torch.save({"lr_scheduler": scheduler, "rng": rng}, folder / f"extra_state_{end}")
        finally:
            dist.destroy_process_group()


# --- verl. source: verl trainer/ppo/ray_trainer.py, utils/checkpoint/fsdp_checkpoint_manager.py


def _verl(run: Path, write: Callable[[Path, int], None]) -> Path:
    """A run of verl; ``write`` makes what the workers save into a step's folder."""
    for step in (OLD, NEW):
        write(run / f"global_step_{step}", step)
        write_torch(run / f"global_step_{step}/data.pt", {"_snapshot": {"_snapshot_step": step}})
    write_text(run / "latest_checkpointed_iteration.txt", str(NEW))
    return run


def _fsdp_worker(folder: Path, tensors: Weights, critic: bool = False) -> None:
    write_ranks(folder, tensors)
    write_json(folder / "fsdp_config.json", {"FSDP_version": 2, "world_size": RANKS})
    write_companions(folder / "huggingface", critic)


def verl_fsdp(run: Path) -> Weights:
    _verl(run, lambda folder, step: _fsdp_worker(folder / "actor", weights(step)))
    return weights(NEW)


def verl_fsdp_critic(run: Path) -> Weights:
    def write(folder: Path, step: int) -> None:
        _fsdp_worker(folder / "actor", weights(step))
        _fsdp_worker(folder / "critic", value_weights(step), critic=True)

    _verl(run, write)
    return weights(NEW)


def verl_fsdp_hf(run: Path) -> Weights:
    """With ``hf_model`` among the contents that are saved."""

    def write(folder: Path, step: int) -> None:
        _fsdp_worker(folder / "actor", weights(step))
        write_model(folder / "actor/huggingface", weights(step))

    _verl(run, write)
    return weights(NEW)


def verl_sft(run: Path) -> Weights:
    """The SFT trainer has no roles: rank files lie in the step's folder."""
    _verl(run, lambda folder, step: _fsdp_worker(folder, weights(step)))
    return weights(NEW)


def _dist_ckpt_of_optimizer(folder: Path, tensors: Weights) -> None:
    """What Megatron's dist_checkpointing writes for an optimizer alone."""
    state: dict[str, Any] = {}
    for name, tensor in tensors.items():
        state[f"optimizer.state.exp_avg.{name}"] = tensor * 0.5
        state[f"optimizer.state.exp_avg_sq.{name}"] = tensor * tensor
        state[f"optimizer.state.fp32_param.{name}"] = tensor
    write_dcp(folder, state)
    write_json(folder / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    write_torch(folder / "common.pt", {"optimizer": {"param_groups": []}, "lr_scheduler": {"num_steps": 3}})


def _dist_ckpt_of_extra(folder: Path) -> None:
    write_dcp(folder, {"rng_state/shard_0_1": {"torch_rng_state": [1, 2, 3]}})
    write_json(folder / "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    write_torch(folder / "common.pt", {})


def verl_megatron_hf(run: Path) -> Weights:
    """With a bridge, schema v2: the model under Hugging Face's names, optimizer and RNG as torch_dist.

    source: verl utils/checkpoint/megatron_checkpoint_manager.py, utils/megatron_utils.py
    """

    def write(folder: Path, step: int) -> None:
        actor = folder / "actor"
        write_model(actor / "model/huggingface", weights(step))
        _dist_ckpt_of_optimizer(actor / "optimizer/dist_ckpt", weights(step))
        _dist_ckpt_of_extra(actor / "extra/dist_ckpt")
        write_json(actor / "transformer_config.json", {"num_layers": 2})
        write_json(actor / "ckpt_contents.json", {"schema_version": 2, "global_step": step})

    _verl(run, write)
    return weights(NEW)


def verl_megatron_hf_v1(run: Path) -> Weights:
    """With a bridge, before schema v2: optimizer and RNG in ``dist_ckpt`` beside ``huggingface``."""

    def write(folder: Path, step: int) -> None:
        actor = folder / "actor"
        write_model(actor / "huggingface", weights(step))
        _dist_ckpt_of_optimizer(actor / "dist_ckpt", weights(step))
        write_json(actor / "transformer_config.json", {"num_layers": 2})

    _verl(run, write)
    return weights(NEW)


# --- NeMo Automodel. source: nemo_automodel recipes/base_recipe.py, components/checkpoint/


def _automodel(run: Path, write: Callable[[Path, int], None], links: bool = True) -> None:
    for step in (OLD, NEW):
        folder = run / f"epoch_0_step_{step}"
        write(folder / "model", step)
        write_dcp(folder / "optim", {"optim": moments(weights(step)), "sched": {"num_steps": step}})
        for kind in ("dataloader", "rng"):
            write_torch(folder / kind / f"{kind}_dp_rank_0.pt", {"seen": step})
        write_torch(folder / "step_scheduler.pt", {"step": step, "epoch": 0})
        write_text(folder / "config.yaml", "model:\n  pretrained_model_name_or_path: org/model\n")
        write_json(folder / "losses.json", {"train_loss": 1.0, "val_loss": 2.0})
    if links:
        (run / "LATEST").symlink_to(f"epoch_0_step_{NEW}")
        (run / "LOWEST_VAL").symlink_to(f"epoch_0_step_{OLD}")


def _hf_shards(folder: Path, tensors: Weights) -> None:
    """What torch's HuggingFaceStorageWriter leaves of two ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(RANKS):
        parts, begins = {}, {}
        for name, tensor in tensors.items():
            rows = -(-len(tensor) // RANKS)
            part = tensor[rank * rows : (rank + 1) * rows]
            if len(part):
                parts[name] = part.contiguous()
                begins[name] = {"saved_offsets": [rank * rows] + [0] * (tensor.dim() - 1)}
        save_file(
            parts,
            folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            metadata={"DCP_SHARDING_INFO": json.dumps(begins), "DCP_VERSION": "1.0", "format": "pt"},
        )


def automodel_sharded(run: Path) -> Weights:
    """Safetensors without consolidation; the config lies in a hidden folder."""

    def write(folder: Path, step: int) -> None:
        _hf_shards(folder, weights(step))
        write_companions(folder / ".hf_metadata")
        index = dict.fromkeys(weights(step), 1)
        write_json(folder / ".hf_metadata/fqn_to_file_index_mapping.json", index)

    _automodel(run, write)
    return weights(NEW)


def automodel_consolidated(run: Path) -> Weights:
    def write(folder: Path, step: int) -> None:
        tensors = weights(step)
        _hf_shards(folder, tensors)
        write_companions(folder / ".hf_metadata")
        write_companions(folder / "consolidated")
        name = "model-00001-of-00001.safetensors"
        save_file(tensors, folder / "consolidated" / name, metadata={"format": "pt"})
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict.fromkeys(tensors, name)}
        write_json(folder / "consolidated/model.safetensors.index.json", index)

    _automodel(run, write)
    return weights(NEW)


def automodel_dcp(run: Path) -> Weights:
    _automodel(run, lambda folder, step: write_dcp(folder, dict(weights(step))))
    return weights(NEW)


def automodel_peft(run: Path) -> Weights:
    def write(folder: Path, step: int) -> None:
        write_adapter(folder, step)
        write_json(folder / "automodel_peft_config.json", {"match_all_linear": False})
        write_tokenizer(folder)

    _automodel(run, write)
    return write_adapter(run.with_name(f"{run.name}-alone"), NEW)


# --- accelerate, by its own code where one process is enough


def _accelerate_rest(folder: Path, models: int = 1, ranks: int = 1) -> None:
    for n in range(models):
        end = f"_{n}" if n else ""
        write_torch(folder / f"scheduler{end}.bin", {"last_epoch": 3, "_step_count": 4})
    for rank in range(ranks):
        write_torch(folder / f"random_states_{rank}.pkl", {"step": 3})
    write_torch(folder / "sampler.bin", {"epoch": 0})
    write_torch(folder / "scaler.pt", {"scale": 1.0})


def accelerate_plain(run: Path, models: int = 1) -> Weights:
    """``save_state`` with automatic naming, by accelerate itself."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    settings = ProjectConfiguration(project_dir=str(run), automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=settings)
    made = [make_model(10 + n) for n in range(models)]
    for model in made:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        accelerator.prepare(model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))
    for step in range(2):
        for model in made:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(step + 1)
        accelerator.save_state()
    accelerator.free_memory()
    return {name: tensor.detach().clone() for name, tensor in made[0].state_dict().items()}


def accelerate_two_models(run: Path) -> Weights:
    return accelerate_plain(run, models=2)


def accelerate_fsdp(run: Path) -> Weights:
    """SHARDED_STATE_DICT. source: accelerate utils/fsdp_utils.py"""
    for n, step in enumerate((OLD, NEW)):
        folder = run / f"checkpoints/checkpoint_{n}"
        write_dcp(folder / "pytorch_model_fsdp_0", {"model": weights(step)})
        write_dcp(folder / "optimizer_0", {"optimizer": moments(weights(step))})
        _accelerate_rest(folder, ranks=2)
    return weights(NEW)


def accelerate_fsdp_full(run: Path) -> Weights:
    """FULL_STATE_DICT."""
    for n, step in enumerate((OLD, NEW)):
        folder = run / f"checkpoints/checkpoint_{n}"
        write_torch(folder / "pytorch_model_fsdp.bin", weights(step))
        write_torch(folder / "optimizer.bin", moments(weights(step)))
        _accelerate_rest(folder, ranks=2)
    return weights(NEW)


def accelerate_fsdp_two(run: Path) -> Weights:
    """Two models of one trainer, each with its optimizer."""
    for n, step in enumerate((OLD, NEW)):
        folder = run / f"checkpoints/checkpoint_{n}"
        for model in range(2):
            tensors = weights(step + model)
            write_dcp(folder / f"pytorch_model_fsdp_{model}", {"model": tensors})
            write_dcp(folder / f"optimizer_{model}", {"optimizer": moments(tensors)})
        _accelerate_rest(folder, ranks=2)
    return weights(NEW)


# --- transformers' Trainer, as axolotl and LLaMA-Factory run it


def _trainer_rest(folder: Path, step: int, optimizer: bool = True) -> None:
    if optimizer:
        write_torch(folder / "optimizer.pt", {"state": {}, "param_groups": []})
    write_torch(folder / "scheduler.pt", {"last_epoch": step})
    write_torch(folder / "rng_state.pth", {"cpu": torch.get_rng_state()})
    write_json(folder / "trainer_state.json", {"global_step": step, "epoch": 1.0, "log_history": []})
    write_torch(folder / "training_args.bin", {"output_dir": "out"})


def _llama_factory(run: Path) -> None:
    for name in ("all_results.json", "train_results.json"):
        write_json(run / name, {"train_loss": 1.0})
    write_json(run / "trainer_state.json", {"global_step": NEW})
    write_text(run / "trainer_log.jsonl", '{"current_steps": 20, "loss": 1.0}\n')
    write_text(run / "llamaboard_config.yaml", "top.model_name: Llama\n")
    write_text(run / "README.md", "---\nlibrary_name: transformers\n---\n")
    write_torch(run / "training_args.bin", {"output_dir": "out"})
    (run / "training_loss.png").write_bytes(b"\x89PNG")


def factory_running(run: Path) -> Weights:
    """LLaMA-Factory before the run's end: steps alone."""
    for step in (OLD, NEW):
        write_model(run / f"checkpoint-{step}", weights(step))
        _trainer_rest(run / f"checkpoint-{step}", step)
    write_text(run / "trainer_log.jsonl", '{"current_steps": 20}\n')
    return weights(NEW)


def factory_full(run: Path) -> Weights:
    """LLaMA-Factory at the end of a full tuning: the final model above its steps."""
    factory_running(run)
    _llama_factory(run)
    write_model(run, weights(NEW + 1))
    return weights(NEW + 1)


def factory_lora(run: Path) -> Weights:
    """LLaMA-Factory at the end of LoRA: the final adapter above its steps."""
    for step in (OLD, NEW):
        folder = run / f"checkpoint-{step}"
        write_adapter(folder, step)
        write_tokenizer(folder)
        _trainer_rest(folder, step)
    _llama_factory(run)
    write_tokenizer(run)
    return write_adapter(run, NEW + 1)


def factory_lora_running(run: Path) -> Weights:
    factory_lora(run)
    for path in [p for p in run.iterdir() if p.is_file()]:
        path.unlink()
    return write_adapter(run.with_name(f"{run.name}-alone"), NEW)


def trainer_fsdp(run: Path) -> Weights:
    """FSDP with sharded state dicts: DCP folders in each step; config and tokenizer are the run's."""
    for step in (OLD, NEW):
        folder = run / f"checkpoint-{step}"
        write_dcp(folder / "pytorch_model_fsdp_0", {"model": weights(step)})
        write_dcp(folder / "optimizer_0", {"optimizer": moments(weights(step))})
        _trainer_rest(folder, step, optimizer=False)
        write_companions(folder)
    return weights(NEW)


def axolotl_prepared(run: Path) -> Weights:
    """axolotl: config and tokenizer in the run from its start, tokenised data, steps."""
    write_companions(run)
    write_json(run / "last_run_prepared/abc123/dataset_info.json", {})
    write_text(run / "last_run_prepared/abc123/data-00000-of-00001.arrow", "ARROW1")
    write_text(run / "debug.log", "")
    return factory_running(run)


def axolotl_fsdp(run: Path) -> Weights:
    """axolotl with FSDP: config and tokenizer in the run from its start."""
    trainer_fsdp(run)
    write_companions(run)
    return weights(NEW)


def axolotl_lora_merged(run: Path) -> Weights:
    """axolotl's ``merge-lora`` puts the merged model below the adapter."""
    write_adapter(run, NEW)
    write_companions(run)
    for step in (OLD, NEW):
        write_adapter(run / f"checkpoint-{step}", step)
        _trainer_rest(run / f"checkpoint-{step}", step)
    write_model(run / "merged", weights(NEW + 5))
    return weights(NEW + 5)


LAYOUTS: dict[str, Callable[[Path], Weights]] = {
    made.__name__: made
    for made in (
        verl_fsdp,
        verl_fsdp_critic,
        verl_fsdp_hf,
        verl_sft,
        verl_megatron_hf,
        verl_megatron_hf_v1,
        automodel_sharded,
        automodel_consolidated,
        automodel_dcp,
        automodel_peft,
        accelerate_plain,
        accelerate_two_models,
        accelerate_fsdp,
        accelerate_fsdp_full,
        accelerate_fsdp_two,
        factory_running,
        factory_full,
        factory_lora,
        factory_lora_running,
        trainer_fsdp,
        axolotl_prepared,
        axolotl_fsdp,
        axolotl_lora_merged,
    )
}
