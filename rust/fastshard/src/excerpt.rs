//! A plan's excerpt: some of its outputs, with all that they are made of and nothing else.

use std::collections::BTreeMap;

use crate::plan::{Pieces, Plan};

/// Old positions that are kept, in the order of their first use, and their new positions.
#[derive(Default)]
struct Kept {
    new: BTreeMap<u32, u32>,
    old: Vec<u32>,
}

impl Kept {
    fn keep(&mut self, old: u32) -> u32 {
        let Kept { new, old: order } = self;
        *new.entry(old).or_insert_with(|| {
            order.push(old);
            order.len() as u32 - 1
        })
    }
}

impl Plan {
    /// The outputs at these positions, with the stored tensors, data ranges, rules and files that they refer
    /// to, all as in this plan. Texts, pointers and notes belong to the full plan and are left out.
    ///
    /// # Panics
    /// If such an output does not exist.
    pub fn excerpt(&self, outputs: &[usize]) -> Plan {
        let (mut stored, mut blobs, mut sources) = (Kept::default(), Kept::default(), Kept::default());
        let (mut rules, mut files) = (Kept::default(), Kept::default());
        let mut excerpt = Plan {
            version: self.version,
            target: self.target.clone(),
            topology: self.topology.clone(),
            axes: self.axes.clone(),
            roots: self.roots.clone(),
            words: self.words.clone(),
            ..Plan::default()
        };
        for &position in outputs {
            let mut output = self.outputs[position].clone();
            output.file = files.keep(output.file);
            for part in &mut output.parts {
                part.sources.iter_mut().for_each(|source| *source = stored.keep(*source));
            }
            excerpt.outputs.push(output);
        }
        // What a tensor is compared with, or scaled by, belongs to it.
        let mut at = 0;
        while let Some(&old) = stored.old.get(at) {
            let mut tensor = self.stored[old as usize].clone();
            tensor.rule = rules.keep(tensor.rule);
            tensor.twins.iter_mut().for_each(|twin| *twin = stored.keep(*twin));
            if let Pieces::Coded(coded) = &mut tensor.pieces {
                coded.renumber(|old| stored.keep(old));
            }
            for change in &mut tensor.changes {
                change.renumber(|old| stored.keep(old));
            }
            tensor.pieces.blobs_mut().for_each(|blob| *blob = blobs.keep(*blob));
            excerpt.stored.push(tensor);
            at += 1;
        }
        for &old in &blobs.old {
            let mut blob = self.blobs[old as usize].clone();
            blob.file = sources.keep(blob.file);
            excerpt.blobs.push(blob);
        }
        excerpt.rules = rules.old.iter().map(|&i| self.rules[i as usize].clone()).collect();
        excerpt.sources = sources.old.iter().map(|&i| self.sources[i as usize].clone()).collect();
        excerpt.files = files.old.iter().map(|&i| self.files[i as usize].clone()).collect();
        for pad in &self.pads {
            if let Some(&new) = stored.new.get(&pad.stored) {
                let mut pad = pad.clone();
                pad.stored = new;
                excerpt.pads.push(pad);
            }
        }
        excerpt.copies = self
            .copies
            .iter()
            .filter_map(|(first, copy)| Some((*stored.new.get(first)?, *stored.new.get(copy)?)))
            .collect();
        excerpt
    }
}
