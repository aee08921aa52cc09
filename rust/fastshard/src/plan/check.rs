//! Checks of the properties of a plan on which the engine relies, wherever the plan came from.

use std::collections::BTreeSet;

use super::{Change, Fill, Output, Part, Plan, StoredTensor};
use crate::codes::{self, Code};
use crate::error::{Finding, Result};
use crate::tensor::element_count;

impl Plan {
    /// Checks the properties on which the engine relies, wherever the plan came from: indices, bounds, and
    /// that each output's parts have the volume of the output. (Composing proves that they are disjoint.)
    ///
    /// # Errors
    /// `FS205`/`FS206` naming the output; `FS211` for one that no file can hold.
    pub fn validate(&self) -> Result<()> {
        let mut findings: Vec<Finding> =
            self.outputs.iter().flat_map(|output| self.faults_of(output)).collect();
        let files = self.files.iter().map(|f| &f.name).chain(self.texts.keys()).chain(&self.index);
        let top: BTreeSet<&str> = files.filter_map(|name| name.split('/').next()).collect();
        for name in self.pointers.iter().filter(|name| !top.contains(name.as_str())) {
            findings.push(
                Finding::new(codes::BAD_VALUE, "the plan's last name is of no file of the result").file(name),
            );
        }
        match findings.is_empty() {
            true => Ok(()),
            false => Err(findings.into()),
        }
    }

    /// The faults of an output and its parts.
    fn faults_of(&self, output: &Output) -> Vec<Finding> {
        let fault = |code, what: &str, expected: String, got: String| {
            Finding::new(code, what).tensor(&output.name).expected(expected, got)
        };
        let size = element_count(&output.shape).and_then(|n| n.checked_mul(output.dtype.size() as u64));
        if size.is_none_or(|bytes| bytes > i64::MAX as u64) {
            let shape = format!("{:?} of {}", output.shape, output.dtype);
            return vec![fault(codes::BAD_VALUE, "size of a tensor", "fewer than 2^63 bytes".into(), shape)];
        }
        let mut faults = Vec::new();
        if matches!(output.fill, Fill::Number(number) if output.dtype.element(number).is_none()) {
            let dtype = output.dtype.to_string();
            faults.push(fault(codes::BAD_VALUE, "type of a number", "one that has it".into(), dtype));
        }
        let elements = output.elements();
        let mut covered = 0u64;
        for part in &output.parts {
            let sources = part.sources.iter().map(|&s| Some((s, self.stored.get(s as usize)?)));
            let Some(stored) = sources.collect::<Option<Vec<_>>>() else {
                let what = "a part names a stored tensor that is missing";
                faults.push(fault(codes::HOLE, what, "".into(), "".into()));
                continue;
            };
            covered += part.volume();
            if part.volume() == 0 {
                continue;
            }
            let end = part.dst_base + part.axes.iter().map(|a| (a.n - 1) * a.dst).sum::<u64>();
            if end >= elements {
                let all = format!("{elements} elements");
                faults.push(fault(codes::OVERLAP, "a part leaves the tensor", all, end.to_string()));
            }
            for (index, tensor) in stored {
                let changes = self.fault_of_changes(tensor).or_else(|| self.fault_of_codes(index, tensor));
                let outside = part.reads_outside(tensor).map(|last| {
                    let expected = format!("{} {:?}", tensor.name, tensor.shape);
                    (codes::HOLE, "a part reads outside its source", expected, format!("{last:?}"))
                });
                let both = changes.into_iter().chain(outside);
                faults.extend(both.map(|(code, what, expected, got)| fault(code, what, expected, got)));
            }
        }
        if covered > elements || (covered < elements && output.fill == Fill::None) {
            let code = if covered > elements { codes::OVERLAP } else { codes::HOLE };
            faults.push(fault(code, "elements covered", elements.to_string(), covered.to_string()));
        }
        faults
    }

    /// The fault of the codes that a tensor's values are made from: code, message, expected, got.
    fn fault_of_codes(
        &self,
        index: u32,
        tensor: &StoredTensor,
    ) -> Option<(Code, &'static str, String, String)> {
        let coded = tensor.coded()?;
        if let Some(misfit) = coded.misfit(&tensor.shape, &self.stored) {
            return Some((codes::SHAPE, misfit.what, misfit.expected, misfit.got));
        }
        // What is made of others comes after them: nothing is made of itself.
        if let Some(later) = coded.needs().find(|of| **of >= index) {
            return Some((codes::HOLE, "values made of later ones", index.to_string(), later.to_string()));
        }
        coded.needs().find_map(|of| self.fault_of_codes(*of, &self.stored[*of as usize]))
    }

    /// The fault of the factors that change a tensor: code, message, expected, got.
    fn fault_of_changes(&self, tensor: &StoredTensor) -> Option<(Code, &'static str, String, String)> {
        let changes = || tensor.changes.iter();
        if changes().flat_map(Change::needs).any(|n| n as usize >= self.stored.len()) {
            return Some((codes::HOLE, "an adapter names a tensor that is missing", "".into(), "".into()));
        }
        let (_, expected, got) = changes().find_map(|c| c.misfit(&tensor.shape, &self.stored))?;
        Some((codes::SHAPE, "a factor of an adapter", expected, got))
    }
}

impl Part {
    /// The last index that is read of a source, if the source does not have it.
    fn reads_outside(&self, tensor: &StoredTensor) -> Option<Vec<u64>> {
        let mut last = self.src_base.to_vec();
        for axis in &self.axes {
            if let Some(at) = last.get_mut(axis.dim as usize) {
                *at += (axis.n - 1) * axis.step;
            }
        }
        let is_inside =
            last.len() == tensor.shape.len() && last.iter().zip(&tensor.shape).all(|(l, n)| l < n);
        (!is_inside).then_some(last)
    }
}
