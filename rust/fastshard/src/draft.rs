//! Drafts: all that a plan says but where its outputs lie. What the files of a target are called and hold follows from
//! the tensors that there are, so a target looks at the draft, and the draft is then placed. Composed once.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use crate::catalog::Catalog;
use crate::codes;
use crate::compose::Drafted;
use crate::error::{Finding, Severity};
use crate::files::{self, Constants, FileSide, Placed, INDEX_NAME};
use crate::plan::{Metadata, Output, Plan};
use crate::request::lookalikes;
use crate::steps::{self, Step};
use crate::tensor::Dtype;
use crate::topics;
use crate::unwritten::{find_unwritten, Holes};

/// The target's places for the drafted outputs, and the files that accompany them.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Files of the result, if the framework prescribes them; by default, outputs fill safetensors files in
    /// their order.
    #[serde(default)]
    pub files: Vec<FileSide>,
    /// Largest output file, in bytes of tensor data, if no files are prescribed.
    pub max_shard_size: u64,
    /// Small text files to write in addition.
    #[serde(default)]
    pub texts: BTreeMap<String, String>,
    /// Integer types of counters whose type the target changes.
    #[serde(default)]
    pub dtypes: BTreeMap<String, Dtype>,
    /// Scalars that come from no tensor of the source.
    #[serde(default)]
    pub constants: Constants,
    /// Metadata for the headers of safetensors files, if no files are prescribed.
    #[serde(default)]
    pub metadata: Metadata,
    /// Top-level names that appear after all others, the last of them the one that readers start from. By default the
    /// index, else the first file.
    #[serde(default)]
    pub pointers: Vec<String>,
    /// The list of expected tensors that the caller gave: its class, version and digest.
    #[serde(default)]
    pub expected: Option<String>,
}

/// A plan without places.
#[derive(Debug)]
pub struct Draft {
    /// The plan without outputs and files.
    pub(crate) plan: Plan,
    /// Its outputs.
    pub outputs: Vec<Drafted>,
    /// Required tensors that are incomplete, with the number of elements of each if the layout states it.
    pub lost: BTreeMap<String, Option<u64>>,
    /// Files of the catalog that state their rank.
    pub(crate) placed: BTreeSet<usize>,
    /// The treatment of holes in files.
    pub(crate) holes: Holes,
    /// The findings so far, errors first.
    pub findings: Vec<Finding>,
}

/// A plan, and the findings of planning. With an error among them the plan is incomplete: it can be
/// inspected, and its complete tensors can be read, but it cannot be executed.
#[derive(Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Findings, errors first.
    pub findings: Vec<Finding>,
}

impl Draft {
    /// Extents of the axes.
    pub fn axes(&self) -> &BTreeMap<String, u64> {
        &self.plan.axes
    }

    /// Names of the stored tensors that make up an output.
    pub fn made_of<'a>(&'a self, output: &'a Output) -> impl Iterator<Item = String> + 'a {
        let sources = output.parts.iter().flat_map(|part| &part.sources);
        sources.map(|&source| self.plan.stored[source as usize].name.to_string())
    }

    fn is_broken(&self) -> bool {
        self.findings.iter().any(|f| f.severity == Severity::Error)
    }

    /// The plan, with every output in a file.
    pub fn placed(mut self, catalog: &Catalog, placement: Placement) -> Planned {
        steps::reach(Step::Place);
        for Drafted { output, .. } in &mut self.outputs {
            // A counter in another integer type: its numbers are checked when they are read.
            let to =
                placement.dtypes.get(&*output.name).filter(|to| to.is_integer() && output.dtype.is_integer());
            output.dtype = to.copied().unwrap_or(output.dtype);
        }
        let broken = self.is_broken();
        let (mut plan, mut findings) = (self.plan, self.findings);
        let outputs = self.outputs.into_iter().map(|o| (o.coords, o.output)).collect();
        let Placed { outputs, files, has_index, findings: found } = match placement.files.is_empty() || broken
        {
            true => files::pack(outputs, placement.max_shard_size, &placement.metadata),
            false => files::place(outputs, &placement.files, &placement.constants),
        };
        findings.extend(found);
        (plan.outputs, plan.files, plan.texts) = (outputs, files, placement.texts);
        plan.index = has_index.then(|| INDEX_NAME.to_string());
        plan.expected = placement.expected;
        plan.metadata = if placement.files.is_empty() { placement.metadata } else { Metadata::new() };
        plan.point(placement.pointers);
        findings.extend(files::beyond(&plan));
        findings.extend(files::misnamed(&plan));
        findings.extend(lookalikes::lookalikes(catalog, &plan, &self.placed));
        findings.extend(lookalikes::unsummed(catalog, &plan));
        findings.extend(find_unwritten(catalog, &plan, self.holes));
        findings.sort_by_key(|f| std::cmp::Reverse(f.severity));
        plan.notes = findings.iter().filter(|f| f.severity != Severity::Error).cloned().collect();
        if findings.iter().all(|f| f.severity != Severity::Error) && plan.outputs.is_empty() {
            findings.insert(
                0,
                Finding::new(codes::USAGE, "nothing is left to write").help("check --include and --exclude"),
            );
        }
        log::debug!(
            target: topics::PLAN,
            "{} outputs in {} files, {} bytes, of {} stored tensors in {} sources; {} findings",
            plan.outputs.len(),
            plan.files.len(),
            plan.bytes(),
            plan.stored.len(),
            plan.sources.len(),
            findings.len(),
        );
        Planned { plan, findings }
    }
}
