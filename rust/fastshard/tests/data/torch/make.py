"""Writes the torch files of this folder and `expected.json`. Run: `python make.py` (torch 2.x, numpy)."""

import argparse
import collections
import dataclasses
import enum
import io
import json
import pathlib
import pickle
import shutil
import zipfile

import numpy
import torch
import torch.distributed.checkpoint as dcp

HERE = pathlib.Path(__file__).parent
EXPECTED = {}


def logical_bytes(tensor):
    """Little-endian C-order bytes of the values."""
    return bytes(tensor.detach().resolve_conj().contiguous().clone().untyped_storage())


def listing(root):
    """Paths of the tensors in dicts, lists and tuples; each container is entered once."""
    found, entered = [], set()

    def walk(path, value):
        if isinstance(value, torch.Tensor):
            found.append(
                {
                    "path": path,
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "shape": list(value.shape),
                    "strides": list(value.stride()),
                    "hex": logical_bytes(value).hex(),
                }
            )
        elif isinstance(value, (dict, list, tuple)) and id(value) not in entered:
            entered.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                if isinstance(key, tuple):
                    key = "(" + ", ".join(map(str, key)) + ")"
                walk([*path, str(key)], item)

    walk([], root)
    return found


def save(name, value, **options):
    torch.save(value, HERE / name, **options)
    EXPECTED[name] = {"tensors": listing(value)}


def refuse(name, value, code, word, **options):
    torch.save(value, HERE / name, **options)
    EXPECTED[name] = {"refused": code, "word": word}


def rezip(source, name, compression, zip64):
    with zipfile.ZipFile(HERE / source) as old, zipfile.ZipFile(HERE / name, "w", compression) as new:
        for member in old.infolist():
            with new.open(member.filename, "w", force_zip64=zip64) as out:
                out.write(old.read(member))
    EXPECTED[name] = EXPECTED[source]


def example(*shape, dtype=torch.float32, start=1):
    count = int(numpy.prod(shape, dtype=int))
    if dtype == torch.bool:
        return (torch.arange(start, start + count) % 3 == 0).reshape(shape)
    if dtype.is_complex:
        real = torch.arange(start, start + count, dtype=torch.float64)
        return torch.complex(real, -real / 2).to(dtype).reshape(shape)
    return torch.arange(start, start + count).to(torch.float32).to(dtype).reshape(shape)


DTYPES = """bool uint8 int8 uint16 int16 uint32 int32 uint64 int64 float16 bfloat16 float32 float64 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu""".split()


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    where: torch.Tensor


class Subclass(torch.Tensor):
    pass


class Settings(dict):
    pass


def nested():
    numpy.random.seed(1)
    shared = {"inner": example(2, start=7)}
    value = {
        "module": collections.OrderedDict(weight=example(2, 3), bias=example(3, dtype=torch.bfloat16)),
        "args": argparse.Namespace(lr=1e-3, name="tiny", flags=[True, None]),
        "rng": numpy.random.get_state(),
        "torch_rng": example(16, dtype=torch.uint8),
        "set": {1},
        "frozen": frozenset({"a"}),
        "enum": Colour.RED,
        "point": Point(3, example(2, start=20)),
        "_extra_state": io.BytesIO(b"\x00\xff extra"),
        "settings": Settings(depth=2),
        "counts": collections.defaultdict(list, a=[example(1)]),
        "bytes": b"\x00\x80\xff",
        "array": bytearray(b"\x01\x02"),
        "big": 1 << 70,
        "negative": -(1 << 40),
        "float": 0.1,
        "text": "m\u00fcnchen \U0001f600",
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "scalar": numpy.float64(2.5),
        "once": shared,
        "again": shared,
        3: example(1, start=9),
        (1, "a"): [example(1, start=10), (example(1, start=11),)],
    }
    value["itself"] = value
    return value


def main():
    for old in HERE.iterdir():
        if old.suffix in {".pt", ".distcp", ".metadata"}:
            old.unlink()

    dtypes = {}
    for name in DTYPES:
        dtype = getattr(torch, name)
        dtypes[name] = {
            "matrix": example(2, 3, dtype=dtype),
            "scalar": example(1, dtype=dtype).reshape(()),
            "empty": example(0, 4, dtype=dtype),
        }
    save("dtypes.pt", dtypes)

    base = example(4, 6)
    wide = example(3, 4, dtype=torch.uint16)
    save(
        "views.pt",
        {
            "base": base,
            "row": base[2],
            "block": base[1:3, 2:5],
            "transposed": base.t(),
            "permuted": example(2, 3, 4).permute(2, 0, 1),
            "stepped": base[::2, ::3],
            "expanded": example(3, 1).expand(3, 5),
            "expanded_scalar": torch.tensor(4.0).expand(2, 2),
            "empty_view": base[4:],
            "tied": base,
            "wide": wide,
            "wide_row": wide[1, 1:],
        },
    )

    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(example(*parameter.shape, start=i))
    parameter = torch.nn.Parameter(example(2, 2))
    marked = torch.nn.Parameter(example(2, 2))
    marked.tensor_model_parallel = True
    attributed = example(2)
    attributed.note = "kept by torch, dropped here"
    save(
        "state_dict.pt",
        {
            "model": model.state_dict(),
            "parameter": parameter,
            "marked": marked,
            "attributed": attributed,
            "subclass": example(3).as_subclass(Subclass),
        },
    )
    for protocol in range(1, 6):
        value = nested()
        if protocol < 2:
            del value["_extra_state"]  # BytesIO needs protocol 2
        save(f"protocol{protocol}.pt", value, pickle_protocol=protocol)
    save("root_tensor.pt", example(2, 2))
    save("root_list.pt", [example(1), (example(2), {"a": example(3)})])
    save("no_tensor.pt", {"iteration": 7})
    save("hidden.pt", argparse.Namespace(sparse=torch.eye(2).to_sparse(), weight=example(2)))
    rezip("views.pt", "deflated.pt", zipfile.ZIP_DEFLATED, False)
    rezip("protocol2.pt", "zip64.pt", zipfile.ZIP_STORED, True)

    refuse("legacy.pt", {"a": example(2)}, "FS514", "torch 1.6", _use_new_zipfile_serialization=False)
    refuse("sparse.pt", {"a": {"b": torch.eye(2).to_sparse()}}, "FS514", "_rebuild_sparse_tensor")
    quantized = torch.quantize_per_tensor(example(4), 0.1, 0, torch.qint8)
    refuse("quantized.pt", {"a": quantized}, "FS514", "_rebuild_qtensor")
    refuse("meta.pt", {"a": torch.empty(3, device="meta")}, "FS514", "_rebuild_meta_tensor_no_storage")
    refuse("conj.pt", {"a": example(3, dtype=torch.complex64).conj()}, "FS514", "conj bit")
    refuse("complex32.pt", {"a": example(2, dtype=torch.complex64).to(torch.complex32)}, "FS514", "complex32")
    refuse("key.pt", {1.5: example(1)}, "FS514", "key")
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), HERE / "torchscript.pt")
    EXPECTED["torchscript.pt"] = {"refused": "FS514", "word": "TorchScript"}

    folder = HERE / "dcp"
    dcp.save({"weight": example(2, 3), "step": 5}, checkpoint_id=folder, no_dist=True)
    (folder / "__0_0.distcp").rename(HERE / "__0_0.distcp")
    (folder / ".metadata").rename(HERE / "dcp.metadata")
    shutil.rmtree(folder)
    with open(HERE / "dcp.metadata", "rb") as file:
        stored = pickle.load(file).storage_data
    weight = next(info for index, info in stored.items() if index.fqn == "weight")
    EXPECTED["__0_0.distcp"] = {
        "tensors": listing(example(2, 3)),
        "range": [weight.offset, weight.length],
    }
    (HERE / "expected.json").write_text(json.dumps(EXPECTED, indent=1) + "\n")


main()
