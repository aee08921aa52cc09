"""Rank files of DTensors without processes, as each version of torch spells them.

Only torch itself of a version would write them; names and fields are those of its sources (device_mesh.py,
tensor/placement_types.py of 2.3 to 2.15), put into streams by hand.
"""

from __future__ import annotations

import io
import itertools
import pickle
from pathlib import Path
from typing import Any

import torch


class Named:
    """An object of a class of some other version, by its name and state."""

    def __init__(self, name: str, state: Any = None, args: tuple[Any, ...] = (), call: bool = False) -> None:
        self.name, self.state, self.args, self.call = name, state, args, call


class Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes names that cannot be imported here."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if not isinstance(obj, Named):
            super().save(obj, save_persistent_id)
        elif (known := self.memo.get(id(obj))) is not None:
            self.write(self.get(known[0]))
        else:
            module, _, name = obj.name.rpartition(".")
            self.write(f"c{module}\n{name}\n".encode())
            if obj.args is not None:
                self.save(obj.args)
                self.write(pickle.REDUCE if obj.call else pickle.NEWOBJ)
            self.memoize(obj)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)


class Module:
    """What torch.save takes for `pickle`."""

    Pickler = Pickler
    dump = staticmethod(pickle.dump)


class Version:
    """The spelling of one version."""

    def __init__(self, minor: int, mesh: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.minor, self.mesh, self.names = minor, mesh, names
        old = minor < 5
        self.classes = "torch.distributed._tensor." if old else "torch.distributed.tensor."
        self.spec = f"{self.classes}placement_types." if old else f"{self.classes}_dtensor_spec."
        self.dtensor = f"{self.classes}api.DTensor" if old else f"{self.classes}DTensor"

    def placement(self, kind: str, **state: int) -> Named:
        return Named(f"{self.classes}placement_types.{kind}", state or None)

    def device_mesh(self, rank: int) -> Named:
        ranks = torch.arange(torch.Size(self.mesh).numel(), dtype=torch.int32)
        at = (ranks.view(self.mesh) == rank).nonzero()[0].tolist()
        state: dict[str, Any] = {"_coordinate_on_dim": at, "_hash": 17 + rank, "_thread_id": None}
        if self.minor < 10:
            state |= {"device_type": "cuda", "mesh": ranks.view(self.mesh), "mesh_dim_names": self.names}
            state["_flatten_mesh_list"] = tuple(ranks.tolist())
        else:
            stride = torch.empty(self.mesh).stride()
            if self.minor < 13:
                layout = {"shape": self.mesh, "stride": stride}
            else:
                flat = "torch.distributed._mesh_layout._FlatLayout"
                axes = [
                    Named(flat, {"shape": (n,), "stride": (s,)})
                    for n, s in zip(self.mesh, stride, strict=True)
                ]
                layout = {"axes": tuple(axes)}
            state |= {
                "_device_type": "cuda",
                "_rank_map": ranks,
                "_mesh_dim_names": self.names,
                "_root_mesh": None,
            }
            state |= {"_layout": Named("torch.distributed._mesh_layout._MeshLayout", layout), "_rank": rank}
            state["_flatten_rank_map"] = tuple(ranks.tolist())
        return Named("torch.distributed.device_mesh.DeviceMesh", state)

    def tensor(
        self, local: torch.Tensor, whole: torch.Tensor, mesh: Named, placements: tuple[Named, ...]
    ) -> Named:
        size, stride = whole.shape, whole.stride()
        meta = Named(f"{self.spec}TensorMeta", args=(size, stride, whole.dtype))
        spec = {"mesh": mesh, "placements": placements, "tensor_meta": meta, "_hash": 3}
        if self.minor >= 10:
            spec["shard_order"] = None
        if self.minor < 13:
            # A frozen dataclass of some versions keeps its state in slots.
            state: Any = {"_local_tensor": local, "_spec": Named(f"{self.spec}DTensorSpec", spec)}
        else:
            state = {"_local_tensor": local, "_spec": Named(f"{self.spec}DTensorSpec", (None, spec))}
        layout = Named("torch.serialization._get_layout", args=("torch.strided",), call=True)
        device = Named("torch.device", args=("cuda", 0), call=True)
        args = (Class(self.dtensor), whole.dtype, size, stride, 0, layout, device, False)
        outer = (Class("torch._utils._rebuild_wrapper_subclass"), Class(self.dtensor), args, (None, state))
        return Named("torch._tensor._rebuild_from_type_v2", args=outer, call=True)


class Class(Named):
    """A class or function itself."""

    def __init__(self, name: str) -> None:
        super().__init__(name, args=None)  # type: ignore[arg-type]


def save(content: dict[str, Any], path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(content, buffer, pickle_module=Module)
    path.write_bytes(buffer.getvalue())


def rank_files(folder: Path, tensors: dict[str, torch.Tensor], world: int, minor: int = 15) -> None:
    """``model_world_size_N_rank_R.pt`` of a model that FSDP2 divides over one mesh."""
    version = Version(minor, (world,), ("fsdp",))
    for rank, shard in itertools.product(range(world), [version.placement("Shard", dim=0)]):
        mesh, content = version.device_mesh(rank), {}
        for name, whole in tensors.items():
            chunks = [*torch.chunk(whole, world), *[whole[:0]] * world]
            content[name] = version.tensor(chunks[rank].clone(), whole, mesh, (shard,))
        save(content, folder / f"model_world_size_{world}_rank_{rank}.pt")
