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

/// What an error of this code does to the exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Damage, mismatch or inconsistency: exit 1.
    Problem,
    /// Usage, permission, unsupported, not checkable: exit 2.
    CouldNotRun,
    /// A piece that may still arrive: exit 3 if nothing worse was found.
    Incomplete,
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
    /// What it is called, in a few words.
    pub title: &'static str,
    /// What it means and what to do.
    pub explanation: &'static str,
}

macro_rules! codes {
    ($($number:literal $constant:ident $severity:ident $exit:ident $title:literal $explanation:literal)*) => {
        $(#[doc = $explanation] pub const $constant: Code = Code($number);)*
        /// Every code, in order.
        pub const TABLE: &[CodeInfo] = &[$(CodeInfo {
            code: $constant, name: stringify!($constant), severity: Severity::$severity,
            exit: Exit::$exit, title: $title, explanation: $explanation,
        }),*];
    };
}

/// What nothing inside the files proves, and a manifest that was made where they were written does.
pub const UNPROVEN: [Code; 2] = [LOOKALIKES, NO_CHECKSUMS];

codes! {
    101 MISSING_FILE Error Incomplete "Missing file" "A file that the checkpoint's own metadata, its config or its other ranks call for is not there. Copy it from the node that wrote it (the finding names the rank), or name that node's directory as a further CKPT."
    102 MISSING_TENSOR Error Incomplete "Missing tensor" "A tensor that the layout, or the reference (--like), expects is in no file. Either a rank's file is missing or was cut short, or the config describes another model."
    103 MISSING_LAYER Error Incomplete "Missing layer" "All files of a layer are absent. The finding names the gap; copy the files from the pipeline stage that owned the layer."
    104 UNCOMMITTED Error Incomplete "Unfinished save" "The checkpoint carries no commit marker: the save may still be running or was cut short. Wait, choose another --step, or pass --accept uncommitted if you know better."
    105 TRACKER_POINTS_NOWHERE Error Incomplete "Tracker names a missing step" "The tracker file (latest, latest_checkpointed_iteration.txt) names a step that is not there. Copy that step, or choose one with --step."
    106 AMBIGUOUS Error Incomplete "Ambiguous checkpoint" "The files allow two readings and nothing outside them decides. Give what the finding asks for (--expect, --config)."
    107 MIXED_STEPS Error Problem "Files from different steps" "Ranks come from different training steps. Take all files from one step."
    108 UNEXPECTED_FILE Warning Problem "Unexpected file" "A file that no part of this checkpoint names, often a leftover of an older, wider run. It was not read. Or a config, a tokenizer or the like above or beside what was named, in a folder that others may write to: it was not taken along; name it with --tokenizer or --config."
    109 NOT_PROVABLE Note Problem "Completeness partly unchecked" "Nothing outside the files states what must exist, so completeness cannot be proven. Give --expect CONFIG, or --like with a good checkpoint of the model. With --like: what the reference does not prove."
    110 RANKS_DISAGREE Error Problem "Ranks disagree" "The metadata of two ranks contradict each other (degrees, sizes, layers): they do not belong to one checkpoint."
    111 MISSING_CHUNKS Error Incomplete "Missing chunks" "Chunks of an array are in none of the directories given: the process that owned them wrote to another disk. They would read as zeros. Name that host's directory as a further CKPT; its chunks are taken even from a temporary directory. As a note: chunks of zeros that the writer left out."
    112 STEP_TAKEN Note Problem "Step chosen" "Several steps are there; the finding says which is taken and why: the one asked for, the tracker's, or the newest by number. --step takes another."
    113 RENAMED Error Problem "Renamed or swapped file" "A torch file bears the name of another rank, layer or stage than the one under which it was saved: torch.save keeps that name inside. It was copied over another's file, or two were swapped. Restore the right file; --accept renamed if the names were changed on purpose."
    114 LOOKALIKES Note Problem "Indistinguishable files" "Nothing inside some files or chunks tells which of them is which, so two that were swapped would not be seen. A manifest that was made where they were written settles it: `fastshard manifest`, then --expect."
    115 INDEX_NAMES_ANOTHER_FILE Error Problem "Index does not match files" "The index sends tensors to a file that does not hold them, and a file beside it that the index names nowhere does. A reader that follows the index does not find them. Write the index again, or restore the one that was saved with these files."
    201 SHAPE Error Problem "Wrong shape" "A tensor has another shape than the layout, or the reference (--like), gives it. The shard comes from another run or tensor-parallel degree, or the config describes another model."
    202 DTYPE Error Problem "Wrong dtype" "Shards of one tensor have different dtypes, or a tensor has another one than in the reference (--like)."
    203 AXIS_CONFLICT Error Problem "Tensors disagree on a size" "Two tensors give one axis (hidden size, heads, ...) different extents. The finding names both; the odd one out is wrong or a shard of it is missing."
    204 NOT_DIVISIBLE Error CouldNotRun "Size not divisible" "The axis cannot be divided by the degree asked for. The finding names degrees that would work."
    205 HOLE Error Problem "Incomplete tensor" "Part of a tensor is covered by no piece."
    206 OVERLAP Error Problem "Overlapping data" "Part of a tensor is filled by more than one source: a normalisation or projection would be applied twice or one of the two is stale."
    207 UNKNOWN_TENSOR Error Problem "Tensor unknown to the layout" "A stored tensor is named by no rule of the layout and would be lost: extend the layout (--layout) or say `ignore` there with a reason. Or the reference (--like) has no such tensor: leave it out on purpose (--exclude), or do without --like."
    208 SLICE_AS_WHOLE Error Problem "Unmerged tensor-parallel slice" "One tensor-parallel rank's slice was saved as the whole tensor. The other slices must come from the other ranks, or from a checkpoint saved with a fixed version of the framework."
    209 FACT_UNKNOWN Error CouldNotRun "Required setting not stated" "Something that decides values is stated nowhere and is not guessed. Give it with --config."
    210 BAD_LAYOUT Error CouldNotRun "Invalid layout file" "The layout table is not valid. The finding names the entry."
    211 BAD_VALUE Error CouldNotRun "Invalid option value" "A value given on the command line or in a config does not fit this checkpoint."
    212 IGNORED Note Problem "Tensors left out" "A stored tensor was left out on purpose; the finding gives the reason."
    213 UNBOUND_AXIS Error CouldNotRun "Size not stated" "An axis of the layout is fixed neither by a tensor's shape nor by a config. Give --config."
    214 LOSSY Note Problem "Values changed as requested" "A value op changes bits (cast, scale, mean). It is listed in the plan and the manifest."
    215 CONFIG_DISAGREES Error Problem "Config contradicts tensors" "The config beside the checkpoint and the tensors contradict each other."
    216 DEFAULT_ASSUMED Warning Problem "Default assumed" "Something that decides values is stated nowhere, and the default of the framework that wrote the checkpoint is written. Give the training config with --config. The manifest records it."
    301 CRC Error Problem "Checksum mismatch" "A zip member's bytes do not fit its CRC32: the file was damaged after it was written. Copy it again from the node that wrote it."
    302 REPLICAS_DIFFER Error Problem "Replicas differ" "Copies of a replicated tensor differ between ranks. Some old runs drift; if that is the case here, --replicas mean averages in float32. Otherwise a rank's file belongs to another step or layer."
    303 DUPLICATED_SHARD Error Problem "Copied shard" "All that a file, rank or chunk holds is the same bytes as another's, where it must be something else: it was copied over another. In a merged model: equal parts of most matrices of a layer hold the same bytes, since one rank's file was taken for another's. Copy the right file from the node that wrote it; --accept copies (or copies=GLOB) if it was copied on purpose."
    304 EQUAL_SHARDS Warning Problem "Identical shards" "Parts of a tensor are equal over all ranks or layers alike. That can be meant (copied layers, constants)."
    305 SWAPPED_SHARD Error Problem "Replica of another layer" "A rank's copy of a replicated tensor belongs to another layer or step: files were swapped."
    306 NON_FINITE Error Problem "NaN or infinite values" "A tensor holds NaN or infinite values: training diverged, a cast overflowed, or the file was damaged before it was saved. Use an earlier step; --accept non-finite takes the values as they are. In a buffer (a mask, a table of biases, rotary frequencies) a note."
    307 PAD_NOT_ZERO Warning Problem "Nonzero padding rows" "Rows beyond the true vocabulary hold values that are not zero. They are dropped or kept as asked."
    308 HASH Error Problem "Changed since the manifest" "Bytes differ from what the manifest recorded: damaged or changed since. Restore the file from a good copy."
    309 DIFFERENT Error Problem "Tensors differ" "The two checkpoints differ in this tensor."
    310 REPLICAS_AVERAGED Warning Problem "Replicas averaged" "Copies of a replicated tensor differed and were averaged in float32, rounded once, as asked."
    311 TIED_DIFFER Error Problem "Tied tensors differ" "Two tensors that the config declares tied hold different values."
    312 TRUNCATED Error Problem "Truncated file" "A file is shorter or longer than its header says. Copy it again from the node that wrote it."
    313 ZERO_SLAB Warning Problem "All-zero block" "Rows, columns or other slabs of a floating tensor are zero throughout while the rest is not, or all of a matrix is that other layers fill, or that is an embedding, a head or a projection. A shard that was lost or never gathered leaves that; so do pruning and tokens that were never trained. Compare with the files of the ranks, or with a good copy by `fastshard diff`."
    314 NO_CHECKSUMS Note Problem "No checksums stored" "Torch files that were saved without checksums (`torch.serialization.set_crc32_options(False)`): bytes that were damaged since are not seen. A manifest that was made where they were written settles it: `fastshard manifest`, then --expect."
    315 SIGNATURE Error Problem "Signature mismatch" "The signature does not vouch for the files that are here: they are not those that were signed, or another key has signed them, or what is called a signature is none."
    316 NOT_WEIGHTS Error Problem "Not a weight file" "A file is not what its name says: a Git LFS pointer, a saved web page, an unfinished download, a text or an empty file lies in its place. Fetch the file itself: `git lfs pull --include FILE` in the clone, or `hf download REPO FILE`."
    401 MASTERS_DIFFER Error Problem "Master weights differ from parameters" "The optimizer's fp32 masters do not round to the parameters: one of the two is stale or damaged, and nothing in the files says which. Parameters are what was evaluated; `--weights params` takes them, `fastshard masters CKPT --repair OUT` rebuilds the masters from them. If the parameters' file is the damaged one, restore it."
    402 MASTERS_NOT_CHECKABLE Warning CouldNotRun "Master weights not checked" "The files hold no second copy of the parameters to check the masters against (ZeRO stage 3, or no optimizer files), or their order is not told."
    403 WEIGHTS_TAKEN Note Problem "Weights chosen" "The checkpoint holds its weights twice, as parameters and as fp32 masters; the finding says which copy was taken. Choose with --weights params|masters."
    404 PARTITION Error Problem "Optimizer partition mismatch" "The ranks' partitions of the flat optimizer state do not fit together: a rank's file was copied over another, or belongs to another step or another number of ranks."
    501 NO_SUCH_PATH Error CouldNotRun "Path not found" "The path does not exist."
    502 PERMISSION Error CouldNotRun "Permission denied" "The path may not be read or written."
    503 NO_SPACE Error CouldNotRun "Not enough space" "The destination has too little space or too few inodes; both numbers are given."
    504 OUT_EXISTS Error CouldNotRun "Output directory not empty" "The destination exists and is not empty. Choose another or pass --overwrite."
    505 OUT_INSIDE_SOURCE Error CouldNotRun "Output inside the source" "The destination lies inside a source (or holds one)."
    506 SOURCE_CHANGED Error Problem "Source changed while reading" "A source file changed while it was read. Wait until the save is complete and run again."
    507 IO Error CouldNotRun "Read or write error" "The operating system reported an error."
    508 LEFTOVER_RUN Error CouldNotRun "Interrupted run found" "An earlier run of this very plan was interrupted. --resume continues it; removing the folder named starts afresh. As a warning: a run of another plan, or of an older version of fastshard, has left its folder at the same destination; it is not continued."
    509 LOCKED Error CouldNotRun "Output in use" "Another process is writing this result."
    510 INTERRUPTED Error CouldNotRun "Interrupted" "Stopped by the user. This run published nothing; --resume continues."
    511 TOO_MANY_FILES Error CouldNotRun "Open-file limit too low" "The open-file limit is too low for this checkpoint."
    512 MEMORY_BUDGET Error CouldNotRun "Memory limit too low" "--memory is below what the plan needs at least; both numbers are given."
    513 NOT_A_CHECKPOINT Error CouldNotRun "No checkpoint found" "Nothing at this path is a checkpoint that fastshard knows."
    514 UNSUPPORTED Error CouldNotRun "Not supported" "A variant that fastshard does not read or write."
    515 USAGE Error CouldNotRun "Invalid arguments" "The call's arguments do not fit together."
    516 PUBLISH_CONFLICT Error CouldNotRun "Output changed during the run" "The destination appeared while the result was written; it was not replaced."
    517 WRITTEN_DIFFERS Error Problem "Written data reads back differently" "A part re-read before publishing differs from what was written: the destination is not the storage it seems to be."
    518 BAD_MANIFEST Error CouldNotRun "Unusable manifest" "The manifest cannot be read or describes something else."
    519 PUBLISHED Note CouldNotRun "Result complete" "The result is complete at its destination. Whatever else is reported came after that: removing what was there before, the last sync, a signal, the output of this program."
    520 INTERNAL Error CouldNotRun "Internal error" "A defect of fastshard itself stopped the run. Please report it with the message that was printed."
    521 IN_STEPS Warning CouldNotRun "Output not replaced atomically" "The destination cannot be exchanged with the new result (a directory of a lower layer of overlayfs, as in a container's image): the older result is removed file by file, its manifest first, and the new one moved in, its manifest last. Whoever reads there meanwhile finds it incomplete; a run that is stopped there goes on with --resume. A new destination appears in one step."
    522 NOT_SHARED Error CouldNotRun "Output not shared" "The destination is not one storage for all ranks: a rank was never seen by rank 0, or never saw it. Each rank says which storage it sees there; a disk of its own is the usual cause."
    523 PART_MISSING Error Incomplete "Rank did not finish" "A part of a run of several processes was not made to its end: its process never came, or ended. This run published nothing; make that part, or run again with --resume and as many processes as there are."
    524 RANKS_DIFFER Error CouldNotRun "Ranks started differently" "The processes of one run were not started alike: other sources, options, versions or numbers of ranks. Each names what differs."
    525 LENT Note CouldNotRun "Data exchanged between hosts" "Ranks whose sources lie on their own disks have lent one another these bytes by way of the destination: headers, copies that were compared, and what tiles needed that are made of several hosts' files."
    601 UNSAFE_HEADER Error Problem "Malformed header" "A header is malformed or made to mislead (sizes, overlaps, holes, duplicate names)."
    602 UNSAFE_PICKLE Error Problem "Malformed pickle" "A pickle stream is malformed or exceeds the limits on depth, size or memo. Nothing of it was executed."
    603 UNSAFE_PATH Error Problem "Path leaves the checkpoint" "A path in an index leaves the checkpoint's directory, or a link does: links must stay inside the roots, or a Hugging Face cache. Copy the file that is meant, or name its directory as a further CKPT; a tokenizer's with --tokenizer."
    604 UNSAFE_ZIP Error Problem "Malformed zip archive" "A zip container is malformed or made to mislead (overlapping or duplicate members, sizes that cannot be)."
}

/// The row of a code.
pub fn info(code: Code) -> &'static CodeInfo {
    TABLE.iter().find(|row| row.code == code).expect("codes are made from the table")
}

/// Parses `FS101`, `fs101` or `101`.
pub fn parse(text: &str) -> Option<Code> {
    let digits = text.trim().trim_start_matches(['F', 'f']).trim_start_matches(['S', 's']);
    let number: u16 = digits.parse().ok()?;
    TABLE.iter().map(|row| row.code).find(|code| code.0 == number)
}
