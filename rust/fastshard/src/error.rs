//! Findings and errors: everything that fastshard has to say about a checkpoint.
//!
//! A [`Finding`] is data: a stable code, where it was seen, what was expected, what was found and
//! what to do. An [`Error`] is one or more findings that stopped an operation.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::codes::{self, Code, Exit};

/// The help for a system without memory left.
pub const MORE_MEMORY: &str =
    "lower --memory or --threads, or raise the limit of the process (ulimit -v, a cgroup)";

pub use crate::codes::Severity;

/// Consecutive numbers: of layers, or of ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Span {
    /// The first.
    pub first: u64,
    /// The last.
    pub last: u64,
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.last - self.first {
            0 => write!(f, "{}", self.first),
            _ => write!(f, "{} to {}", self.first, self.last),
        }
    }
}

/// Ranks of the run that wrote a checkpoint: the numbers on each dimension of its mesh. A missing dimension
/// may have any number.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Ranks(pub Vec<(String, Vec<Span>)>);

impl Ranks {
    /// Makes one rank from its number on each dimension.
    pub fn one<D: AsRef<str>>(coords: impl IntoIterator<Item = (D, u64)>) -> Self {
        let span = |at| vec![Span { first: at, last: at }];
        Ranks(coords.into_iter().map(|(d, at)| (d.as_ref().to_string(), span(at))).collect())
    }
}

/// E.g. `tp 3 to 5, pp 1`.
impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, (dimension, spans)) in self.0.iter().enumerate() {
            write!(f, "{}{dimension} ", if i > 0 { ", " } else { "" })?;
            for (k, span) in spans.iter().enumerate() {
                let joint = match k {
                    0 => "",
                    _ if k + 1 == spans.len() => " and ",
                    _ => ", ",
                };
                write!(f, "{joint}{span}")?;
            }
        }
        Ok(())
    }
}

/// The effect of a finding: the tensors that are missing, incomplete or unreadable because of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Effect {
    /// The number of these tensors.
    pub count: u64,
    /// The total number of tensors of a complete checkpoint, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<u64>,
    /// The number of them in layers.
    #[serde(default)]
    pub in_layers: u64,
    /// These layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<Span>,
    /// The number of them in layers without any remaining tensor.
    #[serde(default)]
    pub in_missing_layers: u64,
    /// These layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing_layers: Vec<Span>,
    /// Names of the tensors, those outside layers first; only the first names if there are very many.
    pub tensors: Vec<String>,
}

/// One observation about a checkpoint: the problem, its place, the expected and the found value, and the
/// remedy.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Finding {
    /// Stable code, e.g. `FS101`; documented by [`crate::codes::TABLE`].
    pub code: Code,
    /// Weight of the finding.
    pub severity: Severity,
    /// One clause that states the problem.
    pub message: String,
    /// File, as the user would name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// All files that it is about, if there are several; `file` is the first of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<String>,
    /// Rank in the field's words, e.g. `tp 1`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rank: Option<String>,
    /// The ranks that it is about, for grouping findings by cause; `rank` has them in words for users.
    #[serde(skip)]
    pub coords: Ranks,
    /// Host name, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// Tensor name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tensor: Option<String>,
    /// Layers that it is about, as a whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<Span>,
    /// Axis of the layout that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub axis: Option<String>,
    /// The number of tensors, files or findings that it represents, if it names one or none of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// What was expected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub got: Option<String>,
    /// The source of the expected value: the checkpoint's arguments, an index, a config.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evidence: Option<String>,
    /// The tensors that it makes unusable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<Effect>,
    /// Findings of the same cause that it represents, if they state more than it does: one for each array.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Finding>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Commands that do it, in their order. One that begins with `-` contains options of the command that was
    /// run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub run: Vec<String>,
    /// The option that changed its severity: `accept WHAT`, `ignore CODE`, `error CODE`, `fail_on warning`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<String>,
    /// What could be missing without a finding, if the finding states that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unnoticed: Option<String>,
}

impl Finding {
    /// A finding with the code's own severity.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Finding {
            code,
            severity: codes::info(code).severity,
            file: None,
            files: Vec::new(),
            rank: None,
            coords: Ranks::default(),
            host: None,
            tensor: None,
            layers: None,
            axis: None,
            count: None,
            expected: None,
            got: None,
            evidence: None,
            effect: None,
            parts: Vec::new(),
            message: message.into(),
            help: None,
            run: Vec::new(),
            decided: None,
            unnoticed: None,
        }
    }

    /// Sets the severity, if it depends on the circumstances.
    #[must_use]
    pub fn severity(mut self, severity: Severity) -> Self {
        self.severity = severity;
        self
    }

    /// Names the file.
    #[must_use]
    pub fn file(mut self, file: impl AsRef<Path>) -> Self {
        self.file = Some(file.as_ref().display().to_string());
        self
    }

    /// Names the rank.
    #[must_use]
    pub fn rank(mut self, rank: impl Into<String>) -> Self {
        self.rank = Some(rank.into());
        self
    }

    /// Names the ranks that it is about.
    #[must_use]
    pub fn ranks(mut self, coords: Ranks) -> Self {
        self.rank = (!coords.0.is_empty()).then(|| coords.to_string());
        self.coords = coords;
        self
    }

    /// Names the rank that it is about: its number on each dimension, and its name in messages.
    #[must_use]
    pub fn of_rank(mut self, coords: &BTreeMap<String, u64>, rank: &Option<String>) -> Self {
        self.coords = Ranks::one(coords.iter().map(|(d, at)| (d, *at)));
        self.rank = rank.clone();
        self
    }

    /// Names the tensor.
    #[must_use]
    pub fn tensor(mut self, tensor: impl Into<String>) -> Self {
        self.tensor = Some(tensor.into());
        self
    }

    /// Names layers that it is about.
    #[must_use]
    pub fn layers(mut self, first: u64, last: u64) -> Self {
        self.layers = Some(Span { first, last });
        self
    }

    /// Names the axis of the layout.
    #[must_use]
    pub fn axis(mut self, axis: impl Into<String>) -> Self {
        self.axis = Some(axis.into());
        self
    }

    /// Sets the number that it represents.
    #[must_use]
    pub fn count(mut self, count: u64) -> Self {
        self.count = Some(count);
        self
    }

    /// States what was expected and what was found.
    #[must_use]
    pub fn expected(mut self, expected: impl fmt::Display, got: impl fmt::Display) -> Self {
        self.expected = Some(expected.to_string());
        self.got = Some(got.to_string());
        self
    }

    /// States the evidence.
    #[must_use]
    pub fn evidence(mut self, evidence: impl Into<String>) -> Self {
        self.evidence = Some(evidence.into());
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds a command that does what the help says, or options of the command that was run.
    #[must_use]
    pub fn run(mut self, command: impl Into<String>) -> Self {
        self.run.push(command.into());
        self
    }
}

/// Replaces control characters, so that a hostile name cannot control a terminal.
pub fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            if c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}') {
                c.escape_default().collect::<Vec<_>>()
            } else {
                vec![c]
            }
        })
        .collect()
}

/// Formats the needed and the free bytes for users, in one unit: GB unless little is needed. It rounds the
/// needed bytes up and the free bytes down, so that they never look equal if space is short.
pub(crate) fn sizes(needed: u64, free: u64) -> (String, String) {
    let units = [(1_000_000_000, "GB"), (1_000_000, "MB"), (1000, "kB")];
    let (unit, name) = units.into_iter().find(|(unit, _)| needed.max(free) >= unit / 10).unwrap_or(units[2]);
    let text = |tenths: u64| format!("{}.{} {name}", tenths / 10, tenths % 10);
    (text(needed.div_ceil(unit / 10)), text(free / (unit / 10)))
}

/// The free space at the place of `path`, which need not exist: bytes, and inodes if none is left.
fn free_at(path: &Path) -> Option<String> {
    let fs = path.ancestors().find_map(|path| rustix::fs::statvfs(path).ok())?;
    let (_, free) = sizes(0, fs.f_bavail.saturating_mul(fs.f_frsize));
    let inodes = if fs.f_files > 0 && fs.f_favail == 0 { ", and no inode" } else { "" };
    Some(format!("{free} free{inodes}"))
}

impl Finding {
    /// The problem and its place: `<path>: <tensor>: <what> (<rank>)`, one line, control characters escaped.
    pub fn headline(&self) -> String {
        let mut line = String::new();
        // What is said of several files names them itself.
        let file = self.file.as_ref().filter(|_| self.files.is_empty());
        for part in [file, self.tensor.as_ref()].into_iter().flatten() {
            line.push_str(part);
            line.push_str(": ");
        }
        line.push_str(&self.message);
        match (self.rank.as_ref().filter(|_| self.files.is_empty()), &self.host) {
            (Some(rank), Some(host)) => line.push_str(&format!(" ({rank} on {host})")),
            (Some(place), None) | (None, Some(place)) => line.push_str(&format!(" ({place})")),
            (None, None) => {}
        }
        printable(&line)
    }

    /// What to do, with its commands: one line.
    pub fn advice(&self) -> Option<String> {
        let help = self.help.as_ref()?;
        Some(match self.run.is_empty() {
            true => help.clone(),
            false => format!("{help}: {}", self.run.join("; ")),
        })
    }
}

impl fmt::Display for Finding {
    /// The headline, and the expected and the found value, or the evidence: one line, control characters
    /// escaped.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.headline())?;
        let rest = match (&self.expected, &self.got) {
            (Some(x), Some(y)) => format!(": expected {x}, got {y}"),
            (Some(x), None) => format!(": expected {x}"),
            (None, Some(y)) => format!(": got {y}"),
            (None, None) => self.evidence.as_ref().map(|says| format!(": {says}")).unwrap_or_default(),
        };
        f.write_str(&printable(&rest))
    }
}

/// One or more findings that stopped an operation.
#[derive(Debug, Clone)]
pub struct Error {
    findings: Vec<Finding>,
}

/// Result of a fallible fastshard operation.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// All findings, the decisive one first.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// The findings, by value.
    pub fn into_findings(self) -> Vec<Finding> {
        self.findings
    }

    /// True if the operation was stopped by the user.
    pub fn is_interrupt(&self) -> bool {
        self.findings.iter().any(|f| f.code == codes::INTERRUPTED)
    }

    /// True if memory did not suffice, which says nothing about a file.
    pub fn is_of_memory(&self) -> bool {
        self.findings.iter().any(|f| f.code == codes::MEMORY_BUDGET)
    }

    /// True if the result was published before this error occurred.
    pub fn is_after_publishing(&self) -> bool {
        self.findings.iter().any(|f| f.code == codes::PUBLISHED)
    }

    /// The same error, for a run whose result is already complete at `out`.
    #[must_use]
    pub fn after_publishing(mut self, out: &Path) -> Self {
        if !self.is_after_publishing() {
            self.findings.push(Finding::new(codes::PUBLISHED, "the result is complete here").file(out));
        }
        self
    }

    /// An error of an operating system call on `path`, mapped to the code that fits.
    pub fn io(path: impl AsRef<Path>, doing: &str, error: &std::io::Error) -> Self {
        use std::io::ErrorKind as K;
        let (code, help) = match error.kind() {
            K::NotFound => (codes::NO_SUCH_PATH, "check the path"),
            K::PermissionDenied | K::ReadOnlyFilesystem => (
                codes::PERMISSION,
                "check the owner and mode of the path, and that it is not mounted read-only",
            ),
            K::StorageFull | K::QuotaExceeded | K::FileTooLarge => {
                (codes::NO_SPACE, "free space or choose another destination")
            }
            K::OutOfMemory => (codes::MEMORY_BUDGET, MORE_MEMORY),
            K::AlreadyExists => (codes::OUT_EXISTS, "choose another destination or pass --overwrite"),
            _ => match error.raw_os_error() {
                Some(23 | 24) => (codes::TOO_MANY_FILES, "raise the open-file limit (ulimit -n)"),
                _ => (codes::IO, "see the system's message; the storage may be failing"),
            },
        };
        let mut finding = Finding::new(code, format!("{doing}: {error}")).help(help);
        if error.kind() == K::StorageFull {
            finding.got = free_at(path.as_ref());
        }
        finding.file(path).into()
    }

    /// The error for a thread that the system does not start.
    pub fn thread(error: &std::io::Error) -> Self {
        Finding::new(codes::MEMORY_BUDGET, format!("the system starts no further thread: {error}"))
            .help("lower --threads, or raise the limits of the process (ulimit -v, ulimit -u, a cgroup)")
            .into()
    }

    /// The same error with the number of required bytes, if it is about space.
    #[must_use]
    pub(crate) fn needing(mut self, bytes: u64) -> Self {
        for finding in self.findings.iter_mut().filter(|f| f.code == codes::NO_SPACE) {
            finding.expected = Some(format!("{} free", sizes(bytes, 0).0));
        }
        self
    }
}

impl From<Finding> for Error {
    fn from(finding: Finding) -> Self {
        Error { findings: vec![finding] }
    }
}

impl From<Vec<Finding>> for Error {
    /// The caller passes at least one finding of severity error.
    fn from(mut findings: Vec<Finding>) -> Self {
        findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
        Error { findings }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, finding) in self.findings.iter().enumerate() {
            if i > 0 {
                writeln!(f)?;
            }
            write!(f, "{finding}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

/// The exit code that a set of findings stands for (0 done, 1 problems, 2 could not run, 3 incomplete only).
pub fn exit_code(findings: &[Finding]) -> u8 {
    let errors = findings.iter().filter(|f| f.severity == Severity::Error);
    // A warning that counts as an error says nothing of whether the run was possible, or more files may come.
    let class = |f: &Finding| if f.is_raised() { Exit::Problem } else { codes::info(f.code).exit };
    let classes: Vec<Exit> = errors.map(class).collect();
    if classes.is_empty() {
        0
    } else if classes.contains(&Exit::Problem) {
        1
    } else if classes.contains(&Exit::CouldNotRun) {
        2
    } else {
        3
    }
}

/// Turns a panic into an error, so that it stops the run like any other error, with workers and staging.
pub(crate) fn without_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    // What it leaves is not looked at again: the run ends.
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Finding::new(codes::INTERNAL, format!("a worker panicked: {text}"))
            .help("report this bug of fastshard with the output")
            .into())
    })
}
