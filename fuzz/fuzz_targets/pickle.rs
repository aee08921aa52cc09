//! Any bytes as a pickle stream.
#![no_main]

use std::path::Path;

use fastshard::format::pickle;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(pickle) = pickle::parse_bytes(data, Path::new("fuzz")) {
        pickle.values.to_json();
    }
});
