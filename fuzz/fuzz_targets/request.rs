//! An arbitrary request over a small checkpoint: no panic, and a plan without errors can be executed
//! and fills each of its outputs.
#![no_main]

use std::sync::{Arc, OnceLock};

use fastshard::catalog::Catalog;
use fastshard::draft::Placement;
use fastshard::engine::{self, Control, Discard, Options};
use fastshard::error::Severity;
use fastshard::format::safetensors;
use fastshard::request::{self, Request};
use fastshard::stats::Level;
use fastshard::tensor::Dtype;
use libfuzzer_sys::fuzz_target;

static CATALOG: OnceLock<Catalog> = OnceLock::new();

/// Two ranks with an embedding, a fused projection of two layers, a norm and a bias.
fn catalog() -> &'static Catalog {
    CATALOG.get_or_init(|| {
        let dir = std::env::temp_dir().join(format!("fastshard-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        let shapes: [(&str, &[u64]); 6] = [
            ("embed", &[8, 4]),
            ("layers.0.qkv", &[24, 4]),
            ("layers.1.qkv", &[24, 4]),
            ("norm", &[4]),
            ("bias", &[4]),
            ("scalar", &[]),
        ];
        let mut names = Vec::new();
        for rank in 0..2u8 {
            let mut bytes = safetensors::header(shapes.iter().map(|(n, s)| (*n, Dtype::F32, *s)));
            for (name, shape) in shapes {
                let n: u64 = shape.iter().product();
                let own = if shape.len() == 2 { rank } else { 0 };
                bytes.extend((0..4 * n).map(|i| (i % 97) as u8 ^ own ^ name.len() as u8));
            }
            let name = format!("rank_{rank}");
            std::fs::write(dir.join(&name), bytes).expect("a file");
            names.push((0, name));
        }
        let catalog = Catalog::open(vec![dir.clone()], &names, 1);
        std::fs::remove_dir_all(dir).expect("a folder");
        assert!(catalog.findings.is_empty());
        catalog
    })
}

fuzz_target!(|data: &[u8]| {
    let Ok(request) = serde_json::from_slice::<Request>(data) else { return };
    let catalog = catalog();
    let Ok(draft) = request::draft(catalog, &request) else { return };
    let planned = draft.placed(catalog, Placement { max_shard_size: 1 << 16, ..Placement::default() });
    planned.plan.digest();
    if planned.findings.iter().any(|f| f.severity == Severity::Error) || planned.plan.bytes() > 1 << 20 {
        return;
    }
    planned.plan.validate().expect("a plan without errors is valid");
    let files: Vec<_> = planned
        .plan
        .sources
        .iter()
        .map(|s| {
            let file = catalog.files.iter().flatten().find(|f| f.path == s.path);
            Arc::clone(&file.expect("planned from this catalog").source)
        })
        .collect();
    let options =
        Options { threads: 1, memory: 1 << 40, scratch_dir: std::env::temp_dir(), held: None, encodes: 0, stats: Level::Nothing };
    engine::execute(&planned.plan, &files, &Discard, &options, &Control::default()).expect("it can be executed");
});
