//! Layers, and experts of a layer, whose matrices equal those of another one.
//!
//! The outputs' hashes show it, so only a few bytes are read: the first ones of one of several equal
//! matrices, and of each layer in a tensor that holds all layers.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::shards::CHUNK;
use super::tile::{self, Twins, Workspace};
use super::values::Values;
use super::{place, OutputReport, Run};
use crate::codes;
use crate::error::{Finding, Result, Severity};
use crate::plan::Output;
use crate::tensor::Dtype;
use crate::words::without_numbers;

/// Maximum number of matrices that a finding names.
const NAMED: usize = 4;
/// Bytes of each layer of a stacked tensor in the search for equal layers.
const SAMPLE: usize = 1 << 10;
/// Maximum bytes in the search for values.
const MOST: u64 = 16 * CHUNK as u64;

/// A name divided at one of its numbers: the part before it, the number, and the part after it.
type Place<'p> = (&'p str, u64, &'p str);

/// The key of a layer's matrix: the name before and after the layer's number.
type Key<'p> = (&'p str, &'p str);
/// Two layers: the name before their numbers, and the numbers.
type Pair<'p> = (&'p str, u64, u64);
/// Matrices that are equal in some layers: the number of each but the first, with that of the first and an output.
type Equal<'p> = BTreeMap<Key<'p>, BTreeMap<u64, (u64, usize)>>;

/// A tensor that holds a matrix of all layers, along one of its dimensions.
struct Stacked<'p> {
    stack: &'p str,
    role: &'p str,
    index: usize,
    dim: usize,
    layers: u64,
}

/// The number of layers with a matrix of a role, and the number of those that equal another one.
#[derive(Default)]
struct Count {
    all: usize,
    equal: usize,
    copies: usize,
}

impl Count {
    /// True if so many layers are equal that it must be by design.
    fn is_by_design(&self) -> bool {
        self.copies > 1 && self.equal * 3 > self.all
    }

    fn add(&mut self, layers: &BTreeSet<u64>, others: Option<&BTreeMap<u64, (u64, usize)>>) {
        self.all += layers.len();
        let Some(others) = others else { return };
        let firsts: BTreeSet<u64> = others.values().map(|(first, _)| *first).collect();
        self.copies += others.len();
        self.equal += others.len() + firsts.iter().filter(|first| !others.contains_key(*first)).count();
    }
}

/// Adds layers that are equal, each with the first of them.
fn add_group<'p>(equal: &mut Equal<'p>, key: Key<'p>, mut group: BTreeMap<u64, usize>) {
    let Some((first, _)) = group.pop_first() else { return };
    let others = equal.entry(key).or_default();
    for (number, output) in group {
        others.entry(number).or_insert((first, output));
    }
}

/// The places of a name, at each of its numbers: `layers.3.w`, `layers_3.w`, and `weight3` of an expert.
fn places(name: &str) -> Vec<Place<'_>> {
    let (mut found, mut at) = (Vec::new(), 0);
    for part in name.split('.') {
        let end = at + part.len();
        let word = part.trim_end_matches(|c: char| c.is_ascii_digit());
        let is_counted = match word {
            "" => end < name.len(),
            "weight" | "kernel" => true,
            word => word.ends_with('_') && end < name.len(),
        };
        if let (true, Ok(number)) = (is_counted, part[word.len()..].parse()) {
            found.push((&name[..at + word.len()], number, &name[end..]));
        }
        at = end + 1;
    }
    found
}

/// True for a tensor with rows and columns.
fn is_matrix(output: &Output) -> bool {
    output.shape.iter().filter(|n| **n > 1).count() > 1
}

impl Run<'_> {
    /// Findings about layers that are equal: a warning for each two, naming the matrices; a note if so many
    /// are equal that it must be by design. Layers in `known` findings are left out.
    ///
    /// # Errors
    /// The reason why a matrix cannot be read.
    pub(super) fn equal_layers(&self, outputs: &[OutputReport], known: &[Finding]) -> Result<Vec<Finding>> {
        let matrices: Vec<usize> = (0..outputs.len()).filter(|&i| self.may_be_copied(i, outputs)).collect();
        let stacked: Vec<Stacked> = (0..outputs.len()).filter_map(|i| self.stacked(i, outputs)).collect();
        let mut equal = Equal::new();
        self.equal_matrices(&matrices, outputs, &mut equal)?;
        for one in &stacked {
            self.equal_slices(one, &mut equal)?;
        }
        if equal.is_empty() {
            return Ok(Vec::new());
        }
        let layers = self.layers_by_role(&matrices, &stacked, &equal);
        // The experts of one layer, and those of all layers.
        let mut counts: HashMap<(String, &str), Count> = HashMap::new();
        let mut roles: HashMap<&str, Vec<&BTreeSet<u64>>> = HashMap::new();
        for (key, numbers) in &layers {
            counts.entry((without_numbers(key.0), key.1)).or_default().add(numbers, equal.get(key));
            roles.entry(key.0).or_default().push(numbers);
        }
        let mut pairs: BTreeMap<Pair, Vec<(&str, usize)>> = BTreeMap::new();
        let mut by_design: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
        for (key @ &(stack, role), others) in &equal {
            let mut own = Count::default();
            own.add(&layers[key], Some(others));
            for (&other, &(first, output)) in others {
                if own.is_by_design() || counts[&(without_numbers(stack), role)].is_by_design() {
                    by_design.entry(stack).or_default().extend([first, other]);
                } else {
                    pairs.entry((stack, first, other)).or_default().push((role, output));
                }
            }
        }
        let mut findings = Vec::new();
        for ((stack, first, other), matrices) in pairs {
            let has_both = |numbers: &&&BTreeSet<u64>| numbers.contains(&first) && numbers.contains(&other);
            let all = roles[stack].iter().filter(has_both).count();
            let finding = self.equal_pair(stack, (first, other), &matrices, all);
            let names = || matrices.iter().map(|(_, i)| &self.plan.outputs[*i].name);
            if !known.iter().any(|one| tells_of(one, &finding) || names().any(|n| is_copy_of(one, n))) {
                findings.push(finding);
            }
        }
        let is_of_copies =
            |one: &Finding| one.code == codes::DUPLICATED_SHARD || one.code == codes::EQUAL_SHARDS;
        if !known.iter().any(is_of_copies) {
            findings.extend(note_of_design(&by_design));
        }
        Ok(findings)
    }

    /// True for a matrix of a layer that training fills.
    fn may_be_copied(&self, index: usize, outputs: &[OutputReport]) -> bool {
        let output = &self.plan.outputs[index];
        is_matrix(output)
            // What counts, or masks, is computed.
            && !matches!(output.dtype, Dtype::Bool | Dtype::I64 | Dtype::U64)
            && !outputs[index].seen.is_zero()
            && !self.plan.words.are_one_buffer(&output.name, &output.name)
            && !places(&output.name).is_empty()
    }

    /// Finds matrices that are equal and whose names differ in one number.
    fn equal_matrices<'p>(
        &'p self,
        matrices: &[usize],
        outputs: &[OutputReport],
        equal: &mut Equal<'p>,
    ) -> Result<()> {
        let mut contents: BTreeMap<[u8; 32], Vec<usize>> = BTreeMap::new();
        for &i in matrices {
            contents.entry(outputs[i].hash).or_default().push(i);
        }
        for group in contents.into_values().filter(|group| group.len() > 1) {
            let output = |i: usize| &self.plan.outputs[i];
            let first = output(group[0]);
            let like = |i: &&usize| (output(**i).dtype, &output(**i).shape) == (first.dtype, &first.shape);
            let mut roles: BTreeMap<Key, BTreeMap<u64, usize>> = BTreeMap::new();
            for &i in group.iter().filter(like) {
                for (stack, number, role) in places(&output(i).name) {
                    // Ranks may each have a tensor of one name.
                    roles.entry((stack, role)).or_default().entry(number).or_insert(i);
                }
            }
            roles.retain(|_, numbers| numbers.len() > 1);
            if !roles.is_empty() && self.has_values(first)? {
                roles.into_iter().for_each(|(key, numbers)| add_group(equal, key, numbers));
            }
        }
        Ok(())
    }

    /// True if a matrix has so many different values that an equal one cannot be a coincidence.
    fn has_values(&self, output: &Output) -> Result<bool> {
        let item = output.dtype.size();
        let mut values = Values::at_least((output.nbytes() as usize / item / 2).max(2));
        let mut work = Workspace::new()?;
        for start in (0..output.nbytes().min(MOST)).step_by(CHUNK) {
            let end = (start + CHUNK as u64).min(output.nbytes());
            tile::make(self.plan, &self.sources, output, start, end, Twins::Leave, &mut work)?;
            values.add(work.tile_bytes((end - start) as usize)?, item);
            if values.enough() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A tensor that holds a matrix of all layers, one after another along its first dimension or its second.
    /// An encoded tensor is left out, as it would have to be decoded once more.
    fn stacked(&self, index: usize, outputs: &[OutputReport]) -> Option<Stacked<'_>> {
        let output = &self.plan.outputs[index];
        let layers = *self.plan.axes.get("L").filter(|layers| **layers > 1)?;
        let end = self.plan.words.stack(&output.name).filter(|_| places(&output.name).is_empty())?;
        let dim = output.shape.iter().take(2).position(|n| *n == layers)?;
        let is_matrix = output.shape.iter().filter(|n| **n > 1).count() > 2;
        let is_decoded = self.blobs_of[index].iter().any(|blob| self.plan.blobs[*blob as usize].encoded);
        let (stack, role) = (&output.name[..=end], &output.name[end..]);
        (is_matrix && !is_decoded && !outputs[index].seen.is_zero()).then_some(Stacked {
            stack,
            role,
            index,
            dim,
            layers,
        })
    }

    /// Finds equal layers of a stacked tensor: by their first values, and by all values if these are equal.
    fn equal_slices<'p>(&self, one: &Stacked<'p>, equal: &mut Equal<'p>) -> Result<()> {
        let mut work = Workspace::new()?;
        let mut samples: BTreeMap<Vec<u8>, Vec<u64>> = BTreeMap::new();
        for layer in 0..one.layers {
            let mut sample = Vec::new();
            self.each_run(one, layer, &mut work, |bytes| {
                sample.extend_from_slice(&bytes[..bytes.len().min(SAMPLE)]);
                sample.len() < SAMPLE
            })?;
            samples.entry(sample).or_default().push(layer);
        }
        for layers in samples.into_values().filter(|layers| layers.len() > 1) {
            let mut contents: BTreeMap<[u8; 32], BTreeMap<u64, usize>> = BTreeMap::new();
            for layer in layers {
                let mut hasher = blake3::Hasher::new();
                self.each_run(one, layer, &mut work, |bytes| {
                    hasher.update(bytes);
                    true
                })?;
                contents.entry(*hasher.finalize().as_bytes()).or_default().insert(layer, one.index);
            }
            for group in contents.into_values().filter(|group| group.len() > 1) {
                let output = &self.plan.outputs[one.index];
                let item = output.dtype.size();
                let elements = (output.nbytes() / one.layers) as usize / item;
                let mut values = Values::at_least((elements / 2).max(2));
                let first = group.keys().next().copied().unwrap_or_default();
                self.each_run(one, first, &mut work, |bytes| {
                    values.add(bytes, item);
                    !values.enough()
                })?;
                if values.enough() {
                    add_group(equal, (one.stack, one.role), group);
                }
            }
        }
        Ok(())
    }

    /// Makes the runs of one layer of a stacked tensor again, in their order, until `each` has seen enough.
    fn each_run(
        &self,
        one: &Stacked,
        layer: u64,
        work: &mut Workspace,
        mut each: impl FnMut(&[u8]) -> bool,
    ) -> Result<()> {
        let output = &self.plan.outputs[one.index];
        let inner = output.shape[one.dim + 1..].iter().product::<u64>() * output.dtype.size() as u64;
        let outer: u64 = output.shape[..one.dim].iter().product();
        for o in 0..outer {
            let first = (o * one.layers + layer) * inner;
            for start in (first..first + inner).step_by(CHUNK) {
                let end = (start + CHUNK as u64).min(first + inner);
                tile::make(self.plan, &self.sources, output, start, end, Twins::Leave, work)?;
                if !each(work.tile_bytes((end - start) as usize)?) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// The numbers of the layers that have a matrix, by stack and role, of all stacks with an equal one.
    fn layers_by_role<'p>(
        &'p self,
        matrices: &[usize],
        stacked: &[Stacked<'p>],
        equal: &Equal,
    ) -> HashMap<Key<'p>, BTreeSet<u64>> {
        let stacks: BTreeSet<String> = equal.keys().map(|(stack, _)| without_numbers(stack)).collect();
        let mut numbers: HashMap<Key, BTreeSet<u64>> = HashMap::new();
        for one in stacked.iter().filter(|one| stacks.contains(&without_numbers(one.stack))) {
            numbers.entry((one.stack, one.role)).or_default().extend(0..one.layers);
        }
        for &i in matrices {
            for (stack, number, role) in places(&self.plan.outputs[i].name) {
                if stacks.contains(&without_numbers(stack)) {
                    numbers.entry((stack, role)).or_default().insert(number);
                }
            }
        }
        numbers
    }

    /// Warns that two layers are equal, in all their matrices or in some.
    fn equal_pair(
        &self,
        stack: &str,
        (first, other): (u64, u64),
        matrices: &[(&str, usize)],
        all: usize,
    ) -> Finding {
        let named: Vec<&str> = matrices.iter().map(|(role, _)| role.trim_start_matches('.')).collect();
        let what = match (named.len(), all) {
            (_, 1) => "one matrix".to_string(),
            (n, all) if n == all => format!("all {all} matrices"),
            (n, all) if n > NAMED => {
                format!("{n} of {all} matrices ({} and {} more)", named[..NAMED].join(", "), n - NAMED)
            }
            (n, all) => format!("{n} of {all} matrices ({})", named.join(", ")),
        };
        let output = &self.plan.outputs[matrices[0].1];
        let mut finding = Finding::new(
            codes::EQUAL_SHARDS,
            format!("{stack}{first} and {stack}{other} hold the same values in {what}"),
        )
        .tensor(&output.name)
        .count(named.len() as u64)
        .expected(format!("other values in {stack}{other}"), format!("those of {stack}{first}"))
        .help("copy the wrong file again; if the two are equal on purpose, ignore the warning")
        .run("--ignore FS304");
        if let Some(&stored) = output.parts.iter().find_map(|part| part.sources.first()) {
            finding = place(self.plan, stored, finding);
            finding.rank = None;
        }
        finding
    }
}

/// Notes that so many layers are equal that it must be by design.
fn note_of_design(stacks: &BTreeMap<&str, BTreeSet<u64>>) -> Option<Finding> {
    let (stack, layers) = stacks.iter().max_by_key(|(_, layers)| layers.len())?;
    let more = match stacks.len() - 1 {
        0 => String::new(),
        n => format!("; {n} more stacks are like this"),
    };
    let message =
        format!("{} layers of {stack}N hold matrices that another one of them holds{more}", layers.len());
    let evidence = "more than a third of them are equal, as in models that share or repeat layers";
    Some(Finding::new(codes::EQUAL_SHARDS, message).severity(Severity::Note).evidence(evidence))
}

/// True if a finding reports that the file of another finding is a copy.
pub(super) fn tells_of(known: &Finding, finding: &Finding) -> bool {
    known.code == codes::DUPLICATED_SHARD
        && known.files.iter().chain(&known.file).any(|file| Some(file) == finding.file.as_ref())
}

/// True if a finding reports that the tensor is a copy.
fn is_copy_of(known: &Finding, name: &str) -> bool {
    known.tensor.as_deref() == Some(name)
        && (known.code == codes::DUPLICATED_SHARD || known.code == codes::EQUAL_SHARDS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_count_layers_and_experts() {
        assert_eq!(
            places("model.layers.3.mlp.experts.5.w1.weight"),
            [
                ("model.layers.", 3, ".mlp.experts.5.w1.weight"),
                ("model.layers.3.mlp.experts.", 5, ".w1.weight")
            ]
        );
        assert_eq!(places("decoder.layers_12.wi.kernel"), [("decoder.layers_", 12, ".wi.kernel")]);
        assert_eq!(places("2.attention.dense.weight"), [("", 2, ".attention.dense.weight")]);
        assert_eq!(places("experts.linear_fc1.weight7"), [("experts.linear_fc1.weight", 7, "")]);
        assert_eq!(places("layers.mlp.fc1.weight"), []);
    }
}
