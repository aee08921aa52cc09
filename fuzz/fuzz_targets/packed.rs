//! Any bytes as an object that a file holds as bytes.
#![no_main]

use std::path::Path;

use fastshard::format::packed;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(packed) = packed::parse(data, Path::new("fuzz")) {
        packed.to_json();
    }
});
