//! What must not pass in silence: each kind of damage is done to a small checkpoint, and found.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::Arc;

use crate::common::{
    carry_out, cases, errors, file_name, make_plan, mix, open, run, sources, temp, units, write_ranks,
    Outcome, RankFile, Tensor,
};
use fastshard::codes;
use fastshard::engine::{self, Control, Sink};
use fastshard::error::Severity;
use fastshard::layout::table::Table;
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;
use proptest::prelude::*;
use serde_json::json;

const TABLE: &str = r#"
layout = "toy"
family = "toy"
vocab = "V"
[shard]
tp = ["V~P", "g", "F"]
[[tensor]]
name = "embed"
shape = "[V~P, H]"
[[tensor]]
name = "layers.{L}.norm"
shape = "[H]"
[[tensor]]
name = "layers.{L}.qkv"
shape = "[g*(q:r|k:1|v:1)*d, H]"
as = "layers.attn.{}"
[[tensor]]
name = "layers.{L}.fc1"
shape = "[(gate:F|up:F), H]"
as = "layers.mlp.{}"
[[tensor]]
name = "layers.{L}.fc2"
shape = "[H, F]"
[[tensor]]
name = "layers.{L}.fc2.bias"
shape = "[H]"
as = "fc2.bias"
partial = "tp"
when = "parallel"
[[tensor]]
name = "layers.{L}.fc2.bias"
shape = "[H]"
as = "fc2.bias"
when = "!parallel"
[[tensor]]
name = "norm"
shape = "[H]"
[[tensor]]
name = "inv_freq"
ignore = "recomputed"
"#;

const H: u64 = 32;
const V: u64 = 50;
const P: u64 = 64;
const L: u64 = 3;

fn seed_of(name: &str, salt: u64) -> u64 {
    name.bytes().fold(salt, |s, b| mix(s ^ u64::from(b))) >> 30
}

/// The shards of `tp` ranks; replicated tensors hold the same on all.
fn ranks(tp: u64, hidden: u64) -> Vec<RankFile> {
    let rank = |r: u64| {
        let mut tensors = Vec::new();
        let mut add = |name: String, shape: Vec<u64>, divided: bool| {
            let mut tensor = Tensor::painted(&name, &shape, seed_of(&name, if divided { r + 1 } else { 0 }));
            if name == "embed" {
                // Padding lies at the end of the last rank's rows and is zero.
                let real = V.saturating_sub(r * P / tp).min(P / tp);
                tensor.bytes[(real * hidden * 4) as usize..].fill(0);
            }
            tensors.push(tensor);
        };
        add("embed".into(), vec![P / tp, hidden], true);
        for l in 0..L {
            add(format!("layers.{l}.norm"), vec![hidden], false);
            add(format!("layers.{l}.qkv"), vec![4 / tp * (2 + 1 + 1) * 8, hidden], true);
            add(format!("layers.{l}.fc1"), vec![2 * 96 / tp, hidden], true);
            add(format!("layers.{l}.fc2"), vec![hidden, 96 / tp], true);
            add(format!("layers.{l}.fc2.bias"), vec![hidden], false);
        }
        add("norm".into(), vec![hidden], false);
        add("inv_freq".into(), vec![4], false);
        RankFile { coords: [("tp".to_string(), r)].into(), tensors, ..RankFile::default() }
    };
    (0..tp).map(rank).collect()
}

fn request(files: &[RankFile], tp: u64) -> serde_json::Value {
    json!({
        "source": {
            "toml": TABLE, "units": units(files), "degrees": {"tp": tp}, "vocab_size": V,
            "facts": {"parallel": false},
            "axes": {"H": H, "P": P, "g": 4, "r": 2, "d": 8, "F": 96, "L": L},
        },
        "max_shard_size": 1u64 << 40,
    })
}

fn merge(files: &[RankFile], request: serde_json::Value) -> Outcome {
    let dir = temp();
    write_ranks(dir.path(), files);
    let names: Vec<String> = (0..files.len()).map(file_name).collect();
    carry_out(dir.path(), &names, request, Some(1024))
}

fn tensor<'a>(files: &'a mut [RankFile], rank: usize, name: &str) -> &'a mut Tensor {
    files[rank].tensors.iter_mut().find(|t| t.name == name).unwrap()
}

fn without(mut request: serde_json::Value, key: &str) -> serde_json::Value {
    request["source"].as_object_mut().unwrap().remove(key);
    request
}

/// Only what no shape tells: how the heads are divided.
fn barely(mut request: serde_json::Value) -> serde_json::Value {
    request["source"]["axes"] = json!({"g": 4, "r": 2, "d": 8});
    request
}

fn with(mut request: serde_json::Value, key: &str, value: serde_json::Value) -> serde_json::Value {
    request[key] = value;
    request
}

#[test]
fn an_undamaged_checkpoint_is_clean() {
    for tp in [1, 2, 4] {
        let files = ranks(tp, H);
        for request in [
            request(&files, tp),
            barely(request(&files, tp)),
            with(request(&files, tp), "mean_replicas", json!(true)),
        ] {
            let outcome = merge(&files, request);
            outcome.clean();
            let loud: Vec<_> = outcome.findings.iter().filter(|f| f.severity != Severity::Note).collect();
            assert!(loud.is_empty(), "{loud:#?}");
            assert_eq!(outcome.outputs.len(), 2 + 5 * L as usize);
        }
    }
}

#[test]
fn every_missing_tensor_and_file_is_named() {
    for tp in [1, 2, 4] {
        let whole = ranks(tp, H);
        for r in 0..tp as usize {
            for t in 0..whole[r].tensors.len() {
                let mut files = whole.clone();
                let gone = files[r].tensors.remove(t).name;
                if gone == "inv_freq" {
                    continue;
                }
                // Also without a config, where only the other ranks and layers say what must exist.
                for request in [request(&files, tp), barely(request(&files, tp))] {
                    let outcome = merge(&files, request);
                    let finding = outcome.expect(codes::MISSING_TENSOR, Severity::Error);
                    assert_eq!(finding.tensor.as_deref(), Some(&gone[..]), "{:#?}", outcome.findings);
                    if tp > 1 {
                        assert_eq!(finding.rank, Some(format!("tp {r}")));
                    }
                    assert!(outcome.outputs.is_empty());
                }
            }
            let mut files = whole.clone();
            files.remove(r);
            if !files.is_empty() {
                let outcome = merge(&files, request(&files, tp));
                let finding = outcome.expect(codes::MISSING_TENSOR, Severity::Error);
                assert_eq!(finding.rank, Some(format!("tp {r}")));
            }
        }
        let mut files = whole.clone();
        files.iter_mut().for_each(|f| f.tensors.retain(|t| !t.name.starts_with("layers.1.")));
        let outcome = merge(&files, request(&files, tp));
        outcome.expect(codes::MISSING_LAYER, Severity::Error);
    }
}

#[test]
fn a_file_copied_over_another_is_found() {
    for tp in [2, 4] {
        for (a, b) in [(0, 1), (1, 0), (0, tp as usize - 1)] {
            for mean in [false, true] {
                let mut files = ranks(tp, H);
                files[b].tensors = files[a].tensors.clone();
                let outcome = merge(&files, with(request(&files, tp), "mean_replicas", json!(mean)));
                let finding = outcome.expect(codes::DUPLICATED_SHARD, Severity::Error);
                // Nothing tells which of the two is the copy.
                let both = format!("tp {} and tp {}", a.min(b), a.max(b));
                assert!(finding.rank.is_none() && finding.message.contains(&both), "{finding:?}");
                assert_eq!(finding.files.len(), 2, "{finding:?}");
            }
        }
    }
    // One tensor only, where the same tensor of other layers differs.
    let mut files = ranks(2, H);
    let copy = tensor(&mut files, 0, "layers.1.fc2").bytes.clone();
    tensor(&mut files, 1, "layers.1.fc2").bytes = copy;
    merge(&files, request(&files, 2)).expect(codes::DUPLICATED_SHARD, Severity::Error);
}

/// Also where a stage holds nothing but layers, which are then all equal alike.
#[test]
fn a_copied_file_of_layers_only_is_found() {
    let table = "layout = \"a\"\nfamily = \"f\"\n[shard]\ntp = [\"F\"]\n\
        [[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n[[tensor]]\nname = \"n.{L}\"\nshape = \"[H]\"\n";
    let rank = |r: u64, from: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: (0..6)
            .map(|l| match l % 2 {
                0 => Tensor::painted(&format!("w.{}", l / 2), &[8, 16], l * 2 + from),
                _ => Tensor::painted(&format!("n.{}", l / 2), &[16], 100 + l),
            })
            .collect(),
        ..RankFile::default()
    };
    for (from, damaged) in [(1, false), (0, true)] {
        let files = vec![rank(0, 0), rank(1, from)];
        let spec = json!({
            "source": {"toml": table, "units": units(&files), "degrees": {"tp": 2}},
            "max_shard_size": 1u64 << 40,
        });
        let outcome = merge(&files, spec);
        assert_eq!(outcome.failed(), damaged);
        if damaged {
            outcome.expect(codes::DUPLICATED_SHARD, Severity::Error);
        }
    }
}

/// A shard of two halves, each constant and longer than what is compared at a time, is no constant.
#[test]
fn a_copied_shard_of_which_half_is_constant_is_found() {
    let table = "layout = \"a\"\nfamily = \"f\"\n[shard]\ntp = [\"F\"]\n\
        [[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n";
    let rank = |r: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: vec![
            Tensor::f32(
                "w.0",
                &[1024, 128],
                (0..1u32 << 17).map(|i| if i < 1 << 16 { 1.0 } else { (i & 0xff) as f32 }),
            ),
            Tensor::painted("w.1", &[1024, 128], r),
        ],
        ..RankFile::default()
    };
    let files = vec![rank(0), rank(1)];
    let spec = json!({
        "source": {"toml": table, "units": units(&files), "degrees": {"tp": 2}}, "max_shard_size": 1u64 << 40,
    });
    let finding = merge(&files, spec);
    assert_eq!(finding.expect(codes::DUPLICATED_SHARD, Severity::Error).tensor.as_deref(), Some("w.0"));
}

#[test]
fn equal_shards_that_may_be_meant_do_not_stop() {
    for value in [0.0f32, 1.0, -0.5] {
        let mut files = ranks(2, H);
        for file in &mut files {
            for t in file.tensors.iter_mut().filter(|t| t.name != "embed" && t.name != "inv_freq") {
                t.bytes.chunks_mut(4).for_each(|c| c.copy_from_slice(&value.to_le_bytes()));
            }
        }
        let outcome = merge(&files, request(&files, 2));
        outcome.clean();
        assert!(outcome.of(codes::EQUAL_SHARDS).is_empty());
    }
    // Equal over ranks in all layers alike, and not everything that the two ranks hold.
    let mut files = ranks(2, H);
    for l in 0..L {
        let copy = tensor(&mut files, 0, &format!("layers.{l}.fc2")).bytes.clone();
        tensor(&mut files, 1, &format!("layers.{l}.fc2")).bytes = copy;
    }
    let outcome = merge(&files, request(&files, 2));
    outcome.clean();
    outcome.expect(codes::EQUAL_SHARDS, Severity::Warning);
}

#[test]
fn drifting_replicas_are_refused_or_averaged_as_asked() {
    let mut files = ranks(4, H);
    let name = "layers.2.norm";
    let mut values: Vec<Vec<f32>> = Vec::new();
    for r in 0..4 {
        let t = tensor(&mut files, r, name);
        let drifted: Vec<f32> = t
            .bytes
            .chunks(4)
            .enumerate()
            .map(|(i, c)| f32::from_le_bytes(c.try_into().unwrap()) * (1.0 + (r * i) as f32 * 1.37e-5))
            .collect();
        t.bytes = drifted.iter().flat_map(|x| x.to_le_bytes()).collect();
        values.push(drifted);
    }
    let outcome = merge(&files, request(&files, 4));
    let finding = outcome.expect(codes::REPLICAS_DIFFER, Severity::Error);
    // All four are unlike.
    assert_eq!((finding.tensor.as_deref(), finding.rank.as_deref()), (Some(name), None));
    assert_eq!(finding.files.len(), 4);

    let outcome = merge(&files, with(request(&files, 4), "mean_replicas", json!(true)));
    outcome.clean();
    outcome.expect(codes::REPLICAS_AVERAGED, Severity::Warning);
    let mean = |i: usize| (((values[0][i] + values[1][i]) + values[2][i]) + values[3][i]) / 4.0;
    let want: Vec<u8> = (0..H as usize).flat_map(|i| mean(i).to_le_bytes()).collect();
    assert_eq!(outcome.outputs[name].bytes, want);

    // The same rounded once to bf16, the order of the files notwithstanding.
    for file in &mut files {
        for t in &mut file.tensors {
            let narrow =
                |c: &[u8]| half::bf16::from_f32(f32::from_le_bytes(c.try_into().unwrap())).to_le_bytes();
            t.bytes = t.bytes.chunks(4).flat_map(narrow).collect();
            t.dtype = Dtype::Bf16;
        }
    }
    let value =
        |t: &Tensor, i: usize| half::bf16::from_le_bytes([t.bytes[2 * i], t.bytes[2 * i + 1]]).to_f32();
    let all: Vec<Tensor> = (0..4).map(|r| tensor(&mut files, r, name).clone()).collect();
    files.reverse();
    let outcome = merge(&files, with(request(&files, 4), "mean_replicas", json!(true)));
    outcome.clean();
    let mean =
        |i: usize| (((value(&all[0], i) + value(&all[1], i)) + value(&all[2], i)) + value(&all[3], i)) / 4.0;
    let want: Vec<u8> = (0..H as usize).flat_map(|i| half::bf16::from_f32(mean(i)).to_le_bytes()).collect();
    assert_eq!(outcome.outputs[name].bytes, want);
}

/// The mean is a quotient, not a product with a rounded reciprocal.
#[test]
fn a_mean_of_three_is_a_division() {
    let table =
        "layout = \"a\"\nfamily = \"f\"\n[shard]\ntp = [\"F\"]\n[[tensor]]\nname = \"n\"\nshape = \"[H]\"\n";
    let value = |i: u32, r: u64| (1.0 + f64::from(i) * 0.013 + r as f64 * 1e-4) as f32;
    let rank = |r: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: vec![Tensor::f32("n", &[900], (0..900).map(|i| value(i, r)))],
        ..RankFile::default()
    };
    let files: Vec<RankFile> = (0..3).map(rank).collect();
    let source = json!({"toml": table, "units": units(&files), "degrees": {"tp": 3}});
    let outcome =
        merge(&files, json!({"source": source, "mean_replicas": true, "max_shard_size": 1u64 << 40}));
    outcome.clean();
    let want = (0..900).map(|i| ((value(i, 0) + value(i, 1)) + value(i, 2)) / 3.0);
    assert_eq!(outcome.outputs["n"].bytes, want.flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
}

/// Copies that are no floats cannot be averaged.
#[test]
fn drifting_integers_are_refused_even_where_means_are_asked_for() {
    let mut files = ranks(2, H);
    for (r, file) in files.iter_mut().enumerate() {
        let t = file.tensors.iter_mut().find(|t| t.name == "norm").unwrap();
        t.dtype = Dtype::I32;
        t.bytes = (0..H as i32).flat_map(|i| (i + r as i32).to_le_bytes()).collect();
    }
    let outcome = merge(&files, with(request(&files, 2), "mean_replicas", json!(true)));
    outcome.expect(codes::REPLICAS_DIFFER, Severity::Error);
}

#[test]
fn a_norm_of_another_layer_is_not_averaged() {
    for mean in [false, true] {
        let mut files = ranks(4, H);
        for file in &mut files {
            // Trained norms drift a little between ranks.
            let r = file.coords["tp"] as f32;
            for t in file.tensors.iter_mut().filter(|t| t.name.ends_with(".norm")) {
                t.bytes.chunks_mut(4).for_each(|c| {
                    let x = f32::from_le_bytes((&*c).try_into().unwrap());
                    c.copy_from_slice(&(x * (1.0 + r * 1e-6)).to_le_bytes());
                });
            }
        }
        let (a, b) = (
            tensor(&mut files, 2, "layers.0.norm").bytes.clone(),
            tensor(&mut files, 2, "layers.1.norm").bytes.clone(),
        );
        tensor(&mut files, 2, "layers.0.norm").bytes = b;
        tensor(&mut files, 2, "layers.1.norm").bytes = a;
        let outcome = merge(&files, with(request(&files, 4), "mean_replicas", json!(mean)));
        if mean {
            let found = outcome.of(codes::SWAPPED_SHARD);
            let named: Vec<_> =
                found.iter().map(|f| (f.tensor.as_deref().unwrap(), f.rank.as_deref().unwrap())).collect();
            assert_eq!(named, [("layers.0.norm", "tp 2"), ("layers.1.norm", "tp 2")], "{found:#?}");
            assert!(outcome.failed());
        } else {
            outcome.expect(codes::REPLICAS_DIFFER, Severity::Error);
        }
    }
}

#[test]
fn shards_of_another_shape_are_found() {
    // A rank of a run at twice the degree.
    let mut files = ranks(2, H);
    files[1].tensors = ranks(4, H).remove(1).tensors;
    for request in [request(&files, 2), barely(request(&files, 2))] {
        let outcome = merge(&files, request);
        let shape = [codes::SHAPE, codes::AXIS_CONFLICT];
        let found: Vec<_> =
            errors(&outcome.findings).into_iter().filter(|f| shape.contains(&f.code)).collect();
        assert!(
            found.iter().any(|f| f.file.as_deref() == Some("rank_01.safetensors")),
            "{:#?}",
            outcome.findings
        );
        assert!(found.iter().all(|f| f.file.as_deref() != Some("rank_00.safetensors")), "{found:#?}");
    }
    // A norm of 24 beside hidden 32, with and without a config.
    for request in [request(&files, 2), barely(request(&files, 2))] {
        let mut files = ranks(2, H);
        *tensor(&mut files, 1, "layers.1.norm") = Tensor::painted("layers.1.norm", &[24], 77);
        let outcome = merge(&files, request);
        let found: Vec<_> = errors(&outcome.findings)
            .into_iter()
            .filter(|f| f.tensor.as_deref() == Some("layers.1.norm"))
            .collect();
        assert!(
            found.iter().any(|f| [codes::SHAPE, codes::AXIS_CONFLICT].contains(&f.code)),
            "{:#?}",
            outcome.findings
        );
    }
    // A rank's rows of the vocabulary saved as the whole.
    let mut files = ranks(1, H);
    *tensor(&mut files, 0, "embed") = Tensor::painted("embed", &[P / 2, H], 5);
    let outcome = merge(&files, request(&files, 1));
    outcome.expect(codes::SLICE_AS_WHOLE, Severity::Error);
}

#[test]
fn what_fills_one_place_twice_is_found() {
    // Two rules for one canonical tensor.
    let table = format!(
        "{TABLE}\n[[tensor]]\nname = \"final_norm\"\nshape = \"[H]\"\nas = \"norm\"\noptional = true\n"
    );
    let mut files = ranks(2, H);
    for file in &mut files {
        file.tensors.push(Tensor::painted("final_norm", &[H], 9));
    }
    let mut spec = request(&files, 2);
    spec["source"]["toml"] = json!(table);
    let target =
        with(spec.clone(), "target", json!({"name": "to", "toml": TABLE, "facts": {"parallel": false}}));
    for spec in [spec, target] {
        let outcome = merge(&files, spec);
        outcome.expect(codes::OVERLAP, Severity::Error);
    }
    // Two spellings of one name in one file, equal or not, replicated or summed.
    for (equal, parallel, mean) in [(true, false, false), (false, false, true), (true, true, false)] {
        let table = TABLE.replace("layers.{L}.fc2.bias", "layers.{L}.fc2.(bias|b)");
        let mut files = ranks(2, H);
        for (r, file) in files.iter_mut().enumerate() {
            let mut twin = file.tensors.iter().find(|t| t.name == "layers.1.fc2.bias").unwrap().clone();
            twin.name = "layers.1.fc2.b".into();
            if !equal {
                twin = Tensor::painted(&twin.name, &[H], 3);
            }
            if r == 1 {
                file.tensors.push(twin);
            }
        }
        let mut spec = with(request(&files, 2), "mean_replicas", json!(mean));
        spec["source"]["toml"] = json!(table);
        spec["source"]["facts"] = json!({"parallel": parallel});
        let outcome = merge(&files, spec);
        outcome.expect(codes::OVERLAP, Severity::Error);
    }
}

#[test]
fn unknown_and_contradictory_things_are_found() {
    let mut files = ranks(2, H);
    files[1].tensors.push(Tensor::painted("layers.0.adapter", &[4], 3));
    let outcome = merge(&files, request(&files, 2));
    let finding = outcome.expect(codes::UNKNOWN_TENSOR, Severity::Error);
    assert_eq!(finding.tensor.as_deref(), Some("layers.0.adapter"));

    // A tensor for which the target has no place.
    let files = ranks(2, H);
    let smaller = TABLE.replace("[[tensor]]\nname = \"norm\"\nshape = \"[H]\"\n", "");
    assert_ne!(smaller, TABLE);
    let outcome = merge(
        &files,
        with(
            request(&files, 2),
            "target",
            json!({"name": "to", "toml": smaller, "facts": {"parallel": false}}),
        ),
    );
    let finding = outcome.expect(codes::UNKNOWN_TENSOR, Severity::Error);
    assert_eq!(finding.tensor.as_deref(), Some("norm"));

    // One rank's dtype.
    let mut files = ranks(2, H);
    let t = tensor(&mut files, 1, "layers.0.fc1");
    (t.dtype, t.bytes) = (Dtype::Bf16, t.bytes[..t.bytes.len() / 2].to_vec());
    merge(&files, request(&files, 2)).expect(codes::DTYPE, Severity::Error);

    // More ranks than the degree says.
    let files = ranks(2, H);
    let outcome = merge(&files, barely(request(&files, 1)));
    assert!(outcome.failed(), "{:#?}", outcome.findings);

    // A degree of the target that does not divide.
    let files = ranks(2, H);
    let outcome = merge(
        &files,
        with(
            request(&files, 2),
            "target",
            json!({"name": "to", "toml": TABLE, "degrees": {"tp": 3}, "facts": {"parallel": false}}),
        ),
    );
    outcome.expect(codes::NOT_DIVISIBLE, Severity::Error);
}

/// What several ranks of the target take alike is taken once, and leaves the rest without a place.
#[test]
fn layers_beyond_the_target_are_found_at_any_degree() {
    let stacked = "layout = \"a\"\nfamily = \"f\"\n[[tensor]]\nname = \"norms\"\nshape = \"[L, H]\"\n";
    let single = "layout = \"b\"\nfamily = \"f\"\n[shard]\ntp = [\"F\"]\n[[tensor]]\nname = \"norm.{L}\"\nshape = \"[H]\"\nas = \"norms\"\n";
    // Half of it, or a single element.
    for (shape, tp) in [([4, 8], 1), ([4, 8], 2), ([4, 8], 4), ([3, 1], 1), ([3, 1], 2)] {
        let norms = Tensor::painted("norms", &shape, 1);
        let files = vec![RankFile { tensors: vec![norms], ..RankFile::default() }];
        let outcome = merge(
            &files,
            json!({
                "source": {"toml": stacked, "units": units(&files)},
                "target": {"name": "to", "toml": single, "degrees": {"tp": tp}, "axes": {"L": 2}},
                "max_shard_size": 1u64 << 40,
            }),
        );
        outcome.expect(codes::UNKNOWN_TENSOR, Severity::Error);
    }
}

/// A target that wants more than there is.
#[test]
fn layers_beyond_the_source_are_missing() {
    let stacked = "layout = \"a\"\nfamily = \"f\"\n[[tensor]]\nname = \"norms\"\nshape = \"[L, H]\"\n";
    let files = vec![RankFile { tensors: vec![Tensor::painted("norms", &[2, 8], 1)], ..RankFile::default() }];
    let target = json!({"name": "to", "toml": stacked, "axes": {"L": 3}});
    let spec = json!({
        "source": {"toml": stacked, "units": units(&files)}, "target": target, "max_shard_size": 1u64 << 40,
    });
    merge(&files, spec).expect(codes::MISSING_TENSOR, Severity::Error);
}

/// A rank beyond the degree would hold nothing of a divided tensor, and vanish.
#[test]
fn ranks_beyond_the_degree_are_refused() {
    let table =
        "layout = \"a\"\nfamily = \"f\"\n[shard]\ntp = [\"F\"]\n[[tensor]]\nname = \"w\"\nshape = \"[F]\"\n";
    let rank = |r: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: vec![Tensor::painted("w", &[16], r)],
        ..RankFile::default()
    };
    for (ranks, degree) in [(2, 1), (4, 2), (3, 2)] {
        let files: Vec<RankFile> = (0..ranks).map(rank).collect();
        for degrees in [json!({"tp": degree}), json!({})] {
            let spec = json!({
                "source": {"toml": table, "units": units(&files), "degrees": degrees},
                "max_shard_size": 1u64 << 40,
            });
            merge(&files, spec).expect(codes::RANKS_DISAGREE, Severity::Error);
        }
    }
}

fn refused_table(table: &str) -> String {
    let error = Table::parse(table).expect_err("a table that is refused");
    let finding = &error.findings()[0];
    assert_eq!(finding.code, codes::BAD_LAYOUT);
    finding.message.clone()
}

#[test]
fn tables_that_promise_what_is_not_done_are_refused() {
    let head = "layout = \"a\"\nfamily = \"f\"\n";
    let tensor = |shape: &str| format!("[[tensor]]\nname = \"w\"\nshape = \"{shape}\"\n");
    for (table, wanted) in [
        // A padded axis inside a derived one, or a derived axis that is padded.
        (format!("{head}[axes]\nd = \"a~b*c\"\n{}", tensor("[d]")), "padded"),
        (format!("{head}[axes]\nd = \"a*c\"\n{}", tensor("[d~P]")), "padded"),
        (format!("{head}[axes]\nP = \"a*c\"\n{}", tensor("[V~P]")), "padded"),
        // A derived axis is divided by dividing one of its factors.
        (format!("{head}[axes]\nd = \"a*c\"\n[shard]\ntp = [\"d\"]\n{}", tensor("[d]")), "derived"),
        // An axis cannot be divided twice.
        (format!("{head}[shard]\ntp = [\"F\"]\nep = [\"F\"]\n{}", tensor("[F]")), "divided by"),
    ] {
        let message = refused_table(&table);
        assert!(message.contains(wanted), "{wanted:?} not in {message}");
    }
}

/// Numbers in names are not to be believed: these would ask for more memory than there is.
#[test]
fn absurd_positions_are_refused() {
    for (name, tensor, axes) in [
        ("w.{L}", "w.999999999", json!({})),
        ("w.{L}", "w.250000", json!({})),
        ("w.{L}.{E}", "w.99999.99999", json!({})),
        ("w.{#L}.{L}", "w.900000000.0", json!({})),
        ("w.{L}", "w.0", json!({"L": 1u64 << 40})),
    ] {
        let table = format!("layout = \"a\"\nfamily = \"f\"\n[[tensor]]\nname = {name:?}\nshape = \"[H]\"\n");
        let files = vec![RankFile { tensors: vec![Tensor::painted(tensor, &[4], 1)], ..RankFile::default() }];
        for target in [false, true] {
            let mut spec = json!({"source": {"toml": table, "units": units(&files), "axes": axes}, "max_shard_size": 1u64 << 40});
            if target {
                spec["target"] = json!({"name": "to", "toml": table});
            }
            let outcome = merge(&files, spec);
            assert!(outcome.failed() && outcome.findings.len() < 4000, "{}", outcome.findings.len());
        }
    }
}

#[test]
fn absurd_degrees_and_extents_are_refused() {
    let files = ranks(2, H);
    let target = |key: &str, value: serde_json::Value| {
        let mut target = json!({"name": "to", "toml": TABLE, "facts": {"parallel": false}});
        target[key] = value;
        with(request(&files, 2), "target", target)
    };
    let source = |key: &str, value: serde_json::Value| {
        let mut spec = request(&files, 2);
        spec["source"][key] = value;
        spec
    };
    for spec in [
        source("degrees", json!({"tp": 42_949_672_962u64})),
        source("degrees", json!({"tp": 2, "ep": 1 << 18, "pp": 1 << 18})),
        source("degrees", json!({"tp": 0})),
        source("axes", json!({"H": u64::MAX})),
        source("vocab_size", json!(u64::MAX)),
        target("degrees", json!({"tp": 1u64 << 40})),
        target("axes", json!({"F": 1u64 << 60})),
        target("pad_multiple", json!(u64::MAX)),
    ] {
        merge(&files, spec).expect(codes::BAD_VALUE, Severity::Error);
    }
    let mut far = ranks(2, H);
    far[1].coords.insert("tp".into(), u64::MAX);
    merge(&far, request(&far, 2)).expect(codes::RANKS_DISAGREE, Severity::Error);
}

/// A tensor whose axes are not known is there all the same.
#[test]
fn tensors_with_unbound_axes_are_not_called_missing() {
    let files = ranks(1, H);
    let mut spec = request(&files, 1);
    spec["source"]["axes"] = json!({});
    let outcome = merge(&files, spec);
    outcome.expect(codes::UNBOUND_AXIS, Severity::Error);
    assert!(outcome.of(codes::MISSING_TENSOR).is_empty(), "{:#?}", outcome.findings);
}

#[test]
fn a_bias_of_unknown_kind_is_not_guessed() {
    let mut files = ranks(2, H);
    let spec = without(request(&files, 2), "facts");
    let outcome = merge(&files, spec.clone());
    let finding = outcome.expect(codes::FACT_UNKNOWN, Severity::Error);
    assert!(finding.message.contains("parallel"));
    // Any one value that is not zero, on any rank.
    for rank in [0, 1] {
        for file in &mut files {
            for t in file.tensors.iter_mut().filter(|t| t.name.ends_with(".bias")) {
                t.bytes.fill(0);
            }
        }
        merge(&files, spec.clone()).clean();
        tensor(&mut files, rank, "layers.2.fc2.bias").bytes[4 * 17 + 2] = 1;
        merge(&files, spec.clone()).expect(codes::FACT_UNKNOWN, Severity::Error);
    }
    // Stated, it is a sum.
    let files = ranks(2, H);
    let mut spec = request(&files, 2);
    spec["source"]["facts"] = json!({"parallel": true});
    let outcome = merge(&files, spec);
    outcome.clean();
    let (a, got) = (
        &files[0].tensors.iter().find(|t| t.name == "layers.0.fc2.bias").unwrap().bytes,
        &outcome.outputs["layers.0.fc2.bias"].bytes,
    );
    let f = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
    assert!(a.chunks(4).zip(got.chunks(4)).all(|(x, y)| f(x) + f(x) == f(y)));
}

#[test]
fn odd_values_are_pointed_out() {
    for (dtype, bits) in
        [(Dtype::F32, f32::NAN.to_le_bytes().to_vec()), (Dtype::F32, f32::INFINITY.to_le_bytes().to_vec())]
    {
        let mut files = ranks(2, H);
        let t = tensor(&mut files, 1, "layers.2.fc1");
        assert_eq!(t.dtype, dtype);
        t.bytes[400..404].copy_from_slice(&bits);
        for (accepted, severity) in [(false, Severity::Error), (true, Severity::Warning)] {
            let mut spec = request(&files, 2);
            spec["source"]["non_finite"] = json!(accepted);
            let outcome = merge(&files, spec);
            assert_eq!(outcome.failed(), !accepted);
            let finding = outcome.expect(codes::NON_FINITE, severity);
            assert_eq!(
                (finding.tensor.as_deref(), finding.got.as_deref()),
                (Some("layers.2.fc1"), Some("1"))
            );
            assert_eq!(finding.decided.as_deref(), accepted.then_some("accept non-finite"));
        }
    }
    for tp in [1u64, 2, 4] {
        // The first and the last element of the padding, which may fill a rank.
        for at in [V * H, P * H - 1] {
            let mut files = ranks(tp, H);
            let rank = at / (P / tp * H);
            let inside = at % (P / tp * H);
            tensor(&mut files, rank as usize, "embed").bytes[4 * inside as usize + 3] = 0x40;
            let outcome = merge(&files, request(&files, tp));
            outcome.clean();
            let finding = outcome.expect(codes::PAD_NOT_ZERO, Severity::Warning);
            assert_eq!(
                (finding.tensor.as_deref(), finding.rank.clone()),
                (Some("embed"), Some(format!("tp {rank}")))
            );
        }
        // The last real element is no padding; -0.0 counts as zero.
        let mut files = ranks(tp, H);
        tensor(&mut files, tp as usize - 1, "embed").bytes.iter_mut().last().map(|b| *b = 0x80).unwrap();
        assert!(merge(&files, request(&files, tp)).of(codes::PAD_NOT_ZERO).is_empty());
    }
}

#[test]
fn values_anywhere_in_large_padding_are_pointed_out() {
    let table =
        "layout = \"t\"\nfamily = \"t\"\nvocab = \"V\"\n[[tensor]]\nname = \"embed\"\nshape = \"[V~P, H]\"\n";
    let (rows, real) = (1300, 10);
    for at in [real * 128, 700 * 128 + 5, rows * 128 - 1, rows * 128] {
        let mut t = Tensor::painted("embed", &[rows, 128], 1);
        t.bytes[(real * 128 * 4) as usize..].fill(0);
        if let Some(byte) = t.bytes.get_mut(4 * at as usize) {
            *byte = 1;
        }
        let files = vec![RankFile { tensors: vec![t], ..RankFile::default() }];
        let source = json!({"toml": table, "units": units(&files), "vocab_size": real});
        let outcome = merge(&files, json!({"source": source, "max_shard_size": 1u64 << 40}));
        outcome.clean();
        assert_eq!(outcome.of(codes::PAD_NOT_ZERO).len(), usize::from(at < rows * 128), "{at}");
    }
}

struct Grow<'a> {
    path: &'a Path,
    /// Writes until the file grows.
    left: AtomicI64,
}

impl Sink for Grow<'_> {
    fn write(&self, _: usize, _: u64, _: &[u8]) -> fastshard::error::Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            let mut file = std::fs::OpenOptions::new().append(true).open(self.path).unwrap();
            file.write_all(b"more").unwrap();
        }
        Ok(())
    }
}

#[test]
fn a_source_that_changes_while_it_is_read_is_found() {
    let files = ranks(2, H);
    let dir = temp();
    write_ranks(dir.path(), &files);
    let catalog = open(dir.path(), 2);
    let plan = make_plan(&catalog, request(&files, 2)).unwrap().plan;
    // At the first write, in the middle, and when all has been read.
    for (rank, at) in [(0, 1), (1, 1), (0, 7), (1, plan.outputs.len() as i64)] {
        write_ranks(dir.path(), &files);
        let catalog = open(dir.path(), 2);
        let path = dir.path().join(file_name(rank));
        let sink = Grow { path: &path, left: AtomicI64::new(at) };
        let error = engine::execute(
            &plan,
            &sources(&catalog, &plan),
            &sink,
            &crate::common::options(1, dir.path()),
            &Control::default(),
        )
        .unwrap_err();
        assert_eq!(error.findings()[0].code, codes::SOURCE_CHANGED);
        assert!(error.findings()[0].file.as_ref().unwrap().ends_with(&file_name(rank)));
    }
}

// --- torch zip files -------------------------------------------------------------------------

fn text(out: &mut Vec<u8>, s: &str) {
    out.push(b'X');
    out.extend((s.len() as u32).to_le_bytes());
    out.extend(s.as_bytes());
}

fn int(out: &mut Vec<u8>, n: u64) {
    out.push(b'J');
    out.extend((n as i32).to_le_bytes());
}

/// A state dict as `torch.save` writes it; each storage has `slack` elements more than its tensor.
fn write_torch(path: &Path, tensors: &[Tensor], slack: u64) {
    let mut pickle = b"\x80\x02}(".to_vec();
    let mut zip = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    let stored = zip::write::SimpleFileOptions::default().compression_method(zip::CompressionMethod::Stored);
    for (key, t) in tensors.iter().enumerate() {
        let n: u64 = t.shape.iter().product();
        text(&mut pickle, &t.name);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        text(&mut pickle, "storage");
        pickle.extend(b"ctorch\nFloatStorage\n");
        text(&mut pickle, &key.to_string());
        text(&mut pickle, "cpu");
        int(&mut pickle, n + slack);
        pickle.extend(b"tQ");
        int(&mut pickle, slack / 2);
        pickle.push(b'(');
        t.shape.iter().for_each(|&n| int(&mut pickle, n));
        pickle.extend(b"t(");
        fastshard::tensor::c_strides(&t.shape).iter().for_each(|&n| int(&mut pickle, n));
        pickle.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
    }
    pickle.extend(b"u.");
    zip.start_file("archive/data.pkl", stored).unwrap();
    zip.write_all(&pickle).unwrap();
    for (key, t) in tensors.iter().enumerate() {
        zip.start_file(format!("archive/data/{key}"), stored).unwrap();
        zip.write_all(&vec![0x11; (slack / 2 * 4) as usize]).unwrap();
        zip.write_all(&t.bytes).unwrap();
        zip.write_all(&vec![0x22; ((slack - slack / 2) * 4) as usize]).unwrap();
    }
    zip.start_file("archive/version", stored).unwrap();
    zip.write_all(b"3\n").unwrap();
    zip.finish().unwrap();
}

fn torch_ranks(dir: &Path, files: &[RankFile], slack: u64) {
    for (i, file) in files.iter().enumerate() {
        write_torch(&dir.join(file_name(i)), &file.tensors, slack);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(300), ..ProptestConfig::default() })]

    /// Any bit of any storage that is read, also where no view reads it: padding, slack.
    #[test]
    fn any_flipped_bit_is_found(which in any::<u32>(), at in any::<u32>(), bit in 0u32..8, tp in prop::sample::select(vec![1u64, 2]), slack in prop::sample::select(vec![0u64, 6])) {
        let files = ranks(tp, H);
        let dir = temp();
        torch_ranks(dir.path(), &files, slack);
        let names: Vec<String> = (0..files.len()).map(file_name).collect();
        let outcome = carry_out(dir.path(), &names, request(&files, tp), Some(1024));
        prop_assert!(errors(&outcome.findings).is_empty());
        let rank = which as usize % files.len();
        let file = {
            let catalog = open(dir.path(), files.len());
            let parsed = &catalog.files[rank].as_ref().unwrap().parsed;
            let read: Vec<_> = parsed.tensors.iter().filter(|t| t.path[..] != ["inv_freq"]).collect();
            let tensor = read[which as usize / 2 % read.len()];
            let blob = &parsed.blobs[tensor.blob as usize];
            let path = dir.path().join(file_name(rank));
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[(blob.offset + u64::from(at) % blob.len) as usize] ^= 1 << bit;
            std::fs::write(&path, bytes).unwrap();
            tensor.path.join(".")
        };
        let outcome = carry_out(dir.path(), &names, request(&files, tp), Some(1024));
        let finding = outcome.expect(codes::CRC, Severity::Error);
        prop_assert_eq!(finding.tensor.as_deref(), Some(&file[..]));
        prop_assert_eq!(finding.file.as_deref(), Some(&file_name(rank)[..]));
    }
}

/// Padding is read by one worker for its zeros and by another for its checksum.
#[test]
fn padding_and_checksums_do_not_meddle() {
    let table = "layout = \"t\"\nfamily = \"t\"\nvocab = \"V\"\n[[tensor]]\nname = \"embed.{L}\"\nshape = \"[V~P, Z]\"\n";
    let tensors: Vec<Tensor> = (0..1)
        .map(|i| {
            let name = format!("embed.{i}");
            let mut t = Tensor::painted(&name, &[2400, 128], i);
            t.bytes[400 * 128 * 4..].fill(0);
            t
        })
        .collect();
    let dir = temp();
    write_torch(&dir.path().join(file_name(0)), &tensors, 0);
    let catalog = open(dir.path(), 1);
    let spec = json!({
        "source": {"toml": table, "units": [{"file": 0}], "vocab_size": 400}, "max_shard_size": 1u64 << 40,
    });
    let plan = make_plan(&catalog, spec).unwrap().plan;
    assert_eq!((plan.outputs.len(), plan.pads.len()), (1, 1));
    let files: Vec<Arc<SourceFile>> = sources(&catalog, &plan);
    for _ in 0..300 {
        let (_, report) = run(&plan, &files, 4, Some(1024), dir.path()).unwrap();
        assert!(report.findings.is_empty(), "{:#?}", report.findings);
    }
}
