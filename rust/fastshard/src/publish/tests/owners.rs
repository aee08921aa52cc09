//! Several processes, leftovers of dead ones, and conflicts over one destination.

use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Barrier;

use super::super::{disk, preflight, Needs};
use super::*;

const PLAIN: Options = Options { fsync: false, ..Options::DEFAULT };
const RESUME: Options = Options { resume: true, ..PLAIN };
const OVERWRITE: Options = Options { overwrite: true, ..PLAIN };

#[test]
fn leftover_and_locked() {
    let s = Setting::new();
    let first = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    for options in [PLAIN, RESUME] {
        assert_eq!(refusal(Staging::begin(&s.out(), RUN, PLAN, &options)), [codes::LOCKED]);
    }
    first.journal().append(b"done").unwrap();
    let folder = first.folder().to_path_buf();
    drop(first);
    let error = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap_err();
    assert_eq!(error.findings()[0].code, codes::LEFTOVER_RUN);
    assert_eq!(error.findings()[0].file, Some(folder.display().to_string()));
    assert_eq!(error.findings()[0].run, ["--resume"]);
    assert_eq!(refusal(Staging::begin(&s.out(), RUN, b"another", &RESUME)), [codes::LEFTOVER_RUN]);
    let again = Staging::begin(&s.out(), RUN, PLAN, &RESUME).unwrap();
    assert!(again.resumed() && !again.sealed());
    assert_eq!(noted(&again), ["done"]);
    again.discard().unwrap();
    assert_eq!(s.folders(), [] as [PathBuf; 0]);
    let fresh = Staging::begin(&s.out(), RUN, PLAN, &RESUME).unwrap();
    assert!(!fresh.resumed() && noted(&fresh).is_empty());
}

#[test]
fn runs_of_other_plans_are_named_and_left_alone() {
    let s = Setting::new();
    let of = |digit: &str| digit.repeat(16);
    let interrupted = |run: &str, plan: &[u8]| {
        let staging = Staging::begin(&s.out(), run, plan, &PLAIN).unwrap();
        staging.journal().append(b"done").unwrap();
        staging.folder().to_path_buf()
    };
    let first = interrupted(&of("1"), b"{\"plan\": \"1\"}");
    let second = interrupted(&of("2"), b"{\"version\": 2}");
    let damaged = interrupted(&of("3"), b"no plan");
    let sealed = interrupted(&of("4"), b"{\"version\": 2}");
    std::fs::write(sealed.join("sealed"), b"").unwrap();
    // A live one is somebody's work, another destination's is another's.
    let live = Staging::begin(&s.out(), &of("5"), PLAN, &PLAIN).unwrap();
    drop(Staging::begin(&s.out().with_file_name("other"), &of("6"), PLAN, &PLAIN).unwrap());
    let name = first.file_name().unwrap().to_string_lossy().replace(&of("1"), &of("7"));
    std::fs::write(first.with_file_name(name), b"a file").unwrap();
    for options in [PLAIN, RESUME] {
        let staging = Staging::begin(&s.out(), RUN, PLAN, &options).unwrap();
        let found = staging.left_beside(2);
        let files: Vec<_> = found.iter().map(|f| PathBuf::from(f.file.as_ref().unwrap())).collect();
        assert_eq!(files, [&first, &second, &damaged, &sealed].map(PathBuf::clone));
        assert!(found
            .iter()
            .all(|f| f.code == codes::LEFTOVER_RUN && f.severity == crate::error::Severity::Warning));
        assert!(found[0].message.contains("made by version 1 of the plan; this is version 2"));
        assert!(found[1..].iter().all(|f| !f.message.contains("version")));
        assert!(found[..3].iter().all(|f| f.message.contains("it takes up space")));
        assert!(found[3].message.contains("it is sealed: look before you remove it"));
        staging.discard().unwrap();
    }
    assert!(first.join("plan").exists() && first.join("journal").exists() && sealed.join("sealed").exists());
    drop(live);
}

#[test]
fn a_live_run_is_not_called_interrupted() {
    let s = Setting::new();
    let live = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    live.journal().append(b"done").unwrap();
    // Another plan's result has come meanwhile.
    put(&s.out(), &old());
    let message = || {
        let error = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::OUT_EXISTS);
        error.findings()[0].help.clone().unwrap()
    };
    assert!(message().contains("another process is writing this in"), "{}", message());
    drop(live);
    assert!(message().contains("an interrupted run of this is kept in"), "{}", message());
}

#[test]
fn concurrent_begins_of_one_run() {
    for options in [PLAIN, RESUME] {
        for _ in 0..10 {
            let s = Setting::new();
            let barrier = Barrier::new(4);
            let results: Vec<_> = std::thread::scope(|scope| {
                let begin = || {
                    barrier.wait();
                    Staging::begin(&s.out(), RUN, PLAN, &options)
                };
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(begin)).collect();
                threads.into_iter().map(|t| t.join().unwrap()).collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(|r| r.is_ok());
            assert_eq!(won.len(), 1, "{lost:?}");
            for result in lost {
                assert_eq!(refusal(result), [codes::LOCKED]);
            }
        }
    }
}

/// The folder comes and goes; at no time have two owners got hold of it.
#[test]
fn one_owner_at_a_time() {
    let s = Setting::in_memory();
    let owners = AtomicUsize::new(0);
    let work = || {
        let mut begun = 0;
        while begun < 50 {
            match Staging::begin(&s.out(), RUN, PLAN, &RESUME) {
                Ok(staging) => {
                    assert_eq!(owners.fetch_add(1, Ordering::SeqCst), 0);
                    staging.write("file", b"content").unwrap();
                    assert_eq!(owners.fetch_sub(1, Ordering::SeqCst), 1);
                    staging.discard().unwrap();
                    begun += 1;
                }
                Err(error) => assert_eq!(error.findings()[0].code, codes::LOCKED, "{error}"),
            }
        }
    };
    std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(work))));
    assert_eq!(s.folders(), [] as [PathBuf; 0]);
}

#[test]
fn new_names_replace_nothing() {
    let s = Setting::new();
    let root = disk::Dir::open(&s.root).unwrap();
    for lacking in [&[][..], &["noreplace"]] {
        fault::lack(lacking);
        for taken in ["file", "directory", "link"] {
            let (from, to) = (s.root.join("from"), s.root.join(taken));
            match taken {
                "file" => fs::write(&to, "").unwrap(),
                "directory" => fs::create_dir(&to).unwrap(),
                _ => symlink("nowhere", &to).unwrap(),
            }
            for directory in [false, true] {
                if directory {
                    fs::create_dir(&from).unwrap()
                } else {
                    fs::write(&from, "new").unwrap()
                };
                let error = root.rename_new("from".as_ref(), &root, taken.as_ref()).unwrap_err();
                assert_eq!(error.kind(), std::io::ErrorKind::AlreadyExists, "{taken}");
                if directory {
                    fs::remove_dir(&from).unwrap()
                } else {
                    fs::remove_file(&from).unwrap()
                };
            }
            if taken == "directory" {
                fs::remove_dir(&to).unwrap()
            } else {
                fs::remove_file(&to).unwrap()
            };
        }
        fault::lack(&[]);
    }
}

#[test]
fn concurrent_publishes_of_two_runs() {
    let other = RUN.replace("0123", "4567");
    for start in [None, Some(Tree::new())] {
        for _ in 0..20 {
            let s = Setting::in_memory();
            start.iter().for_each(|tree| put(&s.out(), tree));
            let barrier = Barrier::new(2);
            let publish = |run: &str| {
                let staging = Staging::begin(&s.out(), run, run.as_bytes(), &PLAIN);
                barrier.wait();
                let staging = staging?;
                fill(&staging, &s.source())?;
                barrier.wait();
                staging.publish(&LAST, &|| true)
            };
            let results = std::thread::scope(|scope| {
                let threads = [RUN, &other].map(|run| scope.spawn(move || publish(run)));
                threads.map(|t| t.join().unwrap())
            });
            let (won, lost): (Vec<_>, Vec<_>) = results.into_iter().partition(|r| r.is_ok());
            assert_eq!(won.len(), 1, "{lost:?}");
            for result in lost {
                assert_eq!(refusal(result), [codes::PUBLISH_CONFLICT]);
            }
            assert_eq!(tree(&s.out()), Some(result()));
            assert_eq!(s.folders().len(), 1);
            assert_eq!(tree(&s.folders()[0].join("data")), Some(result()));
        }
    }
}

#[test]
fn two_runs_inside_one_directory() {
    let s = Setting::new();
    fs::create_dir(s.out()).unwrap();
    fault::lack(&["replacing"]);
    let first = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    let other = RUN.replace("0123", "4567");
    assert_eq!(refusal(Staging::begin(&s.out(), &other, PLAN, &PLAIN)), [codes::OUT_EXISTS]);
    // As if the second had begun at the same instant.
    fs::create_dir(s.out().join(".fastshard-4567456745674567")).unwrap();
    fill(&first, &s.source()).unwrap();
    assert_eq!(refusal(first.publish(&LAST, &|| true)), [codes::PUBLISH_CONFLICT]);
    fault::lack(&[]);
    assert_eq!(tree(&s.out()), Some(Tree::new()));
}

#[test]
fn an_interrupted_publishing_that_cannot_be_trusted() {
    let s = Setting::new();
    let staging = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    fill(&staging, &s.source()).unwrap();
    let (folder, seal) = (staging.folder().to_path_buf(), staging.folder().join("sealed"));
    put(&s.out(), &old());
    assert_eq!(refusal(staging.publish(&LAST, &|| true)), [codes::PUBLISH_CONFLICT]);
    fs::remove_dir_all(s.out()).unwrap();
    let good = fs::read_to_string(&seal).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    for bad in [good.replace(boot.trim(), "another boot"), good[..9].to_string()] {
        fs::write(&seal, bad).unwrap();
        assert_eq!(refusal(run(&s.out(), &s.source(), &RESUME)), [codes::LEFTOVER_RUN]);
    }
    fs::write(&seal, good).unwrap();
    fs::rename(folder.join("data"), s.root.join("taken")).unwrap();
    assert_eq!(refusal(run(&s.out(), &s.source(), &RESUME)), [codes::LEFTOVER_RUN]);
    put(&s.out(), &old());
    for options in [RESUME, Options { overwrite: true, ..RESUME }] {
        assert_eq!(refusal(run(&s.out(), &s.source(), &options)), [codes::LEFTOVER_RUN]);
    }
    assert_eq!(tree(&s.out()), Some(old()));
    fs::remove_dir_all(s.out()).unwrap();
    fs::rename(s.root.join("taken"), folder.join("data")).unwrap();
    let needs = Needs { bytes: 1000, files: 3, open_files: 3 };
    preflight(&s.out(), &[], RUN, &needs, &RESUME).unwrap();
    assert_eq!(run(&s.out(), &s.source(), &RESUME).unwrap(), []);
    assert_eq!(tree(&s.out()), Some(result()));
}

#[test]
fn a_conflict_keeps_the_result() {
    for lacking in [&[][..], &["noreplace"], &["replacing"]] {
        let s = Setting::new();
        if lacking == ["replacing"] {
            fs::create_dir(s.out()).unwrap();
        }
        fault::lack(lacking);
        let staging = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
        fill(&staging, &s.source()).unwrap();
        put(&s.out(), &old());
        assert_eq!(refusal(staging.publish(&LAST, &|| true)), [codes::PUBLISH_CONFLICT]);
        assert_eq!(tree(&s.out()), Some(old()));
        let resumed = Staging::begin(&s.out(), RUN, PLAN, &RESUME).unwrap();
        assert!(resumed.sealed());
        assert_eq!(refusal(resumed.write("x", b"")), [codes::USAGE]);
        assert_eq!(refusal(resumed.discard()), [codes::USAGE]);
        assert_eq!(refusal(run(&s.out(), &s.source(), &RESUME)), [codes::PUBLISH_CONFLICT]);
        for name in old().keys() {
            fs::remove_file(s.out().join(name)).unwrap();
        }
        assert_eq!(run(&s.out(), &s.source(), &RESUME).unwrap(), []);
        fault::lack(&[]);
        assert_eq!(tree(&s.out()), Some(result()));
        assert_eq!(s.folders(), [] as [PathBuf; 0]);
    }
}

#[test]
fn overwrite_replaces_only_what_it_saw() {
    let s = Setting::new();
    put(&s.out(), &old());
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    fill(&staging, &s.source()).unwrap();
    fs::rename(s.out(), s.root.join("moved")).unwrap();
    put(&s.out(), &Tree::from([("other".to_string(), vec![1])]));
    assert_eq!(refusal(staging.publish(&LAST, &|| true)), [codes::PUBLISH_CONFLICT]);
    assert_eq!(tree(&s.out()).unwrap().len(), 1);
}
