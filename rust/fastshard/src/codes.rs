//! The table of finding codes: stable numbers, severities, exit classes and what they mean.

use std::fmt;

use serde::{de, Deserialize, Deserializer, Serialize, Serializer};

/// A stable finding code, printed as `FS` and three digits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Code(u16);

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FS{:03}", self.0)
    }
}

impl fmt::Debug for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Serialize for Code {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Code {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let text = String::deserialize(d)?;
        parse(&text).ok_or_else(|| de::Error::custom(format!("unknown finding code {text:?}")))
    }
}

/// How much a finding weighs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// A fact worth recording; never changes an exit code.
    Note,
    /// Something to look at; the result is right as far as can be proven.
    Warning,
    /// The operation is refused.
    Error,
}

impl Severity {
    /// Its word.
    pub fn word(self) -> &'static str {
        match self {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "error",
        }
    }
}

/// The effect of an error of this code on the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Damage, mismatch or inconsistency: exit 1.
    Problem,
    /// Usage, permission, unsupported or uncheckable input: exit 2.
    CouldNotRun,
    /// A missing part that may still arrive: exit 3 if nothing worse was found.
    Incomplete,
}

/// The line of a report's list of checks that a finding fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// Are all files there?
    Files,
    /// Do names and shapes fit? Findings of no other check belong here.
    Names,
    /// Are all files from one step?
    Step,
    /// Is no file a copy of another, or in its place?
    Copies,
    /// Can the data be read, and do its checksums match?
    Data,
    /// Are replicas equal?
    Replicas,
    /// Are the values plausible?
    Values,
    /// Do the hashes of the manifest match?
    Manifest,
}

impl Check {
    /// Its name.
    pub fn word(self) -> &'static str {
        match self {
            Check::Files => "files",
            Check::Names => "names",
            Check::Step => "step",
            Check::Copies => "copies",
            Check::Data => "data",
            Check::Replicas => "replicas",
            Check::Values => "values",
            Check::Manifest => "manifest",
        }
    }
}

/// A property that findings of several codes share, for code that treats them alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A file or a step is missing.
    MissingFile,
    /// No file has a tensor, or any tensor of a layer.
    MissingTensor,
    /// A part of a tensor is missing.
    Incomplete,
    /// A tensor exists and does not fit: its shape, its dtype or its place is wrong.
    Misfit,
    /// A file or a step is in the place of another.
    Misplaced,
    /// Two files, or parts of them, are exchanged, or one is a copy of the other.
    Swapped,
    /// A file cannot be read, or is of the wrong kind.
    Unreadable,
    /// The data differs from the data that was written.
    Damaged,
    /// The contents of a file cannot be used.
    LostFile,
    /// The metadata or the config by which everything else is read is wrong.
    WholeCheckpoint,
    /// It may be a mere consequence of another finding.
    Consequence,
    /// A comparison of values that must be equal found it.
    Comparison,
    /// Nothing inside the files proves it; a manifest that was made where they were written does.
    Unproven,
    /// By the names of files there is no checkpoint, or too little of one.
    NothingFound,
    /// It may apply to each of several files.
    PerFile,
    /// It is reported once for a file, even if several checks notice it.
    OncePerFile,
    /// It follows from the contents of a file, not from the system or from a lack of support.
    Content,
    /// A checkpoint that was refused for it can have a report, although the code is not about checkpoints.
    Reportable,
    /// It says nothing against what a run has written so far, so that the run can be continued.
    Resumable,
}

/// One row of the table.
#[derive(Debug, Clone, Copy)]
pub struct CodeInfo {
    /// The code.
    pub code: Code,
    /// Short stable name.
    pub name: &'static str,
    /// Severity unless the finding says otherwise.
    pub severity: Severity,
    /// Exit class of an error.
    pub exit: Exit,
    /// The check of a report that it fails.
    pub check: Check,
    /// What it has in common with others.
    pub kinds: &'static [Kind],
    /// What it is called, in a few words.
    pub title: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// What to do.
    pub help: &'static str,
}

macro_rules! codes {
    ($($number:literal $constant:ident $severity:ident $exit:ident $check:ident [$($kind:ident)*] $title:literal $meaning:literal $help:literal)*) => {
        $(#[doc = $meaning] pub const $constant: Code = Code($number);)*
        /// Every code, in order.
        pub const TABLE: &[CodeInfo] = &[$(CodeInfo {
            code: $constant, name: stringify!($constant), severity: Severity::$severity,
            exit: Exit::$exit, check: Check::$check, kinds: &[$(Kind::$kind),*], title: $title, meaning: $meaning, help: $help,
        }),*];
    };
}

codes! {
    101 MISSING_FILE Error Incomplete Files [MissingFile LostFile Consequence NothingFound OncePerFile] "Missing file"
        "The checkpoint needs a file that is in none of the directories given: its metadata, an index, its config or the numbers in other file names say so."
        "Copy the file from the node that wrote it, or add that node's directory as another CKPT."
    102 MISSING_TENSOR Error Incomplete Files [MissingTensor Consequence] "Missing tensor"
        "The layout, the config, an index or the reference (--like) expects a tensor, and no file holds it."
        "Copy the file that holds it, or pass the config of this model."
    103 MISSING_LAYER Error Incomplete Files [MissingTensor LostFile Consequence] "Missing layer"
        "No file has any tensor of a layer."
        "Copy the files of these layers from the pipeline stage that owned them."
    104 UNCOMMITTED Error Incomplete Files [MissingFile WholeCheckpoint NothingFound] "Unfinished save"
        "The save did not finish: its commit marker or its metadata is missing."
        "Wait for it, choose another step with --step, or pass --accept uncommitted to read it as it is."
    105 TRACKER_POINTS_NOWHERE Error Incomplete Files [MissingFile Misplaced LostFile NothingFound] "Tracker names a missing step"
        "The tracker file (latest, latest_checkpointed_iteration.txt) names a step that is missing."
        "Copy that step, or choose one with --step."
    106 AMBIGUOUS Error CouldNotRun Step [WholeCheckpoint] "Ambiguous checkpoint"
        "The files can be read in several ways, and nothing in them decides."
        "Say which is meant: --step, --prefix, --expect or --config."
    107 MIXED_STEPS Error Problem Step [Misplaced LostFile PerFile] "Files from different steps"
        "Files are from different training steps."
        "Copy all files from one step."
    108 UNEXPECTED_FILE Warning Problem Names [] "Unexpected file"
        "No part of the checkpoint names this file, so it was not read. Another run often leaves such files. Or a companion file (config, tokenizer) is in a folder that others can write to, so it was not taken along."
        "Move the file away; pass a companion with --tokenizer or --config."
    109 NOT_PROVABLE Note Problem Names [] "Completeness partly unchecked"
        "No config and no reference says which tensors the model has, so some could be missing unnoticed. With --like the finding says what the reference does not prove."
        "Pass the model's config with --expect, or a good checkpoint with --like."
    110 RANKS_DISAGREE Error Problem Step [PerFile] "Ranks disagree"
        "The metadata of two ranks disagree (degrees, sizes, layers): the files are from different runs."
        "Copy the file of the rank that differs from the run of the others."
    111 MISSING_CHUNKS Error Incomplete Files [Incomplete] "Missing chunks"
        "An array lacks chunks: the process that wrote them saved to another disk, or the writer left out zeros and nothing in the files says so. They would be read as zeros. As a note: the writer left out chunks that hold only zeros."
        "Add that host's directory as another CKPT; a temporary one will do. If the chunks hold zeros: --accept elided-zeros."
    112 STEP_TAKEN Note Problem Names [] "Step chosen"
        "The checkpoint has several steps; the finding says which one is used and why: the one that was asked for, the tracker's, or the newest."
        "Choose another with --step."
    113 RENAMED Error Problem Copies [Misplaced Swapped LostFile] "Renamed or swapped file"
        "The file records another rank, layer or stage than its name says: it was copied over that file, or two files were swapped."
        "Rename the files back, or copy both again. If the names were changed on purpose: --accept renamed."
    114 LOOKALIKES Note Problem Names [Unproven] "Indistinguishable files"
        "Some files or chunks do not name their rank, so a swap among them would go unnoticed."
        "Make a manifest where they were written (`fastshard manifest`), and pass it with --expect."
    115 INDEX_NAMES_ANOTHER_FILE Error Problem Copies [LostFile] "Index does not match files"
        "The index sends tensors to a file that does not hold them, and another file, which the index does not name, holds them. A loader that follows the index does not find them. As a warning: another file that the index names holds them, and they are read from there."
        "Write the index again, or restore the one that was saved with these files."
    116 MISSING_PART Warning Incomplete Files [] "Missing part"
        "config.json promises a part of the model, such as MTP layers, and no file holds any tensor of it. transformers loads the model without that part; a server that needs it (speculative decoding) fails."
        "Copy the files of the part from the original checkpoint. If the part was left out on purpose, set its key in config.json to 0."
    117 FILLED Note Problem Names [] "Taken from the original"
        "Tensors that the checkpoint does not hold are taken from another model, because --fill-from asks for it; the manifest names each. As a warning: single tensors of a part that the checkpoint does hold (--fill-only), or nothing that could be taken."
        "Leave --fill-from out to see what is missing."
    118 PART Error CouldNotRun Files [WholeCheckpoint] "Part of a checkpoint"
        "A file that was named by itself holds one part of a checkpoint: one of several files, one rank's tensors, or a partition of the optimizer state. Its name, an index beside it, its contents or the files beside it say so."
        "Name the folder that holds all parts. To take the part as it is: --accept part."
    119 NOT_LOADED Error Problem Names [] "Names that are not loaded"
        "config.json names a class of transformers, and its from_pretrained does not find tensors under the names that they have. It initialises these at random and goes on. As a warning: the checkpoint is not loaded by from_pretrained, or it is a model without the head of its class."
        "Write the names that the class loads: merge with --like GOOD, or with --prefix NAME where the names have a prefix."
    201 SHAPE Error Problem Names [Misfit] "Wrong shape"
        "A tensor has another shape than the layout, the config or the reference (--like) gives it: the file is from another run or another tensor-parallel degree, or the config describes another model."
        "Copy the file from the run of the others, or pass the config of this model with --config."
    202 DTYPE Error Problem Names [Misfit] "Wrong dtype"
        "Shards of one tensor have different dtypes, or the tensor has another dtype than in the reference (--like). As a warning: the same tensor has another dtype in the other layers."
        "Copy the file from the same run and step."
    203 AXIS_CONFLICT Error Problem Names [Misfit] "Tensors disagree on a size"
        "Two tensors give one size (hidden size, heads, ...) different values. The finding names both: one of them is wrong, or lacks a shard."
        "Look for a missing shard of the two tensors, or pass the config of this model with --config."
    204 NOT_DIVISIBLE Error CouldNotRun Names [Misfit] "Size not divisible"
        "The size cannot be divided by the degree that was asked for."
        "Choose a degree that divides the size."
    205 HOLE Error Problem Files [Incomplete Consequence] "Incomplete tensor"
        "No chunk covers a part of the tensor."
        "Use another step: this one was written before all ranks had saved."
    206 OVERLAP Error Problem Names [Misfit] "Overlapping data"
        "Two sources fill the same part of a tensor: one of them is stale."
        "Mark the stale one `ignore` in a layout (--layout), or name in the index the file that counts."
    207 UNKNOWN_TENSOR Error Problem Names [Consequence] "Tensor unknown to the layout"
        "No rule of the layout names this tensor, so it would be lost. Or the reference (--like) has no such tensor."
        "Describe it in a layout of your own (--layout), or leave it out with --exclude."
    208 SLICE_AS_WHOLE Error Problem Names [Misfit] "Unmerged tensor-parallel slice"
        "One tensor-parallel rank's slice was saved as if it were the full tensor."
        "Merge the slices of all ranks, or save again with a version of the framework that gathers this tensor."
    209 FACT_UNKNOWN Error CouldNotRun Names [] "Required setting not stated"
        "A setting that decides values is not stated, and fastshard does not guess it."
        "Pass a config that states it with --config."
    210 BAD_LAYOUT Error CouldNotRun Names [] "Invalid layout file"
        "The layout file is not valid. The finding names the entry."
        "Correct the entry; docs/layouts.md has the syntax."
    211 BAD_VALUE Error CouldNotRun Names [WholeCheckpoint] "Invalid value"
        "The value of an option is not valid, or that of a config, an index or another small file is malformed or does not fit this checkpoint."
        "Correct the value, or the file that holds it."
    212 IGNORED Note Problem Names [] "Tensors left out"
        "Tensors or values are left out on purpose; the finding gives the reason."
        ""
    213 UNBOUND_AXIS Error CouldNotRun Names [] "Size not stated"
        "No tensor and no config states a size of the layout."
        "Pass the model's config with --config."
    214 LOSSY Note Problem Names [] "Values changed as requested"
        "The values change as requested (cast, scale, mean). The plan and the manifest list it."
        "Leave the option out to keep the values."
    215 CONFIG_DISAGREES Error Problem Names [WholeCheckpoint] "Config contradicts tensors"
        "The config and the tensors contradict each other, or the config states one setting under two keys, differently. As a warning: the tokenizer has ids beyond the rows of the embedding. As a note: --config states a setting otherwise than the checkpoint does, and --config is taken."
        "Pass the config of this checkpoint with --config."
    216 DEFAULT_ASSUMED Warning Problem Names [] "Default assumed"
        "A setting that decides values is not stated, so the default of the framework is written, and the manifest records it."
        "Pass the training config with --config."
    301 CRC Error Problem Data [Damaged] "Checksum mismatch"
        "The CRC32 of a zip member does not match its bytes: the file was damaged after it was written."
        "Copy it again from the node that wrote it."
    302 REPLICAS_DIFFER Error Problem Replicas [Comparison] "Replicas differ"
        "Copies of a replicated tensor differ between ranks: the file of one rank is from another step or layer."
        "Copy the file of the rank that differs again. If replicas drifted in this run, --replicas mean averages them in float32."
    303 DUPLICATED_SHARD Error Problem Copies [Misplaced Swapped LostFile PerFile OncePerFile] "Copied shard"
        "A file, rank or chunk is a copy of another one, where it must hold something else. In a merged model: equal parts of most matrices of a layer are identical, because one rank's file was copied over another's."
        "Copy the file again from the node that wrote it. If it was copied on purpose: --accept copies (or copies=GLOB)."
    304 EQUAL_SHARDS Warning Problem Copies [] "Identical shards"
        "Parts of a tensor are identical on all ranks or in all layers, or matrices of a layer or an expert hold what those of another one hold. As a note: more than a third of the layers do, as in models that share or repeat layers."
        "Copy the file again. If it was copied on purpose: --ignore FS304."
    305 SWAPPED_SHARD Error Problem Copies [Swapped Comparison] "Replica of another layer"
        "A rank's copy of a replicated tensor is closer to another layer or step than to its replicas: files were swapped."
        "Copy the file of that rank again."
    306 NON_FINITE Error Problem Values [] "NaN or infinite values"
        "The tensor holds NaN or infinite values: training diverged, a cast overflowed, or the file was damaged before it was saved. In a buffer (a mask, a table of biases, rotary frequencies) it is a note."
        "Use an earlier step. To take the values as they are: --accept non-finite."
    307 PAD_NOT_ZERO Warning Problem Values [] "Nonzero padding rows"
        "Padding rows beyond the vocabulary are not zero. They are dropped or kept as requested."
        "Pass a larger --vocab-size if they are tokens."
    308 HASH Error Problem Manifest [Damaged] "Changed since the manifest"
        "The bytes differ from what the manifest recorded: they were damaged or changed since."
        "Restore the file from a good copy."
    309 DIFFERENT Error Problem Names [] "Tensors differ"
        "The two checkpoints differ in this tensor."
        "Look at one tensor alone: `fastshard diff A B --include TENSOR`."
    310 REPLICAS_AVERAGED Warning Problem Replicas [] "Replicas averaged"
        "Copies of a replicated tensor differ, and the result is their mean, computed in float32 and rounded once, as requested."
        "Leave out --replicas mean to stop on differences."
    311 TIED_DIFFER Error Problem Replicas [] "Tied tensors differ"
        "The config ties two tensors, and their values differ."
        "Correct tie_word_embeddings, or restore the file of the one that is wrong."
    312 TRUNCATED Error Problem Names [Unreadable LostFile PerFile Content] "Truncated file"
        "The file is shorter or longer than its header says."
        "Copy or download it again."
    313 ZERO_SLAB Warning Problem Values [] "All-zero block"
        "Rows, columns or other blocks of a floating tensor are zero while the rest is not. Or a matrix is zero that is not zero in other layers, or an embedding, a head or a projection is zero, or every matrix is. Or an expert holds one value throughout. A lost or unmerged shard leaves that, and an expert that was never written; so do pruning and tokens that were never trained."
        "Compare with a good copy: `fastshard diff`."
    314 NO_CHECKSUMS Note Problem Names [Unproven] "No checksums stored"
        "Torch files were saved without checksums (`torch.serialization.set_crc32_options(False)`), so later damage would go unnoticed. Or the hashes that the Hub's cache keeps of a download are not compared."
        "Make a manifest where they were written (`fastshard manifest`), and pass it with --expect. Compare a download with --check-hub."
    315 SIGNATURE Error Problem Manifest [] "Signature mismatch"
        "The signature does not match the files: they changed since they were signed, another key signed them, or the signature file is not one."
        "Download both again, or pass the signer's key."
    316 NOT_WEIGHTS Error Problem Names [Unreadable LostFile PerFile] "Not a weight file"
        "The file is not what its name says: a Git LFS pointer, a saved web page, an unfinished download, a text or an empty file."
        "Fetch the file itself: `git lfs pull --include FILE` in the clone, or `hf download REPO FILE`."
    317 UNWRITTEN Error Problem Names [Damaged] "Data never written"
        "A file has holes in the place of tensors, more than 1 GiB of them: what wrote or copied it never wrote that data. It would be read as zeros."
        "Copy the file again from the node that wrote it. If it holds zeros on purpose: --accept holes."
    318 UNTRAINED Error Problem Values [] "Loss of an untrained model"
        "The model predicts the text no better than a model that was never trained, or its loss is not a number: weights are damaged or in a wrong layout, or the text, the tokenizer or the BOS token is not the model's. As a warning: the frequencies of the text's tokens alone predict it better."
        "Pass a text of the kind that the model was trained on, and its tokenizer. Compare with a model that is known to be good: `fastshard layers GOOD CKPT`."
    319 LOSS_DIFFERS Error Problem Values [] "Loss differs from the expected one"
        "The loss on these tokens is not the one that --expect-loss states: weights or settings differ from those of the run that computed it, or the tokens do."
        "Compare the layers of both models: `fastshard layers GOOD CKPT`. Take the same tokens (--tokens), with the same BOS token."
    320 OUTPUTS_DIFFER Error Problem Values [] "Outputs of a layer differ"
        "A layer computes something else than the same layer of the other model does on the same input: its weights are damaged or in another layout, or a setting of the config differs (rotary embedding, epsilon of the norms, activation)."
        "Compare the tensors of this layer (`fastshard diff A B`), then the settings of both configs."
    401 MASTERS_DIFFER Error Problem Replicas [Comparison] "Master weights differ from parameters"
        "The optimizer's fp32 master weights do not round to the parameters. One of the two is stale or damaged, and the files do not say which."
        "Rebuild the master weights if you evaluated the parameters: `fastshard master-weights CKPT --repair OUT`. Or pass `--weights params` to convert without them. Restore the file of the parameters if those are damaged."
    402 MASTERS_NOT_CHECKABLE Warning CouldNotRun Replicas [] "Master weights not checked"
        "The fp32 master weights cannot be checked: the files hold no second copy of the parameters (ZeRO stage 3, or no optimizer files), or do not state the order of the parameters."
        "Compare the model with a 16-bit copy of it: `fastshard diff A B`."
    403 WEIGHTS_TAKEN Note Problem Names [] "Weights chosen"
        "The checkpoint holds its weights twice, as parameters and as fp32 master weights; the finding says which are used."
        "Choose with --weights params or --weights masters."
    404 PARTITION Error Problem Names [Comparison] "Optimizer partition mismatch"
        "The ranks' partitions of the flat optimizer state do not fit together: the file of a rank was copied over another, or is from another step or another number of ranks."
        "Copy it again from the node that ran the rank."
    501 NO_SUCH_PATH Error CouldNotRun Names [NothingFound] "Path not found"
        "The path does not exist."
        "Check its spelling."
    502 PERMISSION Error CouldNotRun Names [Unreadable LostFile PerFile Resumable] "Permission denied"
        "The path cannot be read or written."
        "Check its owner and mode, and whether it is mounted read-only."
    503 NO_SPACE Error CouldNotRun Names [Resumable] "Not enough space"
        "The destination has too little space or too few inodes; the finding says what is needed and what is free."
        "Free space, or choose another OUT."
    504 OUT_EXISTS Error CouldNotRun Names [Reportable] "Output directory not empty"
        "OUT exists and is not empty."
        "Choose another OUT, or pass --overwrite to replace an unmodified result of fastshard."
    505 OUT_INSIDE_SOURCE Error CouldNotRun Names [] "Output inside the source"
        "OUT is inside a source, or contains one."
        "Choose an OUT outside the checkpoint."
    506 SOURCE_CHANGED Error Problem Data [Unreadable LostFile PerFile Reportable] "Source changed while reading"
        "A source file changed while it was read."
        "Wait until the save has finished, and run again."
    507 IO Error CouldNotRun Data [Unreadable LostFile PerFile Reportable Resumable] "Read or write error"
        "The operating system reported an error."
        "Check the storage and its logs."
    508 LEFTOVER_RUN Error CouldNotRun Names [] "Interrupted run found"
        "An earlier run of this plan was interrupted. As a warning: a run of another plan, or of an older version of fastshard, left its folder there; it is not continued."
        "Continue with --resume, or remove its folder to start over."
    509 LOCKED Error CouldNotRun Names [] "Output in use"
        "Another process is writing to OUT."
        "Wait for it, or choose another OUT."
    510 INTERRUPTED Error CouldNotRun Names [Resumable] "Interrupted"
        "A user or a signal stopped the run, and it wrote nothing to OUT."
        "Continue with --resume."
    511 TOO_MANY_FILES Error CouldNotRun Names [Unreadable LostFile Resumable] "Open-file limit too low"
        "The open-file limit is too low for this checkpoint."
        "Raise it with `ulimit -n`."
    512 MEMORY_BUDGET Error CouldNotRun Names [] "Memory limit too low"
        "--memory is less than the plan needs; the finding gives both numbers. Or the system has no memory left for a buffer or a thread."
        "Pass a larger --memory; where the system has no memory left, a smaller one, or raise the limit of the process."
    513 NOT_A_CHECKPOINT Error CouldNotRun Names [NothingFound Reportable Content] "No checkpoint found"
        "The path holds no checkpoint that fastshard knows."
        "Pass the directory of the shards or of the steps."
    514 UNSUPPORTED Error CouldNotRun Names [] "Not supported"
        "fastshard does not read or write this variant."
        "Choose a form that fastshard reads and writes: docs/systems.md lists them."
    515 USAGE Error CouldNotRun Names [Consequence] "Invalid arguments"
        "An argument is not valid, or arguments do not fit together."
        "Correct the argument; --help shows examples."
    516 PUBLISH_CONFLICT Error CouldNotRun Names [] "Output changed during the run"
        "OUT appeared or changed while the result was written, and was not replaced."
        "Move it away, then run the command again with --resume."
    517 WRITTEN_DIFFERS Error Problem Names [] "Written data reads back differently"
        "A part that was read back before publishing differs from what was written."
        "Test the storage: `fastshard check-storage OUT`."
    518 BAD_MANIFEST Error CouldNotRun Manifest [Reportable] "Unusable manifest"
        "The manifest cannot be read, or describes something else."
        "Make one with `fastshard manifest CKPT`."
    519 PUBLISHED Note CouldNotRun Names [] "Result complete"
        "The result is complete. What else is reported happened after that: removing the older result, the last sync, a signal, the output of this program."
        "Use the result: nothing has to be repeated."
    520 INTERNAL Error CouldNotRun Names [] "Internal error"
        "A defect of fastshard stopped the run."
        "Report it with the message that was printed."
    521 IN_STEPS Warning CouldNotRun Names [] "Output not replaced atomically"
        "OUT cannot be replaced in one step (a directory of a lower overlayfs layer, as in a container's image). The older result is removed file by file, its manifest first, and the new one is moved in, its manifest last; a reader sees it incomplete meanwhile. A run that is stopped there continues with --resume."
        "Keep readers away until the run ends, or choose a new OUT, which appears in one step."
    522 NOT_SHARED Error CouldNotRun Names [] "Output not shared"
        "The ranks do not see one storage at OUT: rank 0 never saw a rank, or a rank never saw rank 0. Each rank says which storage it sees; a separate disk is the usual cause."
        "Choose an OUT that all hosts mount."
    523 PART_MISSING Error Incomplete Files [MissingFile] "Rank did not finish"
        "A part of a run of several processes did not finish: its process never came, or ended early. This run wrote nothing to OUT."
        "Make that part, or run again with --resume."
    524 RANKS_DIFFER Error CouldNotRun Names [] "Ranks started differently"
        "The processes of one run were started with different sources, options, versions or numbers of ranks; each names what differs."
        "Start all with one command and one version."
    525 LENT Note CouldNotRun Names [] "Data exchanged between hosts"
        "Ranks whose sources are on separate disks exchanged these bytes through OUT: headers, copies that were compared, and data of tiles that several hosts' files make up."
        "Put the sources on storage that all hosts share to avoid this."
    601 UNSAFE_HEADER Error Problem Names [Unreadable LostFile PerFile Content] "Malformed header"
        "A header is malformed or deceptive (sizes, overlaps, holes, duplicate names)."
        "Copy or download the file again."
    602 UNSAFE_PICKLE Error Problem Names [Unreadable LostFile PerFile Content] "Malformed pickle"
        "A pickle stream is malformed or exceeds the limits on depth, size or memo. Nothing in it was executed."
        "Copy the file again, and never open it with torch.load."
    603 UNSAFE_PATH Error Problem Names [Unreadable LostFile PerFile Content] "Path leaves the checkpoint"
        "A path in an index, or a link, leaves the checkpoint's directory; links must stay inside the roots or a Hugging Face cache."
        "Copy the file that the link leads to, or add its directory as another CKPT; pass a tokenizer with --tokenizer."
    604 UNSAFE_ZIP Error Problem Names [Unreadable LostFile PerFile Content] "Malformed zip archive"
        "A zip archive is malformed or deceptive (overlapping or duplicate members, impossible sizes)."
        "Copy the file again."
}

/// The row of a code.
pub fn info(code: Code) -> &'static CodeInfo {
    TABLE.iter().find(|row| row.code == code).expect("codes are made from the table")
}

impl Code {
    /// Returns true if the table lists the code under a kind.
    pub fn is_a(self, kind: Kind) -> bool {
        info(self).kinds.contains(&kind)
    }
}

/// Parses `FS101`, `fs101` or `101`.
pub fn parse(text: &str) -> Option<Code> {
    let digits = text.trim().trim_start_matches(['F', 'f']).trim_start_matches(['S', 's']);
    let number: u16 = digits.parse().ok()?;
    TABLE.iter().map(|row| row.code).find(|code| code.0 == number)
}
