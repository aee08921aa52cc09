//! Destinations, files and refusals on an ordinary filesystem.

use std::os::unix::fs::{symlink, PermissionsExt};

use super::super::{preflight, Needs};
use super::*;

const SMALL: Needs = Needs { bytes: 1000, files: 3, open_files: 3 };
const PLAIN: Options = Options { fsync: false, ..Options::DEFAULT };
const OVERWRITE: Options = Options { overwrite: true, ..PLAIN };

fn check(setting: &Setting, out: &Path, options: &Options) -> Result<()> {
    preflight(out, &[setting.root.join("source")], RUN, &SMALL, options)
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn destination_states() {
    let s = Setting::new();
    check(&s, &s.out(), &PLAIN).unwrap();
    fs::create_dir(s.out()).unwrap();
    check(&s, &s.out(), &PLAIN).unwrap();
    put(&s.out(), &old());
    assert_eq!(refusal(check(&s, &s.out(), &PLAIN)), [codes::OUT_EXISTS]);
    assert_eq!(refusal(Staging::begin(&s.out(), RUN, PLAN, &PLAIN)), [codes::OUT_EXISTS]);
    assert_eq!(s.folders(), [] as [PathBuf; 0]);
    check(&s, &s.out(), &OVERWRITE).unwrap();
    let file = s.out().join("tokenizer.json");
    for options in [PLAIN, OVERWRITE] {
        assert_eq!(refusal(check(&s, &file, &options)), [codes::OUT_EXISTS]);
        assert_eq!(refusal(Staging::begin(&file, RUN, PLAN, &options)), [codes::OUT_EXISTS]);
    }
    assert_eq!(refusal(check(&s, &s.root.join("no/such/out"), &PLAIN)), [codes::NO_SUCH_PATH]);
    assert_eq!(refusal(check(&s, &file.join("out"), &PLAIN)).len(), 1);
    assert_eq!(tree(&s.out()), Some(old()));
}

#[test]
fn all_problems_are_reported() {
    let s = Setting::new();
    let out = s.root.join("source/out");
    put(&out, &old());
    let needs = Needs { bytes: u64::MAX, files: 3, open_files: 1 << 50 };
    let codes = refusal(preflight(&out, &[s.root.join("source"), s.root.join("gone")], RUN, &needs, &PLAIN));
    for code in [codes::NO_SPACE, codes::TOO_MANY_FILES, codes::OUT_INSIDE_SOURCE, codes::NO_SUCH_PATH] {
        assert!(codes.contains(&code), "{code} is not in {codes:?}");
    }
}

#[test]
fn open_file_limit_is_raised() {
    use rustix::process::{getrlimit, setrlimit, Resource, Rlimit};
    let s = Setting::new();
    let before = getrlimit(Resource::Nofile);
    // Only above what the other tests of this process need.
    setrlimit(Resource::Nofile, Rlimit { current: Some(900), ..before }).unwrap();
    let needs = Needs { open_files: 950, ..SMALL };
    let done = preflight(&s.out(), &[], RUN, &needs, &PLAIN);
    let after = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, before).unwrap();
    done.unwrap();
    assert!(after.current.is_none_or(|soft| soft >= 950), "{after:?}");
}

#[test]
fn source_and_destination_stay_apart() {
    let s = Setting::new();
    let source = s.root.join("source");
    symlink(&source, s.root.join("link")).unwrap();
    fs::create_dir(source.join("deep")).unwrap();
    symlink(source.join("deep"), s.root.join("deep-link")).unwrap();
    for inside in
        ["source", "source/out", "link/out", "link", "source/deep/out", "deep-link", "deep-link/out"]
    {
        let codes = refusal(check(&s, &s.root.join(inside), &OVERWRITE));
        assert_eq!(codes, [codes::OUT_INSIDE_SOURCE], "{inside}");
    }
    // A source inside the destination, also by way of a link.
    let codes = refusal(preflight(&s.root, &[s.root.join("deep-link")], RUN, &SMALL, &OVERWRITE));
    assert_eq!(codes, [codes::OUT_INSIDE_SOURCE]);
    let codes = refusal(preflight(&source, &[s.source()], RUN, &SMALL, &OVERWRITE));
    assert_eq!(codes, [codes::OUT_INSIDE_SOURCE]);
    check(&s, &s.root.join("source-2"), &PLAIN).unwrap();
    preflight(&source.join("out"), &[s.source()], RUN, &SMALL, &PLAIN).unwrap();
}

#[test]
fn destination_by_a_link() {
    let s = Setting::new();
    let target = s.root.join("elsewhere/target");
    symlink(&target, s.out()).unwrap();
    assert_eq!(refusal(check(&s, &s.out(), &PLAIN)), [codes::NO_SUCH_PATH]);
    assert_eq!(refusal(Staging::begin(&s.out(), RUN, PLAN, &PLAIN)), [codes::NO_SUCH_PATH]);
    fs::create_dir_all(&target).unwrap();
    for options in [PLAIN, OVERWRITE] {
        run(&s.out(), &s.source(), &options).unwrap();
        assert!(s.out().is_symlink());
        assert_eq!(tree(&target), Some(result()));
        assert_eq!(fs::read_dir(target.parent().unwrap()).unwrap().count(), 1);
    }
}

#[test]
fn relative_destination() {
    // `begin` and `find` resolve names against the working directory, which tests share: only look.
    let place = super::super::place::Place::find(Path::new("fastshard-no-such-out/"), RUN).unwrap();
    let here = std::env::current_dir().unwrap().canonicalize().unwrap();
    assert_eq!(place.out, here.join("fastshard-no-such-out"));
    assert_eq!(place.folder_path(), here.join(".fastshard-no-such-out.fastshard-0123456789abcdef"));
    let root = super::super::place::Place::find(Path::new("/"), RUN).unwrap();
    assert_eq!((root.inside, root.folder_path()), (true, PathBuf::from("/.fastshard-0123456789abcdef")));
}

#[test]
fn modes_follow_the_umask_or_the_replaced_directory() {
    let s = Setting::new();
    fs::write(s.root.join("file"), "").unwrap();
    fs::create_dir(s.root.join("directory")).unwrap();
    fs::set_permissions(s.source(), PermissionsExt::from_mode(0o400)).unwrap();
    run(&s.out(), &s.source(), &PLAIN).unwrap();
    for name in result().keys() {
        assert_eq!(mode(&s.out().join(name)), mode(&s.root.join("file")), "{name}");
    }
    assert_eq!(mode(&s.out()), mode(&s.root.join("directory")));
    fs::set_permissions(s.out(), PermissionsExt::from_mode(0o2710)).unwrap();
    run(&s.out(), &s.source(), &OVERWRITE).unwrap();
    assert_eq!(mode(&s.out()), 0o2710);
}

#[test]
fn files_of_fixed_size_and_plain_names() {
    let s = Setting::new();
    let staging = Staging::begin(&s.out(), RUN, PLAN, &PLAIN).unwrap();
    for name in ["", ".", "..", "a/../b", "a//b", "a/", "./a", "/etc/x", "a\0b", "a\\b", "../a"] {
        assert_eq!(refusal(staging.file(name, 1, Space::Sparse)), [codes::UNSAFE_PATH], "{name:?}");
        assert_eq!(refusal(staging.write(name, b"")), [codes::UNSAFE_PATH], "{name:?}");
    }
    let file = staging.file("data", 1 << 40, Space::Sparse).unwrap();
    assert_eq!((file.size(), file.kept()), (1 << 40, false));
    file.write_all_at((1 << 40) - 2, b"ab").unwrap();
    assert_eq!(refusal(file.write_all_at((1 << 40) - 1, b"ab")), [codes::IO]);
    assert_eq!(refusal(file.write_all_at(u64::MAX, b"ab")), [codes::IO]);
    assert!(staging.file("data", 1 << 40, Space::Sparse).unwrap().kept());
    assert_eq!(fs::metadata(file.path()).unwrap().len(), 1 << 40);
    let small = staging.file("small", 3, Space::Reserved).unwrap();
    std::thread::scope(|scope| {
        for i in 0..3u8 {
            let small = &small;
            scope.spawn(move || small.write_all_at(i.into(), &[b'a' + i]).unwrap());
        }
    });
    assert_eq!(fs::read(small.path()).unwrap(), b"abc");
    assert_eq!(refusal(staging.copy_in("x", &s.root, None, &|_| Ok(()))), [codes::UNSUPPORTED]);
    assert_eq!(refusal(staging.publish(&["never-written"], &|| true)), [codes::USAGE]);
    assert!(!s.out().exists());
}

#[test]
fn subdirectories_are_published_too() {
    for lacking in [&[][..], &["replacing"]] {
        let s = Setting::new();
        fs::create_dir(s.out()).unwrap();
        fault::lack(lacking);
        let staging = Staging::begin(&s.out(), RUN, PLAN, &Options { fsync: true, ..PLAIN }).unwrap();
        fs::create_dir_all(staging.path().join("d/e")).unwrap();
        fs::write(staging.path().join("d/e/chunk"), b"chunk").unwrap();
        staging.write("zarr.json", b"{}").unwrap();
        assert_eq!(staging.publish(&["zarr.json"], &|| true).unwrap(), []);
        fault::lack(&[]);
        assert_eq!(fs::read(s.out().join("d/e/chunk")).unwrap(), b"chunk");
        assert_eq!(fs::read_dir(s.out()).unwrap().count(), 2);
    }
}
