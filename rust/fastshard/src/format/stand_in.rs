//! What lies in the place of a file that was to be read: a pointer of Git LFS, a web page, nothing.

use std::path::Path;

use crate::codes::{self, Kind};
use crate::error::{Error, Finding};
use crate::storage::SourceFile;

/// Bytes at the beginning of a file that tell what it is. No pointer of Git LFS is longer.
// source: git-lfs docs/spec.md ("must be less than 1024 bytes")
pub const HEAD: usize = 1024;

/// Characters of a text that a message shows.
const SHOWN: usize = 80;

/// How pointers of Git LFS begin; the second is the name that it had before 2014.
const POINTERS: &[&[u8]] =
    &[b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"];

/// What kind of file is expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Tensors: no text is that.
    Weights,
    /// An index, a config, a file of a tokenizer.
    Text,
}

/// The finding for a file that is not what its name says, by its first bytes; `None` for others.
pub fn finding(path: &Path, head: &[u8], size: u64, place: Place) -> Option<Finding> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let meant = if place == Place::Weights { "weights" } else { "the file itself" };
    let found = |what: &str| Finding::new(codes::NOT_WEIGHTS, format!("{what}, not {meant}")).file(path);
    let bytes = format!("{size} bytes");
    let file = quoted(&name);
    let again = "download it again, or copy it from the original checkpoint";
    let folder = quoted(
        &path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_string_lossy(),
    );
    let download = || format!("hf download REPO {file} --local-dir {folder}");
    // No repository has what a rank wrote.
    let of_rank = path.extension().is_some_and(|end| end == "pt" || end == "distcp");
    let offered = |finding: Finding| match of_rank {
        true => finding.help("copy the file again from the node that wrote it"),
        false => finding.help(again).run(download()),
    };
    if POINTERS.iter().any(|begin| head.starts_with(begin)) {
        let text = String::from_utf8_lossy(head);
        let value = |key: &str| {
            let mut lines = text.lines();
            lines.find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')).map(str::trim)
        };
        let real: Vec<_> = value("size")
            .map(|size| format!("{size} bytes"))
            .into_iter()
            .chain(value("oid").map(|oid| oid.replacen(':', " ", 1)))
            .collect();
        let finding = found("a Git LFS pointer")
            .help("fetch the file itself, inside the clone")
            .run(format!("git lfs pull --include {file}"));
        return Some(if real.is_empty() { finding } else { finding.expected(real.join(", "), bytes) });
    }
    if is_page(head) {
        return Some(
            found("a web page")
                .expected(meant, format!("{bytes} of HTML: {}", shown(head)))
                .help("log in where the page asks for it, then download the file")
                .run("hf auth login")
                .run(download()),
        );
    }
    if name.ends_with(".incomplete") {
        return Some(
            found("an unfinished download")
                .expected("the complete file", bytes)
                .help("finish it with the same command, which continues it")
                .run(format!("hf download REPO --local-dir {folder}")),
        );
    }
    if size == 0 {
        return Some(offered(found("an empty file").expected(meant, bytes)));
    }
    (place == Place::Weights && is_text(head, size))
        .then(|| offered(found("a text").expected(meant, format!("{bytes}: {}", shown(head)))))
}

/// Of a file that was refused: what it is instead of weights, where its first bytes tell, else why it was refused.
pub fn explained(file: &SourceFile, error: Error) -> Error {
    // What the system refuses says nothing of the file, and what a reader does not support is what it says.
    if !error.findings().iter().all(|f| f.code.is_a(Kind::Content)) {
        return error;
    }
    let mut head = vec![0; file.size().min(HEAD as u64) as usize];
    if file.read_at(0, &mut head).is_err() {
        return error;
    }
    finding(file.path(), &head, file.size(), Place::Weights).map_or(error, Into::into)
}

/// True for HTML, and for the XML in which object stores tell errors.
fn is_page(head: &[u8]) -> bool {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head).trim_ascii_start();
    [&b"<!doctype html"[..], b"<html", b"<?xml"]
        .iter()
        .any(|begin| head.get(..begin.len()).is_some_and(|start| start.eq_ignore_ascii_case(begin)))
}

/// True for letters, digits and the like throughout; the last character may have been cut.
fn is_text(head: &[u8], size: u64) -> bool {
    let text = match std::str::from_utf8(head) {
        Ok(text) => text,
        Err(e) if e.error_len().is_none() && (head.len() as u64) < size => {
            std::str::from_utf8(&head[..e.valid_up_to()]).unwrap_or_default()
        }
        Err(_) => return false,
    };
    // A damaged header begins with a length, a truncated one of few bytes says nothing.
    text.len() >= 8 && text.chars().all(|c| !c.is_control() || matches!(c, '\n' | '\r' | '\t'))
}

/// The beginning of a text, in one line.
fn shown(head: &[u8]) -> String {
    let text = String::from_utf8_lossy(head);
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{} ...", &line[..end]),
        None => line,
    }
}

/// A name as a shell takes it.
fn quoted(name: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.=+,@".contains(c);
    if name.chars().all(plain) {
        name.into()
    } else {
        format!("'{}'", name.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message_of(name: &str, head: &[u8], place: Place) -> Option<String> {
        finding(Path::new(name), head, head.len() as u64, place).map(|f| f.message)
    }

    #[test]
    fn a_pointer_says_what_it_stands_for() {
        let pointer =
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 4938985352\n";
        let found = finding(Path::new("a b.bin"), pointer, 91, Place::Weights).unwrap();
        assert_eq!(found.code, codes::NOT_WEIGHTS);
        assert_eq!(found.message, "a Git LFS pointer, not weights");
        assert_eq!(found.expected.as_deref(), Some("4938985352 bytes, sha256 4d7a214614ab"));
        assert_eq!(found.got.as_deref(), Some("91 bytes"));
        assert_eq!(found.run, ["git lfs pull --include 'a b.bin'"]);
        // As a clone on Windows has it, with an extension, and without what it should say.
        let other =
            b"version https://git-lfs.github.com/spec/v1\r\next-0-x sha256:00\r\noid sha256:11\r\nsize 5\r\n";
        let found = finding(Path::new("x"), other, 91, Place::Text).unwrap();
        assert_eq!(found.expected.as_deref(), Some("5 bytes, sha256 11"));
        assert!(message_of("x", b"version https://git-lfs.github.com/spec/v1\n", Place::Text).is_some());
    }

    #[test]
    fn pages_texts_and_nothing_are_told_apart() {
        let of = |head: &[u8]| message_of("model.safetensors", head, Place::Weights);
        assert_eq!(of(b"\xef\xbb\xbf\n <!DOCTYPE HTML><title>x").as_deref(), Some("a web page, not weights"));
        assert_eq!(of(b"<?xml version='1.0'?><Error/>").as_deref(), Some("a web page, not weights"));
        assert_eq!(of(b"Entry not found").as_deref(), Some("a text, not weights"));
        assert_eq!(of(b"").as_deref(), Some("an empty file, not weights"));
        assert_eq!(
            message_of("x.incomplete", b"\0\0", Place::Weights).as_deref(),
            Some("an unfinished download, not weights")
        );
        assert_eq!(
            message_of("config.json", b"", Place::Text).as_deref(),
            Some("an empty file, not the file itself")
        );
    }

    #[test]
    fn what_may_be_the_file_itself_is_left_alone() {
        let header = b"\x80\0\0\0\0\0\0\0{\"a\":{}}";
        assert_eq!(message_of("model.safetensors", header, Place::Weights), None);
        assert_eq!(message_of("model.safetensors", &[7; 900], Place::Weights), None);
        for text in [&b"{}"[..], b"<pad>\n<unk>\n", b"#version: 0.2\n", b"model_type: llama\n"] {
            assert_eq!(message_of("vocab.txt", text, Place::Text), None);
        }
    }

    #[test]
    fn a_character_that_the_head_cuts_makes_no_text_another() {
        let text = "é".repeat(HEAD);
        assert!(is_text(&text.as_bytes()[..HEAD - 1], text.len() as u64));
        assert!(!is_text(&text.as_bytes()[..HEAD - 1], HEAD as u64 - 1));
    }
}
