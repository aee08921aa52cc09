"""The options of the functions that open, plan and write: type, default, check and meaning of each. The
checks of the API, `help()`, the command line and the pages are generated from this table.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict

from .records import asdict, dataclass, replace

#: A path, as callers pass it.
StrPath = str | os.PathLike[str]
#: Dtypes of floating-point tensors in a result.
Dtype = Literal["keep", "bf16", "f16", "f32"]
#: Values of ``accept``, except ``copies=GLOB``.
ACCEPTABLE = (
    "uncommitted",
    "elided-zeros",
    "older-step",
    "renamed",
    "copies",
    "non-finite",
    "holes",
    "part",
    "unconditional",
)
#: Maximum number of ranks of one parallel dimension; no run has as many.
MAX_DEGREE = 1 << 16
#: Severities at or above which a finding can be made an error.
FAIL_ON = ("error", "warning")

#: How the values of an option are checked: ``words`` and ``patterns`` are lists of strings; a ``degree`` is a
#: number of ranks; a ``size`` describes the checkpoint; a ``choice`` is one of several words; ``any`` is
#: checked where it is used.
Kind = Literal[
    "any",
    "choice",
    "degree",
    "mapping",
    "number",
    "pair",
    "path",
    "patterns",
    "size",
    "source",
    "switch",
    "word",
    "words",
]


@dataclass(frozen=True)
class Option:
    """An option. None is a valid value if it is the default."""

    kind: Kind
    help: str
    default: Any = None
    #: Placeholder for the value on the command line.
    metavar: str | None = None
    #: The words of a ``choice``; for a ``switch``, the command line's words for True and False.
    choices: tuple[str, ...] = ()
    #: The largest value of a ``size``.
    most: int = (1 << 48) - 1
    #: Its name in the API.
    name: str = ""
    #: Its description in the API reference, if that is longer than the command line's help.
    meaning: str = ""
    #: False if the processes that write a result together may have different values.
    is_common: bool = True
    #: False if only the API has the option.
    is_on_command_line: bool = True

    @property
    def flag(self) -> str:
        """Spelling on the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def departure(self) -> str:
        """Spelling of a value other than the default on the command line."""
        return self.flag.replace("--", "--no-", 1) if self.default is True else self.flag


class Source(TypedDict, total=False):
    """Options of :func:`fastshard.open`, except the vocabulary."""

    storage_options: Annotated[
        Mapping[str, str] | None,
        Option(
            "any",
            "settings of stores: endpoint, region, credentials",
            meaning="settings for all stores that addresses name, under the names that obstore uses "
            "(``endpoint``, ``region``, ``access_key_id``, ...) or the hub (``endpoint``, "
            "``token``). They override the environment and are neither logged nor saved.",
            is_on_command_line=False,
        ),
    ]
    step: Annotated[
        str | int | None,
        Option(
            "any",
            "step to use, by name or number, or latest (default: the step of the tracker file, else the "
            "newest)",
            metavar="N",
        ),
    ]
    prefix: Annotated[
        str | None,
        Option(
            "word",
            "use the model whose tensor names begin with NAME, if a trainer saved several (model, ema, "
            "state_dict)",
            metavar="NAME",
        ),
    ]
    config: Annotated[
        StrPath | Mapping[str, Any] | None,
        Option(
            "mapping",
            "the model's config.json, or a training config of GPT-NeoX, Megatron-LM or MaxText; it "
            "overrides what the checkpoint states",
            metavar="FILE",
        ),
    ]
    layout: Annotated[
        StrPath | None, Option("path", "your own layout table (TOML) for the source", metavar="FILE")
    ]
    adapter: Annotated[
        StrPath | None,
        Option(
            "path",
            "a LoRA adapter of PEFT to merge into the weights: its directory, or its adapter_config.json if "
            "CKPT holds the adapter",
            metavar="DIR",
        ),
    ]
    fill_from: Annotated[
        StrPath | None,
        Option(
            "path",
            "take parts that no file holds (a frozen tower, MTP layers, buffers) from this model, which is "
            "the one that training began with. If only a part was trained, it replaces that part of the "
            "model",
            metavar="DIR",
        ),
    ]
    fill_only: Annotated[
        Iterable[str],
        Option(
            "patterns",
            "also take these tensors from --fill-from if the checkpoint lacks them",
            (),
            metavar="GLOB",
        ),
    ]
    accept: Annotated[
        Iterable[str],
        Option(
            "words",
            "accept one kind of error: a save that was not committed; absent chunks (FS111) as zeros; an "
            "older step if the newest cannot be used (FS104); files that were renamed on purpose (FS113); "
            "NaN and infinite values (FS306); more than 1 GiB of holes in a file, in place of tensors "
            "(FS317); files, or those that copies=GLOB names, that were copied on purpose (FS303); only one "
            "part of a checkpoint (FS118); a destination in a store that ignores conditional writes "
            "(FS514). WHAT: " + ", ".join(ACCEPTABLE),
            (),
            metavar="WHAT",
        ),
    ]
    expect_processes: Annotated[
        int | None,
        Option(
            "size",
            "number of processes that wrote the checkpoint, if its files do not state it (Orbax)",
            metavar="N",
            most=MAX_DEGREE,
        ),
    ]
    transformers: Annotated[
        Literal["auto", "off"],
        Option(
            "choice",
            "auto (default): for a model family without a layout table, the installed transformers lists "
            "the tensors that the config requires when a checkpoint is verified or written. "
            "FASTSHARD_TRANSFORMERS=off in the environment turns this off",
            "auto",
            choices=("auto", "off"),
        ),
    ]


class Gating(TypedDict, total=False):
    """Options that select which findings are errors."""

    fail_on: Annotated[
        Literal["error", "warning"] | None,
        Option("choice", "warning: count each warning as an error (exit code 1)", choices=FAIL_ON),
    ]
    error: Annotated[
        Iterable[str],
        Option(
            "words", "count warnings and notes with this code as errors (exit code 1)", (), metavar="CODE"
        ),
    ]
    ignore: Annotated[
        Iterable[str],
        Option(
            "words",
            "hide warnings and notes with this code; --json and manifests still list them. Errors cannot be "
            "ignored: see --accept",
            (),
            metavar="CODE",
        ),
    ]


class Vocabulary(TypedDict, total=False):
    """Options for the vocabulary size."""

    vocab_size: Annotated[
        int | None, Option("size", "true vocabulary size; rows beyond it are dropped", metavar="N")
    ]


class Against(TypedDict, total=False):
    """References with which functions compare a checkpoint when they open it."""

    like: Annotated[
        StrPath | None,
        Option(
            "path",
            "a good checkpoint of the same model: names, shapes and dtypes must match it. Pass a directory, "
            "a file of tensors, an index or a config.json; only headers are read",
            metavar="DIR|FILE",
        ),
    ]


class Threads(TypedDict, total=False):
    """The number of threads."""

    threads: Annotated[int | None, Option("any", "worker threads (default: all cores)", metavar="N")]


class Opening(Source, Gating, Vocabulary, total=False):
    """Options of :func:`fastshard.open`, except the threads."""


class OpenOptions(Opening, Against, Threads, total=False):
    """Options of :func:`fastshard.open`."""


class Threaded(Source, Gating, Threads, total=False):
    """Options of :func:`fastshard.open`, for functions that get the vocabulary elsewhere."""


class Placing(TypedDict, total=False):
    """Options of targets. Each target lists the options that it supports."""

    tp: Annotated[int, Option("degree", "tensor-parallel degree of the result", 1, metavar="N")]
    pp: Annotated[int, Option("degree", "pipeline-parallel degree of the result", 1, metavar="N")]
    ep: Annotated[int, Option("degree", "expert-parallel degree of the result", 1, metavar="N")]
    etp: Annotated[
        int | None,
        Option(
            "degree",
            "tensor-parallel degree of expert tensors (default: that of the other tensors)",
            metavar="N",
        ),
    ]
    make_vocab_size_divisible_by: Annotated[
        int | None,
        Option(
            "number",
            "pad the vocabulary to a multiple of this times tp (default: the source's value, else 128)",
            metavar="N",
        ),
    ]
    param_scan_axis: Annotated[
        int | None, Option("number", "MaxText: axis of the stacked layers (default: 1)", metavar="N")
    ]
    fused_qkv: Annotated[
        bool | None,
        Option(
            "switch",
            "MaxText's GPT-3: store queries, keys and values in one projection (default: as in the source)",
        ),
    ]
    rope_type: Annotated[
        Literal["default", "llama3.1"] | None,
        Option(
            "choice",
            "MaxText: the rotary embedding that the result will run with. It decides the order of queries "
            "and keys (default: as MaxText's own converter writes: llama3.1 for Llama and Mistral, default "
            "for Mixtral and Qwen3)",
            choices=("default", "llama3.1"),
        ),
    ]
    stacked_experts: Annotated[
        bool,
        Option(
            "switch",
            "DCP, universal: stack the experts, as a model of transformers 5 has them in memory (default: "
            "one by one, as in version 4 and in files)",
            False,
        ),
    ]
    zarr2: Annotated[
        bool, Option("switch", "write plain zarr v2, for Pathways, instead of OCDBT and zarr v3", False)
    ]
    card: Annotated[
        bool,
        Option(
            "switch",
            "Hugging Face: draft a model card (README.md) if none is copied (default: yes)",
            True,
        ),
    ]


class Planned(Threaded, Against, Placing, total=False):
    """Options that :func:`fastshard.plan` passes to :func:`fastshard.open` and to the target."""


class Choosing(TypedDict, total=False):
    """Options that select tensors."""

    include: Annotated[Iterable[str], Option("patterns", "only these tensors", (), metavar="GLOB")]
    exclude: Annotated[Iterable[str], Option("patterns", "not these tensors", (), metavar="GLOB")]


class ValueOptions(Choosing, total=False):
    """Options for the values of a result's tensors, independent of their names."""

    dtype: Annotated[
        Dtype,
        Option(
            "choice",
            "dtype of floating-point tensors (default: keep)",
            "keep",
            choices=("keep", "bf16", "f16", "f32"),
        ),
    ]
    keep_dtype: Annotated[
        Literal["auto", "none"],
        Option(
            "choice",
            "auto (default): with --dtype bf16 or f16, tensors that a model computes with in float32 keep "
            "their stored dtype (router biases, A_log, dt_bias, and others that the transformers class or "
            "the layout names); none: every floating-point tensor is cast",
            "auto",
            choices=("auto", "none"),
        ),
    ]
    replicas: Annotated[
        Literal["equal", "mean"],
        Option(
            "choice",
            "if copies of a replicated tensor differ: refuse (default), or average in float32",
            "equal",
            choices=("equal", "mean"),
        ),
    ]
    weights: Annotated[
        Literal["params", "masters"] | None,
        Option(
            "choice",
            "which copy of the weights to use if there are fp32 master weights too (default: params if "
            "stored; both must agree)",
            choices=("params", "masters"),
        ),
    ]
    optimizer: Annotated[
        bool,
        Option("switch", "include the optimizer state (merge; --to dcp, universal, maxtext, orbax)", False),
    ]


class Shaping(ValueOptions, Placing, total=False):
    """Options that control how tensors are converted."""


class Sharding(TypedDict, total=False):
    """Options that control how tensors are divided into files."""

    max_shard_size: Annotated[
        str | int, Option("any", "maximum bytes of tensors in a file (default: 5GB)", "5GB", metavar="SIZE")
    ]


class Traced(Opening, Against, Shaping, Sharding, total=False):
    """Options that :func:`fastshard.trace` passes to :func:`fastshard.open` and :func:`fastshard.plan`."""


class Checked(TypedDict, total=False):
    """Options for checking a source, and for writing the result."""

    expect: Annotated[
        StrPath | Mapping[str, Any] | None,
        Option("mapping", "a manifest or config to check the source against", metavar="FILE"),
    ]
    tokenizer: Annotated[
        StrPath | None,
        Option(
            "path",
            "take tokenizer files from here: a directory, or a vocabulary file (default: the files next to "
            "the source)",
            metavar="DIR",
        ),
    ]


class Viewing(Shaping, Checked, total=False):
    """Options of :func:`fastshard.open` with a target."""


class Viewed(OpenOptions, Viewing, total=False):
    """All options of :func:`fastshard.open` with a target, for the checkpoint and for the result."""


class Loading(Opening, Against, Viewing, Threads, total=False):
    """Options of :func:`fastshard.load_model` for the checkpoint."""


class Evaluating(TypedDict, total=False):
    """Options of :func:`fastshard.loss` for the text and for its expected loss."""

    text: Annotated[
        StrPath | None,
        Option("path", "a UTF-8 text file (default: a page of text in the package)", metavar="FILE"),
    ]
    tokens: Annotated[
        Any,
        Option(
            "any",
            "token ids instead of a text: a .json, .npy or .safetensors file with one or two dimensions",
            metavar="FILE",
        ),
    ]
    expect_loss: Annotated[
        float | None,
        Option(
            "any",
            "the loss that the trainer computed on the same tokens; a different loss is an error",
            metavar="X",
        ),
    ]
    tolerance: Annotated[
        float | None, Option("any", "maximum distance from the expected loss (default: 0.02)", metavar="Y")
    ]
    sequence_length: Annotated[
        int,
        Option(
            "size", "maximum number of tokens in a sequence (default: 512)", 512, metavar="N", most=1 << 24
        ),
    ]
    max_tokens: Annotated[
        int,
        Option(
            "size",
            "maximum number of tokens in total (default: 2048); they are computed together, so that each "
            "weight is read once",
            2048,
            metavar="N",
            most=1 << 30,
        ),
    ]
    device: Annotated[
        Any, Option("any", "device of torch that computes: cpu, cuda or another one", "cpu", metavar="DEVICE")
    ]


class CheckingLoss(TypedDict, total=False):
    """Options of :func:`fastshard.convert` for the loss of the result."""

    check_loss: Annotated[
        StrPath | None,
        Option(
            "path",
            "compute the loss of the result on a text, or on token ids (.json, .npy, .safetensors), before "
            "OUT is written; a loss like that of an untrained model is an error; only with --to hf",
            metavar="FILE",
        ),
    ]
    expect_loss: Annotated[
        float | None,
        Option(
            "any",
            "with --check-loss: the loss that the trainer computed on the same tokens; a different loss is "
            "an error",
            metavar="X",
        ),
    ]


class Uploading(TypedDict, total=False):
    """Options of a destination on the Hugging Face Hub."""

    hf_branch: Annotated[
        str | None,
        Option(
            "word",
            "with OUT on the hub (hf://): the branch for the commit, created from main if it does not "
            "exist; the same as hf://ORG/NAME@BRANCH",
            metavar="BRANCH",
        ),
    ]
    hf_pr: Annotated[
        bool,
        Option(
            "switch",
            "with OUT on the hub (hf://): open a pull request, and leave the branch unchanged",
            False,
        ),
    ]


class Comparing(TypedDict, total=False):
    """Options for comparing the files of a source before a result is written."""

    check_hub: Annotated[
        bool,
        Option(
            "switch",
            "before OUT is written, compare files of a Hugging Face download with the hashes in the Hub's "
            "cache, as `fastshard verify` does; each file is read once more",
            False,
        ),
    ]


class Writing(Opening, Against, Shaping, Sharding, Comparing, total=False):
    """Options of functions that publish a result, for the source and for its conversion."""


class Memory(TypedDict, total=False):
    """The memory limit of a run."""

    memory: Annotated[
        str | int | None,
        Option(
            "any",
            "RAM limit of the process; it includes the baseline and excludes the page cache (default: "
            "256MiB, more if the plan alone needs it; no limit for `loss`)",
            metavar="SIZE",
        ),
    ]


class Requested(TypedDict, total=False):
    """Options that control how a result is written, the fields of a :class:`WriteRequest`."""

    resume: Annotated[bool, Option("switch", "continue an interrupted run of the same plan", False)]
    overwrite: Annotated[
        bool,
        Option("switch", "replace OUT if it exists", False, meaning="replace ``out`` if it exists."),
    ]
    fsync: Annotated[
        bool,
        Option(
            "switch",
            "durability (default: full)",
            True,
            choices=("full", "none"),
            meaning="flush everything to disk before the result is put in place.",
            is_common=False,
        ),
    ]
    sparse: Annotated[
        bool,
        Option(
            "switch",
            "leave holes in files instead of zeros",
            False,
            meaning="leave holes in the result's files instead of zeros, and reserve no space.",
        ),
    ]
    io: Annotated[
        Literal["auto", "buffered", "direct"],
        Option(
            "choice",
            "auto (default): bypass the page cache when writing (O_DIRECT) on ext4 and XFS, with --fsync "
            "full; buffered: never bypass it; direct: always bypass it, or fail",
            "auto",
            choices=("auto", "buffered", "direct"),
            meaning='``"auto"`` bypasses the page cache (``O_DIRECT``) on ext4 and XFS with ``fsync``, '
            '``"buffered"`` never, ``"direct"`` always: ``FS515`` on a file system that does not '
            "support it.",
            is_common=False,
        ),
    ]
    stats: Annotated[
        bool,
        Option(
            "switch",
            "write statistics of each tensor to the manifest (see `fastshard stats`)",
            False,
            meaning="write statistics of each tensor to the manifest; with ``resume`` everything is written "
            "again.",
        ),
    ]


@dataclass(frozen=True)
class WriteRequest:
    """The settings of one write, with a value for each option of :class:`Requested`."""

    resume: bool
    overwrite: bool
    fsync: bool
    sparse: bool
    io: str
    stats: bool

    @classmethod
    def of(cls, **options: Any) -> "WriteRequest":
        """Make a request from some options; the others have their defaults."""
        return cls(**{name: option.default for name, option in table(Requested).items()} | options)

    def to_dict(self) -> dict[str, Any]:
        """Return the options by name, as the core reads them; it refuses a name that it does not know."""
        return asdict(self)

    def list_common(self) -> dict[str, Any]:
        """Return the options that must be equal in all processes that write a result together."""
        common = (name for name, option in table(Requested).items() if option.is_common)
        return {name: getattr(self, name) for name in common}


def split_request(options: Mapping[str, Any]) -> tuple[WriteRequest, dict[str, Any]]:
    """Split the options of a call into the request of a write, and the others."""
    known = table(Requested)
    request = WriteRequest.of(**{name: value for name, value in options.items() if name in known})
    return request, {name: value for name, value in options.items() if name not in known}


class WriteOptions(Writing, Requested, total=False):
    """Options of functions that publish a result: for the source, its conversion, and writing."""


class Publishing(Memory, Requested, total=False):
    """Options that control how a result is written, with the memory limit and the progress callback."""

    progress: Annotated[
        Any, Option("any", "report progress on stderr, or to a function of (bytes done, total bytes)", False)
    ]


class Published(Writing, Checked, Threads, Publishing, total=False):
    """Options of all functions that publish a result, besides the source and the destination."""


class Ranked(TypedDict, total=False):
    """The rank of this process among several."""

    rank: Annotated[
        int | Literal["auto"] | None,
        Option(
            "any",
            "rank of this process, from 0, or auto: as torchrun, srun, mpirun or Kubernetes state it "
            "(default: one process)",
            metavar="I",
        ),
    ]
    world: Annotated[int | None, Option("number", "number of ranks, if no launcher states it", metavar="N")]
    timeout: Annotated[
        float | None, Option("any", "how long ranks wait for each other (default: 600)", metavar="SECONDS")
    ]


class Lending(TypedDict, total=False):
    """The option for checkpoints that are distributed over the ranks' own disks."""

    node_local: Annotated[
        bool,
        Option(
            "any",
            "with --rank or --ray: CKPT is the part of the checkpoint on the local disk of this host (of "
            "each node); tensors that need files of several hosts are exchanged through OUT's storage",
            False,
        ),
    ]


class Merging(Published, Ranked, Lending, Uploading, total=False):
    """Options of :func:`fastshard.merge`, besides the source and the destination."""


class Clustered(TypedDict, total=False):
    """The cluster on which a run works."""

    address: Annotated[
        str | None,
        Option(
            "any",
            "address of the cluster: auto, HOST:PORT, or local for a separate Ray instance on this host",
            metavar="ADDRESS",
        ),
    ]
    parts: Annotated[int | None, Option("any", "number of parts of the work (default: one for each node)")]
    cpus: Annotated[int | None, Option("any", "CPU cores for each part (default: all cores of a node)")]
    retries: Annotated[int, Option("any", "how often a part is retried after its worker died", 3)]


class Spread(Published, Clustered, Lending, total=False):
    """Options of :func:`fastshard.ray.merge`, besides the source and the destination."""


#: Arguments and options that individual functions declare themselves.
_OF_FUNCTIONS = {
    "source": Option("source", "a path, several node-local ones, or an opened checkpoint"),
    "a": Option("source", "one checkpoint"),
    "b": Option("source", "the other"),
    "out": Option("path", "destination directory"),
    "to": Option("any", "the target"),
    "certificates": Option("patterns", "", ()),
    "signature": Option("path", ""),
    "public_key": Option("path", ""),
    "subset": Option("pair", "part n of t"),
    "drop_optimizer": Option("switch", "", False),
}


@functools.cache
def table(kind: type) -> dict[str, Option]:
    """Return the options of a type in this module, by name, in the type's order."""
    return {name: replace(hint.__metadata__[0], name=name) for name, hint in kind.__annotations__.items()}


#: Options that shape a plan.
PLANNING = table(Writing).keys() - (
    table(Source).keys() | table(Gating).keys() | table(Against).keys() | table(Comparing).keys()
)
#: Options of any function.
ALL: dict[str, Option] = (
    table(Merging) | table(Spread) | table(Viewed) | table(CheckingLoss) | table(Evaluating)
)
ALL |= {name: replace(option, name=name) for name, option in _OF_FUNCTIONS.items()}
