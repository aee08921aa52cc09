//! Any bytes as a torch zip file, and as the pickle of one whose container is in order: checksums
//! stop most mutations of a pickle inside a zip.
#![no_main]

mod file;

use std::io::{Cursor, Write};

use fastshard::format::torch_zip;
use libfuzzer_sys::fuzz_target;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

fn zipped(pickle: &[u8]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    for (name, data) in [("a/data.pkl", pickle), ("a/data/0", &[7; 24]), ("a/data/1", &[7; 12])] {
        zip.start_file(name, stored).expect("a new name");
        zip.write_all(data).expect("memory");
    }
    zip.finish().expect("memory").into_inner()
}

fuzz_target!(|data: &[u8]| {
    if data.starts_with(b"PK") {
        file::check(data, torch_zip::parse);
    } else {
        file::check(&zipped(data), torch_zip::parse);
    }
});
