//! How a run is asked for.

use std::path::PathBuf;
use std::sync::Arc;

use fastshard::engine::Options as EngineOptions;
use fastshard::gate::Gate;
use fastshard::stats::Level;
use fastshard::{publish, verify, write};
use pyo3::prelude::*;

use crate::{companions, stores, CopiedFile};

/// How a run is asked for.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunOptions {
    pub(crate) threads: usize,
    pub(crate) memory: u64,
    #[serde(default)]
    pub(crate) scratch_dir: Option<PathBuf>,
    #[serde(default)]
    pub(crate) overwrite: bool,
    #[serde(default)]
    pub(crate) resume: bool,
    #[serde(default = "yes")]
    pub(crate) fsync: bool,
    #[serde(default)]
    pub(crate) sparse: bool,
    /// How data files are written.
    #[serde(default)]
    pub(crate) io: publish::Io,
    #[serde(default)]
    pub(crate) values: serde_json::Value,
    /// Of the files that go along those from above the checkpoint: where from, by name.
    #[serde(default)]
    pub(crate) above: std::collections::BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) subset: Option<(u64, u64)>,
    /// Only these outputs.
    #[serde(default)]
    pub(crate) only: Option<std::collections::HashSet<String>>,
    #[serde(default)]
    pub(crate) stats: Statistics,
    /// The sources were compared with a manifest of theirs.
    #[serde(default)]
    pub(crate) expected: bool,
    /// Seconds that other processes of a run are given to show a sign of life.
    #[serde(default = "patience")]
    pub(crate) patience: f64,
    /// Which rank has each root of the sources on its own disk.
    #[serde(default)]
    pub(crate) near: Option<Vec<u32>>,
    /// How findings are judged.
    #[serde(default)]
    pub(crate) gate: Gate,
}

fn patience() -> f64 {
    5.0
}

impl RunOptions {
    /// How to write with them.
    pub(crate) fn writing(self, copies: Vec<CopiedFile>, arrays: Option<Py<PyAny>>) -> write::Options {
        let patience = std::time::Duration::try_from_secs_f64(self.patience);
        write::Options {
            threads: self.threads,
            memory: self.memory,
            publish: publish::Options {
                overwrite: self.overwrite,
                resume: self.resume,
                fsync: self.fsync,
                sparse: self.sparse,
                io: self.io,
                stats: self.stats == Statistics::Full,
            },
            copies: companions(copies),
            above: self.above,
            values: self.values,
            arrays: arrays
                .map(|writer| Arc::new(stores::PythonWriter { writer }) as Arc<dyn write::ArrayWriter>),
            expected: self.expected,
            patience: patience.unwrap_or(std::time::Duration::MAX).into(),
            near: self.near,
            gate: self.gate,
        }
    }

    /// How to run the engine with them.
    pub(crate) fn engine(&self) -> EngineOptions {
        EngineOptions {
            threads: self.threads,
            memory: self.memory,
            scratch_dir: self.scratch_dir.clone().unwrap_or_else(std::env::temp_dir),
            max_decoded: None,
            encodes: 0,
            stats: match self.stats {
                Statistics::Nothing => Level::Nothing,
                Statistics::ZeroSlabs => Level::ZeroSlabs,
                Statistics::Full => Level::Full,
            },
        }
    }

    pub(crate) fn subset(&self) -> Option<verify::Subset> {
        self.subset.map(|(part, of)| verify::Subset { part, of })
    }

    pub(crate) fn holds(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|names| names.contains(name))
    }
}

/// Statistics that a run gathers.
#[derive(serde::Deserialize, Default, Clone, Copy, PartialEq)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Statistics {
    #[default]
    Nothing,
    ZeroSlabs,
    Full,
}

fn yes() -> bool {
    true
}
