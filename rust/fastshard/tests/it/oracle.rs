//! Layout tables to bytes, against an oracle that knows nothing but index loops.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::world::{self, Case, Extents, Role, Side, World};
use crate::common::{
    carry_out, cases, errors, file_name, make_plan, open, run, sources, temp, units, write_ranks, Dice,
    RankFile, Tensor,
};
use fastshard::codes;
use fastshard::engine;
use proptest::prelude::*;

fn dice() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(any::<u32>(), 0..240)
}

/// Extents that a config would give, stored names for padded axes.
fn config(world: &World, side: &Side) -> Extents {
    let mut axes = world.extents.clone();
    axes.insert("P".into(), side.padded(world.extents["V"]));
    axes
}

fn request(world: &World, source: &Side, target: Option<&Side>, files: &[RankFile]) -> serde_json::Value {
    let mut request = serde_json::json!({
        "source": {
            "toml": source.table("from", world.vocab.as_deref()),
            "units": units(files),
            "degrees": source.degrees,
            "axes": config(world, source),
            "vocab_size": world.extents["V"],
        },
        "max_shard_size": 1u64 << 40,
    });
    if let Some(target) = target {
        request["target"] = serde_json::json!({
            "name": "to",
            "toml": target.table("to", world.vocab.as_deref()),
            "degrees": target.degrees,
            "pad_multiple": target.pad_multiple,
        });
    }
    request
}

/// How to run a case.
struct How {
    tile: u64,
    threads: usize,
    drop_axes: Option<u32>,
}

/// Converts files and returns one file per target rank, or `None` if the plan was refused for want
/// of an axis that the config leaves out.
fn convert(
    world: &World,
    source: &Side,
    target: Option<&Side>,
    files: &[RankFile],
    how: &How,
) -> Option<BTreeMap<(u32, String), Tensor>> {
    let dir = temp();
    write_ranks(dir.path(), files);
    let catalog = open(dir.path(), files.len());
    assert!(catalog.findings.is_empty(), "{:?}", catalog.findings);
    let mut spec = request(world, source, target, files);
    if let Some(mask) = how.drop_axes {
        let axes = spec["source"]["axes"].as_object_mut().unwrap();
        let mut bit = 0;
        axes.retain(|_, _| {
            bit += 1;
            mask >> (bit - 1) & 1 == 1
        });
    }
    let planned = make_plan(&catalog, spec.clone()).unwrap_or_else(|e| panic!("{e}\n{spec:#}"));
    if how.drop_axes.is_some() && !errors(&planned.findings).is_empty() {
        // Refusing is right as long as the reason is that an axis is unknown.
        assert!(planned.findings.iter().any(|f| f.code == codes::UNBOUND_AXIS), "{:#?}", planned.findings);
        return None;
    }
    assert!(
        errors(&planned.findings).is_empty(),
        "{:#?}\n{}",
        planned.findings,
        spec["source"]["toml"].as_str().unwrap()
    );
    let plan = planned.plan;
    let sources = sources(&catalog, &plan);
    let (bytes, report) = run(&plan, &sources, how.threads, Some(how.tile), dir.path()).unwrap();
    assert!(errors(&report.findings).is_empty(), "{:#?}", report.findings);
    for (i, output) in plan.outputs.iter().enumerate() {
        if let Some((file, offset)) = plan.contiguous(output) {
            let mut raw = vec![0; bytes[i].len()];
            sources[file as usize].read_at(offset, &mut raw).unwrap();
            assert_eq!(raw, bytes[i], "{} is said to be one run of its file", output.name);
        }
        let item = output.dtype.size() as u64;
        let n = output.elements();
        if n > 0 && i % 4 == 0 {
            // Any range of an output can be read by itself.
            let (lo, hi) = (n / 3, n - n / 4);
            let mut part = vec![0; ((hi - lo) * item) as usize];
            engine::read(&plan, &sources, i, lo * item, &mut part, dir.path(), 2).unwrap();
            assert_eq!(part, bytes[i][(lo * item) as usize..(hi * item) as usize], "{}", output.name);
        }
    }
    let mut out = BTreeMap::new();
    for (output, bytes) in plan.outputs.iter().zip(bytes) {
        let tensor = Tensor {
            name: output.name.to_string(),
            dtype: output.dtype,
            shape: output.shape.to_vec(),
            bytes,
        };
        assert!(
            out.insert((output.file, output.name.to_string()), tensor).is_none(),
            "{} twice",
            output.name
        );
    }
    Some(out)
}

fn compare(got: &BTreeMap<(u32, String), Tensor>, want: &[RankFile], case: &Case) {
    let names = |file: &RankFile| file.tensors.iter().map(|t| t.name.clone()).collect::<BTreeSet<_>>();
    let wanted: BTreeSet<(u32, String)> =
        want.iter().enumerate().flat_map(|(i, f)| names(f).into_iter().map(move |n| (i as u32, n))).collect();
    assert_eq!(got.keys().cloned().collect::<BTreeSet<_>>(), wanted);
    for (i, file) in want.iter().enumerate() {
        for tensor in &file.tensors {
            let got = &got[&(i as u32, tensor.name.clone())];
            assert!(
                got == tensor,
                "{} on {:?}: got {} {:?}, expected {} {:?}\nfrom {}\nto {}",
                tensor.name,
                file.coords,
                got.dtype,
                got.shape,
                tensor.dtype,
                tensor.shape,
                case.source.table("from", None),
                case.target.table("to", None),
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(900), max_shrink_iters: 4000, ..ProptestConfig::default() })]

    /// Any layout to any other, at any degrees.
    #[test]
    fn conversion_equals_the_oracle(data in dice(), seed in any::<u32>()) {
        let mut dice = Dice::new(&data);
        let case = world::case(&mut dice);
        let files = case.world.staged(&case.source, &mut dice);
        let how = How {
            tile: 1024 << (seed % 3),
            threads: 1 + (seed >> 4) as usize % 3,
            drop_axes: (seed >> 8 & 3 == 3).then_some(seed >> 10),
        };
        if let Some(got) = convert(&case.world, &case.source, Some(&case.target), &files, &how) {
            compare(&got, &case.world.files(&case.target, Role::Target), &case);
        }
    }

    /// There and back again: the original, bit for bit, with zeros in the padding.
    #[test]
    fn there_and_back_is_the_original(data in dice(), seed in any::<u32>()) {
        let mut dice = Dice::new(&data);
        let case = world::case(&mut dice);
        let how = How { tile: 1024 << (seed % 2), threads: 1, drop_axes: None };
        let files = case.world.files(&case.source, Role::Source);
        let there = convert(&case.world, &case.source, Some(&case.target), &files, &how).unwrap();
        let mut between: Vec<RankFile> = World::ranks(&case.target).into_iter().map(|coords| RankFile { coords, ..RankFile::default() }).collect();
        for ((file, _), tensor) in there {
            between[file as usize].tensors.push(tensor);
        }
        let back = convert(&case.world, &case.target, Some(&case.source), &between, &how).unwrap();
        compare(&back, &case.world.files(&case.source, Role::Target), &case);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(300), max_shrink_iters: 4000, ..ProptestConfig::default() })]

    /// A merge is the source's own layout at degree 1.
    #[test]
    fn merge_equals_the_oracle(data in dice(), seed in any::<u32>()) {
        let mut dice = Dice::new(&data);
        let case = world::case(&mut dice);
        let files = case.world.staged(&case.source, &mut dice);
        let how = How { tile: 1024, threads: 1 + seed as usize % 2, drop_axes: None };
        let got = convert(&case.world, &case.source, None, &files, &how).unwrap();
        let mut whole = case.source.clone();
        (whole.degrees, whole.pad_multiple) = (Extents::new(), None);
        let mut want = case.world.files(&whole, Role::Target);
        for (rule, at) in whole.rules.iter().flat_map(|r| case.world.positions(r).into_iter().map(move |at| (r, at))) {
            // A merge keeps the spelling it found.
            let first = rule.name_at(&at, &Extents::new(), &case.world.extents, 0);
            let found = rule.name_at(&at, &Extents::new(), &case.world.extents, rule.spelling);
            want[0].tensors.iter_mut().filter(|t| t.name == first).for_each(|t| t.name = found.clone());
        }
        compare(&got, &want, &case);
    }

    /// Without any one file, or any one tensor, nothing is made.
    #[test]
    fn nothing_is_made_of_an_incomplete_checkpoint(data in dice(), which in any::<u32>(), whole_file in any::<bool>()) {
        let mut dice = Dice::new(&data);
        let case = world::case(&mut dice);
        let mut files = case.world.staged(&case.source, &mut dice);
        let which = which as usize;
        let (kept, gone) = if whole_file {
            let gone = files.remove(which % files.len());
            (files, gone.tensors)
        } else {
            let i = which % files.len();
            let n = files[i].tensors.len();
            let gone = if n == 0 { vec![] } else { vec![files[i].tensors.remove(which / 7 % n)] };
            (files, gone)
        };
        prop_assume!(!gone.is_empty());
        let dir = temp();
        write_ranks(dir.path(), &kept);
        let names: Vec<String> = (0..kept.len()).map(file_name).collect();
        for target in [None, Some(&case.target)] {
            let outcome = carry_out(dir.path(), &names, request(&case.world, &case.source, target, &kept), Some(1024));
            prop_assert!(outcome.failed(), "dropped {:?} without a word\n{}", gone.iter().map(|t| &t.name).collect::<Vec<_>>(), case.source.table("from", None));
            prop_assert!(outcome.outputs.is_empty());
            let named = [codes::MISSING_TENSOR, codes::MISSING_LAYER];
            prop_assert!(outcome.findings.iter().any(|f| named.contains(&f.code)), "{:#?}", outcome.findings);
        }
    }
}
