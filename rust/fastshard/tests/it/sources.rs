//! Source files that change, end or are replaced while they are read, and paths that are no files.

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crate::common::paused::{child_of_its_own, until, Steps};
use crate::common::{mix, options, temp};
use fastshard::codes;
use fastshard::engine::{self, Control, Discard};
use fastshard::error::Severity;
use fastshard::plan::{
    Combine, Fill, Output, Part, PartAxis, Pieces, Plan, PlanBlob, PlanFile, StoredTensor,
};
use fastshard::storage::SourceFile;
use fastshard::tensor::Dtype;

/// Columns of the source, in bytes: a quarter is a run that is gathered from a map.
const COLUMNS: u64 = 8 << 10;
const ROWS: u64 = 2 << 10;

fn row(number: u64) -> Vec<u8> {
    (0..COLUMNS / 8).flat_map(|i| mix(number * COLUMNS + i).to_le_bytes()).collect()
}

fn source(path: &Path, rows: u64) {
    let mut file = std::io::BufWriter::new(std::fs::File::create(path).unwrap());
    (0..rows).for_each(|i| file.write_all(&row(i)).unwrap());
    file.flush().unwrap();
}

/// Four quarters of the columns, or all of it with rows and columns exchanged.
fn plan(transposed: bool) -> Plan {
    let len = ROWS * COLUMNS;
    let output = |name: &str, shape: [u64; 2], axes: [PartAxis; 2], column: u64| Output {
        name: name.into(),
        dtype: Dtype::U8,
        shape: shape.into(),
        parts: [Part {
            axes: axes.into(),
            dst_base: 0,
            src_base: [0, column].into(),
            sources: [0].into(),
            combine: Combine::Equal,
            ops: Box::default(),
        }]
        .into(),
        fill: Fill::None,
        file: 0,
        offset: 0,
        key: None,
    };
    let axis = |n, dst, dim| PartAxis { n, dst, dim, step: 1 };
    let quarter = COLUMNS / 4;
    let outputs = if transposed {
        vec![output("t", [COLUMNS, ROWS], [axis(COLUMNS, ROWS, 1), axis(ROWS, 1, 0)], 0)]
    } else {
        let of = |i: u64| {
            let axes = [axis(ROWS, quarter, 0), axis(quarter, 1, 1)];
            output(&i.to_string(), [ROWS, quarter], axes, i * quarter)
        };
        (0..4).map(of).collect()
    };
    Plan {
        version: 1,
        sources: vec![PlanFile { path: "w".into(), root: 0, size: len, mtime_ns: 0, header: String::new() }],
        blobs: vec![PlanBlob {
            file: 0,
            offset: 0,
            stored_len: len,
            len,
            crc32: None,
            deflated: false,
            zstd: None,
            encoded: false,
            member: None,
        }],
        stored: vec![StoredTensor {
            name: "w".into(),
            dtype: Dtype::U8,
            shape: [ROWS, COLUMNS].into(),
            pieces: Pieces::View { blob: 0, offset: 0, strides: [COLUMNS, 1].into() },
            rank: None,
            rule: 0,
            index: Default::default(),
            shard: None,
            twins: Default::default(),
            changes: Box::default(),
        }],
        rules: vec!["w".into()],
        outputs,
        ..Plan::default()
    }
}

/// What the plan's outputs hash to.
fn expected(transposed: bool) -> Vec<[u8; 32]> {
    let rows: Vec<Vec<u8>> = (0..ROWS).map(row).collect();
    if transposed {
        let column = |c: usize| rows.iter().map(move |row| row[c]);
        let bytes: Vec<u8> = (0..COLUMNS as usize).flat_map(column).collect();
        return vec![*blake3::hash(&bytes).as_bytes()];
    }
    let quarter = (COLUMNS / 4) as usize;
    let part = |i: usize| rows.iter().flat_map(move |row| row[i * quarter..][..quarter].iter().copied());
    (0..4).map(|i| *blake3::hash(&part(i).collect::<Vec<u8>>()).as_bytes()).collect()
}

const CHILD: &str = "sources::child_gathers";

/// Not a test: the process whose source is taken away. It reads until somebody does, and is content with the
/// right bytes or `FS506` alone.
#[test]
#[ignore = "run by a_source_that_is_cut_short_at_any_instant_is_no_signal"]
fn child_gathers() {
    let Some(dir) = std::env::var_os("FASTSHARD_TEST_SOURCE").map(PathBuf::from) else { return };
    let file = Arc::new(SourceFile::open(&dir.join("w")).unwrap());
    let wanted = [expected(false), expected(true)];
    // It is held after two turns; those beyond are of a source that nobody took away.
    for _ in 0..8 {
        for transposed in [false, true] {
            let control = Control::default();
            let files = [Arc::clone(&file)];
            match engine::execute(&plan(transposed), &files, &Discard, &options(2, &dir), &control) {
                Ok(report) => {
                    let found: Vec<_> = report.outputs.iter().map(|o| o.hash).collect();
                    assert_eq!(found, wanted[usize::from(transposed)]);
                    // A replaced file is read on to its end.
                    if dir.join("replaced").exists() {
                        return;
                    }
                }
                Err(error) => {
                    assert!(error.findings().iter().all(|f| f.code == codes::SOURCE_CHANGED), "{error}");
                    return;
                }
            }
        }
    }
    panic!("nobody took the source away");
}

#[test]
fn a_source_that_is_cut_short_at_any_instant_is_no_signal() {
    let instants = std::env::var("FASTSHARD_INSTANTS").ok().and_then(|n| n.parse().ok()).unwrap_or(12);
    for i in 0..instants {
        let dir = temp();
        let path = dir.path().join("w");
        source(&path, ROWS);
        let steps = Steps::new();
        let mut command = child_of_its_own(CHILD);
        command.env("FASTSHARD_TEST_SOURCE", dir.path()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = steps.hold(&mut command).spawn().unwrap();
        // A turn in which nothing happens tells what there is to be held at.
        let mut places = Vec::new();
        while places.iter().filter(|place| *place == "made").count() < 2 {
            places.push(steps.next(&mut child).expect("it reads").place.clone());
        }
        assert!(places.iter().filter(|place| place.starts_with("tile-")).count() >= 12, "{places:?}");
        // From the first to the last, then anywhere.
        let number = match i < 12 {
            true => i as usize * (places.len() - 1) / 11,
            false => mix(i) as usize % places.len(),
        };
        let mut paused = None;
        // In the next turn two threads come by in another order perhaps, but by the same places.
        for _ in 0..=number {
            drop(paused.take());
            paused = steps.next(&mut child);
        }
        let place = paused.as_ref().expect("it reads").place.clone();
        if i % 12 >= 6 {
            // Within the tile: it comes no further than the places after it, at which nobody lets it go yet.
            drop(paused.take());
        }
        let open = || std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        match i % 6 {
            0 => open().set_len(0).unwrap(),
            1 => open().set_len(mix(i + 1) % (ROWS * COLUMNS)).unwrap(),
            2 => {
                let other = dir.path().join("other");
                source(&other, ROWS / 2);
                std::fs::rename(other, &path).unwrap();
                std::fs::write(dir.path().join("replaced"), "").unwrap();
            }
            3 => std::fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(b"more").unwrap(),
            // Made anew in place, as a save that starts over does.
            4 => source(&path, ROWS),
            _ => {
                open().set_len(0).unwrap();
                open().set_len(ROWS * COLUMNS).unwrap();
            }
        }
        drop(paused);
        steps.all(&mut child);
        let ended = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), None, "change {i} at {place}: {stderr}");
        assert!(ended.status.success(), "change {i} at {place}: {stderr}");
    }
}

#[test]
fn both_plans_are_gathered_right() {
    let dir = temp();
    source(&dir.path().join("w"), ROWS);
    for network in [false, true] {
        let file = SourceFile::open(&dir.path().join("w")).unwrap();
        let files = [Arc::new(if network { file.as_network() } else { file })];
        for transposed in [false, true] {
            let options = options(2, dir.path());
            let report =
                engine::execute(&plan(transposed), &files, &Discard, &options, &Control::default()).unwrap();
            let found: Vec<_> = report.outputs.iter().map(|o| o.hash).collect();
            assert_eq!(found, expected(transposed));
        }
    }
}

/// Changes something until the time of the last change is another one: clocks of filesystems tick.
fn until_ctime_moves(path: &Path, change: &mut dyn FnMut()) {
    let ctime = || std::fs::metadata(path).map(|meta| (meta.ctime(), meta.ctime_nsec())).unwrap();
    let before = ctime();
    until("another time", || {
        change();
        ctime() != before
    });
}

#[test]
fn other_permissions_or_another_name_meanwhile_are_a_warning() {
    use std::os::unix::fs::PermissionsExt;
    let dir = temp();
    let path = dir.path().join("w");
    source(&path, ROWS);
    let run = |file: &Arc<SourceFile>| {
        let (files, options) = ([Arc::clone(file)], options(2, dir.path()));
        engine::execute(&plan(false), &files, &Discard, &options, &Control::default())
    };
    let mut links = 0;
    let changes: [&mut dyn FnMut(); 2] = [
        &mut || std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap(),
        &mut || {
            links += 1;
            std::fs::hard_link(&path, dir.path().join(format!("another {links}"))).unwrap()
        },
    ];
    for change in changes {
        let file = Arc::new(SourceFile::open(&path).unwrap());
        assert!(run(&file).unwrap().findings.is_empty());
        until_ctime_moves(&path, change);
        let report = run(&file).unwrap();
        let found: Vec<_> = report.findings.iter().map(|f| (f.code, f.severity)).collect();
        assert_eq!(found, [(codes::SOURCE_CHANGED, Severity::Warning)]);
        assert_eq!(report.outputs.iter().map(|o| o.hash).collect::<Vec<_>>(), expected(false));
    }
    let file = Arc::new(SourceFile::open(&path).unwrap());
    let written = std::fs::metadata(&path).unwrap().modified().unwrap();
    source(&path, ROWS);
    // As if it had been written a moment later.
    let again = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    again.set_modified(written + Duration::from_millis(20)).unwrap();
    assert_eq!(run(&file).unwrap_err().findings()[0].code, codes::SOURCE_CHANGED);
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let dir = temp();
    let at = |name: &str| dir.path().join(name);
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
    std::fs::create_dir(at("folder")).unwrap();
    for link in ["fifo", "socket", "folder"] {
        std::os::unix::fs::symlink(at(link), at(&format!("link to {link}"))).unwrap();
    }
    let names = ["fifo", "socket", "folder", "link to fifo", "link to socket", "link to folder"];
    let paths = names.map(at).into_iter().chain(["/dev/zero".into(), "/dev/tty".into()]);
    for path in paths.filter(|path| path.exists()) {
        let error = SourceFile::open(&path).unwrap_err();
        let finding = &error.findings()[0];
        assert_eq!(finding.code, codes::NOT_A_CHECKPOINT, "{}", path.display());
        assert!(finding.got.is_some() && finding.file.is_some());
    }
    std::fs::write(at("file"), "content").unwrap();
    std::os::unix::fs::symlink(at("file"), at("link to file")).unwrap();
    assert_eq!(SourceFile::open(&at("link to file")).unwrap().read_vec(0, 7).unwrap(), b"content");
}
