"""The options of the functions that open, plan and write: type, default, check and meaning of each. The
checks of the API, `help()`, the command line and the pages are generated from this table.
"""

import functools
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypedDict

from .records import asdict, dataclass, replace

#: A path as callers give it.
StrPath = str | os.PathLike[str]
#: Types of floating tensors in a result.
Dtype = Literal["keep", "bf16", "f16", "f32"]
#: What ``accept`` takes: all of it but ``copies=GLOB``.
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
#: Ranks of one parallel dimension at most; no run has as many.
MAX_DEGREE = 1 << 16
#: Severities from which on a finding is an error.
FAIL_ON = ("error", "warning")

#: How the values of an option are checked: ``words`` and ``patterns`` are lists of texts; a ``degree`` is a
#: number of ranks; a ``size`` says something of the checkpoint; a ``choice`` is one of several words; ``any``
#: is checked where it is used.
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
    #: What stands for the value on the command line.
    metavar: str | None = None
    #: The words of a ``choice``; of a ``switch`` those by which the command line calls True and False.
    choices: tuple[str, ...] = ()
    #: The largest value of a ``size``.
    most: int = (1 << 48) - 1
    #: As the API calls it.
    name: str = ""
    #: What the API's pages say of it, where that is more than the command line's help.
    meaning: str = ""
    #: False where each of several processes that make a result together may choose for itself.
    is_common: bool = True
    #: False for what only the API takes.
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
            "settings of stores: the endpoint, the region, credentials",
            meaning="settings of the stores that addresses name, for all of them, by the names of obstore "
            "(``endpoint``, ``region``, ``access_key_id``, ...) or of the hub (``endpoint``, ``token``). "
            "They go before the environment; they are neither logged nor kept.",
            is_on_command_line=False,
        ),
    ]
    step: Annotated[
        str | int | None,
        Option(
            "any",
            "step to take, by name or number, or latest (default: the tracker file's, else the newest)",
            metavar="N",
        ),
    ]
    prefix: Annotated[
        str | None,
        Option(
            "word",
            "take the model whose tensor names begin with NAME, where a trainer saved several (model, ema, "
            "state_dict)",
            metavar="NAME",
        ),
    ]
    config: Annotated[
        StrPath | Mapping[str, Any] | None,
        Option(
            "mapping",
            "the model's config.json, or a training config of GPT-NeoX, Megatron-LM or MaxText: goes before "
            "what the checkpoint states",
            metavar="FILE",
        ),
    ]
    layout: Annotated[
        StrPath | None, Option("path", "a layout table (TOML) of your own for the source", metavar="FILE")
    ]
    adapter: Annotated[
        StrPath | None,
        Option(
            "path",
            "a LoRA adapter of PEFT to be merged into the weights: its folder, or its adapter_config.json "
            "where CKPT holds it",
            metavar="DIR",
        ),
    ]
    fill_from: Annotated[
        StrPath | None,
        Option(
            "path",
            "take parts of which no file holds anything (a frozen tower, MTP layers, buffers) from this "
            "model, with which training began; a part that was trained alone takes its place in it",
            metavar="DIR",
        ),
    ]
    fill_only: Annotated[
        Iterable[str],
        Option(
            "patterns",
            "take single tensors from --fill-from too: those of these names that the checkpoint lacks",
            (),
            metavar="GLOB",
        ),
    ]
    accept: Annotated[
        Iterable[str],
        Option(
            "words",
            "accept one kind of error: a save that was not committed; absent chunks (FS111) as zeros; an "
            "older step "
            "where the newest cannot be used (FS104); files that were renamed on purpose (FS113); NaN and "
            "infinite values (FS306); more than 1 GiB of holes in a "
            "file, in the place of tensors (FS317); files, or those that copies=GLOB names, that were copied "
            "on purpose (FS303); a part of a checkpoint that is named alone (FS118); a destination in a "
            "store that does not honour conditions (FS514). WHAT: " + ", ".join(ACCEPTABLE),
            (),
            metavar="WHAT",
        ),
    ]
    expect_processes: Annotated[
        int | None,
        Option(
            "size",
            "number of processes that wrote the checkpoint, where its files do not state it (Orbax)",
            metavar="N",
            most=MAX_DEGREE,
        ),
    ]
    transformers: Annotated[
        Literal["auto", "off"],
        Option(
            "choice",
            "auto (default): what a config of a family without a layout table promises is listed by the "
            "transformers that is "
            "installed, where a checkpoint is verified or written. The environment's "
            "FASTSHARD_TRANSFORMERS=off turns it off",
            "auto",
            choices=("auto", "off"),
        ),
    ]


class Gating(TypedDict, total=False):
    """Options that choose which findings are errors."""

    fail_on: Annotated[
        Literal["error", "warning"] | None,
        Option("choice", "warning: each warning counts as an error (exit code 1)", choices=FAIL_ON),
    ]
    error: Annotated[
        Iterable[str],
        Option("words", "warnings and notes of this code count as errors (exit code 1)", (), metavar="CODE"),
    ]
    ignore: Annotated[
        Iterable[str],
        Option(
            "words",
            "warnings and notes of this code are not shown; --json and manifests have them. An error is not "
            "ignored: see --accept",
            (),
            metavar="CODE",
        ),
    ]


class Vocabulary(TypedDict, total=False):
    """Options that state the number of tokens."""

    vocab_size: Annotated[
        int | None, Option("size", "true vocabulary; rows beyond it are dropped", metavar="N")
    ]


class Against(TypedDict, total=False):
    """References that functions compare a checkpoint with when they open it."""

    like: Annotated[
        StrPath | None,
        Option(
            "path",
            "a good checkpoint of the same model: names, shapes and dtypes must be its own. A directory, a "
            "file of tensors, an index or "
            "a config.json; by headers alone",
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
    """Options of targets. Each target lists those that it supports."""

    tp: Annotated[int, Option("degree", "tensor-parallel degree of the result", 1, metavar="N")]
    pp: Annotated[int, Option("degree", "pipeline-parallel degree of the result", 1, metavar="N")]
    ep: Annotated[int, Option("degree", "expert-parallel degree of the result", 1, metavar="N")]
    etp: Annotated[
        int | None,
        Option(
            "degree",
            "tensor-parallel degree of the tensors of experts (default: that of others)",
            metavar="N",
        ),
    ]
    make_vocab_size_divisible_by: Annotated[
        int | None,
        Option(
            "number",
            "pad the vocabulary to a multiple of this times tp (default: the source's, else 128)",
            metavar="N",
        ),
    ]
    param_scan_axis: Annotated[
        int | None, Option("number", "MaxText: axis of the stacked layers (default: 1)", metavar="N")
    ]
    fused_qkv: Annotated[
        bool | None,
        Option(
            "switch", "MaxText's GPT-3: one projection for queries, keys and values (default: the source's)"
        ),
    ]
    rope_type: Annotated[
        Literal["default", "llama3.1"] | None,
        Option(
            "choice",
            "MaxText: the rotary embedding that the result will be run with (default: that whose order of "
            "queries and keys MaxText's own converter writes: llama3.1 for Llama and Mistral, default for "
            "Mixtral and Qwen3)",
            choices=("default", "llama3.1"),
        ),
    ]
    stacked_experts: Annotated[
        bool,
        Option(
            "switch",
            "DCP, universal: experts stacked, as a model of transformers 5 has them in memory (default: one "
            "by one, as version 4 and files)",
            False,
        ),
    ]
    zarr2: Annotated[
        bool, Option("switch", "plain zarr v2, for Pathways, instead of OCDBT and zarr v3", False)
    ]
    card: Annotated[
        bool,
        Option(
            "switch",
            "Hugging Face: draft a model card (README.md) where the checkpoint has none (default: yes)",
            True,
        ),
    ]


class Planned(Threaded, Against, Placing, total=False):
    """Options that :func:`fastshard.plan` passes to :func:`fastshard.open` and to the target."""


class Choosing(TypedDict, total=False):
    """Options that choose tensors."""

    include: Annotated[Iterable[str], Option("patterns", "only these tensors", (), metavar="GLOB")]
    exclude: Annotated[Iterable[str], Option("patterns", "not these tensors", (), metavar="GLOB")]


class ValueOptions(Choosing, total=False):
    """Options for the values of a result's tensors, under any names."""

    dtype: Annotated[
        Dtype,
        Option(
            "choice", "of floating tensors (default: keep)", "keep", choices=("keep", "bf16", "f16", "f32")
        ),
    ]
    keep_dtype: Annotated[
        Literal["auto", "none"],
        Option(
            "choice",
            "auto (default): with --dtype bf16 or f16, tensors that a model computes with in float32 (biases "
            "of routers, A_log, dt_bias; "
            "what transformers' class and the layout say) keep the dtype that they are stored in; none: "
            "every floating tensor is cast",
            "auto",
            choices=("auto", "none"),
        ),
    ]
    replicas: Annotated[
        Literal["equal", "mean"],
        Option(
            "choice",
            "copies of a replicated tensor that differ: refuse (default), or average in float32",
            "equal",
            choices=("equal", "mean"),
        ),
    ]
    weights: Annotated[
        Literal["params", "masters"] | None,
        Option(
            "choice",
            "which copy of the weights, where fp32 master weights are there too (default: params where "
            "stored; the two must agree)",
            choices=("params", "masters"),
        ),
    ]
    optimizer: Annotated[
        bool, Option("switch", "optimizer state too (merge; --to dcp, universal, maxtext, orbax)", False)
    ]


class Shaping(ValueOptions, Placing, total=False):
    """Options that choose how tensors are converted."""


class Sharding(TypedDict, total=False):
    """Options that choose how tensors are divided into files."""

    max_shard_size: Annotated[
        str | int, Option("any", "bytes of tensors in a file, at most (default: 5GB)", "5GB", metavar="SIZE")
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
            "take tokenizer files from here: a directory, or a vocabulary file (default: the files beside "
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
        Option("path", "a text file in UTF-8 (default: a page of text in the package)", metavar="FILE"),
    ]
    tokens: Annotated[
        Any,
        Option(
            "any",
            "token ids in the place of a text: a .json, .npy or .safetensors file of one or two dimensions",
            metavar="FILE",
        ),
    ]
    expect_loss: Annotated[
        float | None,
        Option(
            "any",
            "the loss that the trainer computed on the same tokens: another one is an error",
            metavar="X",
        ),
    ]
    tolerance: Annotated[
        float | None, Option("any", "how far the loss may be from it (default: 0.02)", metavar="Y")
    ]
    sequence_length: Annotated[
        int, Option("size", "tokens of a sequence, at most (default: 512)", 512, metavar="N", most=1 << 24)
    ]
    max_tokens: Annotated[
        int,
        Option(
            "size",
            "tokens in all, at most (default: 2048); they are computed at once, so that each weight is read "
            "once",
            2048,
            metavar="N",
            most=1 << 30,
        ),
    ]
    device: Annotated[
        Any, Option("any", "what computes: cpu, cuda or another device of torch", "cpu", metavar="DEVICE")
    ]


class CheckingLoss(TypedDict, total=False):
    """Options of :func:`fastshard.convert` for the loss of the result."""

    check_loss: Annotated[
        StrPath | None,
        Option(
            "path",
            "compute the loss of the result on a text, or on token ids (.json, .npy, .safetensors), before "
            "OUT is written; one as of an untrained model is an error; only with --to hf",
            metavar="FILE",
        ),
    ]
    expect_loss: Annotated[
        float | None,
        Option(
            "any",
            "with --check-loss: the loss that the trainer computed on the same tokens; another one is an "
            "error",
            metavar="X",
        ),
    ]


class Uploading(TypedDict, total=False):
    """Options of a destination on the Hugging Face Hub."""

    hf_branch: Annotated[
        str | None,
        Option(
            "word",
            "with OUT on the hub (hf://): the branch that gets the commit, made from main if it is missing; "
            "the same as hf://ORG/NAME@BRANCH",
            metavar="BRANCH",
        ),
    ]
    hf_pr: Annotated[
        bool,
        Option(
            "switch", "with OUT on the hub (hf://): open a pull request, and leave the branch as it is", False
        ),
    ]


class Comparing(TypedDict, total=False):
    """Options for comparing the files of a source before a result is written."""

    check_hub: Annotated[
        bool,
        Option(
            "switch",
            "compare files of a Hugging Face download with the hashes that the Hub's cache keeps, as "
            "`fastshard verify` does, before OUT "
            "is written; each file is read once more",
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
            "RAM of the process without page cache, baseline included (default: 256MiB, more if the plan "
            "alone needs it; of `loss` no limit)",
            metavar="SIZE",
        ),
    ]


class Requested(TypedDict, total=False):
    """Options that choose how a result is written, the fields of a :class:`WriteRequest`."""

    resume: Annotated[bool, Option("switch", "continue an interrupted run of the same plan", False)]
    overwrite: Annotated[
        bool,
        Option("switch", "replace OUT if it is there", False, meaning="replace ``out`` if it is there."),
    ]
    fsync: Annotated[
        bool,
        Option(
            "switch",
            "durability (default: full)",
            True,
            choices=("full", "none"),
            meaning="bring everything to disk before the result is put in place.",
            is_common=False,
        ),
    ]
    sparse: Annotated[
        bool,
        Option(
            "switch",
            "leave holes in files where they hold zeros",
            False,
            meaning="leave holes in the result's files where they hold zeros, and reserve no space.",
        ),
    ]
    io: Annotated[
        Literal["auto", "buffered", "direct"],
        Option(
            "choice",
            "auto (default): files are written around the page cache (O_DIRECT) on ext4 and XFS, with "
            "--fsync full; buffered: never; "
            "direct: always, or not at all",
            "auto",
            choices=("auto", "buffered", "direct"),
            meaning='``"auto"`` writes around the page cache (``O_DIRECT``) on ext4 and XFS with ``fsync``, '
            '``"buffered"`` '
            'never, ``"direct"`` always: ``FS515`` on a file system that cannot.',
            is_common=False,
        ),
    ]
    stats: Annotated[
        bool,
        Option(
            "switch",
            "statistics of each tensor into the manifest (see `fastshard stats`)",
            False,
            meaning="put statistics of each tensor into the manifest; with ``resume`` everything is made "
            "again.",
        ),
    ]


@dataclass(frozen=True)
class WriteRequest:
    """One write as its caller chooses it, with a value for each option of :class:`Requested`."""

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
    """Options that choose how a result is written, with the memory limit and the progress callback."""

    progress: Annotated[
        Any, Option("any", "how far it is, on stderr, or to a function of (bytes done, bytes in all)", False)
    ]


class Published(Writing, Checked, Threads, Publishing, total=False):
    """Options of all functions that publish a result, besides the source and the destination."""


class Ranked(TypedDict, total=False):
    """The rank of this process among several."""

    rank: Annotated[
        int | Literal["auto"] | None,
        Option(
            "any",
            "this process's rank, from 0, or auto: as torchrun, srun, mpirun or Kubernetes say (default: one "
            "process)",
            metavar="I",
        ),
    ]
    world: Annotated[
        int | None, Option("number", "how many ranks there are, where no launcher says so", metavar="N")
    ]
    timeout: Annotated[
        float | None, Option("any", "how long ranks wait for one another (default: 600)", metavar="SECONDS")
    ]


class Lending(TypedDict, total=False):
    """An option for checkpoints that are divided among the ranks' own disks."""

    node_local: Annotated[
        bool,
        Option(
            "any",
            "with --rank or --ray: CKPT is the part of the checkpoint on this host's (each node's) own disk; "
            "tensors that need several hosts' "
            "files are exchanged through OUT's storage",
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
            "of the cluster: auto, HOST:PORT, or local for a separate Ray on this host",
            metavar="ADDRESS",
        ),
    ]
    parts: Annotated[
        int | None, Option("any", "how many parts the work is divided into (default: one for each node)")
    ]
    cpus: Annotated[int | None, Option("any", "cores that a part takes (default: all of a node)")]
    retries: Annotated[int, Option("any", "how often a part whose worker died is made again", 3)]


class Spread(Published, Clustered, Lending, total=False):
    """Options of :func:`fastshard.ray.merge`, besides the source and the destination."""


#: Arguments and options that single functions list themselves.
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
    """Return the options that a type of this module lists, by name and in its order."""
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
