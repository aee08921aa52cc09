//! Which storage a path lies on, as the system names it.

use std::path::{Path, PathBuf};

/// A mounted filesystem.
struct Mount {
    /// Major and minor number of its device.
    device: String,
    /// What of it is mounted.
    root: PathBuf,
    /// Where.
    point: PathBuf,
    /// Its kind, and what is mounted.
    kind: String,
    source: String,
}

fn parse(line: &str) -> Option<Mount> {
    // id, parent, major:minor, root, mount point, options, optional fields, -, kind, source; blanks as \040
    let (before, after) = line.split_once(" - ")?;
    let mut fields = before.split(' ').skip(2);
    let (device, root, point) = (fields.next()?, unescape(fields.next()?), unescape(fields.next()?));
    let mut named = after.split(' ');
    Some(Mount {
        device: device.to_string(),
        root: root.into(),
        point: point.into(),
        kind: named.next()?.to_string(),
        source: unescape(named.next().unwrap_or_default()),
    })
}

/// The mount that a path lies on.
fn of(path: &Path) -> Option<Mount> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let over = mounts.lines().filter_map(parse).filter(|mount| path.starts_with(&mount.point));
    // Of several mounts on one point the last hides the others; max_by_key keeps the last.
    over.max_by_key(|mount| mount.point.as_os_str().len())
}

/// Device and path from the root of its filesystem, whatever it is mounted as.
pub(super) fn location(path: &Path) -> Option<(String, PathBuf)> {
    let mount = of(path)?;
    let rest = path.strip_prefix(&mount.point).ok()?;
    Some((mount.device, mount.root.join(rest)))
}

/// Describes the storage that a path lies on, for people: `nfs4 server:/data mounted at /mnt/data`.
pub fn describe_storage(path: &Path) -> String {
    match of(path) {
        Some(mount) => format!("{} {} mounted at {}", mount.kind, mount.source, mount.point.display()),
        None => "of an unknown kind".into(),
    }
}

fn unescape(field: &str) -> String {
    field.replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_mountinfo_is_understood() {
        let line = r"36 35 98:0 /mnt1 /mnt\040two rw,noatime master:1 shared:7 - ext3 /dev/root rw";
        let mount = parse(&line.replace(r"\\", r"\")).unwrap();
        assert_eq!((&*mount.device, &*mount.kind, &*mount.source), ("98:0", "ext3", "/dev/root"));
        assert_eq!((mount.root, mount.point), ("/mnt1".into(), "/mnt two".into()));
        assert!(parse("").is_none() && parse("36 35 98:0").is_none());
        assert!(describe_storage(Path::new("/")).contains("mounted at /"));
    }
}
