//! Torch files that a plan prescribes: placed, written in any order, resumed, read back.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use crate::common::{make_plan, mix, open, sources, temp, units, write_ranks, RankFile, Tensor, AMPLE};
use fastshard::catalog::Catalog;
use fastshard::codes;
use fastshard::engine::{Control, Options};
use fastshard::error::Result;
use fastshard::manifest::Manifest;
use fastshard::write::Run;
use fastshard::{publish, verify, write};
use serde_json::{json, Value as Json};

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n\
    [[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n[[tensor]]\nname = \"n.{L}\"\nshape = \"[H]\"\n\
    [[tensor]]\nname = \"big\"\nshape = \"[K, F]\"\n[[tensor]]\nname = \"scalar\"\nshape = \"[]\"\n";

const LAYERS: u64 = 5;

fn checkpoint() -> Vec<RankFile> {
    let mut tensors = Vec::new();
    for l in 0..LAYERS {
        tensors.push(Tensor::painted(&format!("w.{l}"), &[16, 64], l));
        tensors.push(Tensor::painted(&format!("n.{l}"), &[64], 100 + l));
    }
    tensors.push(Tensor::painted("big", &[60_000, 16], 500));
    tensors.push(Tensor::painted("scalar", &[], 501));
    vec![RankFile { tensors, ..RankFile::default() }]
}

fn text(s: &str) -> Json {
    json!({"str": s})
}

/// A file per rank with everything in it, nested, and a file per layer and rank.
fn files(tp: u64) -> Vec<Json> {
    let mut files = Vec::new();
    for r in 0..tp {
        let module = json!({"ordered": [
            [text("big"), {"tensor": "big"}], [text("a.scalar"), {"tensor": "scalar"}], [text("again"), {"tensor": "big"}],
        ]});
        let value = json!({"dict": [
            [text("module"), module],
            [text("step"), {"int": 1u64 << 40}],
            [text("lr"), {"float": "0.1"}],
            [text("shapes"), {"list": [{"size": [1, 2]}, "none", {"bool": true}, {"tuple": [{"bytes": [0, 255]}]}]}],
        ]});
        files.push(
            json!({"name": format!("step/mp_{r}.pt"), "coords": {"tp": r}, "content": {"torch_zip": value}}),
        );
        for l in 0..LAYERS {
            let value = json!({"ordered": [
                [text("w"), {"tensor": format!("w.{l}")}], [text("n"), {"tensor": format!("n.{l}")}],
            ]});
            let name = format!("step/deep/layer_{l}-model_{r}.pt");
            files.push(json!({"name": name, "coords": {"tp": r}, "content": {"torch_zip": value}}));
        }
    }
    files
}

fn request(tp: u64, files: Vec<Json>) -> Json {
    json!({
        "source": {"toml": TABLE, "units": units(&checkpoint())},
        "target": {"name": "t", "toml": TABLE, "degrees": {"tp": tp}, "files": files},
        "max_shard_size": 1u64 << 40,
        "pointers": ["latest"],
        "texts": {"latest": "step", "step/configs/x.yml": "a: 1\n"},
    })
}

fn write_out(
    source: &Path,
    out: &Path,
    tp: u64,
    threads: usize,
    resume: bool,
    control: &Control,
) -> Result<Manifest> {
    let catalog = open(source, 1);
    let planned = make_plan(&catalog, request(tp, files(tp))).unwrap();
    assert!(crate::common::errors(&planned.findings).is_empty(), "{:?}", planned.findings);
    let options = write::Options {
        threads,
        memory: AMPLE,
        publish: publish::Options { resume, ..Default::default() },
        ..Default::default()
    };
    let roots = [source.to_path_buf()];
    let plan = planned.plan;
    let files = sources(&catalog, &plan);
    write::write(&Run { plan: &plan, files: &files, roots: &roots, out, options: &options, control })
        .map(|(manifest, _)| manifest)
}

fn names(manifest: &Manifest) -> Vec<(u32, String)> {
    manifest.files.iter().filter(|f| f.holds_tensors()).map(|f| (0, f.name.clone())).collect()
}

fn content(out: &Path, manifest: &Manifest) -> BTreeMap<String, Vec<u8>> {
    manifest.files.iter().map(|f| (f.name.clone(), std::fs::read(out.join(&f.name)).unwrap())).collect()
}

fn options(dir: &Path) -> Options {
    Options {
        threads: 2,
        memory: AMPLE,
        scratch_dir: dir.to_path_buf(),
        max_decoded: None,
        encodes: 0,
        stats: Default::default(),
    }
}

#[test]
fn what_is_written_reads_back_and_verifies() {
    let dir = temp();
    let source = dir.path().join("in");
    std::fs::create_dir(&source).unwrap();
    write_ranks(&source, &checkpoint());
    for tp in [1, 2, 4] {
        let out = dir.path().join(format!("out{tp}"));
        let manifest = write_out(&source, &out, tp, 3, false, &Control::default()).unwrap();
        assert_eq!(std::fs::read(out.join("latest")).unwrap(), b"step");
        assert_eq!(std::fs::read(out.join("step/configs/x.yml")).unwrap(), b"a: 1\n");
        assert!(!out.join(write::INDEX_NAME).exists());

        let catalog = Catalog::open(vec![out.clone()], &names(&manifest), 1);
        assert!(catalog.findings.is_empty(), "{:?}", catalog.findings);
        let first = catalog.files.iter().flatten().find(|f| f.path.contains("mp_")).unwrap();
        let paths: Vec<String> = first.parsed.tensors.iter().map(|t| t.path.join(".")).collect();
        assert_eq!(paths, ["module.big", "module.a.scalar", "module.again"]);
        assert_eq!(first.parsed.tensors[0].blob, first.parsed.tensors[2].blob);
        let values = first.parsed.values.to_json();
        assert_eq!(values["step"], json!(1u64 << 40));
        assert_eq!(values["lr"], json!(0.1));
        assert_eq!(values["shapes"], json!([[1, 2], null, true, [{"__bytes__": 2}]]));

        // The identity of each file is that of an inventory of what is there.
        let (found, findings) =
            verify::inventory(&catalog, &options(dir.path()), &Control::default()).unwrap();
        assert!(crate::common::errors(&findings).is_empty(), "{findings:?}");
        let identities = |m: &Manifest| -> BTreeMap<String, (u64, String)> {
            m.files
                .iter()
                .map(|f| (f.name.clone(), (f.size, f.identity.clone().unwrap_or_default())))
                .collect()
        };
        let (want, got) = (identities(&found), identities(&manifest));
        for (name, want) in &want {
            // Two names of one tensor are two in an inventory, one in the plan.
            assert!(want.0 == got[name].0 && (name.contains("mp_") || *want == got[name]), "{name}");
        }
        let by_name = |m: &Manifest| -> BTreeMap<(String, String), String> {
            m.tensors.iter().map(|t| ((t.file.clone(), t.name.clone()), t.blake3.clone())).collect()
        };
        let mut found = by_name(&found);
        found.retain(|(_, name), _| name != "module.again");
        assert_eq!(found, by_name(&manifest));

        // A flipped bit of any tensor is found, by checksum and by hash.
        let tensor = &manifest.tensors[manifest.tensors.len() / 2];
        let path = out.join(&tensor.file);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[tensor.offset.unwrap() as usize] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let catalog = Catalog::open(vec![out.clone()], &names(&manifest), 1);
        let known = verify::Hashed::new();
        let found = verify::against(
            &catalog,
            &manifest,
            1,
            &verify::Selection::default(),
            &known,
            &options(dir.path()),
            &Control::default(),
        )
        .unwrap();
        let codes: Vec<_> = crate::common::errors(&found).iter().map(|f| f.code).collect();
        assert!(codes.contains(&codes::CRC) && codes.contains(&codes::HASH), "{found:?}");
    }
}

#[test]
fn an_interrupted_run_continues_to_the_same_files() {
    let dir = temp();
    let source = dir.path().join("in");
    std::fs::create_dir(&source).unwrap();
    write_ranks(&source, &checkpoint());
    let fresh = dir.path().join("fresh");
    let manifest = write_out(&source, &fresh, 2, 1, false, &Control::default()).unwrap();
    let want = content(&fresh, &manifest);
    let mut interrupted = 0;
    for i in 0..crate::common::cases(30) as u64 {
        let out = dir.path().join(format!("out{i}"));
        for n in 0..3 {
            let control = Control::default();
            let until = mix(i * 5 + n) % 4_000_000;
            let result = std::thread::scope(|scope| {
                scope.spawn(|| {
                    while control.done.load(Ordering::Relaxed) < until
                        && !control.cancel.load(Ordering::Relaxed)
                    {
                        std::thread::yield_now();
                    }
                    control.cancel.store(true, Ordering::Relaxed);
                });
                let result = write_out(&source, &out, 2, 1 + (i as usize % 2), n > 0, &control);
                control.cancel.store(true, Ordering::Relaxed);
                result
            });
            match result {
                Ok(_) => break,
                Err(error) => {
                    assert!(error.is_interrupt(), "{error}");
                    assert!(!out.exists());
                    interrupted += 1;
                }
            }
        }
        if !out.exists() {
            write_out(&source, &out, 2, 2, true, &Control::default()).unwrap();
        }
        assert!(content(&out, &manifest) == want, "run {i}");
    }
    assert!(interrupted > 0);
}

#[test]
fn files_that_do_not_fit_the_outputs_are_refused() {
    let dir = temp();
    write_ranks(dir.path(), &checkpoint());
    let catalog = open(dir.path(), 1);
    let found = |change: &dyn Fn(&mut Vec<Json>)| {
        let mut files = files(1);
        change(&mut files);
        let planned = make_plan(&catalog, request(1, files)).unwrap();
        let errors = crate::common::errors(&planned.findings);
        errors.iter().map(|f| (f.code, f.tensor.clone().unwrap_or_default())).collect::<Vec<_>>()
    };
    let layer = |name: &str| json!({"torch_zip": {"list": [{"tensor": name}]}});
    assert_eq!(found(&|_| ()), []);
    let lost = found(&|f| drop(f.pop()));
    assert_eq!(lost, [(codes::UNKNOWN_TENSOR, "w.4".into()), (codes::UNKNOWN_TENSOR, "n.4".into())]);
    let unknown = found(&|f| f.push(json!({"name": "x.pt", "content": layer("w.9")})));
    assert_eq!(unknown, [(codes::MISSING_TENSOR, "w.9".into())]);
    let twice = found(&|f| f.push(json!({"name": "x.pt", "content": layer("w.0")})));
    assert_eq!(twice, [(codes::OVERLAP, "w.0".into())]);
    let same = found(&|f| f.push(json!({"name": "step/mp_0.pt", "content": {"torch_zip": "none"}})));
    assert_eq!(same, [(codes::OVERLAP, String::new())]);
    let empty = found(&|f| f.push(json!({"name": "x.pt", "content": {"torch_zip": "none"}})));
    assert_eq!(empty, []);
}

/// Per-rank safetensors with names of their own.
#[test]
fn safetensors_files_can_be_prescribed() {
    let dir = temp();
    let source = dir.path().join("in");
    std::fs::create_dir(&source).unwrap();
    write_ranks(&source, &checkpoint());
    let catalog = open(&source, 1);
    let all: Vec<(String, String)> = (0..LAYERS)
        .flat_map(|l| [(format!("x.{l}"), format!("w.{l}")), (format!("y.{l}"), format!("n.{l}"))])
        .chain([("big".into(), "big".into()), ("scalar".into(), "scalar".into())])
        .collect();
    let files = vec![json!({"name": "ranks/0.safetensors", "content": {"safetensors": all}})];
    let plan = make_plan(&catalog, request(1, files)).unwrap().plan;
    let out = dir.path().join("out");
    let options = write::Options { threads: 1, memory: AMPLE, ..Default::default() };
    let (files, roots, control) = (sources(&catalog, &plan), [source], Control::default());
    let run =
        Run { plan: &plan, files: &files, roots: &roots, out: &out, options: &options, control: &control };
    let (manifest, _) = write::write(&run).unwrap();
    let catalog = Catalog::open(vec![out], &names(&manifest), 1);
    let known = verify::Hashed::new();
    let found = verify::against(
        &catalog,
        &manifest,
        1,
        &verify::Selection::default(),
        &known,
        &self::options(dir.path()),
        &Control::default(),
    );
    assert_eq!(found.unwrap(), []);
    assert!(
        manifest.tensors.iter().any(|t| t.name == "x.0") && manifest.tensors.iter().all(|t| t.name != "w.0")
    );
}

/// An axis that only an optional tensor has is bound by nothing where the source has none of its kind.
#[test]
fn optional_tensors_that_no_source_knows_are_left_out() {
    let dir = temp();
    write_ranks(dir.path(), &checkpoint());
    let catalog = open(dir.path(), 1);
    let with = |optional: &str| {
        let entry = format!("[[tensor]]\nname = \"positions\"\nshape = \"[S, H]\"\n{optional}");
        let mut request = request(1, files(1));
        request["target"]["toml"] = json!(format!("{TABLE}{entry}"));
        let planned = make_plan(&catalog, request).unwrap();
        crate::common::errors(&planned.findings).iter().map(|f| f.code).collect::<Vec<_>>()
    };
    assert_eq!(with("optional = true\n"), []);
    assert_eq!(with(""), [codes::UNBOUND_AXIS]);
}
