//! What `overwrite` may replace, and what it must not lose.

use std::os::unix::fs::{symlink, MetadataExt, PermissionsExt};
use std::process::Command;

use super::super::{preflight, Needs};
use super::*;

const OVERWRITE: Options = Options { overwrite: true, fsync: false, ..Options::DEFAULT };
const RESUME: Options = Options { resume: true, ..OVERWRITE };
const NEEDS: Needs = Needs { bytes: 1, files: 1, open_files: 1 };

/// A tree as deep as the destination of a store.
fn nested() -> Tree {
    let files = [("global_step4/layer_00.pt", painted(8, 90)), ("latest", b"global_step4".to_vec())];
    with_manifest(OTHER_RUN, files.into_iter().map(|(name, bytes)| (name.to_string(), bytes)).collect())
}

fn put_deep(directory: &Path, tree: &Tree) {
    for (name, bytes) in tree {
        fs::create_dir_all(directory.join(name).parent().unwrap()).unwrap();
        fs::write(directory.join(name), bytes).unwrap();
    }
}

/// Everything below a directory: path and content, folders and other things by their kind.
fn all(directory: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![directory.to_path_buf()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let entry = entry.unwrap();
            let name = entry.path().strip_prefix(directory).unwrap().to_string_lossy().into_owned();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                found.insert(format!("{name}/"), Vec::new());
                folders.push(entry.path());
            } else {
                found.insert(
                    name,
                    if kind.is_file() { fs::read(entry.path()).unwrap() } else { b"special".to_vec() },
                );
            }
        }
    }
    found
}

/// Something that is not the older result's own, put into its folder; a word of it is in the refusal.
type Foreign = (&'static str, fn(&Path));

const FOREIGN: &[Foreign] = &[
    ("notes.txt", |out| fs::write(out.join("notes.txt"), "mine").unwrap()),
    ("README.md", |out| fs::write(out.join("README.md"), "mine").unwrap()),
    (".git", |out| {
        fs::create_dir(out.join(".git")).unwrap();
        fs::write(out.join(".git/HEAD"), "ref").unwrap();
    }),
    ("empty", |out| fs::create_dir(out.join("empty")).unwrap()),
    ("link", |out| symlink("/etc/hostname", out.join("link")).unwrap()),
    ("pipe", |out| assert!(Command::new("mkfifo").arg(out.join("pipe")).status().unwrap().success())),
    ("global_step4/mine.pt", |out| fs::write(out.join("global_step4/mine.pt"), "mine").unwrap()),
    (".cache/other", |out| {
        fs::create_dir_all(out.join(".cache/huggingface")).unwrap();
        fs::write(out.join(".cache/other"), "mine").unwrap();
    }),
    (".nfs-data", |out| fs::write(out.join(".nfs-data"), "mine").unwrap()),
    ("__pycache__", |out| fs::write(out.join("__pycache__"), "a file of this name").unwrap()),
    ("latest (not as it was written", |out| fs::write(out.join("latest"), "global_step9").unwrap()),
    ("global_step4/layer_00.pt (not as it was written", |out| {
        fs::write(out.join("global_step4/layer_00.pt"), painted(9, 90)).unwrap();
    }),
    ("latest", |out| {
        fs::remove_file(out.join("latest")).unwrap();
        symlink("global_step4", out.join("latest")).unwrap();
    }),
    ("has no fastshard.manifest.json", |out| fs::remove_file(out.join(LAST[0])).unwrap()),
    ("cannot be read", |out| fs::write(out.join(LAST[0]), "{}").unwrap()),
    ("inventory", |out| {
        let text = fs::read_to_string(out.join(LAST[0])).unwrap();
        fs::write(out.join(LAST[0]), text.replace("merge", "inventory")).unwrap();
    }),
];

#[test]
fn what_is_not_its_own_is_refused_and_named() {
    for (word, change) in FOREIGN {
        let s = Setting::new();
        put_deep(&s.out(), &nested());
        change(&s.out());
        let before = all(&s.out());
        for refused in [
            preflight(&s.out(), &[], RUN, &NEEDS, &OVERWRITE),
            Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).map(drop),
        ] {
            let error = refused.expect_err(word);
            assert_eq!(error.findings()[0].code, codes::OUT_EXISTS, "{word}");
            assert!(error.to_string().contains(word), "{word}: {error}");
        }
        assert_eq!(all(&s.out()), before, "{word}");
        assert_eq!(s.folders(), [] as [PathBuf; 0]);
    }
}

#[test]
fn leavings_of_readers_do_not_count() {
    let s = Setting::new();
    put_deep(&s.out(), &nested());
    for leaving in [
        ".cache/huggingface/download/x.metadata",
        ".gitattributes",
        "__pycache__/modeling.pyc",
        "global_step4/.nfs0000000000a1b2c300000001",
    ] {
        fs::create_dir_all(s.out().join(leaving).parent().unwrap()).unwrap();
        fs::write(s.out().join(leaving), "left").unwrap();
    }
    // A file that is gone loses nothing more.
    fs::remove_file(s.out().join("latest")).unwrap();
    assert_eq!(run(&s.out(), &s.source(), &OVERWRITE).unwrap(), []);
    assert_eq!(tree(&s.out()), Some(result()));
    assert_eq!(fs::read_dir(&s.root).unwrap().count(), 2, "source and out");
}

#[test]
fn large_files_are_known_by_their_time() {
    let s = Setting::new();
    let large = painted(1, 400 << 10);
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    let file = staging.file("model.safetensors", large.len() as u64, Space::Sparse).unwrap();
    file.write_all_at(0, &large).unwrap();
    staging.write("config.json", b"{}").unwrap();
    let files = staging.listing().unwrap();
    let kinds: Vec<_> = files.iter().map(|f| (&*f.name, f.blake3.is_some(), f.mtime_ns.is_some())).collect();
    assert_eq!(kinds, [("config.json", true, false), ("model.safetensors", false, true)]);
    let manifest =
        serde_json::json!({"format": "fastshard.manifest", "version": 1, "kind": "merge", "files": files});
    staging.write(LAST[0], manifest.to_string().as_bytes()).unwrap();
    staging.publish(&[LAST[0]], &|| true).unwrap();
    preflight(&s.out(), &[], RUN, &NEEDS, &OVERWRITE).unwrap();
    // Same size, other bytes, another time.
    let edited = fs::OpenOptions::new().write(true).open(s.out().join("model.safetensors")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&edited, b"edit", 9).unwrap();
    let error = preflight(&s.out(), &[], RUN, &NEEDS, &OVERWRITE).unwrap_err();
    assert!(error.to_string().contains("model.safetensors (not as it was written"), "{error}");
}

#[test]
fn what_comes_during_the_run_is_a_conflict() {
    for lacking in [&[][..], &["exchange"], &["moving"]] {
        let s = Setting::new();
        put_deep(&s.out(), &nested());
        let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
        fill(&staging, &s.source()).unwrap();
        fs::write(s.out().join("global_step4/mine.pt"), "mine").unwrap();
        let before = all(&s.out());
        fault::lack(lacking);
        let error = staging.publish(&LAST, &|| true).unwrap_err();
        assert_eq!(error.findings()[0].code, codes::PUBLISH_CONFLICT);
        assert!(error.to_string().contains("global_step4/mine.pt"), "{error}");
        assert_eq!(all(&s.out()), before);
        fs::remove_file(s.out().join("global_step4/mine.pt")).unwrap();
        let codes: Vec<_> = run(&s.out(), &s.source(), &RESUME).unwrap().iter().map(|f| f.code).collect();
        assert_eq!(codes, if lacking == ["moving"] { vec![codes::IN_STEPS] } else { vec![] });
        fault::lack(&[]);
        assert_eq!(tree(&s.out()), Some(result()));
        assert_eq!(s.folders(), [] as [PathBuf; 0]);
    }
}

/// A file that appears between the last look and the exchange lies in the older result afterwards.
#[test]
fn what_came_into_the_older_result_is_kept_and_named() {
    let s = Setting::new();
    put_deep(&s.out(), &nested());
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    fill(&staging, &s.source()).unwrap();
    let (folder, out) = (staging.folder().to_path_buf(), s.out());
    // Asked for the first time when the clean-up comes to the older result's first file.
    let late = std::cell::Cell::new(true);
    let go_on = || {
        let published = folder.join("data/latest").exists();
        if published && late.replace(false) {
            fs::write(folder.join("data/global_step4/late.pt"), "mine").unwrap();
            fs::write(folder.join("data/latest"), "edited").unwrap();
        }
        true
    };
    let warnings = staging.publish(&LAST, &go_on).unwrap();
    assert!(!late.get());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let kept = PathBuf::from(warnings[0].file.clone().unwrap());
    assert_eq!(kept, s.root.canonicalize().unwrap().join("out.kept-1"));
    let left = all(&kept);
    assert_eq!(left["global_step4/late.pt"], b"mine");
    assert_eq!(left["latest"], b"edited");
    assert_eq!(tree(&out), Some(result()));
    assert_eq!(s.folders(), [] as [PathBuf; 0]);
}

/// What cannot be looked at is neither older result nor foreign.
#[test]
fn an_error_of_looking_is_told_as_that() {
    for errno in [rustix::io::Errno::IO, rustix::io::Errno::ACCESS] {
        for hidden in ["fastshard.manifest.json", "global_step4/layer_00.pt", "latest"] {
            for kept_from in ["begin", "exchange", "removal"] {
                let when = format!("{errno}: {hidden} before the {kept_from}");
                let s = Setting::new();
                put_deep(&s.out(), &nested());
                let (out, aside) =
                    (s.out().canonicalize().unwrap().join(hidden), Path::new("data").join(hidden));
                let hide =
                    |below: PathBuf| fault::hide(errno.raw_os_error(), move |path| path.ends_with(&below));
                if kept_from == "begin" {
                    hide(out.clone());
                }
                let begun = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE);
                let outcome = begun.and_then(|staging| {
                    fill(&staging, &s.source())?;
                    if kept_from == "exchange" {
                        hide(out.clone());
                    }
                    let exchanged = s.out().join(LAST[1]);
                    if kept_from == "removal" {
                        fault::hide(errno.raw_os_error(), move |path| {
                            exchanged.exists() && path.ends_with(&aside)
                        });
                    }
                    staging.publish(&LAST, &|| true)
                });
                fault::show();
                let published = all(&s.out()) == result();
                assert_eq!(published, kept_from == "removal", "{when}");
                assert_eq!(outcome.is_ok(), published, "{when}");
                let findings = outcome.unwrap_or_else(Error::into_findings);
                let words = format!("{findings:?}");
                assert_eq!(findings.len(), 1, "{when}: {words}");
                assert!(words.contains(&std::io::Error::from(errno).to_string()), "{when}: {words}");
                assert!(words.contains(hidden), "{when}: {words}");
                for claim in ["no older result", "not there before", "destination changed", "would be lost"] {
                    assert!(!words.contains(claim), "{when}: {words}");
                }
                assert!(!s.root.join("out.kept-1").exists(), "{when}");
                assert_eq!(run(&s.out(), &s.source(), &RESUME).expect(&when), [], "{when}");
                assert_eq!(s.folders(), [] as [PathBuf; 0], "{when}");
                assert_eq!(tree(&s.out()), Some(result()), "{when}");
            }
        }
    }
}

/// Whoever dies while it is moved aside or after: the run that continues names it.
#[test]
fn what_is_kept_is_named_by_the_run_that_goes_on() {
    let mut named = 0;
    let faults = [fault::Fault::Gone, fault::Fault::Once(5)];
    for (at, fault) in (0..).flat_map(|at| faults.map(|fault| (at, fault))) {
        let s = Setting::new();
        put_deep(&s.out(), &nested());
        let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
        fill(&staging, &s.source()).unwrap();
        let folder = staging.folder().to_path_buf();
        let late = std::cell::Cell::new(true);
        let go_on = || {
            if folder.join("data/latest").exists() && late.replace(false) {
                fs::write(folder.join("data/global_step4/late.pt"), "mine").unwrap();
                fault::arm(at, fault);
            }
            true
        };
        let findings = staging.publish(&LAST, &go_on).unwrap_or_else(Error::into_findings);
        let calls = fault::disarm().len();
        let kept = s.root.canonicalize().unwrap().join("out.kept-1");
        let names = |findings: &[Finding]| {
            findings.iter().any(|f| f.file.as_deref() == Some(&*kept.display().to_string()))
        };
        assert_eq!(tree(&s.out()), Some(result()), "{at}");
        if calls <= at {
            assert!(names(&findings), "{at}: {findings:?}");
            break;
        }
        if names(&findings) {
            continue;
        }
        // The last call of all removes the empty folder: nothing tells of the run before it any more.
        let over = s.folders().iter().all(|folder| fs::read_dir(folder).unwrap().next().is_none());
        let warnings = run(&s.out(), &s.source(), &RESUME).unwrap();
        assert!(over || names(&warnings), "{at}: {warnings:?}");
        named += usize::from(!over);
        assert_eq!(all(&kept)["global_step4/late.pt"], b"mine", "{at}");
        assert!(!s.root.join("out.kept-2").exists(), "{at}");
        assert_eq!(tree(&s.out()), Some(result()), "{at}");
    }
    assert!(named > 10, "{named}");
}

#[test]
fn a_removal_that_is_stopped_goes_on_with_resume() {
    for stop in 0..4 {
        let s = Setting::new();
        put_deep(&s.out(), &nested());
        let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
        fill(&staging, &s.source()).unwrap();
        let out = s.out();
        let looks = std::cell::Cell::new(0);
        let go_on = || {
            let published = tree(&out) == Some(result());
            looks.set(looks.get() + usize::from(published));
            looks.get() <= stop
        };
        let warnings = staging.publish(&LAST, &go_on).unwrap();
        assert_eq!(warnings.len(), 1);
        assert_eq!(warnings[0].run, ["--resume"]);
        assert_eq!(tree(&s.out()), Some(result()));
        assert_eq!(run(&s.out(), &s.source(), &RESUME).unwrap(), []);
        assert_eq!(s.folders(), [] as [PathBuf; 0]);
        assert_eq!(tree(&s.out()), Some(result()));
    }
}

#[test]
fn stopped_before_it_is_sealed_nothing_has_happened() {
    let s = Setting::new();
    let durable = Options { fsync: true, ..OVERWRITE };
    let staging = Staging::begin(&s.out(), RUN, PLAN, &durable).unwrap();
    fill(&staging, &s.source()).unwrap();
    let error = staging.publish(&LAST, &|| false).unwrap_err();
    assert!(error.is_interrupt() && !error.is_after_publishing());
    assert!(!s.out().exists());
    let again = Staging::begin(&s.out(), RUN, PLAN, &Options { resume: true, ..durable }).unwrap();
    assert!(again.resumed() && !again.sealed());
}

#[test]
fn a_seal_can_be_taken_off_until_something_appeared() {
    for lacking in [&[][..], &["replacing"]] {
        let s = Setting::new();
        fs::create_dir(s.out()).unwrap();
        fault::lack(lacking);
        let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
        fill(&staging, &s.source()).unwrap();
        let calls = {
            fault::arm(usize::MAX, fault::Fault::Gone);
            // Sealed, then in the way of the first rename.
            fs::write(s.out().join("in-the-way"), "mine").unwrap();
            let _ = staging.publish(&LAST, &|| true);
            fault::disarm()
        };
        assert!(calls.iter().any(|(_, p)| p.ends_with("sealed")));
        fs::remove_file(s.out().join("in-the-way")).unwrap();
        let mut sealed = Staging::begin(&s.out(), RUN, PLAN, &RESUME).unwrap();
        assert!(sealed.sealed() && sealed.unseal().unwrap() && !sealed.sealed());
        sealed.keep_only(&["model-1.safetensors", "d/e"].into()).unwrap();
        assert_eq!(tree(&sealed.path()).unwrap().into_keys().collect::<Vec<_>>(), ["model-1.safetensors"]);
        fill(&sealed, &s.source()).unwrap();
        sealed.publish(&LAST, &|| true).unwrap();
        fault::lack(&[]);
        assert_eq!(tree(&s.out()), Some(result()));
    }
}

#[test]
fn a_staging_folder_is_its_owners_alone() {
    let s = Setting::new();
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    let folder = staging.folder().to_path_buf();
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o7777, 0o700);
    drop(staging);
    // Others may write to it, so that what is in it proves nothing.
    for mode in [0o770, 0o702, 0o777, 0o1777] {
        fs::set_permissions(&folder, PermissionsExt::from_mode(mode)).unwrap();
        for options in [OVERWRITE, RESUME] {
            let error = Staging::begin(&s.out(), RUN, PLAN, &options).unwrap_err();
            assert_eq!(error.findings()[0].code, codes::PERMISSION, "{mode:o}: {error}");
            assert!(!format!("{:?}", error.findings()).contains("--resume"));
        }
    }
    fs::set_permissions(&folder, PermissionsExt::from_mode(0o755)).unwrap();
    Staging::begin(&s.out(), RUN, PLAN, &RESUME).unwrap();
}

/// Links in the place of everything that a resumed run opens: none is followed.
#[test]
fn links_in_a_staging_folder_are_not_followed() {
    for name in [
        "lock",
        "plan",
        "journal",
        "data",
        "sealed",
        "sealed.new",
        "kept",
        "kept.new",
        "data/model-1.safetensors",
        "data/tokenizer.json",
    ] {
        let s = Setting::new();
        let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
        fill(&staging, &s.source()).unwrap();
        let at = staging.folder().join(name);
        drop(staging);
        let victim = s.root.join("victim");
        match name {
            "data" => {
                fs::create_dir(&victim).unwrap();
                fs::write(victim.join("model-1.safetensors"), "precious").unwrap();
                fs::remove_dir_all(&at).unwrap();
            }
            _ => {
                fs::write(&victim, "precious").unwrap();
                let _ = fs::remove_file(&at);
            }
        }
        symlink(&victim, &at).unwrap();
        let _ = run(&s.out(), &s.source(), &RESUME);
        let kept = if name == "data" { victim.join("model-1.safetensors") } else { victim };
        assert_eq!(fs::read(kept).unwrap(), b"precious", "{name}");
        assert!(!s.out().exists() || tree(&s.out()) == Some(result()), "{name}");
    }
}

/// Other names (hard links) of everything that a resumed run writes to: backups by `cp -al` have them. What they name stays as
/// it is, and the result shares nothing with them.
#[test]
fn hard_links_in_a_staging_folder_are_not_written_through() {
    for name in [
        "lock",
        "plan.new",
        "journal",
        "sealed.new",
        "kept.new",
        "data/model-1.safetensors",
        "data/tokenizer.json",
        "data/model.safetensors.index.json",
    ] {
        for length in [8, 5000] {
            let s = Setting::new();
            let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
            fill(&staging, &s.source()).unwrap();
            let at = staging.folder().join(name);
            drop(staging);
            let victim = s.root.join("victim");
            let precious = painted(9, length);
            fs::write(&victim, &precious).unwrap();
            let _ = fs::remove_file(&at);
            fs::hard_link(&victim, &at).unwrap();
            run(&s.out(), &s.source(), &RESUME).unwrap();
            assert_eq!(fs::read(&victim).unwrap(), precious, "{name}");
            assert_eq!(fs::metadata(&victim).unwrap().nlink(), 1, "{name}");
            assert_eq!(tree(&s.out()), Some(result()), "{name}");
        }
    }
}

/// A copy of the whole folder made of hard links.
#[test]
fn a_backup_of_a_staging_folder_stays_as_it_was() {
    let s = Setting::new();
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    fill(&staging, &s.source()).unwrap();
    let (folder, backup) = (staging.folder().to_path_buf(), s.root.join("backup"));
    drop(staging);
    assert!(Command::new("cp").arg("-al").arg(&folder).arg(&backup).status().unwrap().success());
    let all = |folder: &Path| (tree(&folder.join("data")), fs::read(folder.join("journal")).unwrap());
    let before = all(&backup);
    assert_eq!(before, all(&folder));
    run(&s.out(), &s.source(), &RESUME).unwrap();
    assert_eq!(all(&backup), before);
    assert_eq!(tree(&s.out()), Some(result()));
    for name in result().keys() {
        assert_eq!(fs::metadata(s.out().join(name)).unwrap().nlink(), 1, "{name}");
    }
}

#[test]
fn a_pipe_among_the_companions_is_refused() {
    let s = Setting::new();
    let pipe = s.root.join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let staging = Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE).unwrap();
    assert_eq!(refusal(staging.copy_in("tokenizer.json", &pipe, None, &|_| Ok(()))), [codes::UNSUPPORTED]);
}
