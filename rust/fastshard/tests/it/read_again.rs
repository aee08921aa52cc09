//! What is laid out is within what is read: by this crate, and by the safetensors library.

use std::collections::BTreeMap;
use std::sync::Arc;

use fastshard::files::{self, Placed, Ranked};
use fastshard::format::safetensors::MAX_HEADER;
use fastshard::plan::{Fill, OutFile, Output};
use fastshard::tensor::Dtype;
use safetensors::SafeTensors;

fn output(name: String, dims: usize) -> Output {
    Output {
        name: name.into(),
        dtype: Dtype::F32,
        shape: vec![1; dims].into(),
        parts: Box::default(),
        fill: Fill::Zero,
        file: 0,
        offset: 0,
        key: None,
    }
}

fn ranked(names: Vec<String>, ranks: u64) -> Ranked {
    let at = |rank| Arc::new(BTreeMap::from([("tp".to_string(), rank)]));
    let outputs = |rank| names.iter().map(move |n| (at(rank), output(n.clone(), 1)));
    (0..ranks).flat_map(outputs).collect()
}

/// The header of a file as it is written, read by the safetensors library.
fn opened(file: &OutFile, outputs: &[Output]) -> Vec<String> {
    let (frame, _) = files::frame(file, &Default::default(), &outputs.iter().collect::<Vec<_>>()).unwrap();
    let mut bytes = frame.pieces[0].1.clone();
    bytes.resize(frame.size as usize, 0);
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    metadata.tensors().into_keys().collect()
}

#[test]
fn names_are_divided_so_that_each_header_can_be_opened() {
    let names: Vec<String> = (0..5).map(|i| format!("{i}{}", "n".repeat(33_000_000))).collect();
    let Placed { outputs, files: laid_out, findings, .. } =
        files::pack(ranked(names.clone(), 1), u64::MAX, &Default::default());
    assert!(findings.is_empty(), "{findings:?}");
    assert_eq!(laid_out.len(), 2);
    let mut seen = Vec::new();
    for (i, file) in laid_out.iter().enumerate() {
        let inside: Vec<Output> = outputs.iter().filter(|o| o.file as usize == i).cloned().collect();
        seen.extend(opened(file, &inside));
    }
    seen.sort();
    assert!(seen == names);
}

#[test]
fn a_rank_stays_in_one_file_or_is_refused_with_both_numbers() {
    let names: Vec<String> = (0..4).map(|i| format!("{i}{}", "n".repeat(25_000_000))).collect();
    let Placed { outputs, files: laid_out, findings, .. } =
        files::pack(ranked(names, 2), u64::MAX, &Default::default());
    assert!(outputs.is_empty() && laid_out.is_empty());
    assert_eq!(findings.len(), 2);
    assert_eq!(findings[1].file.as_deref(), Some("tp_rank_01.safetensors"));
    assert_eq!(findings[0].expected.as_deref(), Some("100000000 at most"));
    assert!(findings[0].got.as_ref().unwrap().parse::<u64>().unwrap() > MAX_HEADER);
}

#[test]
fn the_boundary_is_that_of_the_format() {
    let (mut good, mut bad) = (0, 0);
    // Headers are padded to whole pages: the last one within the limit, and the first beyond it.
    for length in [99_999_000, 99_999_500, 99_999_600, 99_999_700, 99_999_800, 99_999_990] {
        let Placed { outputs, files, findings, .. } =
            files::pack(ranked(vec!["n".repeat(length)], 1), u64::MAX, &Default::default());
        match findings.first() {
            None => {
                good += 1;
                assert_eq!(opened(&files[0], &outputs).len(), 1);
            }
            Some(finding) => {
                bad += 1;
                assert!(finding.got.as_ref().unwrap().parse::<u64>().unwrap() > MAX_HEADER);
            }
        }
    }
    assert!(good > 0 && bad > 0, "{good} {bad}");
}
