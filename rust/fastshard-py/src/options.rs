//! How a run is asked for.

use std::path::PathBuf;
use std::sync::Arc;

use fastshard::engine::Options as EngineOptions;
use fastshard::stats::Level;
use fastshard::{verify, write};
use pyo3::prelude::*;

use crate::{companions, stores, CopiedFile};

/// How a run reads. One that writes comes with the core's own [`write::Options`].
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RunOptions {
    pub(crate) threads: usize,
    pub(crate) memory: u64,
    #[serde(default)]
    pub(crate) scratch_dir: Option<PathBuf>,
    #[serde(default)]
    pub(crate) subset: Option<(u64, u64)>,
    /// Only these outputs.
    #[serde(default)]
    pub(crate) only: Option<std::collections::HashSet<String>>,
    #[serde(default)]
    pub(crate) stats: Statistics,
}

/// Adds to the options of a write the files that go along, and Python's writer of arrays.
pub(crate) fn complete(
    options: write::Options,
    copies: Vec<CopiedFile>,
    arrays: Option<Py<PyAny>>,
) -> write::Options {
    let arrays =
        arrays.map(|writer| Arc::new(stores::PythonWriter { writer }) as Arc<dyn write::ArrayWriter>);
    write::Options { copies: companions(copies), arrays, ..options }
}

impl RunOptions {
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
