//! A layout table from arbitrary text, bound to a few tensors of arbitrary shapes: no panic, and boxes
//! that lie inside their tensors.
#![no_main]

use fastshard::layout::bind::Known;
use fastshard::layout::resolve::{resolve, Outside, Registry, Stored, Unit, Unknown};
use fastshard::layout::table::Table;
use fastshard::tensor::Dtype;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    // The table, a line of dashes, the degree, the vocabulary, and a tensor with its shape per line; a line of dashes,
    // and a config.
    let (text, tensors) = text.split_once("\n---\n").unwrap_or((text, ""));
    let (tensors, config) = tensors.split_once("\n---\n").unwrap_or((tensors, ""));
    let Ok(mut table) = Table::parse(text) else { return };
    let config = serde_json::from_str(config).ok();
    let Ok(told) = table.describe(config.as_ref(), &[], None) else { return };
    let mut lines = tensors.lines();
    let mut number = || lines.next().and_then(|l| l.parse::<u64>().ok()).unwrap_or(0);
    let (degree, vocabulary) = (number() % 5 + 1, number());
    let units: Vec<Unit> =
        (0..degree).map(|r| Unit { coords: [("tp".to_string(), r)].into(), ..Unit::default() }).collect();
    let stored: Vec<Stored> = lines
        .take(16)
        .enumerate()
        .map(|(i, line)| {
            let mut words = line.split(' ');
            let name = words.next().unwrap_or("").to_string();
            let shape: Vec<u64> = words.take(6).map_while(|w| w.parse().ok()).collect();
            Stored { name, shape, dtype: Dtype::Bf16, unit: (i as u64 % degree) as u32 }
        })
        // A file's header is refused where the size of a tensor overflows.
        .filter(|s| s.shape.iter().try_fold(2u64, |n, d| n.checked_mul(*d)).is_some())
        .collect();
    let outside = Outside {
        known: Known { degrees: [("tp".to_string(), degree)].into(), extents: told.extents },
        facts: told.facts,
        sets: told.sets,
        vocab_size: (vocabulary > 0).then_some(u64::from(vocabulary)),
        ..Outside::default()
    };
    let mut registry = Registry::default();
    let resolved = resolve(&mut table, &mut registry, &stored, &units, &outside, Unknown::Refuse);
    for instance in &resolved.instances {
        let shape = &stored[instance.tensor as usize].shape;
        for held in &instance.boxes {
            if held.lo.iter().zip(&held.hi).any(|(lo, hi)| lo >= hi) {
                continue;
            }
            let mut last = held.atom.base.clone();
            for ((lo, hi), place) in held.lo.iter().zip(&held.hi).zip(&held.atom.places) {
                if let Some(place) = place {
                    last[place.dim] += (hi - lo - 1) * place.stride;
                }
            }
            assert!(last.iter().zip(shape).all(|(l, n)| l < n), "{last:?} in {shape:?}");
        }
    }
});
