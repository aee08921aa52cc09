//! Real filesystems that are full, read-only or mount points, in a private mount namespace. Where
//! that is not allowed (it takes root), these tests say so and pass.

use std::process::Command;

use super::super::{preflight, Needs};
use super::*;

const CHILD: &str = "FASTSHARD_TEST_MOUNTED";
const PLAIN: Options = Options::DEFAULT;
const RESUME: Options = Options { resume: true, ..PLAIN };
const OVERWRITE: Options = Options { overwrite: true, ..PLAIN };

/// Runs `body` after the shell lines of `mounts` in a namespace of its own; `$1` is the setting.
fn mounted(test: &str, mounts: &str, start: &str, body: impl FnOnce(Setting)) {
    if let Ok(root) = std::env::var(CHILD) {
        return body(Setting::at(Path::new(&root)));
    }
    let allowed = Command::new("unshare").args(["-m", "true"]).output();
    if !allowed.is_ok_and(|o| o.status.success()) {
        eprintln!("SKIPPED {test}: mounting takes root (unshare -m)");
        return;
    }
    let s = Setting::new();
    let script =
        format!("set -e; {mounts}; exec {start} \"$2\" --exact publish::tests::mounts::{test} --nocapture");
    let child = Command::new("unshare")
        .args(["-m", "sh", "-c", &script, "sh"])
        .arg(&s.root)
        .arg(std::env::current_exe().unwrap())
        .env(CHILD, &s.root)
        .output()
        .unwrap();
    let output =
        format!("{}{}", String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && output.contains("1 passed"), "{output}");
    if output.contains("SKIPPED") {
        eprintln!("{test}: {output}");
    }
}

#[test]
fn full_filesystem() {
    let mounts = "mkdir \"$1/small\"; mount -t tmpfs -o size=128k,nr_inodes=40 t \"$1/small\"";
    mounted("full_filesystem", mounts, "", |s| {
        let out = s.root.join("small/out");
        let needs = |bytes, files| Needs { bytes, files, open_files: 1 };
        preflight(&out, &[], RUN, &needs(1000, 3), &PLAIN).unwrap();
        assert_eq!(refusal(preflight(&out, &[], RUN, &needs(1 << 20, 3), &PLAIN)), [codes::NO_SPACE]);
        assert_eq!(refusal(preflight(&out, &[], RUN, &needs(1000, 50), &PLAIN)), [codes::NO_SPACE]);
        let both = preflight(&out, &[], RUN, &needs(1 << 20, 50), &PLAIN).unwrap_err();
        let text = both.to_string();
        assert_eq!(both.findings().len(), 2, "{text}");
        assert!(text.contains("expected 1048576 free, got 131072"), "{text}");
        assert!(text.contains("not enough space: the result needs 1.1 MB, 0.1 MB are free"), "{text}");
        assert!(text.contains("not enough inodes: the result needs "), "{text}");

        let staging = Staging::begin(&out, RUN, PLAN, &PLAIN).unwrap();
        let large = staging.file("large", 1 << 20, Space::Reserved).unwrap_err();
        let space = &large.findings()[0];
        assert_eq!(
            (space.code, space.expected.as_deref()),
            (codes::NO_SPACE, Some("1.1 MB free")),
            "{large}"
        );
        assert!(space.got.as_ref().is_some_and(|got| got.ends_with(" free")), "{large}");
        staging.discard().unwrap();
        let staging = Staging::begin(&out, RUN, PLAN, &PLAIN).unwrap();
        // Space reserved by the interrupted run counts as free to the one that resumes it.
        let file = staging.file("half", 80 << 10, Space::Reserved).unwrap();
        drop(staging);
        preflight(&out, &[], RUN, &needs(100 << 10, 3), &RESUME).unwrap();
        drop(file);

        let staging = Staging::begin(&out, RUN, PLAN, &RESUME).unwrap();
        let file = staging.file("sparse", 1 << 20, Space::Sparse).unwrap();
        let full = (0..16).find_map(|i| file.write_all_at(i << 16, &[1; 1 << 16]).err()).unwrap();
        assert_eq!(full.findings()[0].code, codes::NO_SPACE);
        assert_eq!(full.findings()[0].got.as_deref(), Some("0.0 kB free"));
        assert!(!out.exists());
        fs::remove_file(file.path()).unwrap();
        fs::remove_file(staging.path().join("half")).unwrap();
        drop((file, staging));
        run(&out, &s.source(), &RESUME).unwrap();
        assert_eq!(tree(&out), Some(result()));
    });
}

#[test]
fn filling_up_at_any_point() {
    // Every size at which the run fits no more, from the first file to the last.
    let mounts = "mkdir \"$1/small\"";
    mounted("filling_up_at_any_point", mounts, "", |s| {
        let (small, mut failed) = (s.root.join("small"), 0);
        for pages in 1..24 {
            let size = format!("size={}k", pages * 4);
            let mount = ["-t", "tmpfs", "-o", &size, "t"];
            assert!(Command::new("mount").args(mount).arg(&small).status().unwrap().success());
            let out = small.join("out");
            if let Err(error) = run(&out, &s.source(), &PLAIN) {
                assert_eq!(error.findings()[0].code, codes::NO_SPACE, "{error}");
                assert!(!out.exists());
                failed += 1;
                let mount = ["-o", "remount,size=1m"];
                assert!(Command::new("mount").args(mount).arg(&small).status().unwrap().success());
                run(&out, &s.source(), &RESUME).unwrap();
            }
            assert_eq!(tree(&out), Some(result()));
            assert_eq!(fs::read_dir(&small).unwrap().count(), 1);
            assert!(Command::new("umount").arg(&small).status().unwrap().success());
        }
        assert!(failed > 5, "{failed} sizes were too small");
    });
}

#[test]
fn read_only_filesystem() {
    let mounts = "mkdir \"$1/ro\"; mount -t tmpfs -o ro t \"$1/ro\"";
    mounted("read_only_filesystem", mounts, "", |s| {
        let needs = Needs { bytes: 1, files: 1, open_files: 1 };
        for out in [s.root.join("ro/out"), s.root.join("ro")] {
            let codes = refusal(preflight(&out, &[], RUN, &needs, &PLAIN));
            assert!(codes.contains(&codes::PERMISSION), "{codes:?}");
            assert_eq!(refusal(Staging::begin(&out, RUN, PLAN, &PLAIN)), [codes::PERMISSION]);
        }
    });
}

/// Staged inside, and not replaceable once it holds something.
fn published_inside(s: &Setting) {
    let staging = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    assert_eq!(staging.folder().parent(), Some(&*s.out().canonicalize().unwrap()));
    fill(&staging, &s.source()).unwrap();
    drop(staging);
    let needs = Needs { bytes: 1, files: 1, open_files: 1 };
    preflight(&s.out(), &[s.root.join("source")], RUN, &needs, &RESUME).unwrap();
    run(&s.out(), &s.source(), &RESUME).unwrap();
    assert_eq!(tree(&s.out()), Some(result()));
    assert_eq!(s.folders(), [] as [PathBuf; 0]);
    assert_eq!(refusal(Staging::begin(&s.out(), RUN, PLAN, &OVERWRITE)), [codes::OUT_EXISTS]);
}

#[test]
fn mount_root() {
    let mounts = "mkdir \"$1/out\"; mount -t tmpfs t \"$1/out\"";
    mounted("mount_root", mounts, "", |s| published_inside(&s));
}

#[test]
fn bind_mount_root() {
    let mounts = "mkdir \"$1/out\" \"$1/disk\"; mount --bind \"$1/disk\" \"$1/out\"";
    mounted("bind_mount_root", mounts, "", |s| published_inside(&s));
}

#[test]
fn parent_of_another_owner() {
    let mounts = "mkdir \"$1/out\"; chown -R 65534 \"$1/source\" \"$1/out\"; chmod 755 \"$1\"; \
                  setpriv --reuid 65534 --clear-groups -- test -x \"$2\" || \
                  { echo 'SKIPPED: needs setpriv and a build folder that all may read; 1 passed'; exit 0; }";
    mounted("parent_of_another_owner", mounts, "setpriv --reuid 65534 --clear-groups --", |s| {
        published_inside(&s);
        let needs = Needs { bytes: 1, files: 1, open_files: 1 };
        let new = s.root.join("new");
        assert_eq!(refusal(preflight(&new, &[], RUN, &needs, &PLAIN)), [codes::PERMISSION]);
        assert_eq!(refusal(Staging::begin(&new, RUN, PLAN, &PLAIN)), [codes::PERMISSION]);
    });
}

#[test]
fn source_through_a_bind_mount() {
    let mounts = "mkdir -p \"$1/source/deep\" \"$1/whole\" \"$1/part\"; \
                  mount --bind \"$1/source\" \"$1/whole\"; mount --bind \"$1/source/deep\" \"$1/part\"";
    mounted("source_through_a_bind_mount", mounts, "", |s| {
        let needs = Needs { bytes: 1, files: 1, open_files: 1 };
        for out in ["whole/out", "part/out", "part"] {
            let codes = refusal(preflight(&s.root.join(out), &[s.root.join("source")], RUN, &needs, &PLAIN));
            assert_eq!(codes, [codes::OUT_INSIDE_SOURCE], "{out}");
        }
        let codes =
            refusal(preflight(&s.root.join("source/out"), &[s.root.join("whole")], RUN, &needs, &PLAIN));
        assert_eq!(codes, [codes::OUT_INSIDE_SOURCE]);
    });
}

/// A directory of a lower layer can be neither exchanged nor moved.
#[test]
fn an_older_result_in_a_lower_layer_of_overlayfs() {
    let mounts = "for d in low up work merged; do mkdir -p \"$1/$d\"; done; mkdir \"$1/disk\"; \
                  mount -t tmpfs t \"$1/disk\"; mkdir \"$1/disk/up\" \"$1/disk/work\"; mkdir \"$1/low/out\"; \
                  touch \"$1/low/out/lower\"; \
                  mount -t overlay o -o lowerdir=\"$1/low\",upperdir=\"$1/disk/up\",workdir=\"$1/disk/work\" \"$1/merged\" || \
                  { echo 'SKIPPED: no overlayfs; 1 passed'; exit 0; }";
    mounted("an_older_result_in_a_lower_layer_of_overlayfs", mounts, "", |s| {
        // Written below the mount: what the layer holds when the run begins.
        let (low, out) = (s.root.join("low/out"), s.root.join("merged/out"));
        fs::remove_file(low.join("lower")).unwrap();
        put(&low, &old());
        assert!(Command::new("mount")
            .args(["-o", "remount"])
            .arg(s.root.join("merged"))
            .status()
            .unwrap()
            .success());
        assert_eq!(tree(&out), Some(old()), "the layer shows");
        let probe = s.root.join("merged/probe");
        assert_eq!(
            fs::rename(&out, &probe).unwrap_err().raw_os_error(),
            Some(rustix::io::Errno::XDEV.raw_os_error()),
            "else this shows nothing"
        );
        let warned = |findings: &[Finding]| matches!(findings, [f] if f.code == codes::IN_STEPS);
        let forecast = |out: &Path| {
            let staging = Staging::begin(out, RUN, PLAN, &OVERWRITE).unwrap();
            let findings = staging.forecast();
            staging.discard().unwrap();
            findings
        };
        assert!(forecast(&out).is_some_and(|f| warned(&[f])), "known before");
        assert!(warned(&run(&out, &s.source(), &OVERWRITE).unwrap()));
        assert_eq!(tree(&out), Some(result()));
        assert_eq!(tree(&low), Some(old()), "the layer below is as it was");
        assert_eq!(fs::read_dir(s.root.join("merged")).unwrap().count(), 1);
        // Now a directory of both layers, with a foreign file.
        fs::write(out.join("mine"), "mine").unwrap();
        assert_eq!(refusal(run(&out, &s.source(), &OVERWRITE)), [codes::OUT_EXISTS]);
        fs::remove_file(out.join("mine")).unwrap();
        assert!(forecast(&out).is_some_and(|f| warned(&[f])), "known before");
        assert!(warned(&run(&out, &s.source(), &OVERWRITE).unwrap()));
        assert_eq!(tree(&out), Some(result()));
        // One of the upper layer alone is exchanged.
        let new = s.root.join("merged/new");
        put(&new, &old());
        assert_eq!(forecast(&new), None);
        assert_eq!(run(&new, &s.source(), &OVERWRITE).unwrap(), []);
        assert_eq!(tree(&new), Some(result()));
        assert_eq!(fs::read_dir(s.root.join("merged")).unwrap().count(), 2);
    });
}

/// What is mounted inside an older result is not its own, be it where readers leave things.
#[test]
fn mounts_inside_an_older_result() {
    let mounts = "mkdir -p \"$1/precious\"; echo mine > \"$1/precious/file\"";
    mounted("mounts_inside_an_older_result", mounts, "", |s| {
        for place in [".cache/huggingface", ".cache/huggingface/hub/deep", "__pycache__"] {
            put(&s.out(), &old());
            let at = s.out().join(place);
            fs::create_dir_all(&at).unwrap();
            for mount in [vec!["--bind", s.root.join("precious").to_str().unwrap()], vec!["-t", "tmpfs", "t"]]
            {
                assert!(Command::new("mount").args(&mount).arg(&at).status().unwrap().success());
                fs::write(at.join("more"), "mine").unwrap();
                assert_eq!(refusal(run(&s.out(), &s.source(), &OVERWRITE)), [codes::OUT_EXISTS], "{place}");
                assert_eq!(fs::read(at.join("more")).unwrap(), b"mine");
                assert!(Command::new("umount").arg(&at).status().unwrap().success());
            }
            assert_eq!(fs::read(s.root.join("precious/file")).unwrap(), b"mine\n");
            assert_eq!(run(&s.out(), &s.source(), &OVERWRITE).unwrap(), []);
            assert_eq!(tree(&s.out()), Some(result()));
            fs::remove_dir_all(s.out()).unwrap();
        }
    });
}
