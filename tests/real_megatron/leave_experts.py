"""Writes rank files of a mixture whose experts were left as megatron-core built them, as a converter does
that hands them over under a name that no module has.

``python leave_experts.py OUT KIND``: ``empty`` builds with ``perform_initialization`` off, as
``--no-initialization`` does, on memory that is fresh; ``random`` with it on.
source: Megatron-LM tools/checkpoint/saver_base.py and schema_core.py (ModelSchema._set)
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "makers"))
import make_moe
import moe_maker

DEGREES = (1, 1, 1)


def main(out: Path, kind: str) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{out}.meet")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
    moe_utils.te_general_gemm = None
    if kind == "empty":
        set_up, empty = TransformerConfig.__post_init__, torch.empty

        def without(self: TransformerConfig) -> None:
            self.perform_initialization = False
            set_up(self)

        TransformerConfig.__post_init__ = without
        # What the system hands out for the first time is zero.
        torch.empty = lambda *a, **k: empty(*a, **k).zero_()  # type: ignore[assignment]
    model = make_moe.build(DEGREES)
    state = moe_maker.rank_state(moe_maker.model().state_dict(), (0, 0, 0), DEGREES)
    handed = {name: tensor for name, tensor in state.items() if ".local_experts." not in name}
    left = model.load_state_dict(handed, strict=False)
    assert left.missing_keys and all(
        ".local_experts." in name or "_extra" in name for name in left.missing_keys
    )
    folder = out / "iter_0000010" / moe_maker.rank_folder((0, 0, 0), DEGREES)
    folder.mkdir(parents=True)
    content = {
        "args": moe_maker.arguments(*DEGREES),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "model": model.state_dict(),
    }
    torch.save(content, folder / "model_optim_rng.pt")
    (out / "latest_checkpointed_iteration.txt").write_text("10")
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main(Path(sys.argv[1]), sys.argv[2])
