//! The engine as a whole: interrupted and resumed runs, value ops, sums and their inverse, budgets.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::Duration;

use crate::common::paused::{child_of_its_own, until, Steps};
use crate::common::world::encode;
use crate::common::{
    carry_out, cases, file_name, make_plan, mix, open, options, run, sources, temp, units, write_ranks,
    RankFile, Tensor, AMPLE,
};
use fastshard::codes;
use fastshard::engine::{self, At, Control, Discard, Report, Sink, TileDone};
use fastshard::error::{Error, Severity};
use fastshard::kernel;
use fastshard::plan::{Fill, Output, Plan};
use fastshard::stats::{Accumulator, Level, Seen};
use fastshard::steps::Step;
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;
use fastshard::write::Run;
use fastshard::{publish, write};
use proptest::prelude::*;
use serde_json::json;

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n\
    [[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n[[tensor]]\nname = \"n.{L}\"\nshape = \"[H]\"\n\
    [[tensor]]\nname = \"big\"\nshape = \"[K, F]\"\n";

/// Two ranks of a model with many small tensors, a large one, and a NaN in the first and the last.
fn checkpoint() -> Vec<RankFile> {
    let rank = |r: u64| {
        let mut tensors = Vec::new();
        for l in 0..60u64 {
            tensors.push(Tensor::painted(&format!("w.{l}"), &[16, 64], l * 2 + r));
            tensors.push(Tensor::painted(&format!("n.{l}"), &[64], 1000 + l));
        }
        tensors.push(Tensor::painted("big", &[30_000, 16], 5000 + r));
        for t in [0, 59 * 2] {
            tensors[t].bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        }
        RankFile { coords: [("tp".to_string(), r)].into(), tensors, ..RankFile::default() }
    };
    (0..2).map(rank).collect()
}

fn write_out(
    source: &Path,
    out: &Path,
    threads: usize,
    resume: bool,
    control: &Control,
) -> Result<(), Error> {
    let files: Vec<RankFile> =
        (0..2).map(|r| RankFile { coords: [("tp".to_string(), r)].into(), ..RankFile::default() }).collect();
    let catalog = open(source, 2);
    let request = json!({
        "source": {"toml": TABLE, "units": units(&files), "degrees": {"tp": 2}},
        "max_shard_size": 400_000,
        "texts": {"config.json": "{}"},
    });
    let plan = make_plan(&catalog, request).unwrap().plan;
    assert!(plan.files.len() > 2);
    let options = write::Options {
        threads,
        memory: AMPLE,
        publish: publish::Options { resume, fsync: false, ..Default::default() },
        patience: Duration::from_secs(1).into(),
        ..Default::default()
    };
    let (files, roots) = (sources(&catalog, &plan), [source.to_path_buf()]);
    write::write(&Run { plan: &plan, files: &files, roots: &roots, out, options: &options, control })
        .map(|_| ())
}

/// All files of a folder; the manifest without the times at which they were written.
fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<String, Vec<u8>> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
        .collect();
    if let Some(manifest) = files.get_mut("fastshard.manifest.json") {
        let text = String::from_utf8(std::mem::take(manifest)).unwrap();
        let timeless: Vec<&str> = text.lines().filter(|l| !l.contains("\"mtime_ns\"")).collect();
        *manifest = timeless.join("\n").into_bytes();
    }
    files
}

fn same(got: &BTreeMap<String, Vec<u8>>, want: &BTreeMap<String, Vec<u8>>) {
    assert_eq!(got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
    for (name, bytes) in want {
        if name.ends_with(".json") {
            let (got, want) = (String::from_utf8_lossy(&got[name]), String::from_utf8_lossy(bytes));
            let first = got.lines().zip(want.lines()).find(|(a, b)| a != b);
            assert_eq!(first, None, "{name}");
        }
        assert!(got[name] == *bytes, "{name} differs");
    }
}

#[test]
fn an_interrupted_run_continues_to_the_same_result() {
    let dir = temp();
    let source = dir.path().join("in");
    std::fs::create_dir(&source).unwrap();
    write_ranks(&source, &checkpoint());
    write_out(&source, &dir.path().join("fresh"), 2, false, &Control::default()).unwrap();
    let want = content(&dir.path().join("fresh"));
    let tiles = Arc::new(AtomicU64::new(0));
    let counts = Arc::clone(&tiles);
    let at = At::new(move |_, step| {
        counts.fetch_add(u64::from(matches!(step, Step::Tile(_))), Ordering::Relaxed);
    });
    write_out(&source, &dir.path().join("counted"), 2, false, &Control { at, ..Control::default() }).unwrap();
    let tiles = tiles.load(Ordering::Relaxed);
    assert!(tiles > 100);
    for i in 0..cases(40) as u64 {
        let out = dir.path().join(format!("out{i}"));
        // Several interrupts before the last run goes through.
        for n in 0..3 {
            let place = match mix(i * 7 + n) % (tiles + 2) {
                0 => Step::Opened,
                1 => Step::TilesMade,
                tile => Step::Tile(tile - 2),
            };
            let at = At::new(move |control, step| {
                if step == place {
                    control.cancel.store(true, Ordering::Relaxed);
                }
            });
            let control = Control { at, ..Control::default() };
            let result = write_out(&source, &out, 1 + (i as usize % 2), n > 0, &control);
            let error = result.expect_err("it was stopped");
            assert!(error.is_interrupt(), "{place}: {error}");
            assert!(!out.exists());
        }
        write_out(&source, &out, 2, true, &Control::default()).unwrap();
        same(&content(&out), &want);
    }
}

const CHILD: &str = "engine::child_writes";

/// Not a test: the process that is killed.
#[test]
#[ignore = "run by a_killed_run_continues_to_the_same_result"]
fn child_writes() {
    let Some(dir) = std::env::var_os("FASTSHARD_TEST_KILLED") else { return };
    let dir = PathBuf::from(dir);
    let _ = write_out(&dir.join("in"), &dir.join("out"), 2, true, &Control::default());
}

#[test]
fn a_killed_run_continues_to_the_same_result() {
    let dir = temp();
    let source = dir.path().join("in");
    std::fs::create_dir(&source).unwrap();
    write_ranks(&source, &checkpoint());
    write_out(&source, &dir.path().join("fresh"), 2, false, &Control::default()).unwrap();
    let want = content(&dir.path().join("fresh"));
    let out = dir.path().join("out");
    let start = |steps: &Steps| {
        let mut command = child_of_its_own(CHILD);
        command.env("FASTSHARD_TEST_KILLED", dir.path()).stdout(Stdio::null()).stderr(Stdio::null());
        steps.hold(&mut command).spawn().unwrap()
    };
    // A run that nobody kills: all the places that it comes by.
    let steps = Steps::new();
    let mut places = steps.all(&mut start(&steps));
    drop(steps);
    same(&content(&out), &want);
    std::fs::remove_dir_all(&out).unwrap();
    // Which of two threads comes first is no matter.
    places
        .sort_by_key(|place| (place.strip_prefix("tile-").map(|n| n.parse::<u64>().unwrap()), place.clone()));
    let few = ["draft", "file-0", "file-1", "made", "opened", "place", "published", "sealed"];
    assert!(places.iter().take(few.len() + 1).eq(few.iter().chain(&["tile-0"])), "{places:?}");
    assert!(places.len() > 100);
    let (few, all) = (few.len(), cases(16).max(few.len() as u32 + 2) as usize);
    for i in 0..all {
        // Each of the few, and tiles from the first one to the last.
        let place = match i.checked_sub(few) {
            None => &places[i],
            Some(tile) => &places[few + tile * (places.len() - few - 1) / (all - few - 1)],
        };
        let steps = Steps::new();
        let mut child = start(&steps);
        let mut paused = Some(steps.until(&mut child, place));
        if i % 2 == 1 && place.starts_with("tile-") {
            // Somewhere within the tile: it comes no further than the places after it, at which nobody lets it go.
            drop(paused.take());
            std::thread::sleep(Duration::from_micros(mix(i as u64) % 300));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().signal(), Some(9), "{place}");
        drop(paused);
        assert_eq!(out.exists(), place == "published", "{place}");
        if !out.exists() {
            write_out(&source, &out, 2, true, &Control::default()).unwrap();
        }
        same(&content(&out), &want);
        let folder = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().path());
        if let Some(folder) = folder.into_iter().find(|p| p.to_string_lossy().contains(".fastshard-")) {
            // Killed between publishing and the end of the clean-up: the next run ends that, or finds nothing to end.
            if write_out(&source, &out, 2, true, &Control::default()).is_err() {
                std::fs::remove_dir(&folder).unwrap();
            }
            same(&content(&out), &want);
        }
        std::fs::remove_dir_all(&out).unwrap();
        let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "only source and fresh result: {left:?}");
    }
}

/// A result in memory, with the records of what is done and the claims of an earlier run.
#[derive(Default)]
struct Records {
    bytes: Vec<Mutex<Vec<u8>>>,
    claims: BTreeMap<(usize, u64), TileDone>,
    done: Mutex<Vec<(usize, TileDone)>>,
    kept: Mutex<Vec<(usize, TileDone)>>,
}

impl Records {
    fn new(plan: &Plan) -> Records {
        let empty = |o: &Output| Mutex::new(vec![0; o.nbytes() as usize]);
        Records { bytes: plan.outputs.iter().map(empty).collect(), ..Records::default() }
    }

    /// A result with the bytes of another, and some of its records as claims.
    fn after(earlier: &Records, claims: impl IntoIterator<Item = (usize, TileDone)>) -> Records {
        let copy = |b: &Mutex<Vec<u8>>| Mutex::new(b.lock().unwrap().clone());
        Records {
            bytes: earlier.bytes.iter().map(copy).collect(),
            claims: claims.into_iter().map(|(output, tile)| ((output, tile.index), tile)).collect(),
            ..Records::default()
        }
    }

    fn all(&self) -> Vec<(usize, TileDone)> {
        self.done.lock().unwrap().clone()
    }

    fn kept(&self) -> Vec<(usize, TileDone)> {
        let mut kept = self.kept.lock().unwrap().clone();
        kept.sort_unstable_by_key(|(output, tile)| (*output, tile.index));
        kept
    }

    fn content(self) -> Vec<Vec<u8>> {
        self.bytes.into_iter().map(|b| b.into_inner().unwrap()).collect()
    }
}

impl Sink for Records {
    fn write(&self, output: usize, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.bytes[output].lock().unwrap()[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn done(&self, output: usize, tile: &TileDone) -> Result<(), Error> {
        self.done.lock().unwrap().push((output, *tile));
        Ok(())
    }

    // The size is not looked at: the engine must.
    fn claimed(&self, output: usize, index: u64, _: u64) -> Result<Option<TileDone>, Error> {
        Ok(self.claims.get(&(output, index)).copied())
    }

    fn read_back(&self, output: usize, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        bytes.copy_from_slice(&self.bytes[output].lock().unwrap()[offset as usize..][..bytes.len()]);
        Ok(())
    }

    fn kept(&self, output: usize, tile: &TileDone) {
        self.kept.lock().unwrap().push((output, *tile));
    }

    fn checksummed(&self, _: usize) -> bool {
        true
    }
}

/// The checkpoint's plan and files, in `dir`.
fn planned(dir: &Path) -> (Plan, Vec<Arc<SourceFile>>) {
    let files = checkpoint();
    write_ranks(dir, &files);
    let catalog = open(dir, 2);
    let request = json!({
        "source": {"toml": TABLE, "units": units(&files), "degrees": {"tp": 2}}, "max_shard_size": 1u64 << 40,
    });
    let plan = make_plan(&catalog, request).unwrap().plan;
    let files = sources(&catalog, &plan);
    (plan, files)
}

/// Runs in tiles of `tile` bytes: hashes and numbers that are not finite, and the sink.
fn resumed(
    plan: &Plan,
    files: &[Arc<SourceFile>],
    records: Records,
    tile: u64,
    stats: Level,
) -> (Report, Records) {
    let options = engine::Options { stats, ..options(2, Path::new("")) };
    let report =
        engine::execute_tiled(plan, files, &records, &options, Some(tile), &Control::default()).unwrap();
    (report, records)
}

fn found(report: &Report) -> Vec<([u8; 32], u64)> {
    report.outputs.iter().map(|o| (o.hash, o.non_finite)).collect()
}

#[test]
fn claims_are_kept_where_the_bytes_are_there_and_the_tile_is_comparable() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    let (want, first) = resumed(&plan, &files, Records::new(&plan), 2048, Level::Nothing);
    let copies = |output: usize| plan.outputs[output].parts.iter().any(|p| p.sources.len() > 1);
    for tile in [1024, 2048, 4096] {
        for keep in [1, 2, 5] {
            let claims: Vec<_> = first.all().into_iter().step_by(keep).collect();
            let mut believed = claims.clone();
            believed.retain(|(output, _)| tile == 2048 && !copies(*output));
            believed.sort_unstable_by_key(|(output, tile)| (*output, tile.index));
            let (report, again) =
                resumed(&plan, &files, Records::after(&first, claims), tile, Level::Nothing);
            assert!(found(&report) == found(&want), "tiles of {tile}, every {keep}th record");
            assert_eq!(again.kept(), believed, "tiles of {tile}, every {keep}th record");
            if tile == 2048 {
                assert_eq!(again.all().len() + believed.len(), first.all().len());
            }
        }
    }
    // Claims of tiles that there are not.
    let (output, mut beyond) = first.all()[0];
    beyond.index = 1 << 40;
    let (report, again) =
        resumed(&plan, &files, Records::after(&first, [(output, beyond)]), 2048, Level::Nothing);
    assert!(found(&report) == found(&want) && again.kept().is_empty());
}

/// What was journalled and is no longer so: lost and made anew as holes, edited, taken from another tile.
#[test]
fn claims_of_bytes_that_are_others_now_are_made_anew() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    let (want, first) = resumed(&plan, &files, Records::new(&plan), 2048, Level::Nothing);
    let bytes: Vec<Vec<u8>> = first.bytes.iter().map(|b| b.lock().unwrap().clone()).collect();
    let big = plan.outputs.iter().position(|o| o.name == "big").unwrap();
    let damages: [fn(&mut [u8]); 4] =
        [|b| b.fill(0), |b| *b.last_mut().unwrap() ^= 1, |b| b[0] ^= 0x80, |b| b.rotate_left(2048)];
    for damage in damages {
        let damaged = Records::after(&first, first.all());
        damage(&mut damaged.bytes[big].lock().unwrap());
        let touched = damaged.bytes[big]
            .lock()
            .unwrap()
            .chunks(2048)
            .zip(bytes[big].chunks(2048))
            .filter(|(a, b)| a != b)
            .count();
        assert!(touched > 0);
        let (report, again) = resumed(&plan, &files, damaged, 2048, Level::Nothing);
        assert!(found(&report) == found(&want));
        assert_eq!(again.all().iter().filter(|(output, _)| *output == big).count(), touched);
        assert!(again.content() == bytes);
    }
}

#[test]
fn statistics_are_those_of_the_outputs_also_where_an_earlier_run_made_tiles() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    let (outputs, plain) = crate::common::run(&plan, &files, 2, Some(2048), dir.path()).unwrap();
    assert!(plain.outputs.iter().all(|o| o.seen == Seen::Nothing));
    let (_, first) = resumed(&plan, &files, Records::new(&plan), 2048, Level::Nothing);
    for claims in [Vec::new(), first.all()] {
        let (report, again) =
            resumed(&plan, &files, Records::after(&first, claims.clone()), 2048, Level::Full);
        assert_eq!(again.all().len(), first.all().len(), "the journal knows no statistics");
        let (slabs, _) = resumed(&plan, &files, Records::after(&first, claims), 2048, Level::ZeroSlabs);
        for (((output, bytes), found), slabs) in
            plan.outputs.iter().zip(&outputs).zip(&report.outputs).zip(&slabs.outputs)
        {
            let naive = Accumulator::new(output.dtype, &output.shape);
            bytes.chunks(2048).enumerate().for_each(|(i, tile)| naive.add(i as u64 * 2048, tile));
            assert_eq!(found.seen.stats(), naive.finish().as_ref(), "{}", output.name);
            assert_eq!(slabs.seen, Seen::ZeroSlabs(naive.zero_slabs()));
        }
    }
}

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::Bf16, Dtype::F16];

fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let one = |c: &[u8]| match dtype {
        Dtype::F16 => half::f16::from_le_bytes([c[0], c[1]]).to_f32(),
        Dtype::Bf16 => half::bf16::from_le_bytes([c[0], c[1]]).to_f32(),
        _ => f32::from_le_bytes(c.try_into().unwrap()),
    };
    bytes.chunks(dtype.size()).map(one).collect()
}

/// One file through a pair of tables with value ops; axis d has the extent 3 to be irrational.
fn through(
    dtype: Dtype,
    bytes: Vec<u8>,
    from: &str,
    to: &str,
    cast: Option<Dtype>,
) -> crate::common::Outcome {
    let n = (bytes.len() / dtype.size()) as u64;
    let files =
        vec![RankFile { tensors: vec![Tensor::new("x", dtype, &[n / 3, 3], bytes)], ..RankFile::default() }];
    let dir = temp();
    write_ranks(dir.path(), &files);
    let table = |ops: &str, shape: &str| {
        format!("layout = \"t\"\nfamily = \"t\"\n[[tensor]]\nname = \"x\"\nshape = \"{shape}\"\n{ops}\n")
    };
    let request = json!({
        "source": {"toml": table(from, "[A, d]"), "units": units(&files)},
        "target": {"name": "to", "toml": table(to, "[d, A]")},
        "dtype": cast.map(|d| d.safetensors_name()),
        "max_shard_size": 1u64 << 40,
    });
    carry_out(dir.path(), &[file_name(0)], request, Some(1024))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(400), ..ProptestConfig::default() })]

    #[test]
    fn value_ops_equal_a_scalar_loop(
        rows in prop::sample::select(vec![1usize, 5, 341, 700]),
        seed in any::<u32>(),
        dtype in prop::sample::select(FLOATS.to_vec()),
        cast in prop::option::of(prop::sample::select(FLOATS.to_vec())),
        from in 0usize..5, to in 0usize..5,
    ) {
        let root = 3f64.sqrt();
        let ops = [("", 1.0, 0.0), ("scale = \"0.5\"", 0.5, 0.0), ("scale = \"1/sqrt(d)\"", 1.0 / root, 0.0), ("add = 1.0", 1.0, 1.0), ("scale = \"d^2\"\nadd = -0.25", 9.0, -0.25)];
        let ((from, undo, minus), (to, redo, plus)): ((&str, f64, f64), (&str, f64, f64)) = (ops[from], ops[to]);
        // Ordinary numbers with zeros of both signs and denormals; no NaN, whose bits are another matter.
        let bytes: Vec<u8> = (0..rows * 3)
            .flat_map(|i| {
                let m = mix(u64::from(seed) << 20 | i as u64);
                let value = match m % 16 { 0 => 0.0, 1 => -0.0, 2 => 1e-7, 3 => -3e-6, _ => (m >> 40) as f32 / 8192.0 - 1000.0 };
                encode(dtype, value).0
            })
            .collect();
        let values = decode(dtype, &bytes);
        let outcome = through(dtype, bytes.clone(), from, to, cast);
        outcome.clean();
        let got = &outcome.outputs["x"];
        let wide = cast.unwrap_or(dtype);
        prop_assert_eq!(got.dtype, wide);
        let mut want = Vec::new();
        for c in 0..3 {
            for r in 0..rows {
                let mut x = values[r * 3 + c];
                if (undo, minus) != (redo, plus) {
                    if undo == redo && undo == 1.0 {
                        x += (plus - minus) as f32;
                    } else {
                        if minus != 0.0 { x += -minus as f32; }
                        if undo != redo { x *= (redo / undo) as f32; }
                        if plus != 0.0 { x += plus as f32; }
                    }
                }
                want.extend(encode(wide, x).0);
            }
        }
        prop_assert!(got.bytes == want);
    }

    /// A value on rank 0 and -0.0 on the others: the sum is the value, bit for bit, -0.0 included.
    #[test]
    fn a_sum_undoes_its_inverse(n in prop::sample::select(vec![1u64, 16, 700]), seed in any::<u32>(), tp in prop::sample::select(vec![1u64, 2, 4]), dtype in prop::sample::select(FLOATS.to_vec())) {
        let table = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n[[tensor]]\nname = \"b\"\nshape = \"[H]\"\npartial = \"tp\"\n";
        // Any bits but NaN, which a sum makes quiet.
        let bytes: Vec<u8> = (0..n)
            .flat_map(|i| {
                let m = mix(u64::from(seed) << 20 | i);
                let bits = if m.is_multiple_of(8) { crate::common::world::negative_zero(dtype) } else { m.to_le_bytes()[..dtype.size()].to_vec() };
                if decode(dtype, &bits)[0].is_nan() { encode(dtype, -0.0).0 } else { bits }
            })
            .collect();
        let whole = vec![RankFile { tensors: vec![Tensor::new("b", dtype, &[n], bytes.clone())], ..RankFile::default() }];
        let dir = temp();
        write_ranks(dir.path(), &whole);
        let catalog = open(dir.path(), 1);
        let there = json!({
            "source": {"toml": table, "units": units(&whole)},
            "target": {"name": "to", "toml": table, "degrees": {"tp": tp}},
            "max_shard_size": 1u64 << 40,
        });
        let plan = make_plan(&catalog, there).unwrap().plan;
        let (outputs, _) = run(&plan, &sources(&catalog, &plan), 1, Some(1024), dir.path()).unwrap();
        prop_assert_eq!(outputs.len() as u64, tp);
        prop_assert_eq!(&outputs[0], &bytes);
        let neutral = crate::common::world::negative_zero(dtype);
        prop_assert!(outputs[1..].iter().all(|o| o.chunks(dtype.size()).all(|c| c == neutral)));

        let split: Vec<RankFile> = outputs
            .into_iter()
            .enumerate()
            .map(|(r, bytes)| RankFile { coords: [("tp".to_string(), r as u64)].into(), tensors: vec![Tensor::new("b", dtype, &[n], bytes)], ..RankFile::default() })
            .collect();
        write_ranks(dir.path(), &split);
        let names: Vec<String> = (0..split.len()).map(file_name).collect();
        let back = json!({"source": {"toml": table, "units": units(&split), "degrees": {"tp": tp}}, "max_shard_size": 1u64 << 40});
        let outcome = carry_out(dir.path(), &names, back, Some(1024));
        outcome.clean();
        prop_assert_eq!(&outcome.outputs["b"].bytes, &bytes);
    }
}

#[test]
fn a_sum_with_copies_over_another_dimension_is_refused() {
    let table = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\nep = [\"E\"]\n[[tensor]]\nname = \"b\"\nshape = \"[H]\"\npartial = \"tp\"\n";
    let files: Vec<RankFile> = (0..4)
        .map(|r| RankFile {
            coords: [("tp".to_string(), r % 2), ("ep".to_string(), r / 2)].into(),
            tensors: vec![Tensor::painted("b", &[16], r % 2)],
            ..RankFile::default()
        })
        .collect();
    let dir = temp();
    write_ranks(dir.path(), &files);
    let names: Vec<String> = (0..4).map(file_name).collect();
    let request = json!({"source": {"toml": table, "units": units(&files), "degrees": {"tp": 2, "ep": 2}}, "max_shard_size": 1u64 << 40});
    carry_out(dir.path(), &names, request, None).expect(codes::UNSUPPORTED, Severity::Error);
}

/// What cannot be computed with is refused before the run, not by a panic in it.
#[test]
fn values_that_are_no_floats_are_neither_scaled_nor_cast_to() {
    let ints: Vec<u8> = (0..12i32).flat_map(i32::to_le_bytes).collect();
    let outcome = through(Dtype::I32, ints.clone(), "add = 1.0", "", None);
    outcome.expect(codes::UNSUPPORTED, Severity::Error);
    // A cast leaves integers alone, and integers are no type to cast to.
    let outcome = through(Dtype::I32, ints, "", "", Some(Dtype::Bf16));
    outcome.clean();
    assert_eq!(outcome.outputs["x"].dtype, Dtype::I32);
    let floats: Vec<u8> = (0..12).flat_map(|i| (i as f32).to_le_bytes()).collect();
    for dtype in [Dtype::I64, Dtype::F8E4m3, Dtype::Bool] {
        let outcome = through(Dtype::F32, floats.clone(), "", "", Some(dtype));
        assert!(outcome.failed());
    }
}

#[test]
fn widened_and_narrowed_values_are_those_of_the_kernel_at_every_position() {
    let patterns: Vec<u8> = (0..3 * 21_845u32).flat_map(|i| (i as u16).to_le_bytes()).collect();
    for (from, to) in [
        (Dtype::F16, Dtype::F32),
        (Dtype::Bf16, Dtype::F32),
        (Dtype::F16, Dtype::Bf16),
        (Dtype::Bf16, Dtype::F64),
    ] {
        let outcome = through(from, patterns.clone(), "", "", Some(to));
        outcome.clean();
        let mut turned = Vec::new();
        for c in 0..3 {
            (0..21_845).for_each(|r| turned.extend(&patterns[2 * (r * 3 + c)..][..2]));
        }
        let mut want = vec![0; turned.len() / 2 * to.size()];
        kernel::convert(from, &turned, to, &mut want);
        assert!(outcome.outputs["x"].bytes == want, "{from} to {to}");
    }
}

/// Panics at a tile once all other threads are at one of theirs, which go on once the thread that panicked is gone.
struct Panics {
    threads: u64,
    tiles: AtomicU64,
    late: AtomicU64,
    /// Of the test, which is one of the workers: it is never gone.
    own: ThreadId,
    chosen: AtomicBool,
    /// Threads that wait for the end of the one that panics.
    waiting: AtomicU64,
    gone: Arc<AtomicBool>,
}

thread_local!(static LAST_WORDS: RefCell<Option<LastWords>> = const { RefCell::new(None) });

/// Says that a thread has ended, and all that came of it is known.
struct LastWords(Arc<AtomicBool>);

impl Drop for LastWords {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl Sink for Panics {
    fn write(&self, _: usize, _: u64, _: &[u8]) -> Result<(), Error> {
        let n = self.tiles.fetch_add(1, Ordering::SeqCst);
        if n < 20 {
            return Ok(());
        }
        let alone = self.threads == 1;
        let may_panic = alone || std::thread::current().id() != self.own;
        if may_panic && !self.chosen.swap(true, Ordering::SeqCst) {
            LAST_WORDS.set(Some(LastWords(Arc::clone(&self.gone))));
            until("all others are at a tile", || self.waiting.load(Ordering::SeqCst) == self.threads - 1);
            panic!("tile 20 is one too many");
        }
        self.late.fetch_add(1, Ordering::SeqCst);
        self.waiting.fetch_add(1, Ordering::SeqCst);
        until("the end of the thread that panicked", || alone || self.gone.load(Ordering::SeqCst));
        Ok(())
    }
}

#[test]
fn a_panic_of_a_worker_stops_all_and_is_an_error() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    for threads in [1, 4] {
        let sink = Panics {
            threads,
            tiles: AtomicU64::new(0),
            late: AtomicU64::new(0),
            own: std::thread::current().id(),
            chosen: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
            gone: Arc::default(),
        };
        let options = options(threads as usize, dir.path());
        let result = engine::execute_tiled(&plan, &files, &sink, &options, Some(1024), &Control::default());
        let error = result.unwrap_err();
        let finding = &error.findings()[0];
        assert_eq!((finding.code, error.findings().len()), (codes::INTERNAL, 1));
        assert!(finding.message.contains("tile 20 is one too many"), "{finding:?}");
        // Each of the others ends with the tile that it was at; there are thousands.
        assert_eq!(sink.late.into_inner(), threads - 1, "the others go on");
    }
}

#[test]
fn an_output_that_no_file_can_hold_is_refused() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    for shape in [vec![1 << 62], vec![1 << 31, 1 << 31], vec![1 << 32, 1 << 32], vec![u64::MAX, 2]] {
        let mut plan = plan.clone();
        plan.outputs[0] = Output {
            shape: shape.into(),
            parts: Box::default(),
            fill: Fill::Zero,
            ..plan.outputs[0].clone()
        };
        let options = options(1, dir.path());
        let error = engine::execute(&plan, &files, &Discard, &options, &Control::default()).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::BAD_VALUE);
    }
}

/// The bytes that were written of the first output.
#[derive(Default)]
struct First(Mutex<Vec<u8>>);

impl Sink for First {
    fn write(&self, output: usize, _: u64, bytes: &[u8]) -> Result<(), Error> {
        if output == 0 {
            self.0.lock().unwrap().extend_from_slice(bytes);
        }
        Ok(())
    }
}

#[test]
fn a_number_is_written_in_the_outputs_type_or_refused() {
    let dir = temp();
    let (plan, files) = planned(dir.path());
    let computed = |dtype, number| {
        let mut plan = plan.clone();
        let fill = Fill::Number(number);
        plan.outputs[0] =
            Output { shape: [3].into(), dtype, parts: Box::default(), fill, ..plan.outputs[0].clone() };
        let (sink, options) = (First::default(), options(1, dir.path()));
        engine::execute(&plan, &files, &sink, &options, &Control::default())
            .map(|_| sink.0.into_inner().unwrap())
    };
    assert_eq!(computed(Dtype::F32, 7).unwrap(), [7f32.to_le_bytes(); 3].concat());
    assert_eq!(computed(Dtype::F64, 7).unwrap(), [7f64.to_le_bytes(); 3].concat());
    assert_eq!(computed(Dtype::I64, 7).unwrap(), [7i64.to_le_bytes(); 3].concat());
    assert_eq!(computed(Dtype::I32, 7).unwrap(), [7i32.to_le_bytes(); 3].concat());
    for (dtype, number) in [(Dtype::I32, u32::MAX), (Dtype::F32, (1 << 24) + 1), (Dtype::Bool, 1)] {
        let error = computed(dtype, number).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::BAD_VALUE, "{dtype:?} {number}");
    }
}
