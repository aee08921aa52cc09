//! The identity of a process, by which another one can check whether it still exists.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::journal::boot_id;

/// The identity of a process, as far as others can know it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Process {
    /// Name of its host.
    pub host: String,
    /// Identity of the machine's run.
    boot: String,
    /// Its number, and in which space of numbers: containers have spaces of their own.
    pub pid: u32,
    space: String,
    /// When it began, in the kernel's ticks: numbers are used again.
    start: String,
}

impl Process {
    /// This process.
    pub fn own() -> Process {
        let pid = std::process::id();
        Process { host: host(), boot: boot_id(), pid, space: space(), start: start(pid).unwrap_or_default() }
    }

    /// True if it has certainly ended. A process on another machine, or one that is not visible, may be
    /// alive.
    pub fn is_dead(&self) -> bool {
        let seen = !self.boot.is_empty() && !self.space.is_empty() && !self.start.is_empty();
        let same = self.boot == boot_id() && self.space == space();
        // Without a /proc nothing can be said.
        seen && same
            && start(std::process::id()).is_some()
            && start(self.pid).is_none_or(|start| start != self.start)
    }

    /// Describes the process for people: `host, process 17`.
    pub fn describe(&self) -> String {
        format!("{}, process {}", self.host, self.pid)
    }
}

fn host() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

fn space() -> String {
    let link = std::fs::read_link(Path::new("/proc/self/ns/pid"));
    link.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// When a process began; none if it is not there, or has ended and only its parent has not asked how.
fn start(pid: u32) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program may hold anything, brackets too.
    let rest = &stat[stat.rfind(')')? + 1..];
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let threads = fields.nth(16)?;
    let start = fields.nth(1)?;
    // The state is that of the first thread: others may be at work still, a killed one within its last call.
    let has_ended = matches!(state, "Z" | "X") && matches!(threads, "0" | "1");
    (!has_ended).then(|| start.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn a_process_is_dead_only_where_that_is_certain() {
        let own = Process::own();
        assert!(!own.is_dead() && own.pid > 0 && !own.host.is_empty());
        let mut child = Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().unwrap();
        let of = |pid: u32| Process { pid, start: start(pid).unwrap(), ..Process::own() };
        let other = of(child.id());
        assert!(!other.is_dead());
        child.kill().unwrap();
        while start(child.id()).is_some() {
            std::thread::yield_now();
        }
        assert!(other.is_dead(), "killed, though its parent has not asked");
        child.wait().unwrap();
        assert!(other.is_dead());
        assert!(!Process { boot: "another".into(), ..other.clone() }.is_dead());
        assert!(!Process { space: "pid:[1]".into(), ..other.clone() }.is_dead());
        assert!(!Process { start: String::new(), ..other }.is_dead());
        assert!(Process { start: "1".into(), ..own }.is_dead(), "its number is another's by now");
    }
}
