//! Any bytes as a safetensors file.
#![no_main]

mod file;

use fastshard::format::safetensors;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| file::check(data, safetensors::parse));
