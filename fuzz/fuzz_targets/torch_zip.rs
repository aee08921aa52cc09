//! Any bytes as a torch zip file. Checksums stop most mutations of the pickle inside; see `pickle`.
#![no_main]

mod file;

use fastshard::format::torch_zip;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| file::check(data, torch_zip::parse));
