//! One run by several processes: begun, made in parts, concluded; interrupted, killed, stopped and woken at any point.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Duration;

use crate::common::paused::{child_of_its_own, until, FileClock, Time, HANG};
use crate::common::{
    cases, make_plan, mix, open, sources, temp, units, write_ranks, RankFile, Tensor, AMPLE,
};
use fastshard::codes::{self, Code};
use fastshard::distributed::meeting::{About, Meeting, Seen};
use fastshard::distributed::parts::{self, Begun, PartOutcome};
use fastshard::distributed::ranks::write_together;
use fastshard::distributed::rounds::Shared;
use fastshard::engine::{At, Control};
use fastshard::error::Error;
use fastshard::plan::Plan;
use fastshard::publish::clock::{Clock, Patience};
use fastshard::steps::Step;
use fastshard::storage::SourceFile;
use fastshard::write::Run;
use fastshard::{publish, write};
use rustix::process::{Pid, Signal};
use serde_json::json;

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n\
    [[tensor]]\nname = \"w.{L}\"\nshape = \"[F, H]\"\n[[tensor]]\nname = \"n.{L}\"\nshape = \"[H]\"\n\
    [[tensor]]\nname = \"big\"\nshape = \"[K, F]\"\n";
const PATIENCE: Duration = Duration::from_millis(1200);

fn checkpoint() -> Vec<RankFile> {
    let rank = |r: u64| {
        let mut tensors = Vec::new();
        for l in 0..60u64 {
            tensors.push(Tensor::painted(&format!("w.{l}"), &[16, 64], l * 2 + r));
            tensors.push(Tensor::painted(&format!("n.{l}"), &[64], 1000 + l));
        }
        tensors.push(Tensor::painted("big", &[30_000, 16], 5000 + r));
        tensors[0].bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        RankFile { coords: [("tp".to_string(), r)].into(), tensors, ..RankFile::default() }
    };
    (0..2).map(rank).collect()
}

/// A checkpoint, and what is made of it.
struct Case {
    dir: tempfile::TempDir,
    plan: Plan,
    files: Vec<Arc<SourceFile>>,
}

impl Case {
    fn new(max_shard_size: u64) -> Case {
        let dir = temp();
        let source = dir.path().join("in");
        std::fs::create_dir(&source).unwrap();
        let ranks = checkpoint();
        write_ranks(&source, &ranks);
        let catalog = open(&source, 2);
        let request = json!({
            "source": {"toml": TABLE, "units": units(&ranks), "degrees": {"tp": 2}},
            "max_shard_size": max_shard_size,
            "texts": {"config.json": "{}"},
        });
        let plan = make_plan(&catalog, request).unwrap().plan;
        let files = sources(&catalog, &plan);
        Case { dir, plan, files }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn roots(&self) -> Vec<PathBuf> {
        vec![self.path("in")]
    }

    fn options(&self, resume: bool) -> write::Options {
        write::Options {
            threads: 2,
            memory: AMPLE,
            publish: publish::Options { resume, ..Default::default() },
            // Whoever waits for others waits in vain, and no time.
            patience: Patience { time: PATIENCE, clock: Clock::leaping() },
            ..Default::default()
        }
    }

    fn run<T>(
        &self,
        out: &Path,
        options: &write::Options,
        control: &Control,
        work: impl FnOnce(&Run<'_>) -> T,
    ) -> T {
        work(&Run { plan: &self.plan, files: &self.files, roots: &self.roots(), out, options, control })
    }

    fn alone(&self, out: &str, resume: bool) -> Result<(), Error> {
        let options = self.options(resume);
        let out = self.path(out);
        self.run(&out, &options, &Control::default(), |run| write::write(run).map(|_| ()))
    }

    fn begin(&self, out: &str, parts: usize, resume: bool) -> Result<Begun, Error> {
        self.run(&self.path(out), &self.options(resume), &Control::default(), |run| {
            parts::begin(run, parts, json!({"by": "a test"}))
        })
    }

    /// Makes a part as another process would: it enters the run by itself.
    fn part(&self, out: &str, part: u32, control: &Control) -> Result<PartOutcome, Error> {
        let out = self.path(out);
        let shared = self.enter(&out)?;
        let round = shared.round()?.expect("a round is open");
        self.run(&out, &self.options(false), control, |run| parts::make_part(run, &shared, &round, part))
    }

    fn enter(&self, out: &Path) -> Result<Shared, Error> {
        Shared::enter(out, &self.plan.digest(), &write::document(&self.plan), None)
    }

    fn conclude(&self, begun: Begun) -> Result<(), Error> {
        let Begun { staging, shared, findings, .. } = begun;
        let out = shared.path().to_path_buf();
        self.run(&out, &self.options(true), &Control::default(), |run| {
            parts::conclude(run, staging, &shared, findings).map(|_| ())
        })
    }
}

/// All files of a folder; the manifest without the times at which they were written, and who wrote them.
fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut files: BTreeMap<String, Vec<u8>> = std::fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap()))
        .collect();
    let manifest = files.get_mut("fastshard.manifest.json").unwrap();
    let mut document: serde_json::Value = serde_json::from_slice(manifest).unwrap();
    document.as_object_mut().unwrap().remove("provenance");
    for file in document["files"].as_array_mut().unwrap() {
        file.as_object_mut().unwrap().remove("mtime_ns");
    }
    *manifest = serde_json::to_vec(&document).unwrap();
    files
}

#[track_caller]
fn same(a: &Path, b: &Path) {
    let (a, b) = (content(a), content(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(b[name] == *bytes, "{name} differs");
    }
}

#[track_caller]
fn refused<T>(result: Result<T, Error>, code: Code) -> Error {
    let Err(error) = result else { panic!("went through") };
    assert_eq!(error.findings()[0].code, code, "{error}");
    error
}

fn left(case: &Case) -> Vec<String> {
    let names = std::fs::read_dir(case.dir.path()).unwrap();
    names.map(|e| e.unwrap().file_name().into_string().unwrap()).filter(|n| n.starts_with('.')).collect()
}

#[test]
fn parts_made_in_any_order_come_to_the_result_of_one_process() {
    for max_shard_size in [400_000, 1 << 40] {
        let case = Case::new(max_shard_size);
        case.alone("alone", false).unwrap();
        for parts in [1usize, 2, 3, 7] {
            let out = format!("out{parts}");
            let begun = case.begin(&out, parts, false).unwrap();
            let largest = begun.bytes.iter().max().unwrap() - begun.bytes.iter().min().unwrap();
            assert!(largest <= 1 << 20, "{:?}", begun.bytes);
            let mut order: Vec<u32> = (0..parts as u32).collect();
            order.sort_by_key(|part| mix(u64::from(*part) + max_shard_size));
            std::thread::scope(|scope| {
                for half in order.chunks(order.len().div_ceil(2)) {
                    let (case, out) = (&case, &out);
                    scope.spawn(move || {
                        for &part in half {
                            assert_eq!(case.part(out, part, &Control::default()).unwrap(), PartOutcome::Now);
                            assert_eq!(
                                case.part(out, part, &Control::default()).unwrap(),
                                PartOutcome::Before
                            );
                        }
                    });
                }
            });
            assert!(!case.path(&out).exists());
            case.conclude(begun).unwrap();
            same(&case.path("alone"), &case.path(&out));
            let manifest = std::fs::read(case.path(&out).join("fastshard.manifest.json")).unwrap();
            let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
            assert_eq!(manifest["provenance"]["parts"].as_array().unwrap().len(), parts);
            assert_eq!(left(&case), Vec::<String>::new());
        }
    }
}

#[test]
fn what_is_missing_is_named_and_made_by_another_number_of_parts() {
    let case = Case::new(400_000);
    case.alone("alone", false).unwrap();
    for (parts, finished, again) in [(4usize, vec![0u32, 2], 3usize), (3, vec![], 2), (2, vec![1], 1)] {
        let out = format!("out{parts}");
        let begun = case.begin(&out, parts, false).unwrap();
        for &part in &finished {
            case.part(&out, part, &Control::default()).unwrap();
        }
        let error = refused(case.conclude(begun), codes::PART_MISSING);
        assert_eq!(error.findings().len(), parts - finished.len(), "{error}");
        assert!(!case.path(&out).exists());
        refused(case.begin(&out, parts, false), codes::LEFTOVER_RUN);
        let begun = case.begin(&out, again, true).unwrap();
        let whole: u64 = case.plan.outputs.iter().map(|o| o.nbytes()).sum();
        let rest = whole * (parts - finished.len()) as u64 / parts as u64;
        let divided: u64 = begun.bytes.iter().sum();
        assert!(divided.abs_diff(rest) < 1 << 20, "only what is missing is made: {divided} of {whole}");
        for part in 0..again as u32 {
            case.part(&out, part, &Control::default()).unwrap();
        }
        case.conclude(begun).unwrap();
        same(&case.path("alone"), &case.path(&out));
        assert_eq!(left(&case), Vec::<String>::new());
    }
}

/// Stops a run when it comes to a place.
fn stops_at(place: Step) -> Control {
    let at = At::new(move |control, step| {
        if step == place {
            control.cancel.store(true, Ordering::Relaxed);
        }
    });
    Control { at, ..Control::default() }
}

#[test]
fn a_stopped_part_is_continued_by_another_one_and_by_one_process() {
    let case = Case::new(400_000);
    case.alone("alone", false).unwrap();
    let begun = case.begin("counted", 2, false).unwrap();
    let tiles = [0, 1].map(|part| {
        let counted = Arc::new(AtomicU64::new(0));
        let counts = Arc::clone(&counted);
        let at = At::new(move |_, step| {
            counts.fetch_add(u64::from(matches!(step, Step::Tile(_))), Ordering::Relaxed);
        });
        case.part("counted", part, &Control { at, ..Control::default() }).unwrap();
        counted.load(Ordering::Relaxed)
    });
    case.conclude(begun).unwrap();
    // One of them is a large tensor, the other one all that is small.
    let (stopped, other) = if tiles[0] > tiles[1] { (0, 1) } else { (1, 0) };
    let tiles = tiles[stopped as usize];
    assert!(tiles > 50, "{tiles}");
    let all = u64::from(cases(12));
    for i in 0..all {
        let out = format!("out{i}");
        let begun = case.begin(&out, 2, false).unwrap();
        // From before the first tile to after the last one.
        let place = match i {
            0 => Step::Opened,
            _ if i + 1 == all => Step::TilesMade,
            _ => Step::Tile((i - 1) * (tiles - 1) / (all - 3).max(1)),
        };
        let outcome = case.part(&out, stopped, &stops_at(place));
        assert!(outcome.as_ref().is_err_and(|error| error.is_interrupt()), "{place}: {outcome:?}");
        case.part(&out, other, &Control::default()).unwrap();
        match i % 3 {
            0 => {
                assert_eq!(
                    case.part(&out, stopped, &Control::default()).unwrap(),
                    PartOutcome::Now,
                    "{place}"
                );
                case.conclude(begun).unwrap();
            }
            1 => {
                drop(begun);
                case.alone(&out, true).unwrap();
            }
            _ => {
                drop(begun);
                let begun = case.begin(&out, 2, true).unwrap();
                for part in 0..2 {
                    case.part(&out, part, &Control::default()).unwrap();
                }
                case.conclude(begun).unwrap();
            }
        }
        same(&case.path("alone"), &case.path(&out));
    }
    assert_eq!(left(&case), Vec::<String>::new());
}

#[test]
fn a_run_that_is_not_there_is_not_made() {
    let case = Case::new(400_000);
    refused(case.part("out", 0, &Control::default()), codes::NO_SUCH_PATH);
    assert_eq!(left(&case), Vec::<String>::new());
    let begun = case.begin("out", 2, false).unwrap();
    let enter = |nonce: &str| {
        Shared::enter(&case.path("out"), &case.plan.digest(), &write::document(&case.plan), Some(nonce))
    };
    let nonce = begun.shared.run.nonce.clone();
    assert_eq!(enter(&nonce).unwrap().run.nonce, nonce);
    refused(enter("0123"), codes::LEFTOVER_RUN);
    refused(case.part("out", 2, &Control::default()), codes::USAGE);
}

fn about(rank: u32, world: u32, timeout: Duration, clock: &Clock) -> About {
    About { rank, world, timeout, words: BTreeMap::new(), hosts: Vec::new(), clock: clock.clone() }
}

#[test]
fn a_rank_is_taken_over_from_a_process_that_is_silent() {
    let dir = temp();
    let out = dir.path().join("out");
    // Nobody else is there: whoever waits may move time.
    let clock = Clock::leaping();
    let begin = || Meeting::begin(&out, about(0, 1, PATIENCE, &clock), &|| true).unwrap();
    let folder = dir.path().join(".out.fastshard-ranks");
    let card = folder.join("rank-00000.json");
    let first = begin();
    until("the first card", || card.exists());
    let mut left: serde_json::Value = serde_json::from_slice(&std::fs::read(&card).unwrap()).unwrap();
    drop(first);
    assert!(!folder.exists());
    // Of this process, which lives; whichever of two random numbers is the smaller one.
    for digit in ["0", "f"] {
        left["nonce"] = json!(digit.repeat(32));
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(&card, serde_json::to_vec(&left).unwrap()).unwrap();
        std::fs::write(folder.join("rank-00007.json"), "{}").unwrap();
        let begun = clock.now();
        let again = begin();
        assert!(clock.elapsed(begun) >= Duration::from_millis(2500), "{digit}: it was watched");
        // It has looked at the cards again and again, and found nothing wrong.
        let time = Time::new(&out, |time| clock.advance(time));
        let beat = time.beat(0);
        until("signs of life", || time.beat(0) >= beat + 4 || again.stopped().is_some());
        assert!(again.stopped().is_none(), "{digit}");
        drop(again);
        assert!(!folder.exists(), "{digit}: cards of more ranks than there are now");
    }
}

/// Ranks that have met, each by its clock.
fn met(out: &Path, timeout: Duration, clocks: [&Clock; 2]) -> [Meeting; 2] {
    let begin = |rank: u32| {
        let (out, about) = (out.to_path_buf(), about(rank, 2, timeout, clocks[rank as usize]));
        std::thread::spawn(move || Meeting::begin(&out, about, &|| true).unwrap())
    };
    [begin(0), begin(1)].map(|thread| thread.join().unwrap())
}

#[test]
fn a_rank_that_is_busy_learns_why_the_others_stopped_though_they_are_gone() {
    let dir = temp();
    let (clock, folder) = (Clock::manual(), dir.path().join(".out.fastshard-ranks"));
    let [zero, one] = met(&dir.path().join("out"), Duration::from_secs(20), [&clock, &clock]);
    zero.stop(&[fastshard::error::Finding::new(codes::UNSUPPORTED, "not read here")]);
    until("rank 1 has read that", || one.stopped().is_some());
    // It gives others a few seconds, and takes the folder away: this one's next sign of life cannot be written.
    let begun = clock.now();
    let gone = std::thread::spawn(|| drop(zero));
    while !gone.is_finished() {
        clock.advance(Duration::from_millis(100));
        std::thread::sleep(Duration::from_millis(2));
    }
    gone.join().unwrap();
    assert!(clock.elapsed(begun) >= Duration::from_secs(3), "{:?}", clock.elapsed(begun));
    assert!(!folder.exists());
    clock.advance(Duration::from_millis(1500));
    until("rank 1 finds that nobody is there", || {
        format!("{one:?}").contains("the other ranks have ended, before this one had read how")
    });
    refused(one.watch(&|_| false), codes::UNSUPPORTED);
}

#[test]
fn a_rank_whose_part_is_made_says_why_another_stopped_and_does_not_blame_the_user() {
    let case = Case::new(400_000);
    let clock = Clock::default();
    let [zero, one] = met(&case.path("out"), HANG, [&clock, &clock]);
    let (sender, is_made) = std::sync::mpsc::channel();
    let at = At::new(move |control, step| {
        if step == Step::PartMade {
            sender.send(()).unwrap();
            until("the watch sees that rank 1 has stopped", || control.cancel.load(Ordering::Relaxed));
        }
    });
    let control = Control { at, ..Control::default() };
    std::thread::scope(|scope| {
        let (case, one) = (&case, &one);
        scope.spawn(move || {
            let seen: Vec<Seen> = case
                .plan
                .sources
                .iter()
                .map(|source| Seen {
                    name: source.path.clone(),
                    size: source.size,
                    mtime_ns: source.mtime_ns,
                })
                .collect();
            one.agree(&case.plan.digest(), &seen, &|| true).unwrap();
            is_made.recv().unwrap();
            one.stop(&[fastshard::error::Finding::new(codes::SOURCE_CHANGED, "its status has changed")]);
        });
        let by = json!({"by": "a test"});
        let together =
            case.run(&case.path("out"), &case.options(false), &control, |run| write_together(run, &zero, by));
        refused(together, codes::SOURCE_CHANGED);
    });
    assert!(!case.path("out").exists());
    let gone = std::thread::spawn(|| drop(zero));
    drop(one);
    gone.join().unwrap();
}

#[test]
fn a_rank_that_is_stopped_is_silent_once_it_was_watched_for_the_timeout() {
    let dir = temp();
    // As if the process of rank 1 were stopped: for it no time passes.
    let (clock, stopped) = (Clock::manual(), Clock::manual());
    let time = Time::new(&dir.path().join("out"), |time| clock.advance(time));
    let [zero, one] = met(&dir.path().join("out"), Duration::from_secs(20), [&clock, &stopped]);
    // What it said last may be read after the first step.
    (0..39).for_each(|_| time.step(&[0]));
    zero.watch(&|_| false).unwrap();
    (0..2).for_each(|_| time.step(&[0]));
    let error = refused(zero.watch(&|_| false), codes::PART_MISSING);
    assert!(error.to_string().contains("no sign of life for 20 s"), "{error}");
    assert_eq!(error.findings()[0].rank.as_deref(), Some("rank 1"));
    drop(one);
}

#[test]
fn ranks_that_were_all_stopped_for_hours_take_nobody_for_silent() {
    let dir = temp();
    let clock = Clock::manual();
    let time = Time::new(&dir.path().join("out"), |time| clock.advance(time));
    let ranks = met(&dir.path().join("out"), Duration::from_secs(4), [&clock, &clock]);
    for _ in 0..20 {
        clock.advance(Duration::from_secs(3600));
        // Before the other one had the time to show that it lives, as well as afterwards.
        ranks.iter().for_each(|rank| rank.watch(&|_| false).unwrap());
        time.jump(Duration::from_secs(3600), &[0, 1]);
        ranks.iter().for_each(|rank| rank.watch(&|_| false).unwrap());
    }
    let [zero, one] = ranks;
    drop(one);
    drop(zero);
}

const CHILD: &str = "shared::child_meets";

/// Not a test: a rank that watches the others, and says when it has met them and why it ends.
#[test]
#[ignore = "run by time_moves_for_all_processes_of_a_run_at_once"]
fn child_meets() {
    let Some(out) = std::env::var_os("FASTSHARD_TEST_OUT").map(PathBuf::from) else { return };
    let rank = std::env::var("FASTSHARD_TEST_RANK").unwrap().parse().unwrap();
    let about = about(rank, 2, Duration::from_secs(20), &Clock::default());
    let meeting = Meeting::begin(&out, about, &|| true).unwrap();
    eprintln!("met");
    let error = loop {
        match meeting.watch(&|_| false) {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    eprintln!("{error}");
}

#[test]
fn time_moves_for_all_processes_of_a_run_at_once() {
    let dir = temp();
    let out = dir.path().join("out");
    let clock = FileClock::new(&dir.path().join("clock"));
    let [mut zero, mut one] = [0, 1].map(|rank: u32| {
        let mut command = child_of_its_own(CHILD);
        command.env("FASTSHARD_TEST_OUT", &out).env("FASTSHARD_TEST_RANK", rank.to_string());
        command.env("FASTSHARD_CLOCK", dir.path().join("clock")).stderr(Stdio::piped()).stdout(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut stderr = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        (child, move || {
            line.clear();
            stderr.read_line(&mut line).unwrap();
            line.clone()
        })
    });
    assert_eq!((zero.1)() + &(one.1)(), "met\nmet\n");
    let time = Time::new(&out, |time| clock.advance(time));
    // Three times as long as anybody may be silent: both live.
    (0..120).for_each(|_| time.step(&[0, 1]));
    let kill = |child: &Child, signal| {
        rustix::process::kill_process(Pid::from_child(child), signal).unwrap();
    };
    kill(&one.0, Signal::STOP);
    (0..39).for_each(|_| time.step(&[0]));
    assert!(zero.0.try_wait().unwrap().is_none());
    // The last second of the timeout: after it no sign of life comes, as the run has ended.
    clock.advance(Duration::from_secs(1));
    assert!((zero.1)().contains("rank 1 has shown no sign of life for 20 s"));
    // It gives the other one time to read that.
    until("the end of rank 0", || {
        clock.advance(Duration::from_millis(100));
        zero.0.try_wait().unwrap().is_some()
    });
    kill(&one.0, Signal::KILL);
    one.0.wait().unwrap();
}
