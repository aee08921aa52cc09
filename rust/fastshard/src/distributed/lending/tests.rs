//! Ranks of one process that lend one another what they have.

use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::borrow::ARRIVAL;
use super::*;
use crate::distributed::meeting::About;
use crate::storage::SourceFile;

/// Two ranks, each with one file; what each reads of the other.
struct Two {
    ranks: Vec<(Arc<Meeting>, Option<Lending>)>,
    folder: tempfile::TempDir,
    /// The threads that have begun the ranks.
    by: Vec<std::thread::ThreadId>,
}

impl Drop for Two {
    fn drop(&mut self) {
        // Rank 0 gives the others time to read how it ended.
        while self.ranks.pop().is_some() {}
    }
}

fn content(rank: u32, bytes: usize) -> Vec<u8> {
    (0..bytes as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> (8 + rank)) as u8).collect()
}

/// Time after which something has got stuck.
const HANG: Duration = Duration::from_secs(240);

fn about(rank: u32, clock: Clock) -> About {
    let (timeout, words, hosts) = (Duration::from_secs(20), BTreeMap::new(), Vec::new());
    About { rank, world: 2, timeout, words, hosts, clock }
}

/// Waits until something is so.
#[track_caller]
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < HANG, "stuck before {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A rank with its file of `bytes` bytes, met and lending.
fn begun(base: &Path, rank: u32, bytes: usize, clock: Clock) -> (Arc<Meeting>, Result<Lending>) {
    let (own, stubs) = (base.join(format!("own-{rank}")), base.join(format!("stubs-{rank}")));
    std::fs::create_dir_all(own.join("deep")).unwrap();
    std::fs::create_dir_all(&stubs).unwrap();
    std::fs::write(own.join("deep/file"), content(rank, bytes)).unwrap();
    let meeting = Arc::new(Meeting::begin(&base.join("out"), about(rank, clock), &|| true).unwrap());
    let roots = vec![Root { folder: own, file: None, called: PathBuf::new() }];
    let by = std::thread::current().id();
    let lending = Lending::begin(&meeting, roots, &[(0, "deep/file".into())], &stubs, by, &|| true);
    (meeting, lending)
}

impl Two {
    fn new(bytes: usize) -> Two {
        Two::by(bytes, &Clock::default())
    }

    /// By this clock.
    fn by(bytes: usize, clock: &Clock) -> Two {
        let folder = tempfile::tempdir().unwrap();
        let base = folder.path().to_path_buf();
        let threads: Vec<_> = (0..2)
            .map(|rank| {
                let (base, clock) = (base.clone(), clock.clone());
                std::thread::spawn(move || begun(&base, rank, bytes, clock))
            })
            .collect();
        let by = threads.iter().map(|thread| thread.thread().id()).collect();
        let ranks = threads.into_iter().map(|thread| {
            let (meeting, lending) = thread.join().unwrap();
            (meeting, Some(lending.unwrap()))
        });
        let ranks = ranks.collect();
        Two { ranks, folder, by }
    }

    /// The file of rank 1, as rank 0 sees it.
    fn stub(&self) -> PathBuf {
        self.ranks[0].1.as_ref().unwrap().sources()[1].here.join("deep/file")
    }

    fn own(&self) -> PathBuf {
        self.folder.path().join("own-1/deep/file")
    }

    /// How often a rank has shown that it lives.
    fn beat(&self, rank: u32) -> u64 {
        let card = self.ranks[0].0.folder().path().join(format!("rank-{rank:05}.json"));
        let card = std::fs::read(card).ok().and_then(|card| serde_json::from_slice(&card).ok());
        card.and_then(|card: serde_json::Value| card["beat"].as_u64()).unwrap_or(0)
    }

    /// Lets the time between two signs of life pass; returns once both ranks have shown one.
    fn step(&self, clock: &Clock) {
        let before = [0, 1].map(|rank| self.beat(rank));
        clock.advance(Duration::from_millis(500));
        until("signs of life", || [0, 1].iter().zip(before).all(|(rank, before)| self.beat(*rank) > before));
    }

    /// How often rank 0 has looked for what it waits for.
    fn looks(&self) -> u64 {
        self.ranks[0].1.as_ref().unwrap().shared.looks.load(Ordering::Relaxed)
    }

    /// The bytes that rank 1 has lent.
    fn spool(&self) -> PathBuf {
        let nonce = self.ranks[1].0.nonce();
        self.ranks[1].0.folder().path().join(bytes_of(&nonce))
    }
}

#[test]
fn any_range_is_what_the_owner_has() {
    let bytes = 3 << 20;
    let two = Two::new(bytes);
    let whole = content(1, bytes);
    let file = SourceFile::open(&two.stub()).unwrap();
    assert!(file.is_lent() && file.size() == bytes as u64);
    let mtime = std::fs::metadata(two.own()).unwrap().modified().unwrap();
    assert_eq!(std::fs::metadata(two.stub()).unwrap().modified().unwrap(), mtime);
    // Heads and tails, what was asked for ahead, what nobody foresaw, over the ends of pieces.
    file.will_read(&[(1 << 20, (1 << 20) + 700_000)]).unwrap();
    let ranges = prop::collection::vec((0..bytes, 0usize..400_000), 1..6);
    TestRunner::deterministic()
        .run(&ranges, |ranges| {
            for (lo, len) in ranges {
                let hi = (lo + len).min(bytes);
                let mut read = vec![1; hi - lo];
                file.read_at(lo as u64, &mut read).unwrap();
                prop_assert_eq!(&read[..], &whole[lo..hi]);
            }
            Ok(())
        })
        .unwrap();
    let served = two.ranks[0].1.as_ref().unwrap().count_served();
    // No byte twice.
    assert!(served[&1] <= bytes as u64, "{served:?}");
    let beyond = file.read_at(bytes as u64 - 1, &mut [0; 2]).unwrap_err();
    assert_eq!(beyond.findings()[0].code, codes::SOURCE_CHANGED);
}

#[test]
fn files_alone_can_be_filled() {
    let bytes = 200 << 10;
    let two = Two::new(bytes);
    crate::storage::remote::bring(&two.stub(), 0, 100).unwrap();
    let stub = std::fs::read(two.stub()).unwrap();
    assert_eq!((stub.len(), &stub[..100]), (bytes, &content(1, bytes)[..100]));
    assert!(stub[100..].iter().all(|byte| *byte == 0));
    crate::storage::remote::bring(&two.stub(), 5000, 6000).unwrap();
    crate::storage::remote::let_go(&two.stub(), 5100, 5900).unwrap();
    let stub = std::fs::read(two.stub()).unwrap();
    assert_eq!((stub.len(), &stub[5000..5100]), (bytes, &content(1, bytes)[5000..5100]));
    assert_eq!(stub[5900..6000], content(1, bytes)[5900..6000]);
    assert!(stub[5100..5900].iter().chain(&stub[6000..]).all(|byte| *byte == 0));
    crate::storage::remote::bring(&two.stub(), 0, u64::MAX).unwrap();
    assert_eq!(std::fs::read(two.stub()).unwrap(), content(1, bytes));
    let mtime = std::fs::metadata(two.own()).unwrap().modified().unwrap();
    assert_eq!(std::fs::metadata(two.stub()).unwrap().modified().unwrap(), mtime);
}

#[test]
fn what_changes_on_the_way_is_never_taken() {
    let bytes = 1 << 20;
    let clock = Clock::manual();
    let two = Two::by(bytes, &clock);
    let file = SourceFile::open(&two.stub()).unwrap();
    file.will_read(&[(0, bytes as u64)]).unwrap();
    until("all is lent", || two.ranks[0].1.as_ref().unwrap().count_served()[&1] >= bytes as u64);
    let mut spooled = std::fs::read(two.spool()).unwrap();
    spooled.iter_mut().for_each(|byte| *byte ^= 1);
    std::fs::write(two.spool(), &spooled).unwrap();
    let begun = clock.now();
    let reading = std::thread::spawn(move || file.read_at(300_000, &mut [0; 10]).unwrap_err());
    while !reading.is_finished() {
        two.step(&clock);
    }
    let error = reading.join().unwrap();
    assert!(clock.elapsed(begun) >= ARRIVAL, "it may arrive late: {:?}", clock.elapsed(begun));
    assert_eq!(error.findings()[0].code, codes::WRITTEN_DIFFERS);
    assert_eq!(error.findings()[0].rank.as_deref(), Some("rank 1"));
}

#[test]
fn what_arrives_late_is_taken() {
    let bytes = 1 << 20;
    let clock = Clock::manual();
    let two = Two::by(bytes, &clock);
    let file = SourceFile::open(&two.stub()).unwrap();
    file.will_read(&[(0, bytes as u64)]).unwrap();
    until("all is lent", || two.ranks[0].1.as_ref().unwrap().count_served()[&1] >= bytes as u64);
    let right = std::fs::read(two.spool()).unwrap();
    let wrong: Vec<u8> = right.iter().map(|byte| byte ^ 1).collect();
    std::fs::write(two.spool(), wrong).unwrap();
    let reading = std::thread::spawn(move || {
        let mut read = [0; 10];
        file.read_at(300_000, &mut read).map(|_| read)
    });
    let looks = two.looks();
    until("it looks again", || two.looks() > looks + 2 || reading.is_finished());
    // Not even hours at once are too late: it was looked at for an instant.
    clock.advance(ARRIVAL * 360);
    let looks = two.looks();
    until("it looks again", || two.looks() > looks + 2 || reading.is_finished());
    assert!(!reading.is_finished());
    std::fs::write(two.spool(), right).unwrap();
    assert_eq!(reading.join().unwrap().unwrap()[..], content(1, bytes)[300_000..300_010]);
}

#[test]
fn an_owner_whose_file_changes_stops_all() {
    let bytes = 1 << 20;
    let two = Two::new(bytes);
    let file = SourceFile::open(&two.stub()).unwrap();
    std::fs::OpenOptions::new().append(true).open(two.own()).unwrap().write_all(b"more").unwrap();
    let error = file.read_at(300_000, &mut [0; 10]).unwrap_err();
    let finding = &error.findings()[0];
    assert_eq!((finding.code, finding.rank.as_deref()), (codes::SOURCE_CHANGED, Some("rank 1")));
    assert!(finding.file.as_deref().unwrap().ends_with("own-1/deep/file"));
}

#[test]
fn an_owner_lends_nothing_of_a_file_whose_status_was_changed() {
    // A link is no harm by itself, but it is all that is seen of content whose time was set back.
    let bytes = 1 << 20;
    let two = Two::new(bytes);
    let file = SourceFile::open(&two.stub()).unwrap();
    std::fs::hard_link(two.own(), two.folder.path().join("link")).unwrap();
    let error = file.read_at(300_000, &mut [0; 10]).unwrap_err();
    let finding = &error.findings()[0];
    assert_eq!((finding.code, finding.severity), (codes::SOURCE_CHANGED, crate::error::Severity::Error));
    assert_eq!(finding.rank.as_deref(), Some("rank 1"));
}

#[test]
fn nobody_waits_once_the_ranks_have_parted_or_the_user_stops() {
    let clock = Clock::manual();
    let mut two = Two::by(1 << 20, &clock);
    let file = SourceFile::open(&two.stub()).unwrap();
    let stub = two.stub();
    // Its owner is gone without a word.
    two.ranks[1].1.take().unwrap();
    let (sender, heard) = mpsc::channel();
    let reading = std::thread::spawn(move || {
        sender.send(file.read_at(300_000, &mut [0; 10]).unwrap_err().findings()[0].code).unwrap();
        file
    });
    // Whoever waits looks again and again, and finds no reason to give up.
    let waits = |why: &str| {
        let looks = two.looks();
        until(why, || two.looks() > looks + 2 || reading.is_finished());
        assert!(heard.try_recv().is_err(), "{why}");
    };
    waits("it waits for its owner");
    // For longer than anybody may be silent: its owner lives.
    (0..50).for_each(|_| two.step(&clock));
    waits("its owner lives");
    crate::storage::remote::interrupt(two.by[1]);
    waits("another run was stopped");
    crate::storage::remote::interrupt(two.by[0]);
    assert_eq!(heard.recv_timeout(HANG).unwrap(), codes::INTERRUPTED);
    let file = reading.join().unwrap();
    two.ranks[0].1.take().unwrap();
    assert!(file.read_at(300_000, &mut [0; 10]).is_err());
    assert!(!crate::storage::remote::is_remote(&stub));
}

#[test]
fn nothing_is_left_in_the_folder_where_ranks_met() {
    let mut two = Two::new(100 << 10);
    let folder = two.ranks[0].0.folder().path().to_path_buf();
    let count_left = || {
        let names = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name());
        names.filter(|name| name.to_string_lossy().starts_with(PREFIX)).count()
    };
    assert_eq!(count_left(), 4);
    two.ranks.iter_mut().for_each(|rank| drop(rank.1.take()));
    assert_eq!(count_left(), 0);
}

#[test]
fn names_that_leave_their_root_are_refused() {
    for path in ["../file", "/etc/passwd", "a/../../b", "", ".", "a/./../b"] {
        let listed = Listed { root: 0, path: path.into(), size: 1, mtime_ns: 0, ctime_ns: 0 };
        let json = serde_json::to_vec(&listed).unwrap();
        assert!(Other::default().name(&json).is_none(), "{path:?}");
    }
    let listed = Listed { root: 0, path: "a/b.pt".into(), size: 1, mtime_ns: 0, ctime_ns: 0 };
    assert!(Other::default().name(&serde_json::to_vec(&listed).unwrap()).is_some());
}

#[test]
fn a_root_is_called_as_its_folder_is() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let folder = tempfile::tempdir().unwrap();
    let called = |name: &OsStr, given: &Path| {
        std::fs::create_dir_all(folder.path().join("run").join(name)).unwrap();
        let mut root = Root { folder: given.into(), file: None, called: PathBuf::new() };
        root.name();
        root
    };
    let link = folder.path().join("latest");
    std::os::unix::fs::symlink(folder.path().join("run/4000"), &link).unwrap();
    assert_eq!(called(OsStr::new("4000"), &link).called, Path::new("run/4000"));
    let odd = OsStr::from_bytes(b"4\xff");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(folder.path().join("run").join(odd), &link).unwrap();
    let root = called(odd, &link);
    assert_eq!(root.called, PathBuf::new());
    assert!(serde_json::to_vec(&root).is_ok());
    let root = |called: &str| Root { folder: "/x".into(), file: None, called: called.into() };
    let base = Path::new("/stands");
    assert_eq!(root("run/4000").below(base, 3), Some(base.join("3/run/4000")));
    for bad in ["../4000", "/etc", "a/b/c", "a/.."] {
        assert_eq!(root(bad).below(base, 3), None, "{bad}");
    }
}

#[test]
fn what_a_rank_says_of_its_files_is_not_believed_beyond_them() {
    let listed = Listed { root: 0, path: "a".into(), size: 100, mtime_ns: 0, ctime_ns: 0 };
    let named = |roots: Vec<Root>| {
        let mut other = Other::default();
        other.name(&serde_json::to_vec(&listed).unwrap()).unwrap();
        other.roots = roots;
        let learnt = other.tell(b"node").unwrap();
        learnt.map(|()| other)
    };
    let root = |file: Option<&str>| Root {
        folder: "/x".into(),
        file: file.map(String::from),
        called: PathBuf::new(),
    };
    assert!(named(vec![]).is_none() && named(vec![root(Some("../b"))]).is_none());
    assert!(named(vec![root(Some("a"))]).is_some());
    let mut other = named(vec![root(None)]).unwrap();
    assert!(other.take([0, 90, 10, 0, 0]).is_some());
    for bad in [
        [1, 0, 1, 0, 0],
        [0, 91, 10, 0, 0],
        [0, u64::MAX, 2, 0, 0],
        [0, 0, 1 << 40, 0, 0],
        [0, 0, 1, 0, 1 << 32],
    ] {
        assert!(other.take(bad).is_none(), "{bad:?}");
    }
}
