//! A run of several processes, in which any one of them fails at any of its system calls.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::parts::{self, Begun};
use super::rounds::Shared;
use crate::catalog::Catalog;
use crate::codes;
use crate::draft::Placement;
use crate::engine::Control;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::publish;
use crate::publish::fault::{arm, disarm, Fault};
use crate::request;
use crate::storage::SourceFile;
use crate::write::{document, write, Options, Run};

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n";

/// Enough for two files, for parts that share a page, and for parts that share none.
fn safetensors() -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for layer in 0..3usize {
        let bytes: Vec<u8> = (0..64 * 600u32).flat_map(|i| (i * 7 + layer as u32).to_le_bytes()).collect();
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(
            format!("w.{layer}"),
            json!({"dtype": "I32", "shape": [64, 600], "data_offsets": offsets}),
        );
        data.extend(bytes);
    }
    let header = serde_json::to_vec(&header).unwrap();
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}

struct Case {
    dir: tempfile::TempDir,
    plan: Plan,
    files: Vec<Arc<SourceFile>>,
}

type Tree = BTreeMap<String, Vec<u8>>;

impl Case {
    fn new() -> Case {
        let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let source = dir.path().join("in");
        std::fs::create_dir(&source).unwrap();
        std::fs::write(source.join("model.safetensors"), safetensors()).unwrap();
        let catalog = Catalog::open(vec![source], &[(0, "model.safetensors".into())], 1);
        let request = json!({
            "source": {"files": {"units": [{"file": 0, "rank": "the only one"}]}, "binding": {"toml": TABLE}},
        });
        let placement = json!({"max_shard_size": 320_000, "texts": {"config.json": "{}"}});
        let request: request::Request = serde_json::from_value(request).unwrap();
        let draft = request::draft(&catalog, &request).unwrap();
        let placement: Placement = serde_json::from_value(placement).unwrap();
        let plan = draft.placed(&catalog, placement).plan;
        let files = catalog.files.iter().flatten().map(|f| Arc::clone(&f.source)).collect();
        Case { dir, plan, files }
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn options(&self, overwrite: bool, resume: bool) -> Options {
        Options {
            threads: 1,
            memory: 1 << 30,
            publish: publish::Options { resume, overwrite, ..Default::default() },
            // Nobody is alive: this thread is all of them.
            patience: Duration::ZERO.into(),
            ..Default::default()
        }
    }

    fn run<T>(&self, out: &Path, options: &Options, work: impl FnOnce(&Run<'_>) -> T) -> T {
        let (roots, control) = ([self.dir.path().join("in")], Control::default());
        let Case { plan, files, .. } = self;
        work(&Run { plan, files, roots: &roots, out, options, control: &control })
    }

    fn begin(&self, overwrite: bool) -> Result<Begun> {
        self.run(&self.out(), &self.options(overwrite, false), |run| parts::begin(run, 2, json!({})))
    }

    fn part(&self, part: u32) -> Result<()> {
        let shared = Shared::enter(&self.out(), &self.plan.digest(), &document(&self.plan), None)?;
        let round = shared.round()?.expect("a round");
        self.run(&self.out(), &self.options(false, false), |run| {
            parts::make_part(run, &shared, &round, part).map(drop)
        })
    }

    fn conclude(&self, begun: Begun, overwrite: bool) -> Result<()> {
        let Begun { staging, shared, .. } = begun;
        self.run(&self.out(), &self.options(overwrite, true), |run| {
            parts::conclude(run, staging, &shared, Vec::new()).map(drop)
        })
    }

    fn alone(&self, out: &Path, overwrite: bool, resume: bool) -> Result<()> {
        self.run(out, &self.options(overwrite, resume), |run| write(run).map(drop))
    }

    /// What lies at a destination, without times and makers.
    fn tree(&self, out: &Path) -> Option<Tree> {
        let entries = std::fs::read_dir(out).ok()?.map(|e| e.unwrap());
        let read = |entry: std::fs::DirEntry| {
            let (name, mut bytes) =
                (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap());
            if name == "fastshard.manifest.json" {
                let mut manifest: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
                manifest.as_object_mut().unwrap().remove("provenance");
                for file in manifest["files"].as_array_mut().unwrap() {
                    file.as_object_mut().unwrap().remove("mtime_ns");
                }
                bytes = serde_json::to_vec(&manifest).unwrap();
            }
            (name, bytes)
        };
        Some(entries.map(read).collect())
    }

    fn hidden(&self) -> Vec<String> {
        let names = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with('.')).collect()
    }
}

/// The steps of a run, each done by a process of its own.
const STEPS: usize = 4;

/// Does all steps, the `at`th with a fault armed; calls made by that one, and what came of it.
fn run(case: &Case, overwrite: bool, at: usize, call: usize, fault: Fault) -> (usize, Result<()>) {
    let mut begun = None;
    for step in 0..STEPS {
        if step == at {
            arm(call, fault);
        }
        let done = match step {
            0 => case.begin(overwrite).map(|run| begun = Some(run)),
            1 | 2 => case.part(step as u32 - 1),
            _ => case.conclude(begun.take().expect("begun"), overwrite),
        };
        let calls = if step == at { disarm().len() } else { 0 };
        // The others go on, if they can.
        if done.is_err() && (step == 0 || step == STEPS - 1) || step == at && step == STEPS - 1 {
            return (calls, done);
        }
        if step == at && done.is_ok() && calls <= call {
            return (calls, done);
        }
    }
    (usize::MAX, Ok(()))
}

#[test]
fn whoever_fails_at_whichever_call_the_result_is_the_old_one_or_the_new_one() {
    let case = Case::new();
    let fresh = case.dir.path().join("fresh");
    case.alone(&fresh, false, false).unwrap();
    let new = case.tree(&fresh).unwrap();
    let older = case.dir.path().join("older");
    case.alone(&older, false, false).unwrap();
    std::fs::remove_dir_all(&older).unwrap();
    let (mut tried, mut failed) = (0, 0);
    for overwrite in [false, true] {
        for at in 0..STEPS {
            let calls = {
                prepare(&case, overwrite);
                let (calls, done) = run(&case, overwrite, at, usize::MAX, Fault::Gone);
                done.unwrap();
                assert!(calls > 5, "step {at}: {calls} calls");
                recover(&case, overwrite);
                calls
            };
            for fault in [Fault::Once(libc::EIO), Fault::Once(libc::ENOSPC), Fault::Gone] {
                for call in 0..calls {
                    let old = prepare(&case, overwrite);
                    let (_, done) = run(&case, overwrite, at, call, fault);
                    tried += 1;
                    failed += usize::from(done.is_err());
                    let now = case.tree(&case.out());
                    let context =
                        format!("step {at}, call {call} of {calls}, {fault:?}, overwrite {overwrite}");
                    let published = now.as_ref() == Some(&new);
                    assert!(
                        published || now == old,
                        "{context}: neither the old nor the new result: {done:?}"
                    );
                    assert!(published || done.is_err() || at < STEPS - 1, "{context}: said to be done");
                    recover(&case, overwrite);
                    assert_eq!(
                        case.tree(&case.out()).as_ref(),
                        Some(&new),
                        "{context}: after it was recovered"
                    );
                    assert_eq!(case.hidden(), Vec::<String>::new(), "{context}: left behind");
                }
            }
        }
    }
    eprintln!("{tried} faults, {failed} of which ended the process that met them; each recovered from");
    assert!(tried > 1000 && failed > 500, "{failed} of {tried}");
}

#[test]
fn whoever_stops_while_it_makes_the_files_may_write_to_none_that_is_used() {
    let case = Case::new();
    let clear = || {
        case.hidden().iter().for_each(|name| std::fs::remove_dir_all(case.dir.path().join(name)).unwrap());
    };
    arm(usize::MAX, Fault::Gone);
    drop(case.begin(false).unwrap());
    let calls = disarm().into_iter().enumerate();
    let is_data = |path: &Path| path.extension().is_some_and(|e| e == "safetensors");
    let writes: Vec<usize> =
        calls.filter(|(_, (call, path))| *call == "write" && is_data(path)).map(|(i, _)| i).collect();
    assert!(writes.len() >= case.plan.files.len(), "{writes:?}");
    for call in writes {
        clear();
        arm(call, Fault::Gone);
        assert!(case.begin(false).is_err());
        disarm();
        let run = Shared::enter(&case.out(), &case.plan.digest(), &document(&case.plan), None).unwrap();
        let claimed = run.claim().unwrap();
        // This process lives: any of them may still be open in it.
        assert_eq!(claimed.renewed.len(), case.plan.files.len(), "call {call}");
    }
}

/// Makes the destination what it was before.
fn prepare(case: &Case, overwrite: bool) -> Option<Tree> {
    let out = case.out();
    let _ = std::fs::remove_dir_all(&out);
    if !overwrite {
        return None;
    }
    let options = publish::Options { fsync: false, ..Default::default() };
    let mut older = crate::writer::ResultWriter::begin(&out, 64, 1 << 20, &options).unwrap();
    older.add("old", crate::tensor::Dtype::U8, &[64], &[7; 64]).unwrap();
    older.finish(crate::writer::Ending::default()).unwrap();
    case.tree(&out)
}

/// What the user would do: the same command once more, with --resume.
fn recover(case: &Case, overwrite: bool) {
    let out = case.out();
    let published = case.tree(&out).is_some_and(|tree| tree.contains_key("config.json"));
    if published && case.hidden().is_empty() {
        return;
    }
    // A process that another test starts has our locks until it runs its program.
    let is_locked = |error: &Error| error.findings().iter().any(|finding| finding.code == codes::LOCKED);
    let done = loop {
        match case.alone(&out, overwrite, true) {
            Err(error) if is_locked(&error) => std::thread::yield_now(),
            done => break done,
        }
    };
    if published && done.is_err() {
        // Cut short at the very end of the clean-up: there is nothing left to be done but this.
        case.hidden().iter().for_each(|folder| std::fs::remove_dir(case.dir.path().join(folder)).unwrap());
    } else {
        done.unwrap();
    }
}
