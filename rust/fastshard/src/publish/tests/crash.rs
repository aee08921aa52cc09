//! Failure and death at every changing system call.

use std::process::Command;

use rustix::io::Errno;

use super::*;
use crate::manifest::MANIFEST_NAME;
use fault::Fault;

/// A destination, and what the filesystem under it lacks.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Fresh,
    FreshWithoutNoReplace,
    Empty,
    Overwrite,
    OverwriteWithoutExchange,
    OverwritePiecewise,
    Inside,
}

const KINDS: [Kind; 7] = [
    Kind::Fresh,
    Kind::FreshWithoutNoReplace,
    Kind::Empty,
    Kind::Overwrite,
    Kind::OverwriteWithoutExchange,
    Kind::OverwritePiecewise,
    Kind::Inside,
];

impl Kind {
    /// Prepares the destination.
    fn set_up(self, setting: &Setting) {
        match self {
            Kind::Fresh | Kind::FreshWithoutNoReplace => {}
            Kind::Empty | Kind::Inside => fs::create_dir(setting.out()).unwrap(),
            Kind::Overwrite | Kind::OverwriteWithoutExchange | Kind::OverwritePiecewise => {
                put(&setting.out(), &old());
            }
        }
    }

    /// The scripted run of this kind.
    fn run(self, setting: &Setting, resume: bool, fsync: bool) -> Result<Vec<Finding>> {
        self.lack();
        let overwrite =
            matches!(self, Kind::Overwrite | Kind::OverwriteWithoutExchange | Kind::OverwritePiecewise);
        let done =
            run(&setting.out(), &setting.source(), &Options { overwrite, resume, fsync, ..Options::DEFAULT });
        fault::lack(&[]);
        let steps = |f: &Finding| matches!(self, Kind::OverwritePiecewise) && f.code == codes::IN_STEPS;
        done.map(|warnings| warnings.into_iter().filter(|f| !steps(f)).collect())
    }

    /// Takes from the filesystem what this kind of it lacks.
    fn lack(self) {
        fault::lack(match self {
            Kind::FreshWithoutNoReplace => &["noreplace"],
            Kind::OverwriteWithoutExchange => &["noreplace", "exchange"],
            Kind::OverwritePiecewise => &["moving"],
            Kind::Inside => &["replacing"],
            _ => &[],
        });
    }

    /// Each result in the folder of a run that is over is called by what it is; no whole one is passed over.
    fn check_results(self, setting: &Setting, when: &str) {
        self.lack();
        let patience = std::time::Duration::from_secs(1).into();
        let leavings = gc::collect(&setting.out(), None, &patience, true, &|| true).unwrap();
        fault::lack(&[]);
        let results: Vec<_> = leavings.iter().flat_map(|leaving| &leaving.results).collect();
        for result in &results {
            let whole = match result.version {
                Version::Older => old(),
                Version::Newer => self::result(),
            };
            let is_whole = tree(&result.path) == Some(whole);
            assert_eq!(result.is_complete, is_whole, "{self:?}, {when}: {result:?}");
        }
        for folder in setting.folders().iter().filter(|folder| folder.join("sealed").exists()) {
            for path in ["data", "old"].map(|name| folder.join(name)) {
                let version = match tree(&path) {
                    Some(content) if content == old() => Version::Older,
                    Some(content) if content == result() => Version::Newer,
                    _ => continue,
                };
                let listed = results.iter().any(|r| r.path == path && r.version == version && r.is_complete);
                assert!(listed, "{self:?}, {when}: {path:?} is not listed: {results:?}");
            }
        }
    }

    /// What an onlooker may see at any time.
    fn check(self, setting: &Setting, when: &str) {
        let out = tree(&setting.out());
        let allowed = match self {
            Kind::Fresh | Kind::FreshWithoutNoReplace => out.is_none(),
            Kind::Empty => out == Some(Tree::new()),
            Kind::Overwrite => out == Some(old()),
            Kind::OverwriteWithoutExchange => {
                // Between the two renames; the old one may be the result of an earlier run.
                let kept = |name: &str| tree(&setting.folders()[0].join(name));
                let aside = || [Some(old()), Some(result())].contains(&kept("old"));
                out == Some(old()) || out.is_none() && aside() && kept("data") == Some(result())
            }
            Kind::OverwritePiecewise => {
                // Piece by piece: the new result is whole, in the folder or here, and no manifest lies beside a part.
                let out = out.as_ref().unwrap();
                let waits = setting.folders().first().and_then(|f| tree(&f.join("data"))).unwrap_or_default();
                let whole = result().iter().all(|(n, b)| out.get(n) == Some(b) || waits.get(n) == Some(b));
                let known = out.iter().all(|(n, b)| old().get(n) == Some(b) || result().get(n) == Some(b));
                let last = out.get(LAST[0]);
                let mixed = last == old().get(LAST[0]) || last.is_some() && out.len() < result().len() - 1;
                *out == old() || whole && known && !mixed && !out.contains_key(LAST[1])
            }
            Kind::Inside => {
                let out = out.as_ref().unwrap();
                out.iter().all(|(name, bytes)| result().get(name) == Some(bytes))
                    && !out.contains_key(LAST[1])
                    && (!out.contains_key(LAST[0]) || out.len() == result().len() - 1)
            }
        };
        let names = out.as_ref().map(|out| out.keys().collect::<Vec<_>>());
        assert!(allowed || out == Some(result()), "{self:?}, {when}: neither old nor new: {names:?}");
        assert_eq!(fs::read(setting.source()).unwrap(), painted(4, 300), "{self:?}, {when}: source");
    }

    /// A later run with `resume` finishes, whatever happened before.
    fn recover(self, setting: &Setting, when: &str) {
        let over = tree(&setting.out()) == Some(result()) && setting.folders().is_empty();
        match self.run(setting, true, true) {
            Ok(warnings) => {
                let steps =
                    |f: &Finding| matches!(self, Kind::OverwritePiecewise) && f.code == codes::IN_STEPS;
                assert!(warnings.iter().all(steps), "{self:?}, {when}: {warnings:?}");
            }
            // Nothing is left that tells of the run.
            Err(error) => {
                assert!(over, "{self:?}, {when}: cannot resume: {error}");
                assert_eq!(error.findings()[0].code, codes::OUT_EXISTS, "{self:?}, {when}");
            }
        }
        assert_eq!(tree(&setting.out()), Some(result()), "{self:?}, {when}: result after resume");
        assert_eq!(setting.folders(), [] as [PathBuf; 0], "{self:?}, {when}: leftovers");
    }

    /// The changing calls of an undisturbed run.
    fn calls(self) -> Vec<(&'static str, PathBuf)> {
        let setting = Setting::in_memory();
        self.set_up(&setting);
        fault::disarm();
        assert_eq!(self.run(&setting, false, true).unwrap(), []);
        let calls = fault::disarm();
        assert_eq!(tree(&setting.out()), Some(result()));
        assert_eq!(setting.folders(), [] as [PathBuf; 0]);
        calls
    }
}

#[test]
fn any_call_may_fail() {
    let mut cases = 0;
    for kind in KINDS {
        let calls = kind.calls();
        assert!(calls.len() > 50, "{kind:?}: only {} calls", calls.len());
        for (at, call) in calls.iter().enumerate() {
            for fault in [Errno::IO, Errno::ACCESS, Errno::NOSPC]
                .map(|errno| Fault::Once(errno.raw_os_error()))
                .into_iter()
                .chain([Fault::Gone])
            {
                let when = format!("{fault:?} at call {at}, {call:?}");
                let setting = Setting::in_memory();
                kind.set_up(&setting);
                fault::arm(at, fault);
                let done = kind.run(&setting, false, true);
                fault::disarm();
                kind.check(&setting, &when);
                kind.check_results(&setting, &when);
                match done {
                    Err(error) => {
                        for finding in error.findings() {
                            assert!(finding.file.is_some(), "{when}: no path in {finding}");
                        }
                        let published = tree(&setting.out()) == Some(result());
                        assert_eq!(error.is_after_publishing(), published, "{kind:?}, {when}: {error}");
                    }
                    Ok(warnings) => {
                        assert_eq!(tree(&setting.out()), Some(result()), "{kind:?}, {when}");
                        let left = setting.folders().is_empty();
                        assert_eq!(warnings.is_empty(), left, "{kind:?}, {when}: {warnings:?}");
                    }
                }
                kind.recover(&setting, &when);
                cases += 1;
            }
        }
    }
    eprintln!("{cases} failures, each recovered from");
}

/// Each sync costs a disk's answer: what a short run waits for is told in `publish.rs`.
#[test]
fn a_short_run_syncs_six_times() {
    let setting = Setting::in_memory();
    fault::disarm();
    let staging = Staging::begin(&setting.out(), RUN, PLAN, &Options::default()).unwrap();
    let file = staging.file("model.safetensors", 8, Space::Reserved).unwrap();
    file.write_all_at(0, b"12345678").unwrap();
    file.sync_with_times().unwrap();
    staging.note_synced("model.safetensors");
    staging.write(MANIFEST_NAME, b"{}").unwrap();
    staging.publish(&[MANIFEST_NAME], &|| true).unwrap();
    let synced = |(call, path): (&str, PathBuf)| {
        (call == "sync").then(|| path.strip_prefix(&setting.root).unwrap().display().to_string())
    };
    let syncs: Vec<String> = fault::disarm().into_iter().filter_map(synced).collect();
    let folder = format!(".out.fastshard-{}", &RUN[..16]);
    let data = |name: &str| format!("{folder}/data{name}");
    let manifest = format!("/{MANIFEST_NAME}");
    let want =
        [data("/model.safetensors"), data(&manifest), data(""), format!("{folder}/sealed.new"), folder];
    assert_eq!(syncs, [&want[..], &[String::new()]].concat());
}

/// The plan of a run that has recorded nothing is not on disk: a power failure may leave a part of it.
#[test]
fn a_torn_plan_of_a_run_that_recorded_nothing_is_written_anew() {
    for plan in [&b""[..], &PLAN[..3]] {
        let setting = Setting::in_memory();
        let resuming = Options { resume: true, ..Options::default() };
        let staging = Staging::begin(&setting.out(), RUN, PLAN, &resuming).unwrap();
        staging.file("model-1.safetensors", 8, Space::Reserved).unwrap();
        drop(staging);
        let path = setting.folders()[0].join("plan");
        fs::write(&path, plan).unwrap();
        assert!(Staging::begin(&setting.out(), RUN, PLAN, &resuming).unwrap().resumed());
        assert_eq!(fs::read(&path).unwrap(), PLAN);
        // Once it has, another plan is another run's.
        let staging = Staging::begin(&setting.out(), RUN, PLAN, &resuming).unwrap();
        staging.journal().append(b"model-1.safetensors").unwrap();
        drop(staging);
        fs::write(&path, plan).unwrap();
        let error = Staging::begin(&setting.out(), RUN, PLAN, &resuming).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::LEFTOVER_RUN);
    }
}

#[test]
fn the_plan_is_on_disk_before_anything_is_recorded() {
    let setting = Setting::in_memory();
    let staging = Staging::begin(&setting.out(), RUN, PLAN, &Options::default()).unwrap();
    fault::disarm();
    staging.journal().append(b"one").unwrap();
    staging.journal().append(b"two").unwrap();
    let calls = fault::disarm();
    let folder = setting.folders().remove(0);
    let want = [
        ("sync", folder.join("plan")),
        ("sync", folder.clone()),
        ("sync", setting.root.clone()),
        ("write", folder.join("journal")),
        ("write", folder.join("journal")),
    ];
    assert_eq!(calls, want);
}

/// The last thing that a run removes is its folder, which is empty then.
#[test]
fn a_clean_up_that_failed_is_finished_with_resume() {
    for kind in KINDS {
        let calls = kind.calls();
        let appears = |call: &str| call.starts_with("rename") || call == "exchange";
        let appeared = calls.iter().rposition(|(call, _)| appears(call)).unwrap();
        let removals = (appeared..calls.len()).filter(|at| calls[*at].0.starts_with("remove_"));
        for at in removals {
            for errno in [Errno::IO, Errno::ACCESS] {
                let when = format!("{kind:?}: {errno} at {:?}", calls[at]);
                let setting = Setting::in_memory();
                kind.set_up(&setting);
                fault::arm(at, Fault::Once(errno.raw_os_error()));
                let warnings = kind.run(&setting, false, true).unwrap();
                fault::disarm();
                let messages: Vec<&str> = warnings.iter().map(|f| f.message.as_str()).collect();
                assert!(
                    matches!(messages[..], [one] if one.contains("complete, but not cleaned up")),
                    "{when}: {messages:?}"
                );
                assert_eq!(setting.folders().len(), 1, "{when}");
                assert_eq!(kind.run(&setting, true, true).expect(&when), [], "{when}");
                assert_eq!(setting.folders(), [] as [PathBuf; 0], "{when}");
                assert_eq!(tree(&setting.out()), Some(result()), "{when}");
            }
        }
    }
}

/// A folder without anything in it says nothing by itself.
#[test]
fn an_empty_folder_beside_another_result_is_not_a_finished_run() {
    for (there, code) in
        [(old(), codes::OUT_EXISTS), (Tree::from([("mine".into(), vec![1])]), codes::OUT_EXISTS)]
    {
        let setting = Setting::in_memory();
        put(&setting.out(), &there);
        let folder = setting.root.join(format!(".out.fastshard-{}", &RUN[..16]));
        fs::create_dir(&folder).unwrap();
        fs::set_permissions(&folder, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
        let error = Kind::Fresh.run(&setting, true, true).unwrap_err();
        assert_eq!(error.findings()[0].code, code);
        let help = error.findings()[0].help.clone().unwrap();
        assert!(!help.contains("another process") && !help.contains("interrupted"), "{help}");
        assert_eq!(tree(&setting.out()), Some(there));
    }
}

/// Two deaths in one run: the second during the recovery from the first.
#[test]
fn recovery_may_fail_too() {
    for kind in KINDS {
        let calls = kind.calls().len();
        for first in (0..calls).rev().take(18).chain((0..calls).step_by(7)) {
            for second in 0..26 {
                let when = format!("death at call {first}, then at {second}");
                let setting = Setting::in_memory();
                kind.set_up(&setting);
                fault::arm(first, Fault::Gone);
                let _ = kind.run(&setting, false, true);
                fault::arm(second, Fault::Gone);
                let _ = kind.run(&setting, true, true);
                fault::disarm();
                kind.check(&setting, &when);
                kind.recover(&setting, &when);
            }
        }
    }
}

const CHILD: &str = "FASTSHARD_TEST_DIE";

/// Not a test by itself: the process that [`the_process_may_die`] lets die.
#[test]
fn dying_process() {
    let Ok(order) = std::env::var(CHILD) else { return };
    let no_core = rustix::process::Rlimit { current: Some(0), maximum: Some(0) };
    rustix::process::setrlimit(rustix::process::Resource::Core, no_core).unwrap();
    let fields: Vec<&str> = order.splitn(3, ' ').collect();
    let (kind, at) = (KINDS[fields[0].parse::<usize>().unwrap()], fields[1].parse().unwrap());
    let setting = Setting::at(Path::new(fields[2]));
    fault::arm(at, Fault::Abort);
    let _ = kind.run(&setting, false, true);
}

#[test]
fn the_process_may_die() {
    let mut deaths = 0;
    for (number, kind) in KINDS.into_iter().enumerate() {
        let calls = kind.calls();
        // Every call from the seal on, and a part of those before.
        let seal = calls.iter().position(|(_, path)| path.ends_with("sealed.new")).unwrap();
        for at in (0..seal).step_by(5).chain(seal..calls.len()) {
            let when = format!("died at call {at}, {:?}", calls[at]);
            let setting = Setting::in_memory();
            kind.set_up(&setting);
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "publish::tests::crash::dying_process", "--nocapture"])
                .env(CHILD, format!("{number} {at} {}", setting.root.display()))
                .output()
                .unwrap();
            assert!(!child.status.success(), "{kind:?}, {when}: it lived");
            deaths += 1;
            kind.check(&setting, &when);
            kind.check_results(&setting, &when);
            kind.recover(&setting, &when);
        }
    }
    eprintln!("{deaths} deaths, each recovered from");
}

#[test]
fn data_is_on_disk_before_it_appears() {
    for kind in KINDS {
        let calls = kind.calls();
        let out_name = |p: &PathBuf| p.ends_with("out");
        let data = |p: &PathBuf| p.components().any(|c| c.as_os_str() == "data");
        let at = |what: &dyn Fn(&(&str, PathBuf)) -> bool| calls.iter().position(what);
        let appears = |(call, path): &(&str, PathBuf)| match kind {
            Kind::Inside => *call == "rename_new",
            Kind::Overwrite => *call == "exchange",
            Kind::OverwritePiecewise => *call == "rename_new" && path.ends_with("out/model-1.safetensors"),
            _ => ["rename_new", "rename_over"].contains(call) && out_name(path),
        };
        let appears = at(&appears).unwrap();
        let seal = at(&|(call, p)| *call == "rename_over" && p.ends_with("sealed")).unwrap();
        for name in result().keys().map(String::as_str).chain(["data"]) {
            let before = &calls[..seal];
            let synced = before.iter().rposition(|(c, p)| *c == "sync" && p.ends_with(name)).unwrap();
            let written = before.iter().rposition(|(c, p)| *c != "sync" && data(p) && p.ends_with(name));
            assert!(written.unwrap() < synced && seal < appears, "{kind:?}: {name}");
        }
        let removes = calls[appears..].iter().position(|(call, _)| call.starts_with("remove_")).unwrap();
        let parent = calls[appears..][..removes].iter().any(|(call, _)| *call == "sync");
        assert!(parent, "{kind:?}: the directory is synced before anything is removed");
    }
}

#[test]
fn without_fsync_nothing_is_synced() {
    let setting = Setting::in_memory();
    fault::disarm();
    Kind::Fresh.run(&setting, false, false).unwrap();
    assert!(fault::disarm().iter().all(|(call, _)| *call != "sync"));
    assert_eq!(tree(&setting.out()), Some(result()));
}
