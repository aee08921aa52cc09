//! Adapters: which stored tensors are factors of changes, and of which tensor.

use std::collections::{HashMap, HashSet};

use serde::Deserialize;

use super::assembled::Gathered;
use crate::codes;
use crate::error::Finding;
use crate::plan::change::{Change, Form, Window};

/// A tensor and what is made of it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AdaptedSide {
    /// The tensor, by the model's own name.
    pub name: String,
    /// What is made of it, one after another.
    pub changes: Vec<ChangeSide>,
}

/// A change; its factors by the names under which they are stored.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ChangeSide {
    /// See [`Change::LowRank`].
    LowRank {
        /// `A`.
        a: String,
        /// `B`.
        b: String,
        /// Columns of `B`, of one expert.
        rank: u64,
        /// Factor of the product.
        scale: f32,
        /// How the tensor has outputs and inputs.
        form: Form,
        /// See [`Change::LowRank`].
        #[serde(default)]
        window: Option<Window>,
        /// Norms of the outputs' rows.
        #[serde(default)]
        magnitude: Option<String>,
    },
    /// See [`Change::Vector`].
    Vector {
        /// The vector.
        of: String,
        /// Factor.
        scale: f32,
    },
    /// See [`Change::Rows`].
    Rows {
        /// The new rows.
        of: String,
        /// Their positions.
        at: Vec<u64>,
    },
}

impl ChangeSide {
    /// The change, its factors found by `find`.
    fn found(&self, find: impl Fn(&str) -> Option<u32>) -> Result<Change, &str> {
        let find = |name| find(name).ok_or(name);
        Ok(match self {
            ChangeSide::LowRank { a, b, rank, scale, form, window, magnitude } => Change::LowRank {
                a: find(a)?,
                b: find(b)?,
                rank: *rank,
                scale: *scale,
                form: *form,
                window: *window,
                magnitude: magnitude.as_deref().map(find).transpose()?,
            },
            ChangeSide::Vector { of, scale } => Change::Vector { of: find(of)?, scale: *scale },
            ChangeSide::Rows { of, at } => Change::Rows { of: find(of)?, at: at.clone() },
        })
    }
}

impl Gathered {
    /// Gives tensors their changes. Returns the stored tensors that are no outputs: factors, and what is replaced.
    pub(super) fn adapt(&mut self, adapted: &[AdaptedSide], hidden: &HashSet<&str>) -> HashSet<u32> {
        let mut by_name: HashMap<&str, u32> = HashMap::new();
        for &index in &self.passes[0].tensors {
            by_name.entry(&self.stored[index as usize].name).or_insert(index);
        }
        let out = self.passes[0]
            .tensors
            .iter()
            .filter(|&&i| hidden.contains(self.stored[i as usize].name.as_str()));
        let out: HashSet<u32> = out.copied().collect();
        let mut of: HashMap<&str, Vec<u32>> = HashMap::new();
        for (seen, &index) in self.passes[0].seen.iter().zip(&self.passes[0].tensors) {
            if !out.contains(&index) {
                of.entry(&seen.name).or_default().push(index);
            }
        }
        let mut all_changes: Vec<(u32, Vec<Change>)> = Vec::new();
        for side in adapted {
            let found: Result<Vec<Change>, &str> =
                side.changes.iter().map(|change| change.found(|name| by_name.get(name).copied())).collect();
            let problem = match (&found, of.get(side.name.as_str())) {
                (Err(name), _) => Some(
                    Finding::new(codes::MISSING_TENSOR, "a tensor of the adapter is missing")
                        .tensor(*name)
                        .help("copy the adapter again from the host that saved it"),
                ),
                (Ok(_), None) => Some(
                    Finding::new(
                        codes::MISSING_TENSOR,
                        "the adapter is for a tensor that the base does not have",
                    )
                    .tensor(&side.name)
                    .help("pass the base that it was trained on"),
                ),
                (Ok(changes), Some(indices)) => {
                    let shape = &self.stored[indices[0] as usize].shape;
                    let misfit = changes.iter().find_map(|change| change.misfit(shape, &self.stored));
                    if misfit.is_none() {
                        all_changes.extend(indices.iter().map(|&index| (index, changes.clone())));
                    }
                    misfit.map(|(factor, expected, got)| {
                        Finding::new(codes::SHAPE, "the adapter does not fit the base")
                            .tensor(&self.stored[factor as usize].name)
                            .expected(format!("{expected}, for {} {shape:?}", side.name), got)
                            .help("pass the base that it was trained on, and the adapter's own adapter_config.json")
                    })
                }
            };
            self.findings.extend(problem);
        }
        for (index, changes) in all_changes {
            self.stored[index as usize].changes = changes.into();
        }
        out
    }
}
