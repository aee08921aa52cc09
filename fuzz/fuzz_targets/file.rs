//! Bytes as a file in memory, and what holds for every file that is accepted.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use fastshard::error::Result;
use fastshard::format::inflate::inflate;
use fastshard::format::ParsedFile;
use fastshard::storage::SourceFile;

pub fn check(data: &[u8], parse: fn(&SourceFile) -> Result<ParsedFile>) {
    let memory = rustix::fs::memfd_create("fuzz", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let mut memory = File::from(memory);
    memory.write_all(data).expect("memory");
    let path = PathBuf::from(format!("/proc/self/fd/{}", memory.as_raw_fd()));
    let file = SourceFile::open(&path).expect("a memfd can be opened");
    let Ok(parsed) = parse(&file) else { return };
    parsed.values.to_json();
    for blob in &parsed.blobs {
        assert!(blob.offset + blob.stored_len <= file.size());
        if blob.deflated {
            let mut len = 0;
            let _ = inflate(&file, blob, &mut |bytes| {
                len += bytes.len() as u64;
                Ok(())
            });
            assert!(len <= blob.len);
        }
    }
    for tensor in &parsed.tensors {
        let blob = &parsed.blobs[tensor.blob as usize];
        let steps = tensor.shape.iter().zip(&tensor.strides);
        let last: Option<u64> =
            if tensor.shape.contains(&0) { None } else { Some(steps.map(|(d, s)| (d - 1) * s).sum()) };
        let size = tensor.dtype.size() as u64;
        assert!(tensor.offset + last.map_or(0, |last| (last + 1) * size) <= blob.len);
    }
}
