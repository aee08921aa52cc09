//! The memory budget: a process of its own, whose anonymous memory nobody else changes.

mod common;

use common::{make_plan, open, options, sources, temp, units, write_ranks, RankFile, Tensor};
use fastshard::codes;
use fastshard::engine::{self, Control, Discard};
use serde_json::json;

const TABLE: &str = "layout = \"t\"\nfamily = \"t\"\n[shard]\ntp = [\"F\"]\n\
    [[tensor]]\nname = \"big\"\nshape = \"[K, F]\"\n";

#[test]
fn a_budget_too_small_is_refused_with_both_numbers() {
    let dir = temp();
    let rank = |r: u64| RankFile {
        coords: [("tp".to_string(), r)].into(),
        tensors: vec![Tensor::painted("big", &[30_000, 16], r)],
        ..RankFile::default()
    };
    let ranks: Vec<RankFile> = (0..2).map(rank).collect();
    write_ranks(dir.path(), &ranks);
    let catalog = open(dir.path(), 2);
    let request = json!({
        "source": {"layout": TABLE, "units": units(&ranks), "degrees": {"tp": 2}}, "max_shard_size": 1u64 << 40,
    });
    let plan = make_plan(&catalog, request).unwrap().plan;
    let files = sources(&catalog, &plan);
    for memory in [0, 1 << 20, engine::anonymous_memory()] {
        let options = engine::Options { memory, ..options(2, dir.path()) };
        let error = engine::execute(&plan, &files, &Discard, &options, &Control::default()).unwrap_err();
        let finding = &error.findings()[0];
        assert_eq!(finding.code, codes::MEMORY_BUDGET);
        assert!(finding.expected.is_some() && finding.got.is_some());
    }
    for more in [6u64 << 20, 9 << 20, 40 << 20] {
        let options = engine::Options { memory: engine::anonymous_memory() + more, ..options(8, dir.path()) };
        let report = engine::execute(&plan, &files, &Discard, &options, &Control::default()).unwrap();
        assert!(report.memory.bound <= options.memory, "{:?} within {}", report.memory, options.memory);
    }
}
